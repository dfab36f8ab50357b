"""The regions of a model that the tensors of an update fill."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.loader.error_text import list_faults, printable
from tandem.engine_core.loader.fit import FilledRegions
from tandem.engine_core.loader.slots import WeightSlot
from tandem.engine_core.weight_updates.tensors import TensorSpec


class UpdateSlots:
    """The slots of one update, which several calls may fill in parts."""

    def __init__(self, slots: list[WeightSlot], rename: Callable[[str], str | None]) -> None:
        """Keep the slots of a model.

        rename: returns the name that a checkpoint's tensor has in the model, None for one that is not read.
        """
        self.slots = slots
        self._rename = rename
        self._by_name: dict[str, list[WeightSlot]] = {}
        for slot in slots:
            self._by_name.setdefault(slot.name, []).append(slot)
        self._tied = {name for slot in slots if slot.tied_to for name in (slot.name, slot.tied_to)}
        self._filled: list[WeightSlot] = []
        self._announced: dict[str, str] = {}
        """Names that were checked, by their names in the model."""

    def check(self, specs: Sequence[TensorSpec]) -> None:
        """Raise ConfigError that names the tensors which do not fit, before any of them arrives.

        Those of earlier calls count: two names must not fill one region of a parameter, unless they are tied.
        """
        problems = []
        announced = dict(self._announced)
        for spec in specs:
            name = self._rename(spec.name)
            slots = [] if name is None else self._by_name.get(name, [])
            if name is not None and (other := announced.setdefault(name, spec.name)) != spec.name:
                problems.append(f"given twice: {printable(other)} and {printable(spec.name)} are one tensor")
            if name is not None and not slots:
                problems.append(f"unexpected {printable(spec.name)}: {list(spec.shape)}")
            for slot in slots:
                if spec.shape not in slot.accepted_shapes:
                    shape = list(slot.accepted_shapes[0])
                    problems.append(f"misshaped {spec.name}: expected {shape}, announced {list(spec.shape)}")
                    break
                if spec.dtype not in slot.dtypes:
                    dtypes = ", ".join(slot.dtypes)
                    problems.append(f"unreadable {spec.name}: it is {spec.dtype}, expected {dtypes}")
                    break
        problems += self._doubles(announced)
        if problems:
            raise ConfigError(f"the tensors do not fit the model:\n  {list_faults(problems, by_kind=True)}")
        self._announced = announced

    def _doubles(self, announced: dict[str, str]) -> list[str]:
        """Return the regions that two tensors would fill."""
        present: dict[int, list[WeightSlot]] = {}
        for slot in self.slots:
            if slot.name in announced:
                present.setdefault(id(slot.parameter), []).append(slot)
        problems = []
        for slots in present.values():
            for first, second in pairwise(sorted(slots, key=lambda slot: slot.start)):
                if first.start + first.length > second.start and not _are_tied(first, second):
                    names = " and ".join(printable(announced[slot.name]) for slot in (first, second))
                    problems.append(f"given twice: {names} fill the same region of a parameter")
        return problems

    @torch.inference_mode()
    def write(self, name: str, tensor: Tensor) -> None:
        """Write a tensor that was checked to the regions that it fills.

        Raises ConfigError, also for a tensor unlike the one that it is tied to.
        """
        renamed = self._rename(name)
        for slot in self._by_name.get(renamed, []) if renamed is not None else []:
            source = slot.source
            part = tensor if source is None else tensor.narrow(source.dim, source.start, source.stop - source.start)
            self._check_tied(slot, part)
            slot.fill(part)
            self._filled.append(slot)

    def _check_tied(self, slot: WeightSlot, part: Tensor) -> None:
        for other in self._filled if slot.name in self._tied else ():
            if _are_tied(slot, other) and not torch.equal(slot.target, part.to(slot.target.dtype)):
                names = f"{printable(other.name)} and {printable(slot.name)}"
                raise ConfigError(f"tied {names} differ, but the model shares one tensor for both")

    @property
    def missing(self) -> list[str]:
        """Names of tensors whose regions no tensor has filled so far."""
        covered: dict[int, FilledRegions] = {}
        for slot in self._filled:
            covered.setdefault(id(slot.parameter), FilledRegions()).add(slot)
        names = []
        for slot in self.slots:
            regions = covered.setdefault(id(slot.parameter), FilledRegions())
            if not slot.is_optional and not regions.cover(slot):
                names.append(slot.name)
                regions.add(slot)
        return names


def _are_tied(first: WeightSlot, second: WeightSlot) -> bool:
    return first.tied_to == second.name or second.tied_to == first.name
