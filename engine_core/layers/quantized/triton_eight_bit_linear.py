"""8-bit linear weights on a CUDA device.

For one row, weights are dequantized inside Triton matmuls, and inputs stay in 16 bits; the same holds for up to 64 rows
if the checkpoint or the GPU needs 16-bit inputs. Otherwise inputs are quantized as the checkpoint expects, if possible
by the norm or gate that computes them, for W8A8 matmuls.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.gpu_traits import FP8_CAPABILITY, GpuTraits
from tandem.engine_core.kernels.kernel_set import KernelSet
from tandem.engine_core.kernels.linear.dequantize import dequantize_eight_bit
from tandem.engine_core.kernels.linear.gated_w8a8_gemm import gated_w8a8_gemm, gated_w8a8_gemm_unquantized
from tandem.engine_core.kernels.linear.plans import choose_normed
from tandem.engine_core.kernels.linear.quantized_gemv import quantized_gemv
from tandem.engine_core.kernels.linear.quantized_plans import (
    MAX_ROWS,
    SCALE_COLUMNS,
    SCALE_ROWS,
    choose_eight_bit,
    choose_eight_bit_gated,
    choose_gated_w8a8_gemm,
    choose_w8a8_gemm,
    quantizes_activations,
    uses_library_matmul,
    w8a8_workspace,
)
from tandem.engine_core.kernels.linear.splitk_gemm import splitk_gemm
from tandem.engine_core.kernels.linear.w8a8_splitk import w8a8_matmul
from tandem.engine_core.kernels.quantize import group_of
from tandem.engine_core.kernels.quantized_activation import WHOLE, ActivationFormat, QuantizedActivation
from tandem.engine_core.kernels.tiles.plan_types import GemvPlan, SplitKPlan, W8A8GemmPlan
from tandem.engine_core.kernels.tiles.table import Scaling
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.linear import LinearWeights, Norm
from tandem.engine_core.layers.quantized.eight_bit_linear import EightBitLinear, empty_eight_bit
from tandem.engine_core.layers.torch_linear import empty_bias
from tandem.engine_core.layers.triton_linear import SplitKWorkspace
from tandem.engine_core.loader.slots import WeightSlot
from tandem.engine_core.quantization.scheme import EightBitScheme

_choose = cache(choose_eight_bit)
_choose_gated = cache(choose_eight_bit_gated)
_choose_normed = cache(choose_normed)


class TritonEightBitLinear(EightBitLinear):
    """8-bit weights, using the kernel planned for their shape."""

    def __init__(
        self,
        values: Tensor,
        scales: Tensor,
        scheme: EightBitScheme,
        bias: Tensor | None,
        kernels: KernelSet,
        workspace: SplitKWorkspace,
        gpu: GpuTraits,
    ) -> None:
        """Store the weights; see `EightBitLinear`."""
        super().__init__(values, scales, scheme, bias, kernels)
        self.workspace = workspace
        self.gpu = gpu
        old = gpu.capability < FP8_CAPABILITY and scheme.kind == "fp8"
        self._stored = values.view(torch.uint8) if old else values
        """The values as passed to kernels: as uint8 bits if the GPU lacks FP8 support."""
        self._format = self.activation_format()
        self.wide_scales: Tensor | None = None
        """Scales for a library matmul: of blocks of 128 x 128, or [1] per tensor with static inputs.

        None: the first checkpoint lacked such scales, or parts of a fused projection end within a block or had
        different ones. Later weights change the values only: CUDA graphs hold the matmul.
        """
        self._is_planned = False
        """True once the scales of a first checkpoint have decided on the matmul."""

    def weight_slots(self, prefix: str, name: str, parts: Mapping[str, int] | None) -> list[WeightSlot]:
        """Implement `UnfusedLinear.weight_slots`."""
        slots = super().weight_slots(prefix, name, parts)
        return [slot if slot.on_filled else replace(slot, on_filled=self.find_wide_scales) for slot in slots]

    def find_wide_scales(self) -> None:
        """Determine whether a library matmul can use the scales, once they are loaded.

        The first weights decide. Raises ConfigError if it cannot use those of later ones.
        """
        found: Tensor | None = None
        if self.scheme.block is not None:
            found = self.scales[:: 128 // SCALE_ROWS].contiguous()
            spread = found.repeat_interleave(128 // SCALE_ROWS, 0)[: self.scales.shape[0]]
        elif self.scheme.has_input_scale:
            found = self.scales[:1]
            spread = found.expand_as(self.scales)
        fits = found is not None and torch.equal(spread, self.scales)
        if not self._is_planned:
            self._is_planned, self.wide_scales = True, found if fits else None
        elif self.wide_scales is not None:
            if found is None or not fits:
                raise ConfigError("the scales need another matmul than those before, which CUDA graphs hold; restart")
            self.wide_scales.copy_(found)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Implement `QuantizedLinear.dequantized` in one launch."""
        return dequantize_eight_bit(self._stored, self.scales, dtype, self.gpu.pdl)

    def apply(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Implement `LinearWeights.apply`."""
        to = self.input_format(x.shape[0])
        if to is not None:
            matmul: Tensor | None = self.apply_quantized(self.kernels.quantize(x, to))
        else:
            matmul = self._planned(x, None) if x.shape[0] <= MAX_ROWS else None
        if matmul is None:
            return super().apply(x, out)
        return matmul if out is None else out.copy_(matmul)

    def input_format(self, rows: int) -> ActivationFormat | None:
        """Implement `LinearWeights.input_format`: 8-bit for more than one row, if the checkpoint expects it."""
        return self._format if quantizes_activations(rows, self.scheme.kind, self.gpu) else None

    def apply_quantized(self, x: QuantizedActivation) -> Tensor:
        """Implement `LinearWeights.apply_quantized`."""
        library_scales = self._library_scales(x)
        if library_scales is not None:
            return library_matmul(x, self.values, library_scales, self.bias)
        outputs, inputs = self.values.shape
        plan = choose_w8a8_gemm(x.count, outputs, inputs, self.scheme.kind, self._scaling, self.gpu)
        space = None if plan is None else self.workspace.take(*plan.workspace(x.count, outputs))
        if plan is None or space is None:
            return super().apply(x.dequantize().to(x.dtype))
        whole = self.wide_scales is not None
        return w8a8_matmul(x, self.values, self.scales, self.bias, plan, *space, whole, self.gpu.pdl)

    def _library_scales(self, x: QuantizedActivation) -> Tensor | None:
        """Return the scales of the library matmul, None if it is not used."""
        (outputs, inputs), scheme = self.values.shape, self.scheme
        if x.dtype != torch.bfloat16 or outputs % 16 or inputs % 16:
            return None
        if not uses_library_matmul(x.count, outputs, inputs, scheme.kind, self._scaling, self.gpu):
            return None
        return self.scales if self._scaling == "output" else self.wide_scales

    @property
    def _scaling(self) -> Scaling:
        if self.scheme.block is not None:
            return "block"
        return "output" if self.wide_scales is None else "tensor"

    def apply_normed(
        self, x: Tensor, residual: Tensor | None, norm: Norm, activation: Activation | None = None
    ) -> tuple[Tensor, Tensor]:
        """Implement `LinearWeights.apply_normed`, in one launch for one row."""
        to = self.input_format(x.shape[0])
        if to is not None:
            rows, stream = norm.quantized(x, residual, to)
            gated_plan = None if activation is None else self._gated_w8a8_plan(x.shape[0], WHOLE)
            if activation is not None and gated_plan is not None:
                weights = (self.values, self.scales, self.bias)
                return gated_w8a8_gemm_unquantized(rows, *weights, gated_plan, activation, self.gpu.pdl), stream
            y = self.apply_quantized(rows)
            return (y if activation is None else self.kernels.gated_activation(y, activation)), stream
        gated = activation is not None
        outputs = self.values.shape[0] // 2 if gated else self.values.shape[0]
        fused = x.shape[0] == 1 and self._fits(x, gated)
        plan = _choose_normed(outputs, self.values.shape[1], gated, self.gpu, 8) if fused else None
        if plan is not None and (residual is None or residual.is_contiguous()):
            x_weight = None if residual is None else norm.update_weight
            given = (self._stored, self.scales, None, self.bias, plan, activation, self.gpu.pdl)
            return quantized_gemv(x, *given, norm.weight, norm.eps, residual, x_weight)
        return super().apply_normed(x, residual, norm, activation)

    def apply_normed_quantized(
        self, x: Tensor, residual: Tensor | None, norm: Norm, activation: Activation, to: ActivationFormat
    ) -> tuple[QuantizedActivation, Tensor]:
        """Implement `LinearWeights.apply_normed_quantized`.

        If planned, everything after the norm is one launch, or two with row scales.
        """
        own, plan = self.input_format(x.shape[0]), self._gated_w8a8_plan(x.shape[0], group_of(to))
        if own is None or plan is None:
            return super().apply_normed_quantized(x, residual, norm, activation, to)
        rows, stream = norm.quantized(x, residual, own)
        given = (self.values, self.scales, self.bias, plan, activation, to, self.gpu.pdl)
        return gated_w8a8_gemm(rows, *given), stream

    def _gated_w8a8_plan(self, rows: int, group: int) -> W8A8GemmPlan | None:
        """Return the plan of a gated W8A8 GEMM, None for separate kernels.

        group: as in `choose_gated_w8a8_gemm`.
        """
        outputs, inputs = self.values.shape
        if self.scheme.block is not None and (self.wide_scales is None or outputs % (2 * SCALE_COLUMNS)):
            return None
        return choose_gated_w8a8_gemm(rows, outputs // 2, inputs, self.scheme.kind, self._scaling, group, self.gpu)

    def apply_gated(self, x: Tensor, activation: Activation) -> Tensor:
        """Implement `UnfusedLinear.apply_gated`, in one launch if planned."""
        matmul = self._planned(x, activation)
        return super().apply_gated(x, activation) if matmul is None else matmul

    def _planned(self, x: Tensor, activation: Activation | None) -> Tensor | None:
        """Return the matmul of a planned kernel, or None without a plan."""
        gated = activation is not None
        if not self._fits(x, gated):
            return None
        rows, (outputs, inputs) = x.shape[0], self.values.shape
        columns = outputs // 2 if gated else outputs
        plan = (_choose_gated if gated else _choose)(rows, columns, inputs, self.gpu)
        if isinstance(plan, GemvPlan):
            return quantized_gemv(x, self._stored, self.scales, None, self.bias, plan, activation, self.gpu.pdl)[0]
        if isinstance(plan, SplitKPlan) and (space := self.workspace.find(rows, columns, plan, gated)):
            return splitk_gemm(x, self._stored, self.bias, plan, *space, activation, self.gpu.pdl, self.scales)
        return None

    def _fits(self, x: Tensor, gated: bool) -> bool:
        """Return whether the kernels support these tensors."""
        ends_with_a_block = self.scheme.block is None or self.values.shape[0] % (2 * SCALE_ROWS) == 0
        return x.is_contiguous() and x.dtype != torch.float32 and (ends_with_a_block or not gated)


def library_matmul(x: QuantizedActivation, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + b, [T, outputs], in x's dtype before quantization.

    values: [outputs, inputs], float8_e4m3fn or int8, inputs and outputs multiples of 16; scales: float32, per output,
    [outputs]; per tensor, [1], if x has one scale too; or per block, [outputs / 128, inputs / 128], rounded up, with x
    in groups of 128, inputs a multiple of 512, and a Hopper GPU. bias: [outputs]. Oracle:
    `kernels.reference.quantized_activation.quantized_matmul`.
    """
    weight, dtype = values.t(), x.dtype
    if values.dtype == torch.int8:
        sums = torch._int_mm(x.values, weight).float() * x.scales * scales
        return (sums if bias is None else sums + bias).to(dtype)
    if scales.ndim == 2:
        matmul = torch._scaled_mm(x.values, weight, x.scales, scales.t(), out_dtype=dtype)[: x.count]
        return matmul if bias is None else matmul.add_(bias)
    if scales.numel() == 1 and x.scales.numel() == 1:
        return torch._scaled_mm(x.values, weight, x.scales, scales, bias, out_dtype=dtype)
    row_scales = x.scales.expand(x.count, 1).contiguous()
    return torch._scaled_mm(x.values, weight, row_scales, scales.expand(values.shape[0])[None], bias, out_dtype=dtype)


class TritonEightBitMethod:
    """Linear method of 8-bit weights for one GPU.

    All weights share a workspace.
    """

    def __init__(self, scheme: EightBitScheme, gpu: GpuTraits, workspace: SplitKWorkspace) -> None:
        self.scheme = scheme
        self.gpu = gpu
        self.workspace = workspace

    def build(self, outputs: int, inputs: int, bias: bool, context: BuildContext) -> LinearWeights:
        """Implement `LinearMethod.build`."""
        self.workspace.reserve(
            outputs,
            context.device,
            lambda rows, columns: choose_eight_bit(rows, columns, inputs, self.gpu),
            lambda rows, columns: choose_eight_bit_gated(rows, columns, inputs, self.gpu),
        )
        self.workspace.grow(*w8a8_workspace(self.gpu), context.device)
        values, scales = empty_eight_bit(outputs, inputs, self.scheme, context.device)
        own = empty_bias(outputs, bias, context)
        return TritonEightBitLinear(values, scales, self.scheme, own, context.kernels, self.workspace, self.gpu)
