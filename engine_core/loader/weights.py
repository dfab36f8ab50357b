"""The filling of a model from a checkpoint.

No tensor may be missing, left over or of another shape.
"""

from collections.abc import Callable
from itertools import pairwise

import torch

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.loader.checkpoint import Checkpoint, StoredTensor
from tandem.engine_core.loader.slots import Loadable, WeightSlot

HARMLESS = (".rotary_emb.inv_freq",)
"""Name suffixes of buffers that old checkpoints hold and that follow from the configuration."""


def fill_with_noise(model: Loadable, scale: float = 0.02) -> None:
    """Fill every weight from a fixed seed.

    Norms get ones, integers any of their values, and the rest normal noise of deviation `scale`.
    """
    with torch.inference_mode():
        for slot in sorted(model.weight_slots(), key=lambda item: item.name):
            generator = torch.Generator(slot.target.device).manual_seed(0)
            if "norm" in slot.name:
                slot.target.fill_(1.0)
            elif slot.target.is_floating_point():
                slot.target.normal_(0.0, scale, generator=generator)
            else:
                slot.target.random_(generator=generator)


def load_weights(model: Loadable, checkpoint: Checkpoint, progress: Callable[[int, int], None] | None = None) -> None:
    """Copy the tensors of a checkpoint into a model's parameters.

    Tensors are cast to the parameters' dtypes and copied one at a time. The parameters keep their storage, which
    captured graphs may hold. progress: called with the bytes of the parameters that are filled, and of all.

    Raises ConfigError that names every tensor which is missing, unexpected, misshaped, of a dtype that is not read, or
    given twice, and tied tensors that differ; then the model is unchanged. Raises it as well if a file cannot be read.
    """
    with torch.inference_mode():
        slots = model.weight_slots()
        if problems := _problems(checkpoint, slots):
            raise ConfigError(
                f"{checkpoint.directory} does not fit the model of its config.json:\n  " + "\n  ".join(problems)
            )
        done = 0
        total = sum(slot.target.nbytes for slot in slots if slot.name in checkpoint.tensors)
        for slot, tensor in checkpoint.read(slots):
            slot.fill(tensor)
            done += slot.target.nbytes
            if progress is not None:
                progress(done, total)


def tensors_differ(checkpoint: Checkpoint, first: str, second: str) -> bool:
    """Return whether a checkpoint holds both tensors and they are not equal."""
    if first not in checkpoint.tensors or second not in checkpoint.tensors:
        return False
    return not torch.equal(checkpoint.read_one(first), checkpoint.read_one(second))


def _problems(checkpoint: Checkpoint, slots: list[WeightSlot]) -> list[str]:
    by_name: dict[str, list[WeightSlot]] = {}
    for slot in slots:
        by_name.setdefault(slot.name, []).append(slot)
    problems = []
    for tensor in checkpoint.tensors.values():
        problems += _misfits(tensor, by_name.get(tensor.name, []))
    present: dict[int, list[WeightSlot]] = {}
    for slot in slots:
        if slot.name in checkpoint.tensors:
            present.setdefault(id(slot.parameter), []).append(slot)
    covered = {key: list(found) for key, found in present.items()}
    for slot in slots:
        others = covered.setdefault(id(slot.parameter), [])
        if not _covers(others, slot):
            problems.append(f"missing {slot.name}: expected {list(slot.shape)}")
            others.append(slot)
    return sorted(problems) + _doubles(checkpoint, present)


def _misfits(tensor: StoredTensor, slots: list[WeightSlot]) -> list[str]:
    """Return the problems of one checkpoint tensor, one line each."""
    if not slots:
        return [] if tensor.name.endswith(HARMLESS) else [f"unexpected {tensor.name}: {list(tensor.shape)}"]
    for slot in slots:
        if tensor.shape != slot.shape:
            return [f"misshaped {tensor.name}: expected {list(slot.shape)}, found {list(tensor.shape)}"]
        if tensor.dtype not in slot.dtypes:
            return [f"unreadable {tensor.name}: it is {tensor.dtype}, expected {', '.join(slot.dtypes)}"]
    return []


def _covers(others: list[WeightSlot], slot: WeightSlot) -> bool:
    """Return whether other slots of a parameter cover all of this one's region."""
    reached = slot.start
    for other in sorted(others, key=lambda item: item.start):
        if other.start <= reached:
            reached = max(reached, other.start + other.length)
    return reached >= slot.start + slot.length


def _doubles(checkpoint: Checkpoint, present: dict[int, list[WeightSlot]]) -> list[str]:
    problems = []
    for slots in present.values():
        for first, second in pairwise(sorted(slots, key=lambda slot: slot.start)):
            if first.start + first.length <= second.start:
                continue
            if first.tied_to != second.name and second.tied_to != first.name:
                problems.append(f"given twice: {first.name} and {second.name} fill the same region of a parameter")
            elif tensors_differ(checkpoint, first.name, second.name):
                problems.append(f"tied {first.name} and {second.name} differ, but the model shares one tensor for both")
    return problems
