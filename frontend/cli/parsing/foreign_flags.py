"""Flags of other engines: aliases of ours, and hints for the rest."""

from msgspec import Struct


class ForeignFlag(Struct, frozen=True):
    """Hint for a flag of another engine."""

    ours: str = ""
    """Equivalent flag here; empty if there is none."""
    reason: str = ""
    """Sentence on the difference, without a period; may be empty if there is a flag."""

    def explain(self, flag: str) -> str:
        """Return the hint for `flag`."""
        if not self.ours:
            return f"{flag}: {self.reason}"
        return f"{flag} is {self.ours} here" + (f" ({self.reason})" if self.reason else "")


class Alias(Struct, frozen=True):
    """Flag of ours that another engine's flag is a synonym of."""

    ours: str
    value: str | None = None
    """Value of our flag for a synonym without a value; None for a flag with the same values."""

    @property
    def meaning(self) -> str:
        """Hint for a command that lacks the flag."""
        return f"{self.ours} {self.value}" if self.value else self.ours

    def explain(self, flag: str) -> str:
        """Return our flag, for a command that does not accept the synonym."""
        return f"{flag} is {self.meaning} here"


_LEN, _ROWS, _MODEL, _DRAIN = Alias("--max-len"), Alias("--max-rows"), Alias("--model"), Alias("--drain-timeout")
_CERT, _KEY, _NO_GRAPHS = Alias("--tls-cert"), Alias("--tls-key"), Alias("--graph-rows", "off")
_NO_CACHE, _NO_ACCESS_LOG = Alias("--prefix-cache", "off"), Alias("--access-log", "off")
_NO_PROMPTS, _NO_OVERLAP = Alias("--log-requests", "off"), Alias("--pipeline", "off")

ALIASES = {
    "--max-model-len": _LEN, "--context-length": _LEN, "--max-seq-len": _LEN,
    "--gpu-memory-utilization": Alias("--gpu-memory"),
    "--max-num-seqs": _ROWS, "--max-running-requests": _ROWS, "--max-seqs": _ROWS, "--max-batch-size": _ROWS,
    "--parallel": _ROWS, "-np": _ROWS,
    "--max-num-batched-tokens": Alias("--max-step-tokens"),
    "--api-server-count": Alias("--frontends"), "-asc": Alias("--frontends"),
    "--block-size": Alias("--page-size"),
    "--max-total-tokens": Alias("--kv-tokens"),
    "--kv-cache-memory-bytes": Alias("--kv-memory"),
    "--kv-cache-dtype": Alias("--kv-dtype"),
    "--model-path": _MODEL, "-m": _MODEL,
    "--alias": Alias("--served-model-name"), "-a": Alias("--served-model-name"),
    "--ssl-certfile": _CERT, "--ssl-cert-file": _CERT, "--ssl-keyfile": _KEY, "--ssl-key-file": _KEY,
    "-t": Alias("--threads"),
    "--lora": Alias("--lora-modules"), "--lora-paths": Alias("--lora-modules"),
    "--max-loras-per-batch": Alias("--max-loras"),
    "--max-logprobs": Alias("--max-top-logprobs"),
    "--shutdown-timeout": _DRAIN, "--timeout-graceful-shutdown": _DRAIN,
    "--max-queued-requests": Alias("--max-waiting"),
    "--enable-prefix-caching": Alias("--prefix-cache", "on"),
    "--no-enable-prefix-caching": _NO_CACHE, "--disable-radix-cache": _NO_CACHE,
    "--enforce-eager": _NO_GRAPHS, "--disable-cuda-graph": _NO_GRAPHS,
    "--async-scheduling": Alias("--pipeline", "on"),
    "--no-async-scheduling": _NO_OVERLAP, "--disable-overlap-schedule": _NO_OVERLAP,
    "--disable-uvicorn-access-log": _NO_ACCESS_LOG, "--no-access-log": _NO_ACCESS_LOG,
    "--disable-log-requests": _NO_PROMPTS, "--no-enable-log-requests": _NO_PROMPTS,
}  # fmt: skip
"""Synonyms from vLLM, SGLang, llama.cpp, TensorRT-LLM and uvicorn that servers accept."""

