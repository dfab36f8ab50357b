"""The check that a checkpoint's tensors fill a model, before any of them is read.

No tensor may be missing, left over or of another shape.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from itertools import pairwise

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.loader.checkpoint import Checkpoint
from tandem.engine_core.loader.error_text import list_faults, printable
from tandem.engine_core.loader.header import StoredTensor
from tandem.engine_core.loader.slots import FLOAT_DTYPES, WeightSlot
from tandem.engine_core.quantization.quantization import STRAY

IGNORED_SUFFIXES = (
    ".rotary_emb.inv_freq", ".weight_shape", ".input_scale", ".activation_scale",
    ".q_scale", ".q_proj.output_scale", ".prob_scale", ".prob_output_scale",
)  # fmt: skip
"""Name suffixes of tensors that are not read: values derived from the configuration, activation scales (recomputed
for each token), and scales of queries and of attention weights, which stay in 16 bits. The rest of the name must be
that of a module of the model."""


class FilledRegions:
    """The parts of a parameter that some slots fill, as disjoint intervals along their dimension.

    A parameter may have hundreds of slots, one or two for each expert.
    """

    def __init__(self, slots: Iterable[WeightSlot] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for slot in slots:
            self.add(slot)

    def add(self, slot: WeightSlot) -> None:
        """Add the region of a slot."""
        start, end = slot.start, slot.start + slot.length
        first, last = bisect_left(self._ends, start), bisect_right(self._starts, end)
        if first < last:
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]

    def cover(self, slot: WeightSlot) -> bool:
        """Return whether all of a slot's region is filled."""
        index = bisect_right(self._starts, slot.start) - 1
        return slot.length == 0 or (index >= 0 and self._ends[index] >= slot.start + slot.length)


def check_fit(checkpoint: Checkpoint, slots: list[WeightSlot]) -> None:
    """Check that the tensors of a checkpoint fill all slots.

    Raises ConfigError that names the tensors which are missing, unexpected, misshaped, of a dtype that is not read, or
    given twice, and tied tensors that differ. Of many it names twenty. Raises it as well if a file cannot be read.
    """
    if problems := _problems(checkpoint, slots):
        faults = list_faults(problems, by_kind=True)
        raise ConfigError(f"{checkpoint.directory} does not fit the model of its config.json:\n  {faults}")


def _problems(checkpoint: Checkpoint, slots: list[WeightSlot]) -> list[str]:
    by_name: dict[str, list[WeightSlot]] = {}
    for slot in slots:
        by_name.setdefault(slot.name, []).append(slot)
    modules = _modules(by_name)
    problems = []
    for name, tensor in checkpoint.tensors.items():
        if name in by_name or not (_is_ignored(name, modules) or _is_stray_scale(name, checkpoint)):
            problems += _misfits(tensor, by_name.get(name, []))
    present: dict[int, list[WeightSlot]] = {}
    for slot in slots:
        if slot.name in checkpoint.tensors:
            present.setdefault(id(slot.parameter), []).append(slot)
    covered = {key: FilledRegions(found) for key, found in present.items()}
    for slot in slots:
        regions = covered.setdefault(id(slot.parameter), FilledRegions())
        if not slot.is_optional and not regions.cover(slot):
            problems.append(f"missing {slot.name}: expected {list(slot.accepted_shapes[0])}")
            regions.add(slot)
    return sorted(problems) + _doubles(checkpoint, present)


def _modules(names: Iterable[str]) -> set[str]:
    """Return the modules of tensors, and all modules that these are in."""
    found: set[str] = set()
    for name in names:
        module = name.rpartition(".")[0]
        while module and module not in found:
            found.add(module)
            module = module.rpartition(".")[0]
    return found


def _is_ignored(name: str, modules: set[str]) -> bool:
    return any(name.endswith(suffix) and name.removesuffix(suffix) in modules for suffix in IGNORED_SUFFIXES)


def _is_stray_scale(name: str, checkpoint: Checkpoint) -> bool:
    """Return whether a tensor is a scale of a weight that is not quantized."""
    module, _, last = name.rpartition(".")
    weight = checkpoint.tensors.get(f"{module}.weight")
    return last in STRAY and weight is not None and weight.dtype in FLOAT_DTYPES


def _misfits(tensor: StoredTensor, slots: list[WeightSlot]) -> list[str]:
    """Return the problems of one checkpoint tensor, one line each."""
    found = printable(str(list(tensor.shape)))
    if not slots:
        return [f"unexpected {printable(tensor.name)}: {found}"]
    for slot in slots:
        if tensor.shape not in slot.accepted_shapes:
            return [f"misshaped {tensor.name}: expected {list(slot.accepted_shapes[0])}, found {found}"]
        if tensor.dtype not in slot.dtypes:
            return [f"unreadable {tensor.name}: it is {tensor.dtype}, expected {', '.join(slot.dtypes)}"]
    return []


def _doubles(checkpoint: Checkpoint, present: dict[int, list[WeightSlot]]) -> list[str]:
    problems = []
    for slots in present.values():
        for first, second in pairwise(sorted(slots, key=lambda slot: slot.start)):
            if first.start + first.length <= second.start:
                continue
            if first.tied_to != second.name and second.tied_to != first.name:
                problems.append(f"given twice: {first.name} and {second.name} fill the same region of a parameter")
            elif checkpoint.tensors_differ(first.name, second.name):
                problems.append(f"tied {first.name} and {second.name} differ, but the model shares one tensor for both")
    return problems
