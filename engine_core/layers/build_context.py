"""Context in which a model's layers are built."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.kernel_set import KernelSet
from tandem.engine_core.kernels.linear.quantized_plans import SCALE_ROWS
from tandem.engine_core.layers.expert_weights import ExpertWeights
from tandem.engine_core.layers.linear import LinearWeights
from tandem.engine_core.layers.lora_linear import LoraSlots
from tandem.engine_core.layers.split_linear import SplitLinear
from tandem.engine_core.loader.header import TORCH_DTYPES
from tandem.engine_core.loader.slots import FLOAT_DTYPES
from tandem.engine_core.quantization.quantization import Quantization
from tandem.engine_core.quantization.scheme import EightBitScheme, Scheme, scheme_texts

BLOCKS = "model.layers."
"""Start of the names of all modules in the blocks of a text model."""


class LinearMethod(Protocol):
    """Storage format of linear weights.

    It is chosen when a model is built; models only define names and shapes.
    """

    def build(self, outputs: int, inputs: int, bias: bool, context: "BuildContext") -> LinearWeights:
        """Allocate the uninitialized weights of a linear layer with `inputs` inputs and `outputs` outputs."""


class ExpertMethod(Protocol):
    """Storage and kernels of experts on a device."""

    def build(
        self,
        experts: int,
        hidden: int,
        width: int,
        activation: Activation,
        scheme: Scheme | None,
        context: "BuildContext",
    ) -> ExpertWeights:
        """Allocate the uninitialized weights of a layer's experts.

        width: inputs of an expert's down projection; scheme: None for the model's dtype. Raises ConfigError for a
        scheme that experts do not support.
        """


@dataclass(frozen=True, slots=True)
class BuildContext:
    """Device, dtype and implementations of a model's layers."""

    device: torch.device
    dtype: torch.dtype
    quantization: Quantization | None
    """Schemes of the linear layers; None: all are unquantized."""
    method_for: Callable[[Scheme | None], LinearMethod]
    """Return the linear method of a scheme, the same object in every call."""
    kernels: KernelSet
    expert_method: ExpertMethod
    stored: Mapping[str, str] = field(default_factory=dict)
    """Dtype of each tensor of the checkpoint in the words of safetensors, by name in the text model; empty: there is no
    checkpoint."""
    lora: LoraSlots | None = None
    """Slots of adapters on all linear layers of the blocks; None: the model takes no adapters."""

    def own_dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which to keep a tensor that is not rounded to the model's dtype, such as a router.

        It is the model's dtype if the checkpoint has the tensor in it, or has no such tensor; otherwise float32.
        """
        stored = self.stored.get(name)
        return self.dtype if stored is None or TORCH_DTYPES.get(stored) == self.dtype else torch.float32

    def scheme_for(self, name: str) -> Scheme | None:
        """Return the scheme of a linear layer, None if it is not quantized; see `Quantization.scheme_for`."""
        return None if self.quantization is None else self.quantization.scheme_for(name)

    def linear(
        self,
        name: str,
        outputs: int,
        inputs: int,
        bias: bool = False,
        parts: Mapping[str, int] | None = None,
        output_order: Sequence[int] | None = None,
    ) -> LinearWeights:
        """Allocate a linear layer with uninitialized weights, in the format that the checkpoint has for it.

        name: of the module in the text model, such as "model.layers.3.self_attn.qkv_proj"; parts: number of outputs of
        each part of a fused projection by the last component of its name, such as "q_proj". Consecutive parts with
        equal schemes are merged, unless they would share block scales; others run one by one; output_order: index in
        the checkpoint's order of each output of the layer, for adapters; None: they are the same.
        """
        linear = self._linear(name, outputs, inputs, bias, parts)
        if self.lora is None or not name.startswith(BLOCKS):
            return linear
        own = {name.rpartition(".")[2]: outputs} if parts is None else parts
        order = None if output_order is None else torch.tensor(output_order)
        return self.lora.wrap(name, linear, inputs, own, self.device, self.dtype, self.kernels, order)

    def _linear(
        self, name: str, outputs: int, inputs: int, bias: bool, parts: Mapping[str, int] | None
    ) -> LinearWeights:
        if parts is None or self.quantization is None:
            return self._build(self.scheme_for(name), name, outputs, inputs, bias)
        schemes = self.quantization.part_schemes(name, parts)
        is_whole = f"{name}.weight" in self.stored
        merged: list[tuple[dict[str, int], Scheme | None]] = []
        for (part, length), scheme in zip(parts.items(), schemes, strict=True):
            if not merged or scheme != merged[-1][1] or not (is_whole or _ends_a_block(merged[-1][0], scheme)):
                merged.append(({}, scheme))
            merged[-1][0][part] = length
        if len(merged) == 1:
            return self._build(schemes[0], name, outputs, inputs, bias)
        return SplitLinear(
            [(own, self._build(scheme, name, sum(own.values()), inputs, bias)) for own, scheme in merged], self.kernels
        )

    def experts(
        self,
        name: str,
        experts: int,
        hidden: int,
        width: int,
        activation: Activation,
        projections: tuple[str, str, str],
        extra: int = 0,
    ) -> ExpertWeights:
        """Allocate the experts of a layer with uninitialized weights, in the format that the checkpoint has for them.

        name: of their module, such as "model.layers.3.mlp.experts"; projections: names of those of an expert; extra:
        number of further experts in the same format, such as a shared one. Raises ConfigError if their formats differ,
        or are not supported.
        """
        schemes = {
            (expert, projection): self.scheme_for(f"{name}.{expert}.{projection}")
            for expert in range(experts)
            for projection in projections
        }
        if self._has_plain_experts(name):
            schemes = {key: _of_plain(found) for key, found in schemes.items()}
        ((usual, count), *others) = Counter(schemes.values()).most_common()
        if others:
            (expert, projection), odd = next(item for item in schemes.items() if item[1] != usual)
            found, expected = scheme_texts(odd, usual)
            raise ConfigError(
                f"{name}: {projection} of expert {expert} is in {found}, but {count} of {len(schemes)} projections are "
                f"in {expected}; all experts of a layer need one format"
            )
        try:
            return self.expert_method.build(experts + extra, hidden, width, activation, usual, self)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None

    def has_format_of_experts(self, name: str, experts: str, projections: tuple[str, str, str]) -> bool:
        """Return whether a gated network can be stored with the experts of a layer.

        It can if its projections are of the same names and in the same format, and take no adapters. name: of its
        module; experts: of theirs.
        """
        usual = self.scheme_for(f"{experts}.0.{projections[0]}")
        if self._has_plain_experts(experts):
            usual = _of_plain(usual)
        schemes = {self.scheme_for(f"{name}.{projection}") for projection in projections}
        return self.lora is None and schemes == {usual} and f"{name}.gate_up_proj.weight" not in self.stored

    def _has_plain_experts(self, name: str) -> bool:
        """Return whether the checkpoint has tensors of all experts of a module at once, not quantized."""
        return self.stored.get(f"{name}.gate_up_proj") in FLOAT_DTYPES

    def _build(self, scheme: Scheme | None, name: str, outputs: int, inputs: int, bias: bool) -> LinearWeights:
        try:
            return self.method_for(scheme).build(outputs, inputs, bias, self)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None


def _ends_a_block(parts: Mapping[str, int], scheme: Scheme | None) -> bool:
    """Return whether the outputs of parts share no block scales with those that follow."""
    return not (isinstance(scheme, EightBitScheme) and scheme.block and sum(parts.values()) % SCALE_ROWS)


def _of_plain(scheme: Scheme | None) -> Scheme | None:
    """Return the scheme of weights that the checkpoint has in 16 bits: None, or to quantize them while loading."""
    return scheme if isinstance(scheme, EightBitScheme) and scheme.from_floats else None