_ONE_GPU = ForeignFlag(reason="one GPU per engine; tensor and pipeline parallelism are not supported")
_WEIGHTS = ForeignFlag("--quantize", "fp8 for 16-bit checkpoints; those in FP8, INT8, GPTQ or AWQ need no flag")
_KV = ForeignFlag("--kv-dtype", "auto or fp8, for keys and values alike")
_COMPILED = ForeignFlag(reason="nothing goes through torch.compile; --graph-rows off runs without CUDA graphs")
_SWAP = ForeignFlag(reason="KV is never swapped to CPU memory; preempted sequences are recomputed")
_CODE = ForeignFlag(reason="code from checkpoints is never run; supported architectures are built in")
_DRAFT_MODEL = ForeignFlag("--speculate", "ngram, or model: and the folder of a draft model or its name on the hub")
_NUM_DRAFTS = ForeignFlag("--speculate-tokens", "1 to 7")
_REPLICAS = ForeignFlag(reason="one GPU per engine; start one server per GPU and balance between them")
_WHOLE_MODEL = ForeignFlag(reason="the whole model runs on the device that --device names")
_STEP = ForeignFlag("--max-step-tokens", "--prefill-chunk bounds one prompt's part of a step")
_CHUNK = ForeignFlag("--prefill-chunk", "--max-step-tokens bounds a whole step")
_CONTEXT = ForeignFlag("--max-len", "of one sequence; llama.cpp divides its own among the slots")
_GRAMMAR = ForeignFlag(reason="structured outputs are always on, and have one backend")
_NO_STATS = ForeignFlag(reason="the line every 10 s has the level info, which --log-level warning leaves out")
_EXPERTS = ForeignFlag(reason="one GPU per engine holds all experts; mixtures of experts need no flag")
_TEXT_ONLY = ForeignFlag(reason="only text is supported, no images, audio or video")
_GENERATION = ForeignFlag(reason="models generate text; embeddings and scores are not supported")
_GRAPH_LIST = ForeignFlag("--graph-rows", "a list such as 1,2,4,8")
_LARGEST_GRAPH = ForeignFlag("--graph-rows", "a list such as 1,2,4,8; by default up to --max-rows")
_CACHED_TOKENS = ForeignFlag(reason="usage.prompt_tokens_details is always there")
_OVERRIDES = ForeignFlag(reason="nothing overrides a checkpoint's config.json; edit it")
_SEED = ForeignFlag(reason="seeds are a field of each request; the server has none")
_TOKENIZER = ForeignFlag(reason="the tokenizer is the model folder's tokenizer.json")
_CLIENT_CERTIFICATES = ForeignFlag(reason="certificates of clients are not checked; a proxy such as nginx can")
_METRICS = ForeignFlag(reason="metrics are always on: GET /metrics on the ops port and that of the API")
_TEMPLATE_FIELDS = ForeignFlag(reason="variables of the template are the field chat_template_kwargs of a request")
_DISAGGREGATION = ForeignFlag(reason="one engine computes prompts and outputs; KV is not transferred")
_TOOLS = ForeignFlag("--tool-parser", "auto finds the format of most models; no further flag is needed")

