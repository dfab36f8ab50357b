"""Unquantized linear weights on a CUDA device.

Matmuls use Triton where it is faster than the library, and are fused with norms and activations.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.gpu_traits import GpuTraits
from tandem.engine_core.kernels.kernel_set import KernelSet
from tandem.engine_core.kernels.linear.gemv import gemv, normed_gemv
from tandem.engine_core.kernels.linear.plans import choose, choose_gated, choose_normed, workspace_size
from tandem.engine_core.kernels.linear.shrink_rows import shrink_rows
from tandem.engine_core.kernels.linear.splitk_gemm import splitk_gemm
from tandem.engine_core.kernels.lora.lora_updates import LoraUpdates
from tandem.engine_core.kernels.tiles.plan_types import GemvPlan, Plan, SplitKPlan
from tandem.engine_core.kernels.tiles.table import BUCKETS, FEW_ROWS
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.linear import LinearWeights, Norm
from tandem.engine_core.layers.torch_linear import TorchLinear, empty_bias

Chooser = Callable[[int, int], Plan]

_choose = cache(choose)
_choose_gated = cache(choose_gated)
_choose_normed = cache(choose_normed)


class SplitKWorkspace:
    """Partial sums and counters shared by the split-K GEMMs of one device.

    It grows while weights are allocated, so calls allocate only their results and can be captured in graphs. Calls and
    graphs that share it must not overlap in time: they need one stream.
    """

    def __init__(self) -> None:
        self._partials: Tensor | None = None
        self._counters: Tensor | None = None
        self._outgrown: list[Tensor] = []

    def reserve(self, outputs: int, device: torch.device, choose: Chooser, choose_gated: Chooser) -> None:
        """Grow to the size that a weight needs for any number of rows.

        choose, choose_gated: functions from a number of rows and of outputs to a plan.
        """
        needs = [(0, 0)]
        for rows in BUCKETS:
            plans = [(choose(rows, outputs), outputs, False)]
            if outputs % 2 == 0:
                plans.append((choose_gated(rows, outputs // 2), outputs // 2, True))
            for plan, columns, gated in plans:
                if isinstance(plan, SplitKPlan):
                    needs.append(workspace_size(rows, columns, plan, gated))
        self.grow(max(need[0] for need in needs), max(need[1] for need in needs), device)

    def grow(self, floats: int, counters: int, device: torch.device) -> None:
        """Grow to a number of floats and of counters."""
        self._partials = self._grown(self._partials, floats, device, torch.float32)
        self._counters = self._grown(self._counters, counters, device, torch.int32)

    def find(self, rows: int, outputs: int, plan: SplitKPlan, gated: bool) -> tuple[Tensor, Tensor] | None:
        """Return partial sums and counters, or None if they are too small for a plan."""
        return self.take(*workspace_size(rows, outputs, plan, gated))

    def take(self, floats: int, counters: int) -> tuple[Tensor, Tensor] | None:
        """Return partial sums and counters, or None if there are fewer."""
        if self._partials is None or self._counters is None:
            return None
        fits = self._partials.numel() >= floats and self._counters.numel() >= counters
        return (self._partials, self._counters) if fits else None

    def _grown(self, old: Tensor | None, size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        if old is not None and old.numel() >= size:
            return old
        if old is not None:
            # Keep it, because a previously captured graph may hold its address.
            self._outgrown.append(old)
        return torch.zeros(size, device=device, dtype=dtype)


class TritonLinear(TorchLinear):
    """Row-major weights in the model's dtype, using the kernel planned for their shape."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, kernels: KernelSet, workspace: SplitKWorkspace, gpu: GpuTraits
    ) -> None:
        """Store the weights.

        weight: [outputs, inputs], contiguous, on the GPU; bias: [outputs].
        """
        super().__init__(weight, bias, kernels)
        self.workspace = workspace
        self.gpu = gpu

    def apply(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Implement `LinearWeights.apply`."""
        weight = self.weight
        plan = _choose(x.shape[0], *weight.shape, weight.itemsize, self.gpu) if _fits(x, weight) else None
        if isinstance(plan, GemvPlan):
            return gemv(x, weight, self.bias, plan, pdl=self.gpu.pdl, out=out)
        if isinstance(plan, SplitKPlan) and (space := self.workspace.find(x.shape[0], weight.shape[0], plan, False)):
            return splitk_gemm(x, weight, self.bias, plan, *space, pdl=self.gpu.pdl, out=out)
        return super().apply(x, out)

    def apply_normed(
        self, x: Tensor, residual: Tensor | None, norm: Norm, activation: Activation | None = None
    ) -> tuple[Tensor, Tensor]:
        """Implement `LinearWeights.apply_normed`, in one launch for one row, and for few if planned."""
        plan = self._normed_plan(x, residual, norm, activation is not None)
        if plan is not None:
            update_weight = None if residual is None else norm.update_weight
            given = (x, residual, update_weight, norm.weight, norm.eps, self.weight, self.bias, plan, activation)
            return normed_gemv(*given, self.gpu.pdl)
        return super().apply_normed(x, residual, norm, activation)

    def apply_gated(self, x: Tensor, activation: Activation) -> Tensor:
        """Implement `UnfusedLinear.apply_gated`, in one launch if planned."""
        weight = self.weight
        width, inputs = weight.shape[0] // 2, weight.shape[1]
        plan = _choose_gated(x.shape[0], width, inputs, weight.itemsize, self.gpu) if _fits(x, weight) else None
        if isinstance(plan, GemvPlan):
            return gemv(x, weight, self.bias, plan, activation, self.gpu.pdl)
        if isinstance(plan, SplitKPlan) and (space := self.workspace.find(x.shape[0], width, plan, True)):
            return splitk_gemm(x, weight, self.bias, plan, *space, activation=activation, pdl=self.gpu.pdl)
        return super().apply_gated(x, activation)

    def apply_updated(
        self, x: Tensor, residual: Tensor | None, norm: Norm | None, activation: Activation | None, lora: LoraUpdates
    ) -> tuple[Tensor, Tensor] | None:
        """Implement `LinearWeights.apply_updated`, for layers that a GEMV computes."""
        weight, gated, pdl = self.weight, activation is not None, self.gpu.pdl
        if norm is not None:
            plan = self._normed_plan(x, residual, norm, gated)
            if plan is None:
                return None
            given = x, residual, None if residual is None else norm.update_weight, norm.weight, norm.eps
            return normed_gemv(*given, weight, self.bias, plan, activation, pdl, shrink_rows(*given, lora, pdl))
        outputs, inputs = weight.shape[0] // 2 if gated else weight.shape[0], weight.shape[1]
        choose = _choose_gated if gated else _choose
        chosen = choose(len(x), outputs, inputs, weight.itemsize, self.gpu) if _fits(x, weight) else None
        if not isinstance(chosen, GemvPlan):
            return None
        update = shrink_rows(x, None, None, None, 0.0, lora, pdl)
        return gemv(x, weight, self.bias, chosen, activation, pdl, update=update), x

    def _normed_plan(self, x: Tensor, residual: Tensor | None, norm: Norm, gated: bool) -> GemvPlan | None:
        """Return the plan of a matmul fused with the norm before it, None for separate launches."""
        weight, rows = self.weight, x.shape[0]
        if not _fits(x, weight) or not (rows == 1 or (rows <= FEW_ROWS and weight.itemsize == 2)):
            return None
        if residual is not None and not residual.is_contiguous():
            return None
        outputs = weight.shape[0] // 2 if gated else weight.shape[0]
        norms = 1 if residual is None or norm.update_weight is None else 2
        return _choose_normed(outputs, weight.shape[1], gated, self.gpu, norms=norms, rows=rows)


class TritonMethod:
    """Linear method for one GPU, with row-major weights in the model's dtype.

    All weights share a workspace.
    """

    def __init__(self, gpu: GpuTraits) -> None:
        self.gpu = gpu
        self.workspace = SplitKWorkspace()

    def build(self, outputs: int, inputs: int, bias: bool, context: BuildContext) -> LinearWeights:
        """Implement `LinearMethod.build`."""
        shape = inputs, context.dtype.itemsize, self.gpu
        self.workspace.reserve(
            outputs,
            context.device,
            lambda rows, columns: choose(rows, columns, *shape),
            lambda rows, columns: choose_gated(rows, columns, *shape),
        )
        weight = torch.empty(outputs, inputs, device=context.device, dtype=context.dtype)
        return TritonLinear(weight, empty_bias(outputs, bias, context), context.kernels, self.workspace, self.gpu)


def _fits(x: Tensor, weight: Tensor) -> bool:
    """Return whether the kernels support these tensors."""
    return x.device == weight.device and x.is_contiguous() and weight.is_contiguous() and x.dtype == weight.dtype
