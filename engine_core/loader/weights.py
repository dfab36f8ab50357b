"""The filling of a model from a checkpoint."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from zlib import crc32

import torch

from tandem.engine_core.loader.checkpoint import Checkpoint
from tandem.engine_core.loader.fit import FilledRegions, check_fit
from tandem.engine_core.loader.slots import Loadable, WeightSlot
from tandem.engine_core.loader.transfer import Progress, transfer

_BYTE_DEVIATION = 64
"""Standard deviation of noise in weights of one byte."""

_KEPT = ("qzeros", "weight_zero_point")
"""Suffixes of tensors with regions that are valid from the start."""


def fill_with_noise(model: Loadable, scale: float = 0.02) -> None:
    """Fill each weight with random values. The seed depends on the tensor's name and offset in its parameter.

    Norms get ones, integers any of their values, and the rest normal noise of deviation `scale`. Scales of quantized
    weights are all equal, and groups of act-order are shuffled.
    """
    with torch.inference_mode():
        slots = model.weight_slots()
        filled: dict[int, FilledRegions] = {}
        for slot in sorted(slots, key=lambda item: item.name):
            regions = filled.setdefault(id(slot.parameter), FilledRegions())
            if regions.cover(slot):
                continue
            regions.add(slot)
            # Parts of a fused projection have one order of inputs.
            shared = slot.name.endswith("g_idx")
            seed = 0 if shared else crc32(f"{slot.name} {slot.start}".encode())
            _fill(slot, scale, torch.Generator(slot.target.device).manual_seed(seed))
        finish(slots)


def _fill(slot: WeightSlot, scale: float, generator: torch.Generator) -> None:
    """Fill a slot with noise of a deviation.

    Weights of one byte have it after they are multiplied by their scales.
    """
    target = slot.target
    if slot.name.endswith(_KEPT) or slot.is_optional:
        return
    if slot.name.endswith("g_idx"):
        # Act-order in the usual order would cost nothing.
        order = torch.randperm(target.shape[-1], device=target.device, generator=generator)
        target.copy_(target.sort(dim=-1).values[..., order])
    elif "norm" in slot.name:
        target.fill_(1.0)
    elif "scale" in slot.name:
        target.fill_(scale / _BYTE_DEVIATION)
    elif slot.name.endswith(".weight") and slot.shapes and slot.transform is not None:
        # Weights that are quantized while they are loaded.
        noise = torch.empty(slot.shapes[0], device=target.device)
        slot.fill(noise.normal_(0.0, scale, generator=generator))
    elif target.is_floating_point() and target.itemsize == 1:
        target.copy_(torch.empty_like(target, dtype=torch.float32).normal_(0.0, _BYTE_DEVIATION, generator=generator))
    elif target.is_floating_point():
        target.normal_(0.0, scale, generator=generator)
    else:
        target.random_(generator=generator)


def load_weights(
    model: Loadable,
    checkpoint: Checkpoint,
    progress: Progress | None = None,
    threads: int | None = None,
) -> None:
    """Copy the tensors of a checkpoint into a model's parameters.

    Tensors are cast to the parameters' dtypes. They are read in pieces by several threads, so that the host holds only
    the pieces (see `transfer`). The parameters keep their storage, which captured graphs may hold.

    progress: called with the bytes that are read, and of all that will be; threads: number of reading threads, None for
    the default of the device.

    Raises ConfigError if the tensors do not fit the model (see `check_fit`), which then is unchanged, if a file cannot
    be read, or if quantized tensors contradict each other.
    """
    with torch.inference_mode(), _without_collections():
        slots = model.weight_slots()
        check_fit(checkpoint, slots)
        transfer(_needed(checkpoint, slots), checkpoint, progress, threads)
        finish(slots)


@contextmanager
def _without_collections() -> Iterator[None]:
    """Pause garbage collection: with 18,432 tensors of experts it took most of the time besides the copies."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _needed(checkpoint: Checkpoint, slots: list[WeightSlot]) -> list[WeightSlot]:
    """Return the slots for tensors that the checkpoint has, without repetitions of tied tensors."""
    present = [slot for slot in slots if slot.name in checkpoint.tensors]
    names = {slot.name for slot in present}
    return [slot for slot in present if slot.tied_to is None or slot.tied_to not in names]


def finish(slots: list[WeightSlot]) -> None:
    """Run the `on_filled` callbacks. Raises ConfigError for tensors that contradict each other."""
    for on_filled in dict.fromkeys(slot.on_filled for slot in slots):
        if on_filled is not None:
            on_filled()
