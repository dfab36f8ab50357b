"""Flags that people know from other engines, and what takes their place here."""

from msgspec import Struct


class ForeignFlag(Struct, frozen=True):
    """Answer to a flag of another engine."""

    ours: str = ""
    """Our flag for the same purpose; empty if there is none."""
    reason: str = ""
    """A sentence on what is different, without a period; may be empty if there is a flag."""

    def explain(self, flag: str) -> str:
        """Say what to give instead of `flag`."""
        if not self.ours:
            return f"{flag}: {self.reason}"
        return f"{flag} is {self.ours} here" + (f" ({self.reason})" if self.reason else "")


_ONE_GPU = ForeignFlag(reason="one GPU per engine; tensor and pipeline parallelism are not supported")
_WEIGHTS = ForeignFlag("--quantize", "fp8 for 16-bit checkpoints; those in FP8, INT8, GPTQ or AWQ need no flag")
_KV = ForeignFlag("--kv-dtype", "auto or fp8, which is e4m3")
_COMPILED = ForeignFlag(reason="nothing goes through torch.compile; --graph-rows off runs without CUDA graphs")
_LORA = ForeignFlag(reason="LoRA adapters are not supported; merge them into the weights")
_SWAP = ForeignFlag(reason="KV is never swapped to CPU memory; preempted sequences are recomputed")
_CODE = ForeignFlag(reason="code from checkpoints is never run; supported architectures are built in")
_SPECULATIVE = ForeignFlag(reason="speculative decoding is not supported")
_REPLICAS = ForeignFlag(reason="one GPU per engine; start one server per GPU and balance between them")
_WHOLE_MODEL = ForeignFlag(reason="the whole model runs on the device that --device names")
_LEN = ForeignFlag("--max-len")
_GPU_SHARE = ForeignFlag("--gpu-memory", "a share such as 0.9")
_ROWS = ForeignFlag("--max-rows")
_STEP = ForeignFlag("--max-step-tokens", "--prefill-chunk bounds one prompt's part of a step")
_CHUNK = ForeignFlag("--prefill-chunk", "--max-step-tokens bounds a whole step")
_CACHE = ForeignFlag("--prefix-cache", "on by default; --prefix-cache off turns it off")
_GRAPHS = ForeignFlag("--graph-rows", "--graph-rows off runs without CUDA graphs")
_MODEL = ForeignFlag("--model")
_NO_ACCESS_LOG = ForeignFlag("--access-log off")
_GRAMMAR = ForeignFlag(reason="structured outputs are always on, and have one backend")
_NO_STATS = ForeignFlag(reason="the line every 10 s has the level info, which --log-level warning leaves out")
_POLICY = ForeignFlag("--policy")
_TOOLS = ForeignFlag("--tool-parser", "auto finds the format of most models; no further flag is needed")

