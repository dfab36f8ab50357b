"""Linear weights of one byte on a CUDA device.

Up to 64 rows they are decoded inside Triton products, which leave the inputs as they are. Above, the inputs are rounded
for each token, as their checkpoint expects, and the tensor cores multiply bytes.
"""

from functools import cache

import torch
from torch import Tensor

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.gpu_traits import GpuTraits
from tandem.engine_core.kernels.kernel_set import KernelSet
from tandem.engine_core.kernels.linear.gemv import add_norm_gemv, gemv, norm_gemv
from tandem.engine_core.kernels.linear.plans import choose_normed
from tandem.engine_core.kernels.linear.quantized_plans import MAX_ROWS, SCALE_ROWS, choose_bytes, choose_bytes_gated
from tandem.engine_core.kernels.linear.splitk_gemm import splitk_gemm
from tandem.engine_core.kernels.tiles.plan_types import GemvPlan, SplitKPlan
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.linear import LinearWeights, Norm
from tandem.engine_core.layers.quantized.byte_linear import ByteLinear, empty_bytes
from tandem.engine_core.layers.quantized.byte_products import byte_product
from tandem.engine_core.layers.torch_linear import empty_bias
from tandem.engine_core.layers.triton_linear import SplitKWorkspace
from tandem.engine_core.quantization.scheme import Activations, ByteScheme

FP8_CAPABILITY = (8, 9)
"""Lowest compute capability that converts and multiplies float8."""

_choose = cache(choose_bytes)
_choose_gated = cache(choose_bytes_gated)
_choose_normed = cache(choose_normed)


class TritonByteLinear(ByteLinear):
    """Weights of one byte, multiplied by the kernel planned for their shape."""

    def __init__(
        self,
        values: Tensor,
        scales: Tensor,
        scheme: ByteScheme,
        bias: Tensor | None,
        kernels: KernelSet,
        workspace: SplitKWorkspace,
        gpu: GpuTraits,
    ) -> None:
        """Keep the weights of a map; see `ByteLinear`."""
        super().__init__(values, scales, scheme, bias, kernels)
        self.workspace = workspace
        self.gpu = gpu
        old = gpu.capability < FP8_CAPABILITY and scheme.kind == "fp8"
        self._stored = values.view(torch.uint8) if old else values
        """The values as the kernels read them: as bits where the GPU does not know float8."""

    def apply(self, x: Tensor) -> Tensor:
        """Implement `LinearWeights.apply`."""
        if x.shape[0] > MAX_ROWS:
            return self._apply_to_many(x)
        product = self._planned(x, None)
        return super().apply(x) if product is None else product

    def apply_normed(
        self, x: Tensor, residual: Tensor | None, norm: Norm, activation: Activation | None = None
    ) -> tuple[Tensor, Tensor]:
        """Implement `LinearWeights.apply_normed`, in one launch for one row."""
        gated = activation is not None
        outputs = self.values.shape[0] // 2 if gated else self.values.shape[0]
        fused = x.shape[0] == 1 and self._fits(x, gated)
        plan = _choose_normed(outputs, self.values.shape[1], gated, self.gpu, 8) if fused else None
        if plan is not None and (residual is None or residual.is_contiguous()):
            given = (norm.weight, norm.eps, self._stored, self.bias, plan, activation, self.gpu.pdl)
            if residual is None:
                return norm_gemv(x, *given, scales=self.scales), x
            return add_norm_gemv(x, residual, *given, norm.update_weight, self.scales)
        return super().apply_normed(x, residual, norm, activation)

    def apply_gated(self, x: Tensor, activation: Activation) -> Tensor:
        """Implement `UnfusedLinear.apply_gated`, in one launch where that is planned."""
        product = self._planned(x, activation)
        return super().apply_gated(x, activation) if product is None else product

    def _planned(self, x: Tensor, activation: Activation | None) -> Tensor | None:
        """Return the product of a planned kernel, or None without a plan."""
        gated = activation is not None
        if not self._fits(x, gated):
            return None
        rows, (outputs, inputs) = x.shape[0], self.values.shape
        columns = outputs // 2 if gated else outputs
        plan = (_choose_gated if gated else _choose)(rows, columns, inputs, self.gpu)
        if isinstance(plan, GemvPlan):
            return gemv(x, self._stored, self.bias, plan, activation, self.gpu.pdl, self.scales)
        if isinstance(plan, SplitKPlan) and (space := self.workspace.find(rows, columns, plan, gated)):
            return splitk_gemm(x, self._stored, self.bias, plan, *space, activation, self.gpu.pdl, self.scales)
        return None

    def _apply_to_many(self, x: Tensor) -> Tensor:
        known = self.gpu.capability >= FP8_CAPABILITY or self.scheme.kind == "int8"
        rounds = self.scheme.activations is not Activations.UNQUANTIZED and self.scheme.block is None
        if known and rounds and x.dtype == torch.bfloat16:
            return byte_product(x, self.values, self.scales, self.bias)
        return super().apply(x)

    def _fits(self, x: Tensor, gated: bool) -> bool:
        """Return whether the kernels can read these tensors."""
        ends_with_a_block = self.scheme.block is None or self.values.shape[0] % (2 * SCALE_ROWS) == 0
        return x.is_contiguous() and x.dtype != torch.float32 and (ends_with_a_block or not gated)


class TritonByteMethod:
    """Linear method of weights of one byte for one GPU.

    All weights share a workspace.
    """

    def __init__(self, scheme: ByteScheme, gpu: GpuTraits, workspace: SplitKWorkspace) -> None:
        self.scheme = scheme
        self.gpu = gpu
        self.workspace = workspace

    def build(self, outputs: int, inputs: int, bias: bool, context: BuildContext) -> LinearWeights:
        """Implement `LinearMethod.build`."""
        self.workspace.reserve(
            outputs,
            context.device,
            lambda rows, columns: choose_bytes(rows, columns, inputs, self.gpu),
            lambda rows, columns: choose_bytes_gated(rows, columns, inputs, self.gpu),
        )
        values, scales = empty_bytes(outputs, inputs, self.scheme, context.device)
        own = empty_bias(outputs, bias, context)
        return TritonByteLinear(values, scales, self.scheme, own, context.kernels, self.workspace, self.gpu)
