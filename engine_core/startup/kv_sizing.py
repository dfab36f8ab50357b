"""The number of KV pages of an engine.

It follows from the flags and the memory that the rest of the engine leaves. All functions are pure.
"""

from msgspec import Struct, structs

from tandem.engine_core.config import GPU_SHARE, EngineConfig, StepConfig
from tandem.engine_core.errors import ConfigError, MemoryTooSmallError
from tandem.engine_core.page_counts import held_pages
from tandem.protocol.engine_options import EngineOptions

CPU_KV_BYTES, CPU_KV_SHARE = 4 * 2**30, 0.25
"""Bounds of the pool on a CPU: bytes, and share of the free memory. It takes no more than all rows could fill."""
STATE_SLOTS_SHARE, MAX_STATE_SLOTS = 0.125, 1024
"""Bounds of the checkpoints of recurrent layers: share of the memory that weights, steps and graphs leave, and number.
On a CPU the share is one of the pool's bounds."""
CONTEXT_BYTES = 640 * 2**20
"""Memory that CUDA may hold for a process before its first tensor; 0.58 GiB on an H200. Of the memory in use at
start, at most this counts as the engine's own."""
GIB = 2**30


class StateSizes(Struct, frozen=True):
    """Bytes of the state of recurrent layers; zeros for a model without any."""

    rows: int = 0
    """Bytes of all rows, which are allocated."""
    checkpoint: int = 0
    """Bytes of one checkpoint."""


class Memory(Struct, frozen=True):
    """The memory of a device before the KV pool is allocated, in bytes.

    Weights are loaded; KV pool, steps and graphs are not allocated yet. On a CPU only `free` counts.
    """

    free: int
    """Bytes that are free now."""
    total: int = 0
    """Bytes of the whole device."""
    free_at_start: int = 0
    """Bytes that were free before this engine allocated any; other processes may hold some of `total`."""
    steps: int = 0
    """Bytes that the largest step takes while it runs."""
    graphs: int = 0
    """Bytes that the captured graphs will hold."""


def check_memory_flags(options: EngineOptions, device: str) -> None:
    """Raise ConfigError for flags that exclude each other, before anything is loaded."""
    sizes = (("--kv-memory", options.kv_memory), ("--kv-tokens", options.kv_tokens))
    given = [flag for flag, value in sizes if value is not None]
    found = []
    if options.gpu_memory is not None and device == "cpu":
        found = ["--gpu-memory with --device cpu: it sets the share of a GPU; use --kv-memory or --kv-tokens"]
    elif options.gpu_memory is not None:
        given.insert(0, "--gpu-memory")
    if len(given) > 1:
        found.append(f"{' and '.join(given)} {'both' if len(given) == 2 else 'all'} size the KV pool; give one of them")
    if found:
        raise ConfigError(*found)