FOREIGN_FLAGS = {
    "--ctx-size": _CONTEXT, "-c": _CONTEXT,
    "--mem-fraction-static": ForeignFlag("--gpu-memory", "a share such as 0.9 of all that the engine uses, graphs too"),
    "--max-prefill-tokens": _STEP, "--batch-size": _STEP, "-b": _STEP,
    "--chunked-prefill-size": _CHUNK, "--enable-chunked-prefill": ForeignFlag("--prefill-chunk", "on by default"),
    "--tensor-parallel-size": _ONE_GPU, "--tp": _ONE_GPU, "-tp": _ONE_GPU, "--tp-size": _ONE_GPU,
    "--pipeline-parallel-size": _ONE_GPU, "--pp": _ONE_GPU, "-pp": _ONE_GPU, "--pp-size": _ONE_GPU,
    "--tensor-split": _ONE_GPU,
    "--data-parallel-size": _REPLICAS, "-dp": _REPLICAS, "--dp": _REPLICAS, "--dp-size": _REPLICAS,
    "-ngl": _WHOLE_MODEL, "--n-gpu-layers": _WHOLE_MODEL, "--gpu-layers": _WHOLE_MODEL,
    "--cpu-offload-gb": _WHOLE_MODEL,
    "--quantization": _WEIGHTS, "-q": _WEIGHTS,
    "--swap-space": _SWAP, "--trust-remote-code": _CODE,
    "--speculative-model": _DRAFT_MODEL, "--model-draft": _DRAFT_MODEL, "--speculative-algorithm": _DRAFT_MODEL,
    "--speculative-draft-model-path": _DRAFT_MODEL, "-md": _DRAFT_MODEL,
    "--spec-method": _DRAFT_MODEL, "--spec-model": _DRAFT_MODEL,
    "--speculative-num-draft-tokens": _NUM_DRAFTS, "--spec-tokens": _NUM_DRAFTS,
    "--calculate-kv-scales": ForeignFlag("--kv-dtype fp8", "which calibrates the scales that a checkpoint lacks"),
    "--cache-type-k": _KV, "--cache-type-v": _KV,
    "--compilation-config": _COMPILED, "-O": _COMPILED, "--enable-torch-compile": _COMPILED,
    "--attention-backend": ForeignFlag(reason="the GPU and the model decide on the kernels of attention"),
    "--hf-overrides": _OVERRIDES, "--json-model-override-args": _OVERRIDES,
    "--tokenizer-mode": _TOKENIZER, "--tokenizer": _TOKENIZER, "--tokenizer-path": _TOKENIZER,
    "--tokenizer-revision": ForeignFlag("--revision", "of the weights and the tokenizer alike"),
    "--distributed-executor-backend": _ONE_GPU, "--nnodes": _ONE_GPU, "--node-rank": _ONE_GPU,
    "--dist-init-addr": _ONE_GPU, "--master-addr": _ONE_GPU, "--headless": _ONE_GPU,
    "--enable-expert-parallel": _EXPERTS, "--ep-size": _EXPERTS, "--ep": _EXPERTS,
    "--limit-mm-per-prompt": _TEXT_ONLY, "--mm-processor-kwargs": _TEXT_ONLY, "--mmproj": _TEXT_ONLY,
    "--task": _GENERATION, "--runner": _GENERATION, "--convert": _GENERATION, "--is-embedding": _GENERATION,
    "--embedding": _GENERATION, "--embeddings": _GENERATION,
    "--weight-transfer-config": ForeignFlag("--enable-weight-updates", "NCCL on a GPU, gloo on a CPU"),
    "--enable-sleep-mode": ForeignFlag("--enable-weight-updates", "which also allows /sleep and /wake_up"),
    "--enable-memory-saver": ForeignFlag("--enable-weight-updates", "which allows vLLM's /sleep and /wake_up"),
    "--kv-transfer-config": _DISAGGREGATION, "--disaggregation-mode": _DISAGGREGATION,
    "--cont-batching": ForeignFlag("--batching", "continuous by default"),
    "--stream-interval": ForeignFlag("--stream-interval-ms", "milliseconds, not tokens"),
    "--admin-api-key": ForeignFlag("--api-keys", "a file, in which a key may have the right admin"),
    "--ssl-ca-certs": _CLIENT_CERTIFICATES, "--ssl-cert-reqs": _CLIENT_CERTIFICATES,
    "--chat-template-kwargs": _TEMPLATE_FIELDS, "--default-chat-template-kwargs": _TEMPLATE_FIELDS,
    "--watchdog-timeout": ForeignFlag("--step-timeout", "which restarts the engine"),
    "--cuda-graph-sizes": _GRAPH_LIST, "--cudagraph-capture-sizes": _GRAPH_LIST, "--cuda-graph-bs": _GRAPH_LIST,
    "--max-cudagraph-capture-size": _LARGEST_GRAPH, "--cuda-graph-max-bs": _LARGEST_GRAPH,
    "--max-seq-len-to-capture": ForeignFlag(reason="CUDA graphs serve sequences of every length"),
    "--scheduling-policy": ForeignFlag("--policy", "under priority greater numbers come first, in vLLM smaller ones"),
    "--schedule-policy": ForeignFlag("--policy", "orders by cached prefixes, such as lpm, do not exist"),
    "--tool-call-parser": _TOOLS, "--enable-auto-tool-choice": _TOOLS,
    "--allowed-origins": ForeignFlag("--cors-origin", "one origin, given several times for several; no JSON list"),
    "--uvicorn-log-level": ForeignFlag("--log-level", "of all messages, not only those of the HTTP server"),
    "--enable-log-requests": ForeignFlag("--log-requests on", "which logs the prompts too"),
    "--disable-log-stats": _NO_STATS,
    "--enable-metrics": _METRICS, "--metrics": _METRICS,
    "--log-config-file": ForeignFlag("--log-level", "--log-format json logs an object a line"),
    "--num-gpu-blocks-override": ForeignFlag("--kv-tokens", "tokens, not blocks"),
    "--long-prefill-token-threshold": _CHUNK,
    "--no-enable-chunked-prefill": ForeignFlag("--prefill-chunk", "off computes prompts whole"),
    "--enable-prompt-tokens-details": _CACHED_TOKENS, "--enable-cache-report": _CACHED_TOKENS,
    "--enable-request-id-headers": ForeignFlag(reason="x-request-id is always there"),
    "--guided-decoding-backend": _GRAMMAR, "--structured-outputs-config": _GRAMMAR, "--grammar-backend": _GRAMMAR,
    "--enable-reasoning": ForeignFlag("--reasoning-parser", "auto finds out from the chat template"),
    "--override-generation-config": ForeignFlag(
        "--generation-config", "auto or off; to change a default edit the checkpoint's generation_config.json"
    ),
    "--seed": _SEED, "--random-seed": _SEED,
    "--temperature": ForeignFlag(reason="sampling parameters are fields of each request; see --generation-config"),
}  # fmt: skip
"""Hints for flags with another meaning here, by their name in vLLM, SGLang or llama.cpp."""
VALUE_HINTS = {
    "--quantize": "checkpoints in FP8, INT8, GPTQ or AWQ need no flag",
    "--kv-dtype": "fp8 is e4m3, and e5m2 is not supported",
    "--dtype": "--quantize fp8 stores the weights of a 16-bit checkpoint in 8 bits",
    "--load-format": "auto loads safetensors",
}
"""Hints for invalid values of our flags."""
