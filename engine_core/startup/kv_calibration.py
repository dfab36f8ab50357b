"""Scales of the keys and values in a pool of 8-bit floats.

They are the checkpoint's, else calibrated. A page that is written with one scale cannot be read with another, and pages
are shared by all requests for as long as they are cached. So scales are calibrated before the pool is allocated: text
of the model's own, behind random tokens, is computed with keys and values in the model's dtype, and the largest of a
layer sets its scale.
"""

import logging

import torch
from msgspec import structs
from torch import Tensor

from tandem.engine_core.attention.base import ForwardBatch, Span
from tandem.engine_core.attention.torch import TorchPlanner
from tandem.engine_core.errors import ConfigError
from tandem.engine_core.integers import ceil_div
from tandem.engine_core.kernels.delta_rule.state import ModelStates, TokenRows
from tandem.engine_core.kernels.kv_dtype import LARGEST
from tandem.engine_core.kv_cache.storage import KVLayout, KVStorage
from tandem.engine_core.models.registry import Model

logger = logging.getLogger(__name__)

ROWS, PROMPT, SAMPLED = 8, 64, 16
"""Sequences that a calibration computes, random tokens that each begins with, and tokens sampled after them."""
MARGIN = 4.0
"""Factor between the largest number seen and the largest that is stored without clamping.

It costs no precision: all numbers above 2^-14 of the largest that is stored keep their three bits of mantissa.
"""
PAGE_SIZE = 16


def calibrate_kv_scales(model: Model, layout: KVLayout, dtype: torch.dtype, max_len: int) -> None:
    """Check the scales that a checkpoint gave, and calibrate those that it lacks.

    For a pool of the model's own dtype they are not used. layout: of the pool; dtype: of the model; max_len: maximum
    positions of a sequence. Raises ConfigError for scales that are negative or not finite.
    """
    scales = model.kv_scales.values
    given = scales.cpu()
    if not layout.has_scales:
        if given.any():
            logger.info("the checkpoint has scales for 8-bit keys and values; --kv-dtype fp8 uses them")
        return
    for layer, pair in enumerate(given.tolist()):
        for name, scale in zip(("keys", "values"), pair, strict=True):
            if not 0 <= scale < float("inf"):
                raise ConfigError(
                    f"--kv-dtype fp8: the checkpoint's scale of the {name} of layer {layer} is {scale}, but it must be "
                    "positive; use --kv-dtype auto or another checkpoint"
                )
    missing = given == 0
    if missing.any():
        largest = _largest(model, layout, dtype, max_len).cpu()
        # Overflowing or all-zero activations cannot give a scale.
        found = torch.where((largest > 0) & largest.isfinite(), MARGIN * largest / LARGEST, 1.0)
        given = torch.where(missing, found, given)
        scales.copy_(given)
    count = int(missing.sum())
    logger.info(
        "KV scales of %d layers: %d from the checkpoint, %d calibrated; keys %.3g to %.3g, values %.3g to %.3g",
        len(given),
        given.numel() - count,
        count,
        given[:, 0].min(),
        given[:, 0].max(),
        given[:, 1].min(),
        given[:, 1].max(),
    )


@torch.inference_mode()
def _largest(model: Model, layout: KVLayout, dtype: torch.dtype, max_len: int) -> Tensor:
    """Return the largest magnitudes of each layer's keys and values.

    They are [layers, 2] float32.
    """
    device = model.kv_scales.values.device
    prompt = min(PROMPT, max_len)
    total = min(prompt + SAMPLED, max_len)
    used = ceil_div(total, PAGE_SIZE)
    groups = len(layout.groups)
    shape, num_recurrent = model.config.delta_rule, len(model.config.recurrent_layers)
    recurrent = () if shape is None else ModelStates.allocate(shape, num_recurrent, ROWS + 1, dtype, device).layers
    own_layout, num_pages = structs.replace(layout, dtype=dtype, page_size=PAGE_SIZE), groups * ROWS * used + 1
    kv = KVStorage.allocate(own_layout, num_pages, device, recurrent)
    pages = torch.arange(1, groups * ROWS * used + 1, dtype=torch.int32, device=device).view(groups, ROWS, used)
    tables = [kv.page_table(own, group) for group, own in enumerate(pages)]
    planner = TorchPlanner(model.config.attention_kinds)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (ROWS, prompt), generator=generator)
    start = 0
    while start < total:
        length = ids.shape[1]
        spans = [Span(row, row * length, start, length) for row in range(ROWS)]
        positions = torch.arange(start, start + length, device=device).repeat(ROWS)
        rows = torch.arange(ROWS, device=device).repeat_interleave(length)
        last = torch.arange(1, ROWS + 1, device=device) * length - 1
        slots = [table.slots(rows, positions) for table in tables]
        step = planner.plan(spans, tables)
        tokens = TokenRows(rows.int() + 1, positions, max_spans=ROWS) if recurrent else None
        batch = ForwardBatch(ids.flatten().to(device), positions, slots, last, step, tokens=tokens)
        logits = model.logits(model.forward(batch, kv)).float().cpu()
        start += length
        ids = torch.multinomial(logits.nan_to_num().softmax(-1), 1, generator=generator)
    largest = torch.zeros(model.config.layers, 2, device=device)
    for group, own in zip(layout.groups, pages, strict=True):
        largest[list(group.layers)] = kv.pool[own.flatten()].abs().amax((0, 3, 4, 5)).float()[: len(group.layers)]
    return largest
