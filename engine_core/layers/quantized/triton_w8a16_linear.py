"""8-bit linear weights in groups on a CUDA device.

Up to 64 rows they are dequantized inside Triton matmuls. Above, they are dequantized for a library matmul.
"""

from functools import cache

import torch
from torch import Tensor

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.gpu_traits import FP8_CAPABILITY, GpuTraits
from tandem.engine_core.kernels.kernel_set import KernelSet
from tandem.engine_core.kernels.linear.dequantize import dequantize_eight_bit
from tandem.engine_core.kernels.linear.plans import choose_normed
from tandem.engine_core.kernels.linear.quantized_gemv import quantized_gemv
from tandem.engine_core.kernels.linear.quantized_plans import choose_eight_bit, choose_eight_bit_gated
from tandem.engine_core.kernels.linear.splitk_gemm import splitk_gemm
from tandem.engine_core.kernels.tiles.plan_types import GemvPlan, SplitKPlan
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.linear import LinearWeights, Norm
from tandem.engine_core.layers.quantized.w8a16_linear import W8A16Linear, empty_w8a16
from tandem.engine_core.layers.torch_linear import empty_bias
from tandem.engine_core.layers.triton_linear import SplitKWorkspace
from tandem.engine_core.quantization.scheme import W8A16Scheme

_choose = cache(choose_eight_bit)
_choose_gated = cache(choose_eight_bit_gated)
_choose_normed = cache(choose_normed)


class TritonW8A16Linear(W8A16Linear):
    """8-bit weights in groups, using the kernel planned for their shape."""

    def __init__(
        self,
        values: Tensor,
        scales: Tensor,
        scheme: W8A16Scheme,
        bias: Tensor | None,
        kernels: KernelSet,
        workspace: SplitKWorkspace,
        gpu: GpuTraits,
    ) -> None:
        """Store the weights; see `W8A16Linear`."""
        super().__init__(values, scales, scheme, bias, kernels)
        self.workspace = workspace
        self.gpu = gpu
        old = gpu.capability < FP8_CAPABILITY and scheme.kind == "fp8"
        self._stored = values.view(torch.uint8) if old else values
        """The values as passed to kernels: as uint8 bits if the GPU lacks FP8 support."""
        self._kernel_scales = scales.view(-1) if scales.shape[1] == 1 else scales

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Implement `QuantizedLinear.dequantized` in one launch."""
        return dequantize_eight_bit(self._stored, self._kernel_scales, dtype, self.gpu.pdl)

    def matmul(self, x: Tensor, order: Tensor | None) -> Tensor:
        """Implement `GroupedLinear.matmul`."""
        x = self.ordered(x, order)
        matmul = self._planned(x, None)
        return super().matmul(x, None) if matmul is None else matmul

    def gated_matmul(self, x: Tensor, activation: Activation, order: Tensor | None) -> Tensor:
        """Implement `GroupedLinear.gated_matmul`, in one launch if planned."""
        x = self.ordered(x, order)
        matmul = self._planned(x, activation)
        return super().gated_matmul(x, activation, None) if matmul is None else matmul

    def apply_normed(
        self, x: Tensor, residual: Tensor | None, norm: Norm, activation: Activation | None = None
    ) -> tuple[Tensor, Tensor]:
        """Implement `LinearWeights.apply_normed`.

        One row takes one launch if a plan fuses the norm with the matmul.
        """
        gated = activation is not None
        outputs = self.values.shape[0] // 2 if gated else self.values.shape[0]
        fused = x.shape[0] == 1 and self.order is None and _fits(x)
        plan = _choose_normed(outputs, self.inputs, gated, self.gpu, 8) if fused else None
        if plan is not None and (residual is None or residual.is_contiguous()):
            x_weight = None if residual is None else norm.update_weight
            given = (self._stored, self._kernel_scales, None, self.bias, plan, activation, self.gpu.pdl)
            return quantized_gemv(x, *given, norm.weight, norm.eps, residual, x_weight)
        return super().apply_normed(x, residual, norm, activation)

    def _planned(self, x: Tensor, activation: Activation | None) -> Tensor | None:
        """Return the matmul of a planned kernel, or None without a plan."""
        if not _fits(x):
            return None
        gated = activation is not None
        rows, outputs = x.shape[0], self.values.shape[0]
        columns = outputs // 2 if gated else outputs
        plan = (_choose_gated if gated else _choose)(rows, columns, self.inputs, self.gpu, self.group_size)
        weights = (self._stored, self._kernel_scales)
        if isinstance(plan, GemvPlan):
            return quantized_gemv(x, *weights, None, self.bias, plan, activation, self.gpu.pdl)[0]
        if isinstance(plan, SplitKPlan) and (space := self.workspace.find(rows, columns, plan, gated)):
            return splitk_gemm(x, self._stored, self.bias, plan, *space, activation, self.gpu.pdl, self._kernel_scales)
        return None


class TritonW8A16Method:
    """Linear method of 8-bit weights in groups for one GPU.

    All weights share a workspace.
    """

    def __init__(self, scheme: W8A16Scheme, gpu: GpuTraits, workspace: SplitKWorkspace) -> None:
        self.scheme = scheme
        self.gpu = gpu
        self.workspace = workspace

    def build(self, outputs: int, inputs: int, bias: bool, context: BuildContext) -> LinearWeights:
        """Implement `LinearMethod.build`.

        Raises ConfigError for a shape that words and groups do not divide.
        """
        values, scales = empty_w8a16(outputs, inputs, self.scheme, context.device)
        group = inputs // scales.shape[1]
        self.workspace.reserve(
            outputs,
            context.device,
            lambda rows, columns: choose_eight_bit(rows, columns, inputs, self.gpu, group),
            lambda rows, columns: choose_eight_bit_gated(rows, columns, inputs, self.gpu, group),
        )
        own = empty_bias(outputs, bias, context)
        return TritonW8A16Linear(values, scales, self.scheme, own, context.kernels, self.workspace, self.gpu)


def _fits(x: Tensor) -> bool:
    """Return whether the kernels support these inputs."""
    return x.is_contiguous() and x.dtype != torch.float32
