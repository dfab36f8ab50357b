"""Int4 linear weights on a CUDA device.

Up to 64 rows they are unpacked inside Triton matmuls. Above, they are dequantized for a library matmul.
"""

from functools import cache

import torch
from torch import Tensor

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.gpu_traits import GpuTraits
from tandem.engine_core.kernels.kernel_set import KernelSet
from tandem.engine_core.kernels.linear.dequantize import dequantize_int4
from tandem.engine_core.kernels.linear.int4_layout import to_kernel_layout
from tandem.engine_core.kernels.linear.int4_splitk import int4_splitk
from tandem.engine_core.kernels.linear.quantized_gemv import quantized_gemv
from tandem.engine_core.kernels.linear.quantized_plans import (
    choose_int4,
    choose_int4_gated,
    choose_int4_normed,
)
from tandem.engine_core.kernels.tiles.plan_types import GemvPlan, SplitKPlan
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.linear import LinearWeights, Norm
from tandem.engine_core.layers.quantized.int4_linear import ROWS, Int4Linear, empty_int4
from tandem.engine_core.layers.torch_linear import empty_bias
from tandem.engine_core.layers.triton_linear import SplitKWorkspace
from tandem.engine_core.quantization.int4 import pack, unpack
from tandem.engine_core.quantization.scheme import Int4Scheme

_choose = cache(choose_int4)
_choose_gated = cache(choose_int4_gated)
_choose_normed = cache(choose_int4_normed)


class TritonInt4Linear(Int4Linear):
    """Int4 weights, using the kernel planned for their shape.

    After loading, the words are in the layout of `kernels.linear.int4_layout`.
    """

    def __init__(
        self,
        words: Tensor,
        scales: Tensor,
        zeros: Tensor,
        scheme: Int4Scheme,
        bias: Tensor | None,
        kernels: KernelSet,
        workspace: SplitKWorkspace,
        gpu: GpuTraits,
    ) -> None:
        """Store the weights; see `Int4Linear`."""
        super().__init__(words, scales, zeros, scheme, bias, kernels)
        self.workspace = workspace
        self.gpu = gpu

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Implement `QuantizedLinear.dequantized` in one launch."""
        return dequantize_int4(self.words, self.scales, self.zeros, dtype, self.gpu.pdl)

    def sort(self, groups: Tensor, name: str) -> None:
        """Extend `Int4Linear.sort` by the conversion to the kernels' layout.

        Called once, when the weights are loaded.
        """
        super().sort(groups, name)
        for start in range(0, self.words.shape[0], ROWS):
            rows = self.words[start : start + ROWS]
            rows.copy_(pack(to_kernel_layout(unpack(rows), self.group_size)))

    def matmul(self, x: Tensor, order: Tensor | None) -> Tensor:
        """Implement `Int4Linear.matmul`."""
        matmul = self._planned(x, None, order)
        return super().matmul(x, order) if matmul is None else matmul

    def gated_matmul(self, x: Tensor, activation: Activation, order: Tensor | None) -> Tensor:
        """Implement `Int4Linear.gated_matmul`, in one launch if planned."""
        matmul = self._planned(x, activation, order)
        return super().gated_matmul(x, activation, order) if matmul is None else matmul

    def apply_normed(
        self, x: Tensor, residual: Tensor | None, norm: Norm, activation: Activation | None = None
    ) -> tuple[Tensor, Tensor]:
        """Implement `LinearWeights.apply_normed`.

        One row takes one launch if a plan fuses the norm with the matmul.
        """
        gated = activation is not None
        outputs = self.words.shape[0] // 2 if gated else self.words.shape[0]
        alone = x.shape[0] == 1 and x.is_contiguous() and x.dtype != torch.float32
        ordered = self.order is not None
        plan = _choose_normed(outputs, x.shape[1], self.group_size, gated, self.gpu, ordered) if alone else None
        if plan is not None and (residual is None or residual.is_contiguous()):
            x_weight = None if residual is None else norm.update_weight
            given = (self.words, self.scales, self.zeros, self.bias, plan, activation, self.gpu.pdl)
            return quantized_gemv(x, *given, norm.weight, norm.eps, residual, x_weight, self.order)
        return super().apply_normed(x, residual, norm, activation)

    def _planned(self, x: Tensor, activation: Activation | None, order: Tensor | None) -> Tensor | None:
        """Return the matmul of a planned kernel, or None without a plan.

        The kernel permutes a single row itself; see `matmul`.
        """
        gated = activation is not None
        rows, inputs = x.shape
        columns = self.words.shape[0] // 2 if gated else self.words.shape[0]
        if not x.is_contiguous() or (rows == 1 and x.dtype == torch.float32):
            # The kernel for one row rounds inputs to float16.
            return None
        plan = (_choose_gated if gated else _choose)(
            rows, columns, inputs, self.group_size, self.gpu, order is not None
        )
        given = (self.words, self.scales, self.zeros, self.bias)
        if isinstance(plan, GemvPlan):
            return quantized_gemv(x, *given, plan, activation, self.gpu.pdl, order=order)[0]
        if isinstance(plan, SplitKPlan) and (space := self.workspace.find(rows, columns, plan, gated)):
            return int4_splitk(self.ordered(x, order), *given, plan, *space, activation, self.gpu.pdl)
        return None


class TritonInt4Method:
    """Linear method of int4 weights for one GPU.

    All weights share a workspace.
    """

    def __init__(self, scheme: Int4Scheme, gpu: GpuTraits, workspace: SplitKWorkspace) -> None:
        self.scheme = scheme
        self.gpu = gpu
        self.workspace = workspace

    def build(self, outputs: int, inputs: int, bias: bool, context: BuildContext) -> LinearWeights:
        """Implement `LinearMethod.build`.

        Raises ConfigError for a shape that words and groups do not divide.
        """
        words, scales, zeros = empty_int4(outputs, inputs, self.scheme, context.device)
        group = inputs // scales.shape[1]
        self.workspace.reserve(
            outputs,
            context.device,
            lambda rows, columns: choose_int4(rows, columns, inputs, group, self.gpu),
            lambda rows, columns: choose_int4_gated(rows, columns, inputs, group, self.gpu),
        )
        own = empty_bias(outputs, bias, context)
        return TritonInt4Linear(words, scales, zeros, self.scheme, own, context.kernels, self.workspace, self.gpu)
