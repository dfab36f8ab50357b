"""Help texts of the commands: summary, description and examples."""

from msgspec import Struct


class CommandHelp(Struct, frozen=True):
    """Help of a command."""

    summary: str
    """Line in the list of commands."""
    description: str
    usage: str
    """Usage line after the command's name."""
    examples: tuple[str, ...]

    @property
    def epilog(self) -> str:
        """Examples, shown after the flags."""
        return "examples:\n" + "\n".join(f"  {example}" for example in self.examples)


TANDEM = CommandHelp(
    "",
    "Serve large language models over OpenAI's and Anthropic's APIs. Each command has its own --help.",
    "COMMAND ...",
    (
        "tandem serve                      # the small model that ships with Tandem, on 127.0.0.1:8000",
        "tandem chat                       # in another terminal",
    ),
)
COMMANDS = {
    "serve": CommandHelp(
        "start an engine core and HTTP frontends",
        "Serve one model on this machine: an engine core that owns the GPU (or CPU), and frontends on one port that "
        "answer OpenAI's and Anthropic's APIs. The model is a folder, or a name on the Hugging Face hub, which is "
        "downloaded first; without one it serves the small model that ships with Tandem.",
        "[MODEL] [FLAGS]",
        ("tandem serve", "tandem serve Qwen/Qwen3-0.6B --host 0.0.0.0 --api-key-file keys.txt",
         "tandem serve Qwen/Qwen3-0.6B --max-len 8192 --gpu-memory 0.8"),
    ),
    "engine": CommandHelp(
        "start an engine core for frontends elsewhere",
        "Run an engine core without a frontend. Frontends connect to its endpoint, from this machine or another; "
        "a tcp endpoint takes two ports, PORT and PORT+1.",
        "[MODEL] --endpoint ENDPOINT [FLAGS]",
        ("tandem engine Qwen/Qwen3-0.6B --endpoint ipc:///run/tandem/engine",
         "tandem engine Qwen/Qwen3-0.6B --endpoint tcp://0.0.0.0:7000 --curve-keys keys"),
    ),
    "frontend": CommandHelp(
        "start HTTP frontends for a running engine",
        "Run HTTP frontends on one port for an engine core that is already running, here or on another machine. They "
        "need the model for its tokenizer and the chat template; the weights stay with the engine.",
        "[MODEL] --endpoint ENDPOINT [FLAGS]",
        ("tandem frontend Qwen/Qwen3-0.6B --endpoint ipc:///run/tandem/engine --port 8001",
         "tandem frontend Qwen/Qwen3-0.6B --endpoint tcp://10.0.0.5:7000 --curve-keys tandem-keys"),
    ),
    "chat": CommandHelp(
        "chat with a running server in the terminal",
        "Chat with a running server in the terminal; /help lists what can be typed besides questions.",
        "[FLAGS]",
        ("tandem chat", "tandem chat --system 'Answer in one sentence.' --temperature 0.2"),
    ),
    "complete": CommandHelp(
        "complete one prompt on a running server",
        "Send one prompt to a running server and print its continuation as it arrives.",
        "[PROMPT] [FLAGS]",
        ("tandem complete 'The capital of France is' --max-tokens 20",
         "tandem complete --json-schema schema.json < prompt.txt"),
    ),
    "run-batch": CommandHelp(
        "send a file of requests to a running server",
        "Send the requests of a file in OpenAI's batch format to a running server, many at a time, and write each "
        "result as it arrives. The same command resumes an interrupted run.",
        "INPUT OUTPUT [FLAGS]",
        ("tandem run-batch requests.jsonl results.jsonl", "tandem run-batch in.jsonl out.jsonl --concurrency 128"),
    ),
    "inspect": CommandHelp(
        "show the scheduler state of a running server",
        "Print the scheduler state of a running server: a summary, the running and waiting sequences, and the "
        "sessions. PROMPT, OUTPUT and COMPUTED count tokens; CACHED counts the prompt tokens whose KV was found in the "
        "cache. PAGES counts a sequence's KV pages in all KV groups; SHARED those of them that are in the prefix "
        "cache, where other sequences find them. REQUEST is a number that each frontend counts from 1, HTTP REQUEST "
        "the `x-request-id`. AGE is the time since a request arrived, WAIT the time since it last joined the queue. "
        "KEPT counts the pages that a session keeps from earlier turns; IDLE is the time since its last turn.",
        "[FLAGS]",
        ("tandem inspect", "tandem inspect --watch 1"),
    ),
    "swap": CommandHelp(
        "replace the weights of a running server",
        "Replace the weights of a running server by those of another checkpoint of the same model, and return once "
        "they serve. The server needs --enable-weight-updates and --swap-root. It checks the checkpoint and reads it "
        "into the page cache first, and goes on meanwhile.",
        "PATH [FLAGS]",
        ("tandem swap /models/step-200", "tandem swap /models/step-200 --running restart"),
    ),
    "bench": CommandHelp(
        "measure throughput and latency of a server",
        "Send random prompts to any OpenAI-compatible server and print its throughput, the time to first token (TTFT), "
        "the time per output token (TPOT) and the gaps between tokens (ITL); with --percentile-metrics e2el the time "
        "of whole answers (E2EL). Flags and figures have the names of `vllm bench serve`.",
        "[FLAGS]",
        ("tandem bench --num-prompts 200 --max-concurrency 16",
         "tandem bench --url http://host:8000 --request-rate 4 --random-input-len 512 --save-result"),
    ),
    "doctor": CommandHelp(
        "show what a server would find and choose here",
        "Print versions, the machine, its GPUs and ports, the model, and what a server would choose and why; nothing "
        "is loaded or started, and of a model on the hub only the small files are downloaded. The output has no keys "
        "and fits a bug report. The exit code is 1 if something would prevent a start.",
        "[MODEL] [FLAGS]",
        ("tandem doctor", "tandem doctor Qwen/Qwen3-0.6B --max-len 8192 --port 8001", "tandem doctor --json"),
    ),
    "api-key": CommandHelp(
        "make an API key of a server",
        "Make a new API key. The key itself is printed once, on stderr; on stdout is its table for the file of a "
        "server's --api-keys, which holds only the key's SHA-256. A running server notices when the file changes. "
        "Rights are generate, metrics (read /metrics) and admin (pause, scheduler).",
        "NAME [FLAGS]",
        ("tandem api-key alice >> api-keys.toml",
         "tandem api-key prometheus --rights metrics >> api-keys.toml",
         "tandem api-key bob --max-concurrent 16 --tokens-per-minute 100000 >> api-keys.toml"),
    ),
    "keys": CommandHelp(
        "create the keys of an encrypted tcp endpoint",
        "Create the CURVE key pair of an engine in a new folder, for its --curve-keys. With --client, create that of a "
        "frontend: DIR/clients/NAME.key lets the engine accept it, and DIR/frontends/NAME is the folder for the "
        "frontend's --curve-keys. A running engine notices keys that are added or deleted.",
        "DIR [--client NAME]",
        ("tandem keys keys", "tandem keys keys --client web1",
         "tandem engine --endpoint tcp://0.0.0.0:7000 --curve-keys keys"),
    ),
}  # fmt: skip
