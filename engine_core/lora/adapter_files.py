"""The files of a LoRA adapter in PEFT's format, read and checked against a model.

An adapter that changes a layer in a way that this engine does not compute, or names one that the model does not have,
is refused: it is never served as the base model.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.layers.lora_linear import LayerUpdate, LoraSlots
from tandem.engine_core.loader.header import TORCH_DTYPES, StoredTensor, read_header
from tandem.engine_core.loader.slots import FLOAT_DTYPES
from tandem.engine_core.loader.source_file import SourceFile, memory_of
from tandem.engine_core.lora.adapter_folder import CONFIG_FILE, WEIGHTS_FILE, AdapterFolder, Stamp, file_stamp
from tandem.engine_core.lora.peft_config import PeftConfig, list_names, read_config
from tandem.engine_core.quantization.module_names import text_model_name

MAX_HEADER_BYTES = 8 * 2**20
"""Most bytes of the header of the weights, as the loop waits while it is parsed: those of adapters of large models have
0.2 MB, or 6 MB with all experts."""
_NAME = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<matrix>[AB])(?:\.[^.]+)?\.weight")
_REFUSED = (
    ("lora_magnitude_vector", "DoRA"),
    ("lora_embedding_", "adapters of embeddings"),
    ("embed_tokens", "adapters of embeddings"),
    ("lm_head", "adapters of the output head"),
    ("modules_to_save", "modules_to_save"),
    ("experts", "adapters of expert weights"),
    ("bias", "a bias"),
)
"""Parts of tensor names and modules, and what they are for."""


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """An adapter in host memory, ready to be copied into a slot."""

    updates: Mapping[str, LayerUpdate]
    """Updates of the layers that it changes, by their names in `LoraSlots.linears`."""
    rank: int
    """Largest rank of its matrices."""
    stamp: Stamp
    """Of the files that it was read from."""


@dataclass(frozen=True, slots=True)
class _Target:
    """A module of the checkpoint that adapters may change: a linear layer, or some parts of a fused one."""

    name: str
    linear: str
    parts: range


@dataclass(frozen=True, slots=True)
class _Matrices:
    a: StoredTensor
    b: StoredTensor


_Own = list[tuple[_Target, _Matrices]]
"""The modules of one linear layer that an adapter changes, with their matrices."""


class Run(Protocol):
    """Calls a function with each item, in any order or at once."""

    def __call__(self, function: Callable[[_Own], LayerUpdate], items: Sequence[_Own]) -> list[LayerUpdate]:
        """Return the results once all calls have ended; raises the first error of one."""


def read_adapter(folder: Path, slots: LoraSlots, root: Path | None = None, run: Run | None = None) -> HostAdapter:
    """Read an adapter into host memory.

    root: as in `AdapterFolder`; run: calls the function that reads one layer; None: for one after the other.

    Raises ConfigError, with the reason, for an adapter that is broken, does not fit the model, or needs more than this
    engine supports.
    """
    with AdapterFolder(folder, root) as opened:
        found = _read_folder(opened, slots, run or _in_order)
    if file_stamp(folder) != found.stamp:
        raise ConfigError(f"{folder} changed while it was read; load it again once it is complete")
    return found


def _in_order(function: Callable[[_Own], LayerUpdate], items: Sequence[_Own]) -> list[LayerUpdate]:
    return list(map(function, items))


def _read_folder(folder: AdapterFolder, slots: LoraSlots, run: Run) -> HostAdapter:
    stamp, config = folder.stamp, read_config(folder.path / CONFIG_FILE, folder.opener)
    path = folder.path / WEIGHTS_FILE
    targets = _targets(slots)
    try:
        matrices = _matrices(read_header(path, MAX_HEADER_BYTES, folder.opener), targets)
        _check_targets(config, matrices, targets, slots)
        for name, found in matrices.items():
            _check_shapes(name, found, config, targets[name], slots)
    except _AdapterError as error:
        raise ConfigError(f"{path}: {error}") from None
    own: dict[str, _Own] = {}
    for name, found in matrices.items():
        own.setdefault(targets[name].linear, []).append((targets[name], found))
    with SourceFile(path, folder.opener) as file:
        updates = dict(zip(own, run(_Reader(file, config, slots).update, list(own.values())), strict=True))
    return HostAdapter(updates, max(config.rank_of(name) for name in matrices), stamp)


class _AdapterError(Exception):
    """The tensors of an adapter do not fit; the text describes how."""


def _targets(slots: LoraSlots) -> dict[str, _Target]:
    """Return the modules that adapters may change, by their name in the text model."""
    found: dict[str, _Target] = {}
    for name, linear in slots.linears.items():
        prefix, count = name.rpartition(".")[0], len(linear.parts)
        found[name] = _Target(name, name, range(count))
        if count > 1:
            for index, part in enumerate(linear.parts):
                found[f"{prefix}.{part}"] = _Target(f"{prefix}.{part}", name, range(index, index + 1))
    return found


def _matrices(tensors: Mapping[str, StoredTensor], targets: Mapping[str, _Target]) -> dict[str, _Matrices]:
    """Return the matrices of each module, by its name in the text model."""
    found: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        module = text_model_name(match["module"]) if match else ""
        if match is None or module not in targets:
            raise _AdapterError(_refusal(name))
        pair = found.setdefault(module, {})
        if match["matrix"] in pair:
            raise _AdapterError(f"it has lora_{match['matrix']} of {module} twice")
        pair[match["matrix"]] = tensor
    if not found:
        raise _AdapterError("it has no tensors")
    for module, pair in found.items():
        if len(pair) < 2:
            (present,) = pair
            raise _AdapterError(f"{module} has lora_{present}, but no lora_{'B' if present == 'A' else 'A'}")
    return {module: _Matrices(pair["A"], pair["B"]) for module, pair in found.items()}


def _refusal(name: str) -> str:
    """Return why a tensor cannot be used."""
    parts = name.split(".")
    for part, what in _REFUSED:
        if any(own.startswith(part) for own in parts):
            return f"{list_names([name])} is for {what}, which is not supported"
    return f"{list_names([name])} names no linear layer of this model's blocks"


def _check_targets(
    config: PeftConfig, matrices: Mapping[str, _Matrices], targets: Mapping[str, _Target], slots: LoraSlots
) -> None:
    """Raise _AdapterError unless the tensors are those of the modules that the configuration names."""
    others = [name for name in matrices if not _is_named(config, targets[name], slots)]
    if others:
        raise _AdapterError(f"it has tensors of modules that target_modules does not include: {list_names(others)}")
    covered = {(targets[name].linear, part) for name in matrices for part in targets[name].parts}
    if len(covered) < sum(len(targets[name].parts) for name in matrices):
        raise _AdapterError("it has tensors both of a fused projection and of its parts")
    named = [target for target in targets.values() if config.targets(target.name)]
    missing = [target.name for target in named if not all((target.linear, part) in covered for part in target.parts)]
    if missing:
        raise _AdapterError(f"it has no tensors of modules in target_modules: {list_names(missing)}")
    ends = {name[start:] for name in targets for start in (0, *(i + 1 for i, c in enumerate(name) if c == "."))}
    for name in config.target_names:
        if text_model_name(name) not in ends:
            raise _AdapterError(
                f"target_modules names {list_names([name])}, which is not a linear layer of this model's blocks"
            )


def _is_named(config: PeftConfig, target: _Target, slots: LoraSlots) -> bool:
    """Return whether a module, or each part of it, is in target_modules."""
    if config.targets(target.name):
        return True
    linear, prefix = slots.linears[target.linear], target.linear.rpartition(".")[0]
    parts = [f"{prefix}.{part}" for index, part in enumerate(linear.parts) if index in target.parts]
    return len(parts) > 1 and all(map(config.targets, parts))


def _check_shapes(name: str, found: _Matrices, config: PeftConfig, target: _Target, slots: LoraSlots) -> None:
    """Raise _AdapterError if the matrices of a module do not have its shape and its rank."""
    linear, rank = slots.linears[target.linear], config.rank_of(name)
    outputs = linear.starts[target.parts.stop] - linear.starts[target.parts.start]
    if rank > slots.max_rank:
        raise _AdapterError(f"{name} has rank {rank}, and --max-lora-rank is {slots.max_rank}")
    for matrix, tensor, shape in (("A", found.a, (rank, linear.inputs)), ("B", found.b, (outputs, rank))):
        if tensor.dtype not in FLOAT_DTYPES:
            raise _AdapterError(
                f"lora_{matrix} of {name} is in {tensor.dtype}, not in one of {', '.join(FLOAT_DTYPES)}"
            )
        if tensor.shape != shape:
            raise _AdapterError(
                f"lora_{matrix} of {name} has the shape {list(tensor.shape)}; for rank {rank} it must be {list(shape)}"
            )


class _Reader:
    """Reads the updates of layers from the file of an adapter, for several threads at once."""

    def __init__(self, file: SourceFile, config: PeftConfig, slots: LoraSlots) -> None:
        self.file = file
        self.config = config
        self.slots = slots

    def update(self, own: _Own) -> LayerUpdate:
        """Return the update of a layer, in the order of its inputs and outputs.

        Raises ConfigError if a value is not finite.
        """
        linear = self.slots.linears[own[0][0].linear]
        count, dtype = len(linear.parts), linear.a.dtype
        rank = max(self.config.rank_of(target.name) for target, _ in own)
        a, b = torch.empty(count, rank, linear.inputs, dtype=dtype), torch.empty(rank, linear.starts[-1], dtype=dtype)
        buffer = torch.empty(max(tensor.nbytes for _, pair in own for tensor in (pair.a, pair.b)), dtype=torch.uint8)
        ranks = [0] * count
        for target, _ in own:
            for part in target.parts:
                ranks[part] = self.config.rank_of(target.name)
        if min(ranks) < rank:
            a.zero_()
            b.zero_()
        for target, matrices in own:
            own_rank = self.config.rank_of(target.name)
            start, end = linear.starts[target.parts.start], linear.starts[target.parts.stop]
            matrix = self._read(matrices.a, buffer)
            for part in target.parts:
                a[part, :own_rank].copy_(matrix)
            matrix = self._read(matrices.b, buffer)
            # Scaled before it is transposed, which is twice as fast, and rounded once.
            matrix = (matrix if matrix.dtype == dtype else matrix.float()).mul_(self.config.scale_of(target.name))
            b[:own_rank, start:end].copy_(matrix.t())
        if not (_is_finite(a) and _is_finite(b)):
            fault = self._fault(own, buffer) or f"{own[0][0].name} is not finite in {dtype} once it is scaled"
            raise ConfigError(f"{self.file.path}: {fault}")
        if (order := linear.input_order) is not None:
            a.copy_(a[:, :, order.cpu()])
        if (order := linear.output_order) is not None:
            b.copy_(b[:, order.cpu()])
        return LayerUpdate(a, b, torch.tensor(ranks, dtype=torch.int32))

    def _read(self, tensor: StoredTensor, buffer: Tensor) -> Tensor:
        """Return a matrix in a buffer of bytes."""
        read = buffer[: tensor.nbytes]
        self.file.read_into(memory_of(read), tensor.start)
        return read.view(TORCH_DTYPES[tensor.dtype]).view(tensor.shape)

    def _fault(self, own: _Own, buffer: Tensor) -> str:
        """Return which matrix is not finite in the file, "" if all are."""
        for target, matrices in own:
            for matrix, tensor in (("A", matrices.a), ("B", matrices.b)):
                if not _is_finite(self._read(tensor, buffer)):
                    return f"lora_{matrix} of {target.name} has values that are NaN or infinite"
        return ""


def _is_finite(tensor: Tensor) -> bool:
    """Return whether all values are finite, twenty times as fast as `isfinite`: both extremes are NaN if one is."""
    return all(map(math.isfinite, torch.stack(torch.aminmax(tensor)).tolist()))
