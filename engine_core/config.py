"""From what a person asked for, what the model is and what the machine has, to what the engine does.

Everything is decided here, once: `resolve` is pure and returns a frozen `EngineConfig`.
"""

from msgspec import Struct

from engine_core.errors import ConfigError
from protocol.engine_options import EngineOptions

CPU_MAX_ROWS, CUDA_MAX_ROWS = 32, 256
CPU_STEP_TOKENS, CUDA_STEP_TOKENS = 128, 2048
"""Small enough that a step full of prompts does not hold up the streams that run beside it for long."""
CPU_KV_BYTES = 4 * 2**30
CPU_KV_SHARE, CUDA_KV_SHARE = 0.25, 0.85
"""Share of the memory still free after loading that the KV pool takes when nobody says how large it is."""


DTYPES = ("bfloat16", "float16", "float32")
GRAPH_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
GRAPH_SINGLES = (0, 8, 32, 64, 128, 192, 256)
GRAPH_TOKENS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)


class ModelShape(Struct, frozen=True):
    """What sizing needs to know of a loaded model."""

    name: str
    max_positions: int
    kv_bytes_per_token: int


class Machine(Struct, frozen=True):
    """What sizing needs to know of the machine, after the weights are in place."""

    device: str
    free_bytes: int


class EngineConfig(Struct, frozen=True):
    """Every decision of one engine core."""

    model_name: str
    device: str
    dtype: str
    depth: int
    max_rows: int
    max_len: int
    max_step_tokens: int
    prefill_chunk: int
    page_size: int
    pages: int
    """Pages of the pool, the reserved page 0 among them."""
    max_waiting: int
    graph_rows: tuple[int, ...] = ()
    """Row counts for which decode steps are captured as CUDA graphs, ascending; none on a CPU."""
    graph_singles: tuple[int, ...] = ()
    """Decoding rows, and"""
    graph_tokens: tuple[int, ...] = ()
    """positions of prompts, for all pairs of which steps that hold both are captured; ascending."""

    @property
    def kv_tokens(self) -> int:
        """Positions that sequences can use."""
        return (self.pages - 1) * self.page_size

    @property
    def pages_per_row(self) -> int:
        return -(-self.max_len // self.page_size)


def resolve_device(options: EngineOptions, cuda: bool) -> str:
    """Raises ConfigError when cuda is asked for and not there."""
    if options.device == "auto":
        return "cuda" if cuda else "cpu"
    if options.device == "cuda" and not cuda:
        raise ConfigError("--device cuda, but torch sees no CUDA device; use --device cpu, or check the driver")
    return options.device


def resolve_dtype(options: EngineOptions, device: str, checkpoint: str) -> str:
    """A CPU computes in float32: its bfloat16 is slower, and not what its tests compare."""
    if options.dtype != "auto":
        return options.dtype
    if device == "cpu":
        return "float32"
    if checkpoint not in DTYPES:
        raise ConfigError(f"the checkpoint's dtype is {checkpoint}; choose --dtype " + ", ".join(DTYPES))
    return checkpoint


def resolve_threads(options: EngineOptions, cores: int) -> int:
    """Torch threads on a CPU: one core is left to the frontends. Raises ConfigError for fewer than one."""
    return _at_least_one("--threads", options.threads, max(1, cores - 1))


def resolve(options: EngineOptions, model: ModelShape, machine: Machine, dtype: str) -> EngineConfig:
    """Raises ConfigError, with the numbers and what to change, for settings that contradict each other."""
    cpu = machine.device == "cpu"
    page_size = options.page_size
    if page_size < 1 or page_size & (page_size - 1):
        raise ConfigError(f"--page-size {page_size} is no power of two")
    max_rows = _at_least_one("--max-rows", options.max_rows, CPU_MAX_ROWS if cpu else CUDA_MAX_ROWS)
    max_waiting = _at_least_one("--max-waiting", options.max_waiting, options.max_waiting)
    usual = max(CPU_STEP_TOKENS if cpu else CUDA_STEP_TOKENS, max_rows)
    step_tokens = _at_least_one("--max-step-tokens", options.max_step_tokens, usual)
    if step_tokens < max_rows:
        raise ConfigError(
            f"--max-step-tokens {step_tokens} is below --max-rows {max_rows}: some decoding rows would starve; "
            "raise the one or lower the other"
        )
    chunk = min(_at_least_one("--prefill-chunk", options.prefill_chunk, step_tokens), step_tokens)
    wanted_len = _at_least_one("--max-len", options.max_len, model.max_positions)
    if wanted_len < 2:
        raise ConfigError(f"--max-len {wanted_len}: at least 2, a prompt token and a generated one")
    if wanted_len > model.max_positions:
        raise ConfigError(f"--max-len {wanted_len}, but the model's positions end at {model.max_positions}")
    if options.kv_tokens is not None:
        kv_tokens = options.kv_tokens
    else:
        kv_tokens = _affordable_tokens(model, machine, max_rows * wanted_len)
    pages = kv_tokens // page_size
    if pages * page_size < 2:
        raise ConfigError(
            f"the KV pool has {kv_tokens} tokens ({machine.free_bytes / 2**30:.2f} GiB free, "
            f"{model.kv_bytes_per_token} bytes a token), less than one page of {max(page_size, 2)}; raise --kv-tokens"
        )
    if options.max_len is not None and pages * page_size < wanted_len:
        raise ConfigError(
            f"--max-len {wanted_len} does not fit the KV pool of {pages * page_size} tokens; "
            "lower it or raise --kv-tokens"
        )
    return EngineConfig(
        model_name=options.served_model_name or model.name,
        device=machine.device,
        dtype=dtype,
        depth=2 if (options.pipeline or ("off" if cpu else "on")) == "on" else 1,
        max_rows=max_rows,
        max_len=wanted_len,
        max_step_tokens=step_tokens,
        prefill_chunk=chunk,
        page_size=page_size,
        pages=pages + 1,
        max_waiting=max_waiting,
        graph_rows=() if cpu else _sizes("--graph-rows", options.graph_rows, GRAPH_ROWS, "--max-rows", max_rows),
        graph_singles=() if cpu else _up_to(GRAPH_SINGLES, max_rows),
        graph_tokens=() if cpu else _graph_tokens(options.graph_tokens, step_tokens, pages * page_size),
    )


def _graph_tokens(asked: str | None, step_tokens: int, kv_tokens: int) -> tuple[int, ...]:
    sizes = _sizes("--graph-tokens", asked, GRAPH_TOKENS, "--max-step-tokens", step_tokens)
    return tuple(size for size in sizes if size <= kv_tokens)


def _sizes(flag: str, asked: str | None, usual: tuple[int, ...], limit_flag: str, limit: int) -> tuple[int, ...]:
    """What graphs are captured for: a smaller step is padded to the next size, a larger one runs eagerly."""
    if asked == "off":
        return ()
    if asked is None:
        return _up_to(usual, limit)
    try:
        counts = sorted({int(part) for part in asked.split(",")})
    except ValueError:
        raise ConfigError(f"{flag} {asked}: a list of sizes like 1,2,4,8, or off") from None
    if counts[0] < 1 or counts[-1] > limit:
        raise ConfigError(f"{flag} {asked}: from 1 to {limit_flag} {limit}")
    return tuple(counts)


def _up_to(sizes: tuple[int, ...], limit: int) -> tuple[int, ...]:
    """The sizes below the limit, and the limit itself unless it is beyond all of them."""
    return tuple(sorted({*(size for size in sizes if size < limit), min(limit, sizes[-1])}))


def _at_least_one(flag: str, value: int | None, default: int) -> int:
    if value is None:
        return default
    if value < 1:
        raise ConfigError(f"{flag} {value}: at least 1")
    return value


def _affordable_tokens(model: ModelShape, machine: Machine, useful: int) -> int:
    """As many as the free memory gives, and on a CPU no more than all rows together could use."""
    if machine.device == "cpu":
        budget = min(int(machine.free_bytes * CPU_KV_SHARE), CPU_KV_BYTES)
        return min(budget // model.kv_bytes_per_token, useful)
    return int(machine.free_bytes * CUDA_KV_SHARE) // model.kv_bytes_per_token
