"""Fills a model from a checkpoint, strictly: nothing missing, nothing left over, nothing of another shape."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.loader.checkpoint import Checkpoint
from tandem.engine_core.loader.slots import Loadable, WeightSlot


def fill_with_noise(model: Loadable, scale: float = 0.02) -> None:
    """Fills every weight from a fixed seed: norms with ones, the rest with normal noise of deviation `scale`."""
    with torch.inference_mode():
        for name, slot in sorted(model.weight_slots().items()):
            generator = torch.Generator(slot.target.device).manual_seed(0)
            if "norm" in name:
                slot.target.fill_(1.0)
            else:
                slot.target.normal_(0.0, scale, generator=generator)


HARMLESS = (".rotary_emb.inv_freq",)
"""Ends of names of buffers that old checkpoints hold and that follow from the configuration."""


def load_weights(model: Loadable, directory: Path, progress: Callable[[float], None] | None = None) -> None:
    """Copies the tensors of a Hugging Face folder into the model, cast to its dtype, one at a time.

    progress: called with the percentage done. Two names of one tied parameter are treated as transformers does it: if
    both are there and differ, they are untied.

    Raises ConfigError as `Checkpoint.open` does, and one that names every missing, unexpected, misshaped and doubly
    given tensor; then the model is unchanged.
    """
    with torch.inference_mode():
        checkpoint = Checkpoint.open(directory)
        tied = model.tied_names()
        if tied and set(tied) <= checkpoint.tensors.keys() and not _equal(checkpoint, *tied):
            model.untie()
            tied = None
        slots = model.weight_slots()
        if problems := _problems(checkpoint, slots, set(tied or ())):
            raise ConfigError(f"{directory} does not fit the model of its config.json:\n  " + "\n  ".join(problems))
        done = 0
        total = sum(slots[name].target.numel() for name in checkpoint.tensors if name in slots)
        for name, tensor in checkpoint.read():
            if name in slots:
                slots[name].target.copy_(tensor)
                done += tensor.numel()
                if progress is not None:
                    progress(100.0 * done / total)


def _equal(checkpoint: Checkpoint, first: str, second: str) -> bool:
    return torch.equal(checkpoint.read_one(first), checkpoint.read_one(second))


def _problems(checkpoint: Checkpoint, slots: dict[str, WeightSlot], tied: set[str]) -> list[str]:
    problems = []
    present: dict[int, list[str]] = {}
    for name, tensor in checkpoint.tensors.items():
        slot = slots.get(name)
        if slot is not None:
            present.setdefault(id(slot.parameter), []).append(name)
            if tensor.shape != slot.shape:
                problems.append(f"misshaped {name}: expected {list(slot.shape)}, found {list(tensor.shape)}")
        elif not name.endswith(HARMLESS):
            problems.append(f"unexpected {name}: {list(tensor.shape)}")
    covered = {key: [slots[name] for name in names] for key, names in present.items()}
    for name, slot in slots.items():
        others = covered.setdefault(id(slot.parameter), [])
        if not _covers(others, slot):
            problems.append(f"missing {name}: expected {list(slot.shape)}")
            others.append(slot)
    return sorted(problems) + _doubles(present, slots, tied)


def _covers(others: list[WeightSlot], slot: WeightSlot) -> bool:
    """Whether slots of the same parameter leave no row of this one uncovered."""
    reached = slot.start
    for other in sorted(others, key=lambda item: item.start):
        if other.start <= reached:
            reached = max(reached, other.start + other.length)
    return reached >= slot.start + slot.length


def _doubles(present: dict[int, list[str]], slots: dict[str, WeightSlot], tied: set[str]) -> list[str]:
    problems = []
    for names in present.values():
        ordered = sorted(names, key=lambda name: slots[name].start)
        for first, second in pairwise(ordered):
            overlap = slots[first].start + slots[first].length > slots[second].start
            if overlap and {first, second} != tied:
                problems.append(f"given twice: {first} and {second} fill the same rows")
    return problems
