"""How many KV pages an engine has: from flags, and from what memory the rest of it leaves. Pure."""

from msgspec import Struct, structs

from tandem.engine_core.config import EngineConfig, StepConfig
from tandem.engine_core.errors import ConfigError
from tandem.protocol.engine_options import EngineOptions

CPU_KV_BYTES, CPU_KV_SHARE = 4 * 2**30, 0.25
"""On a CPU the pool takes this share of the free memory, no more than that, and no more than all rows could fill."""
GPU_SHARE = 0.9
"""Of a device's memory, for all that an engine holds there. The rest is for what the allocator cannot place."""
GIB = 2**30


class Memory(Struct, frozen=True):
    """Bytes of the machine once all is in place but the KV pool and what steps and graphs will take.

    On a CPU only `free` counts.
    """

    free: int
    """Now."""
    total: int = 0
    """Of the device."""
    free_at_start: int = 0
    """Before this engine allocated anything; less than `total` where other processes hold some."""
    steps: int = 0
    """What any step takes meanwhile."""
    graphs: int = 0
    """What the captured graphs will hold."""


def check_flags(options: EngineOptions, device: str) -> None:
    """Raises ConfigError for flags that exclude each other, before anything is loaded."""
    if options.kv_memory is not None and options.kv_tokens is not None:
        raise ConfigError("--kv-memory and --kv-tokens both size the KV pool; give one of them")
    for flag, amount in (("--kv-memory", options.kv_memory), ("--kv-tokens", options.kv_tokens)):
        if amount is not None and amount < 1:
            raise ConfigError(f"{flag} {amount}: at least 1")
    if options.gpu_memory is None:
        return
    if device == "cpu":
        raise ConfigError("--gpu-memory with --device cpu: there is no GPU; use --kv-memory or --kv-tokens")
    for flag, value in (("--kv-memory", options.kv_memory), ("--kv-tokens", options.kv_tokens)):
        if value is not None:
            raise ConfigError(f"--gpu-memory and {flag} both size the KV pool; give one of them")
    if not 0 < options.gpu_memory <= 1:
        raise ConfigError(f"--gpu-memory {options.gpu_memory:g}: above 0 and up to 1, a share of the device's memory")


def with_pool(config: StepConfig, options: EngineOptions, memory: Memory, token_bytes: int) -> EngineConfig:
    """The configuration with its pages. token_bytes: of one token's keys and values over all layers.

    Raises ConfigError if less than one page, or less than a --max-len that was asked for, has room.
    """
    page_size = config.page_size
    tokens = options.kv_tokens
    if tokens is None:
        # The reserved page is part of the memory.
        tokens = _pool_bytes(config, options, memory, token_bytes) // token_bytes - page_size
    pages = max(0, tokens) // page_size
    if pages * page_size < 2:
        raise ConfigError(
            f"the KV pool has {tokens} tokens ({memory.free / GIB:.2f} GiB free, of which steps and graphs need "
            f"{(memory.steps + memory.graphs) / GIB:.2f}, {token_bytes} bytes a token), less than one page of "
            f"{max(page_size, 2)}; {_remedy(options, config)}"
        )
    if options.max_len is not None and pages * page_size < config.max_len:
        raise ConfigError(
            f"--max-len {config.max_len} does not fit the KV pool of {pages * page_size} tokens; lower it or "
            f"{_remedy(options, config)}"
        )
    return EngineConfig(**structs.asdict(config), pages=pages + 1)


def _pool_bytes(config: StepConfig, options: EngineOptions, memory: Memory, token_bytes: int) -> int:
    if options.kv_memory is not None:
        return options.kv_memory
    if config.device == "cpu":
        useful = (config.max_page_entries + 1) * config.page_size * token_bytes
        return min(int(memory.free * CPU_KV_SHARE), CPU_KV_BYTES, useful)
    share = GPU_SHARE if options.gpu_memory is None else options.gpu_memory
    held = memory.free_at_start - memory.free
    return min(int(memory.total * share), memory.free_at_start) - held - memory.steps - memory.graphs


def _remedy(options: EngineOptions, config: StepConfig) -> str:
    if options.kv_memory is not None:
        return "raise --kv-memory"
    if options.kv_tokens is not None or config.device == "cpu":
        return "raise --kv-tokens"
    return "raise --gpu-memory, or lower --max-rows or --max-step-tokens"