FOREIGN_FLAGS = {
    "--max-model-len": _LEN, "--ctx-size": _LEN, "-c": _LEN, "--context-length": _LEN, "--max-seq-len": _LEN,
    "--gpu-memory-utilization": _GPU_SHARE, "--mem-fraction-static": _GPU_SHARE,
    "--max-num-seqs": _ROWS, "--max-running-requests": _ROWS, "--max-seqs": _ROWS, "--max-batch-size": _ROWS,
    "--parallel": _ROWS, "-np": _ROWS,
    "--max-num-batched-tokens": _STEP, "--max-prefill-tokens": _STEP, "--batch-size": _STEP, "-b": _STEP,
    "--chunked-prefill-size": _CHUNK, "--enable-chunked-prefill": ForeignFlag("--prefill-chunk", "on by default"),
    "--tensor-parallel-size": _ONE_GPU, "--tp": _ONE_GPU, "-tp": _ONE_GPU, "--tp-size": _ONE_GPU,
    "--pipeline-parallel-size": _ONE_GPU, "--pp": _ONE_GPU, "-pp": _ONE_GPU, "--pp-size": _ONE_GPU,
    "--tensor-split": _ONE_GPU,
    "--data-parallel-size": _REPLICAS, "-dp": _REPLICAS, "--dp": _REPLICAS, "--dp-size": _REPLICAS,
    "--api-server-count": ForeignFlag("--frontends"), "-asc": ForeignFlag("--frontends"),
    "-ngl": _WHOLE_MODEL, "--n-gpu-layers": _WHOLE_MODEL, "--gpu-layers": _WHOLE_MODEL,
    "--cpu-offload-gb": _WHOLE_MODEL,
    "--quantization": _WEIGHTS, "-q": _WEIGHTS,
    "--enable-lora": _LORA, "--lora-modules": _LORA, "--lora-paths": _LORA, "--lora": _LORA,
    "--swap-space": _SWAP, "--trust-remote-code": _CODE,
    "--speculative-config": _SPECULATIVE, "--speculative-model": _SPECULATIVE, "--model-draft": _SPECULATIVE,
    "--block-size": ForeignFlag("--page-size"),
    "--enable-prefix-caching": _CACHE, "--no-enable-prefix-caching": _CACHE, "--disable-radix-cache": _CACHE,
    "--calculate-kv-scales": ForeignFlag("--kv-dtype fp8", "which calibrates the scales that a checkpoint lacks"),
    "--kv-cache-dtype": _KV, "--cache-type-k": _KV, "--cache-type-v": _KV,
    "--compilation-config": _COMPILED, "-O": _COMPILED,
    "--attention-backend": ForeignFlag(reason="the GPU and the model decide on the kernels of attention"),
    "--hf-overrides": ForeignFlag(reason="nothing overrides a checkpoint's config.json; edit it"),
    "--tokenizer-mode": ForeignFlag(reason="the tokenizer is the model folder's tokenizer.json"),
    "--distributed-executor-backend": _ONE_GPU,
    "--max-total-tokens": ForeignFlag("--kv-tokens"),
    "--kv-cache-memory-bytes": ForeignFlag("--kv-memory"),
    "--enforce-eager": _GRAPHS, "--disable-cuda-graph": _GRAPHS, "--cuda-graph-sizes": _GRAPHS,
    "--model-path": _MODEL, "-m": _MODEL,
    "--scheduling-policy": _POLICY, "--schedule-policy": _POLICY,
    "--tool-call-parser": _TOOLS, "--enable-auto-tool-choice": _TOOLS,
    "--allowed-origins": ForeignFlag("--cors-origin"),
    "--ssl-certfile": ForeignFlag("--tls-cert"), "--ssl-keyfile": ForeignFlag("--tls-key"),
    "--ssl-cert-file": ForeignFlag("--tls-cert"), "--ssl-key-file": ForeignFlag("--tls-key"),
    "--uvicorn-log-level": ForeignFlag("--log-level"),
    "--disable-uvicorn-access-log": _NO_ACCESS_LOG, "--no-access-log": _NO_ACCESS_LOG,
    "--enable-log-requests": ForeignFlag("--log-requests on"),
    "--disable-log-requests": ForeignFlag("--log-requests off", "which is the default"),
    "-t": ForeignFlag("--threads"),
    "--no-enable-log-requests": ForeignFlag("--log-requests off", "which is the default"),
    "--disable-log-stats": _NO_STATS,
    "--enable-metrics": ForeignFlag(reason="metrics are always on: GET /metrics on the ops port and that of the API"),
    "--log-config-file": ForeignFlag("--log-level", "--log-format json logs an object a line"),
    "--max-logprobs": ForeignFlag("--max-top-logprobs"),
    "--num-gpu-blocks-override": ForeignFlag("--kv-tokens", "tokens, not blocks"),
    "--long-prefill-token-threshold": _CHUNK,
    "--no-enable-chunked-prefill": ForeignFlag("--prefill-chunk", "off computes prompts whole"),
    "--shutdown-timeout": ForeignFlag("--drain-timeout"), "--timeout-graceful-shutdown": ForeignFlag("--drain-timeout"),
    "--max-queued-requests": ForeignFlag("--max-waiting"),
    "--enable-prompt-tokens-details": ForeignFlag(reason="usage.prompt_tokens_details is always there"),
    "--enable-request-id-headers": ForeignFlag(reason="x-request-id is always there"),
    "--guided-decoding-backend": _GRAMMAR, "--structured-outputs-config": _GRAMMAR, "--grammar-backend": _GRAMMAR,
    "--enable-reasoning": ForeignFlag("--reasoning-parser", "auto finds out from the chat template"),
    "--override-generation-config": ForeignFlag(
        "--generation-config", "auto or off; to change a default edit the checkpoint's generation_config.json"
    ),
    "--seed": ForeignFlag(reason="seeds are a field of each request; the server has none"),
    "--temperature": ForeignFlag(reason="sampling parameters are fields of each request; see --generation-config"),
    "--tokenizer": ForeignFlag(reason="the tokenizer is the model folder's tokenizer.json"),
}  # fmt: skip
"""The answer to each flag, by its name in vLLM, SGLang or llama.cpp."""
VALUE_HINTS = {
    "--quantize": "checkpoints in FP8, INT8, GPTQ or AWQ need no flag",
    "--kv-dtype": "fp8 is e4m3, and e5m2 is not supported",
    "--dtype": "half is float16 here",
    "--load-format": "auto loads safetensors",
}
"""What is added to the error of a value that one of our flags does not take."""
