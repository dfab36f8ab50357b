"""Descriptions of the KV pool and of its groups of layers, for the log and the preflight report."""

from collections import Counter

from tandem.engine_core.config import EngineConfig, StepConfig
from tandem.engine_core.kv_cache.storage import KVLayout
from tandem.engine_core.model_config import ModelConfig
from tandem.engine_core.page_counts import held_pages

GIB, MIB, KIB = 2**30, 2**20, 2**10


def size_text(size: int) -> str:
    """Return a number of bytes in GiB, or in MiB below one."""
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / MIB:.1f} MiB"


def capacity_text(config: EngineConfig) -> str:
    """Return the tokens of a pool.

    With windows this depends on the length of the sequences: a long one gives up the pages before its windows.
    """
    shortest = (config.pages - 1) // len(config.held_windows) * config.page_size
    if shortest >= config.kv_tokens:
        return f"{config.kv_tokens} tokens"
    return f"{shortest} tokens in sequences of any length, {config.kv_tokens} in sequences of {config.max_len}"


def states_text(config: StepConfig, model: ModelConfig, itemsize: int) -> str:
    """Return the size of the state of recurrent layers. itemsize: of the model's dtype."""
    row = model.recurrent_row_bytes(itemsize, config.max_drafts)
    text = f"{size_text((config.max_rows + 1) * row)} for {config.max_rows} rows"
    if not config.max_drafts:
        return text
    drafts = row - model.recurrent_row_bytes(itemsize)
    return f"{text}, {size_text(row)} a row, {size_text(drafts)} of that for drafts"


def checkpoints_text(config: EngineConfig, checkpoint_bytes: int) -> str:
    """Return the number and size of the checkpoints of recurrent layers; empty for a model without them."""
    if not checkpoint_bytes:
        return ""
    size = size_text(config.state_slots * checkpoint_bytes)
    return f"{size} for {config.state_slots} of {size_text(checkpoint_bytes)}"


def pages_text(config: EngineConfig, layout: KVLayout) -> str:
    """Return the number and size of the pages that sequences can own, without the reserved one."""
    layers = layout.page_shape[0]
    return (
        f"{config.pages - 1} pages of {layout.page_bytes / KIB:g} KiB "
        f"({config.page_size} tokens, {layers} layer{'' if layers == 1 else 's'})"
    )


def windows_text(config: EngineConfig, model: ModelConfig, layout: KVLayout) -> str:
    """Return the windows of the layers, or why they save no memory; empty for a model without windows."""
    windows = [group.window for group in layout.groups]
    if not any(windows):
        used = [model.attention[layer].window for layer in model.attention_layers]
        unused = any(window is not None and window < config.max_len for window in used)
        return "windows are not used (--page-size max)" if unused else ""
    if len(windows) == 1:
        return f"window of {windows[0]} in all {len(layout.groups[0].layers)} layers"
    counts = Counter(windows)
    parts = [
        f"{count} over all positions" if window is None else f"{count} with a window of {window}"
        for window, count in counts.items()
    ]
    return f"{len(windows)} KV groups: {', '.join(parts)}"


def sequence_text(config: EngineConfig) -> str:
    """Return the pages of the longest sequence."""
    held = held_pages(config.held_windows, config.max_len, config.page_size, config.max_lead)
    return f"a sequence of {config.max_len} tokens takes {held} pages"