def size_pool(config: StepConfig, memory: Memory, token_bytes: int, states: StateSizes | None = None) -> EngineConfig:
    """Add the number of pages, and of checkpoints of recurrent layers, to the settings.

    token_bytes: bytes of one token in the pages of all KV groups.

    Raises MemoryTooSmallError if less than one page, or less than a requested --max-len, has room, and for a requested
    pool that is larger than the free memory.
    """
    page_size, options, windows = config.page_size, config.options, config.held_windows
    page_bytes = page_size * token_bytes // len(windows)
    states = states or StateSizes()
    slots = _num_state_slots(config, memory, token_bytes, states)
    if options.kv_tokens is not None:
        # For sequences of any length: within all windows, a position takes a share of a page in each group.
        pages = options.kv_tokens // page_size * len(windows)
    else:
        # The reserved page is part of the memory.
        pages = max(0, _pool_bytes(config, memory, page_bytes, slots * states.checkpoint) // page_bytes - 1)
    _check_given_size(options, memory, (pages + 1) * page_bytes, token_bytes)
    sized = EngineConfig(**structs.asdict(config), pages=pages + 1, state_slots=slots)
    if sized.kv_tokens < 2:
        tokens = pages * page_size // len(windows) if options.kv_tokens is None else options.kv_tokens
        raise MemoryTooSmallError(
            f"the KV pool has {tokens} tokens ({memory.free / GIB:.2f} GiB free, steps and graphs "
            f"need {(memory.steps + memory.graphs) / GIB:.2f}, {token_bytes} bytes a token), less than one page of "
            f"{max(page_size, 2)}{f' in each of {len(windows)} KV groups' if len(windows) > 1 else ''}; "
            f"{_remedy(config, _least_bytes(config, 2, page_bytes))}"
        )
    if options.max_len is not None and sized.kv_tokens < config.max_len:
        raise MemoryTooSmallError(
            f"--max-len {config.max_len} does not fit the KV pool of {sized.kv_tokens} tokens; lower it or "
            f"{_remedy(config, _least_bytes(config, config.max_len, page_bytes))}"
        )
    return sized


def short_pool(config: EngineConfig, page_bytes: int) -> str:
    """Return a warning about a pool that holds less than the longest sequence, empty if it holds one."""
    if config.kv_tokens >= config.max_len:
        return ""
    return (
        f"the KV pool holds {config.kv_tokens} tokens, less than one sequence of {config.max_len}; lower --max-len or "
        f"{_remedy(config, _least_bytes(config, config.max_len, page_bytes))}"
    )


def _least_bytes(config: StepConfig, positions: int, page_bytes: int) -> int:
    """Return the bytes of a pool for one sequence of this many positions."""
    return (held_pages(config.held_windows, positions, config.page_size, config.max_lead) + 1) * page_bytes


def _check_given_size(options: EngineOptions, memory: Memory, pool: int, token_bytes: int) -> None:
    """Raise MemoryTooSmallError for a pool that is larger than the free memory."""
    flag = "--kv-memory" if options.kv_memory is not None else "--kv-tokens"
    given = options.kv_memory if options.kv_memory is not None else options.kv_tokens
    if given is not None and pool > memory.free:
        raise MemoryTooSmallError(
            f"{flag} {given} takes {pool / GIB:.2f} GiB at {token_bytes} bytes a token, but "
            f"{memory.free / GIB:.2f} GiB are free; lower {flag}, or leave it out for a pool that fits"
        )


def _num_state_slots(config: StepConfig, memory: Memory, token_bytes: int, states: StateSizes) -> int:
    """Return the number of checkpoints that fit their share of the memory, next to a KV pool of a given size."""
    options = config.options
    if not config.prefix_cache or not states.checkpoint:
        return 0
    if config.device == "cpu":
        room = share = min(memory.free * CPU_KV_SHARE, CPU_KV_BYTES) * STATE_SLOTS_SHARE
    else:
        room = _gpu_room(config, memory)
        share = (room + states.rows) * STATE_SLOTS_SHARE
        # Rows asked for may leave little: then pages get half of it.
        room = room / 2 if options.kv_memory is None and options.kv_tokens is None else room
    given = options.kv_memory if options.kv_memory is not None else (options.kv_tokens or 0) * token_bytes
    if given and config.device != "cpu":
        room -= given
    return max(0, min(MAX_STATE_SLOTS, int(min(room, share)) // states.checkpoint))


def _pool_bytes(config: StepConfig, memory: Memory, page_bytes: int, slots_bytes: int) -> int:
    options = config.options
    if options.kv_memory is not None:
        return options.kv_memory
    if config.device == "cpu":
        held = held_pages(config.held_windows, config.max_len, config.page_size, config.max_lead)
        useful = (config.max_rows * held + 1) * page_bytes
        return min(int(memory.free * CPU_KV_SHARE), CPU_KV_BYTES, useful)
    return _gpu_room(config, memory) - slots_bytes


def _gpu_room(config: StepConfig, memory: Memory) -> int:
    """Return the bytes of a GPU that are left for the pool and checkpoints."""
    options = config.options
    share = GPU_SHARE if options.gpu_memory is None else options.gpu_memory
    held = memory.free_at_start - memory.free
    context = min(memory.total - memory.free_at_start, CONTEXT_BYTES)
    return min(int(memory.total * share) - context, memory.free_at_start) - held - memory.steps - memory.graphs


def _remedy(config: StepConfig, least: int) -> str:
    """Return the flag to change.

    least: bytes of the smallest pool that would do, its reserved page included.
    """
    options = config.options
    if options.kv_memory is not None:
        return f"raise --kv-memory to {least} or more"
    if options.kv_tokens is not None or config.device == "cpu":
        return "raise --kv-tokens"
    return "raise --gpu-memory, or lower --max-rows or --max-step-tokens"
