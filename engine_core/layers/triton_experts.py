"""Weights of the experts of one layer on a CUDA device.

A few tokens read the weights of their experts in a GEMV for each pair of a token and an expert. More are multiplied in
blocks of pairs of one expert. With FP8 weights the activations of a GEMV have 16 bits; those of blocks are quantized,
if the checkpoint expects it and the GPU can, as in `layers.quantized.triton_eight_bit_linear`. Static scales of
activations are not used: dynamic ones of each token are finer.
"""

from functools import cache

import torch
from torch import Tensor

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.gpu_traits import FP8_CAPABILITY, GpuTraits
from tandem.engine_core.kernels.moe.expert_gemv import down_gemv, gate_up_gemv
from tandem.engine_core.kernels.moe.grouped_gemm import combine, grouped_down, grouped_gate_up
from tandem.engine_core.kernels.moe.plans import choose_expert_plan, multiplies_pairs
from tandem.engine_core.kernels.moe.routing import Routed, SharedOutput
from tandem.engine_core.kernels.moe.scales import SCALE_BLOCK
from tandem.engine_core.kernels.quantize import quantize
from tandem.engine_core.kernels.quantized_activation import ActivationFormat, QuantizedActivation
from tandem.engine_core.kernels.tiles.plan_types import ExpertPlan, GemvPlan, GroupedPlan
from tandem.engine_core.kernels.tiles.table import ExpertKey, ExpertPart
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.expert_weights import ExpertWeights
from tandem.engine_core.layers.experts import Experts, empty_experts, fp8_scheme
from tandem.engine_core.layers.int4_experts import empty_int4_experts
from tandem.engine_core.layers.triton_int4_experts import TritonInt4Experts
from tandem.engine_core.quantization.scheme import Activations, EightBitScheme, Int4Scheme, Scheme

_choose = cache(choose_expert_plan)
_multiplies_pairs = cache(multiplies_pairs)


class TritonExperts(Experts):
    """Experts, using the kernels planned for their shape and the number of tokens."""

    def __init__(
        self,
        gate_up: Tensor,
        down: Tensor,
        gate_up_scales: Tensor | None,
        down_scales: Tensor | None,
        scheme: EightBitScheme | None,
        activation: Activation,
        gpu: GpuTraits,
    ) -> None:
        """Store the weights; see `Experts`."""
        super().__init__(gate_up, down, gate_up_scales, down_scales, scheme, activation)
        self.gpu = gpu
        old = scheme is not None and gpu.capability < FP8_CAPABILITY
        self._stored = [part.view(torch.uint8) if old else part for part in (self.gate_up, self.down)]
        """The values as passed to kernels: as uint8 bits if the GPU lacks FP8 support."""
        self._format = None if old else self._activation_format()

    def _activation_format(self) -> ActivationFormat | None:
        """Return the format of activations of grouped GEMMs, None for 16 bits."""
        hidden, width = self.down.shape[1:]
        if self.scheme is None or self.scheme.activations is Activations.UNQUANTIZED:
            return None
        if hidden % SCALE_BLOCK or width % SCALE_BLOCK:
            return None
        return ActivationFormat(torch.float8_e4m3fn, SCALE_BLOCK if self.scheme.block is not None else None)

    def needs_sorted(self, tokens: int, top_k: int) -> bool:
        """Implement `ExpertWeights.needs_sorted`."""
        (experts, hidden, width), bits = self.down.shape, 8 * self.down.itemsize
        return not _multiplies_pairs(ExpertKey("down", bits, 16, hidden, width, experts, top_k, tokens), self.gpu)

    def input_format(self, tokens: int, top_k: int) -> ActivationFormat | None:
        """Implement `ExpertWeights.input_format`."""
        return self._format if self.needs_sorted(tokens, top_k) else None

    def run(
        self,
        x: Tensor,
        routed: Routed,
        shared: SharedOutput | None = None,
        quantized: QuantizedActivation | None = None,
    ) -> Tensor:
        """Implement `ExpertWeights.run`."""
        (gate_up, down), pdl = self._stored, self.gpu.pdl
        if routed.pairs is None:
            first, last = self._plan("gate_up", x, routed, None), self._plan("down", x, routed, None)
            assert isinstance(first, GemvPlan) and isinstance(last, GemvPlan)
            gated = gate_up_gemv(x, gate_up, self.gate_up_scales, routed, self.activation, first, pdl)
            return down_gemv(gated, down, self.down_scales, routed, last, pdl, shared)
        to = self._format
        assert (to is None) == (quantized is None), "x is quantized in the format of the experts"
        grouped, plan = self._plan("gate_up", x, routed, to), self._plan("down", x, routed, to)
        assert isinstance(grouped, GroupedPlan) and isinstance(plan, GroupedPlan)
        rows = x if quantized is None else quantized
        fused = to if to is not None and to.group is not None else None
        hidden = grouped_gate_up(rows, gate_up, self.gate_up_scales, routed, self.activation, grouped, fused, pdl)
        if to is not None and not isinstance(hidden, QuantizedActivation):
            hidden = quantize(hidden, to, pdl)
        return combine(grouped_down(hidden, down, self.down_scales, routed, plan, pdl), routed, pdl, shared)

    def _plan(self, part: ExpertPart, x: Tensor, routed: Routed, to: ActivationFormat | None) -> ExpertPlan:
        """Return the plan of a matmul. to: format of its inputs, None if they are not quantized."""
        (experts, hidden, width), (tokens, top_k) = self.down.shape, routed.ids.shape
        bits = 8 * self.down.itemsize, 8 * x.itemsize if to is None else 8
        return _choose(ExpertKey(part, *bits, hidden, width, experts, top_k, tokens), self.gpu)


class TritonExpertMethod:
    """Expert method for one GPU."""

    def __init__(self, gpu: GpuTraits) -> None:
        self.gpu = gpu

    def build(
        self,
        experts: int,
        hidden: int,
        width: int,
        activation: Activation,
        scheme: Scheme | None,
        context: BuildContext,
    ) -> ExpertWeights:
        """Implement `ExpertMethod.build`."""
        if isinstance(scheme, Int4Scheme):
            given = empty_int4_experts(experts, hidden, width, scheme, context.device)
            return TritonInt4Experts(*given, scheme, activation, self.gpu)
        weights = empty_experts(experts, hidden, width, scheme, context)
        return TritonExperts(*weights, fp8_scheme(scheme), activation, self.gpu)
