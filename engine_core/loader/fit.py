"""The check that a checkpoint's tensors fill a model, before any of them is read.

No tensor may be missing, left over or of another shape.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from itertools import pairwise
from math import prod

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.loader.checkpoint import Checkpoint, read_stored
from tandem.engine_core.loader.error_text import MAX_LISTED, list_faults, printable
from tandem.engine_core.loader.header import StoredTensor
from tandem.engine_core.loader.slots import FLOAT_DTYPES, WeightSlot
from tandem.engine_core.quantization.quantization import PACKED, STRAY

IGNORED_SUFFIXES = (
    ".rotary_emb.inv_freq", ".weight_shape", ".input_scale", ".activation_scale",
    ".q_scale", ".q_proj.output_scale", ".prob_scale", ".prob_output_scale",
)  # fmt: skip
"""Name suffixes of tensors that are not read: values derived from the configuration, activation scales (recomputed
for each token), and scales of queries and of attention weights, which stay in 16 bits. The rest of the name must be
that of a module of the model."""


MAX_EXAMPLES = 3
"""Maximum number of faults in a message that says their cause."""


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
    given twice, and tied tensors that differ. Of many it names twenty, or three after their cause if it is known:
    other bits than those of the config, or no quantization_config. Raises it as well if a file cannot be read.
    """
    if problems := _problems(checkpoint, slots):
        cause = _unconfigured(checkpoint, slots) or _other_bits(checkpoint, slots)
        faults = list_faults(problems, by_kind=True, limit=MAX_EXAMPLES if cause else MAX_LISTED)
        reason = f" {cause}" if cause else ""
        raise ConfigError(f"{checkpoint.directory} does not fit the model of its config.json:{reason}\n  {faults}")


def _unconfigured(checkpoint: Checkpoint, slots: list[WeightSlot]) -> str | None:
    """Return the fault of quantized weights in a model without quantized layers, None if there are none."""
    if any(slot.dtypes != FLOAT_DTYPES for slot in slots):
        return None
    kinds: list[str] = []
    for name, tensor in checkpoint.tensors.items():
        last = name.rpartition(".")[2]
        if last in PACKED:
            kinds.append(last)
        elif last == "weight" and tensor.dtype not in FLOAT_DTYPES:
            kinds.append("FP8" if tensor.dtype == "F8_E4M3" else tensor.dtype)
    if not kinds:
        return None
    return (
        f"{len(kinds)} weights are quantized ({', '.join(sorted(set(kinds)))}), but config.json has no "
        "quantization_config for them; restore it (and hf_quant_config.json) from the original repository"
    )


def _other_bits(checkpoint: Checkpoint, slots: list[WeightSlot]) -> str | None:
    """Return the fault of the first packed weight of other bits than the config says, None if there is none.

    Its scales fit, so that its layer has the right shape.
    """
    by_name = {slot.name: slot for slot in slots}
    for name, slot in by_name.items():
        module, _, last = name.rpartition(".")
        tensor, expected = checkpoint.tensors.get(name), slot.accepted_shapes[0]
        if last not in PACKED or tensor is None or len(tensor.shape) != len(expected):
            continue
        scales = f"{module}.{'scales' if last == 'qweight' else 'weight_scale'}"
        stored = checkpoint.tensors.get(scales)
        if stored is None or scales not in by_name or stored.shape not in by_name[scales].accepted_shapes:
            continue
        # Packed weights of 8 bits are unpacked to bytes, those of 4 bits stay in words.
        said = 8 if slot.parameter.itemsize == 1 else 4
        found, rest = divmod(said * prod(tensor.shape), prod(expected))
        if rest == 0 and found != said and found in (2, 3, 4, 8):
            field = "bits" if last == "qweight" else "num_bits"
            return f"{name} has {found} bits, quantization_config says {said}; correct its {field}"
    return None


def _problems(checkpoint: Checkpoint, slots: list[WeightSlot]) -> list[str]:
    by_name: dict[str, list[WeightSlot]] = {}
    for slot in slots:
        by_name.setdefault(slot.name, []).append(slot)
    modules = _modules(by_name)
    problems = []
    for name, tensor in checkpoint.tensors.items():
        if name not in by_name and _is_bias_of_packed(name, tensor, by_name):
            problems += _nonzero_bias(name, tensor)
        elif name in by_name or not (_is_ignored(name, modules) or _is_stray_scale(name, checkpoint)):
            problems += _misfits(tensor, by_name.get(name, []))
    present: dict[int, list[WeightSlot]] = {}
    for slot in slots:
        if slot.name in checkpoint.tensors:
            present.setdefault(id(slot.parameter), []).append(slot)
    covered = {key: FilledRegions(found) for key, found in present.items()}
    for slot in slots:
        regions = covered.setdefault(id(slot.parameter), FilledRegions())
        if not slot.is_optional and not regions.cover(slot):
            problems.append(f"missing {slot.name}: expected {_shape_text(slot)}")
            regions.add(slot)
    return sorted(set(problems)) + _doubles(checkpoint, present)


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


def _is_bias_of_packed(name: str, tensor: StoredTensor, slots: Mapping[str, list[WeightSlot]]) -> bool:
    """Return whether a tensor has the name, shape and dtype of a bias of a layer with `qweight` and `scales`."""
    module, _, last = name.rpartition(".")
    scales = slots.get(f"{module}.scales")
    if last != "bias" or scales is None or f"{module}.qweight" not in slots:
        return False
    return tensor.dtype in FLOAT_DTYPES and tensor.shape == scales[0].accepted_shapes[0][-1:]


def _nonzero_bias(name: str, tensor: StoredTensor) -> list[str]:
    """Return the problem of a bias of a layer without one, none if all its values are 0: AutoGPTQ saves such."""
    stored = read_stored(tensor).double()
    largest = float(stored[stored.abs().argmax()])
    return (
        [f"unexpected {name}: the layer has no bias here, and not all values are 0 ({largest:.3g})"] if largest else []
    )


def _misfits(tensor: StoredTensor, slots: list[WeightSlot]) -> list[str]:
    """Return the problems of one checkpoint tensor, one line each."""
    if not slots:
        return [f"unexpected {printable(tensor.name)}: {printable(str(list(tensor.shape)))}"]
    for slot in slots:
        if tensor.shape not in slot.accepted_shapes:
            found = printable(str(list(tensor.shape)))
            return [f"misshaped {tensor.name}: expected {_shape_text(slot)}, found {found}"]
        if tensor.dtype not in slot.dtypes:
            return [f"unreadable {tensor.name}: it is {tensor.dtype}, expected {', '.join(slot.dtypes)}"]
    return []


def _shape_text(slot: WeightSlot) -> str:
    """Return the usual shape of a slot's tensor for errors."""
    shape = slot.accepted_shapes[0]
    return str(list(shape)) if shape else "a scalar"


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
