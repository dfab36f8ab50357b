"""Unquantized linear maps on a CUDA device: Triton where it beats the library, and products fused with neighbours."""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from tandem.engine_core.kernels.activation import silu_mul
from tandem.engine_core.kernels.linear.gemv import add_norm_gemv, gemv, gemv_silu_mul, norm_gemv
from tandem.engine_core.kernels.linear.plans import (
    BUCKETS,
    GemvPlan,
    Plan,
    SplitKPlan,
    choose,
    choose_gated,
    choose_normed,
    workspace_size,
)
from tandem.engine_core.kernels.linear.splitk_gemm import splitk_gemm
from tandem.engine_core.kernels.norm import add_rms_norm, rms_norm

_choose = cache(choose)
_choose_gated = cache(choose_gated)
_choose_normed = cache(choose_normed)


class TritonMethod:
    """Weights in their own dtype, row after row, as in `PlainMethod`.

    Owns the workspace of split-K products, sized while weights are allocated. So calls allocate nothing but results and
    can be captured in graphs. One instance serves one device, and calls and graphs that share it must not overlap in
    time: one stream.
    """

    def __init__(self) -> None:
        self._partials: Tensor | None = None
        self._counters: Tensor | None = None
        self._outgrown: list[Tensor] = []

    def allocate(self, outputs: int, inputs: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """As in `LinearMethod`."""
        self._reserve(outputs, inputs, device, dtype.itemsize)
        return torch.empty(outputs, inputs, device=device, dtype=dtype)

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """As in `LinearMethod`."""
        plan = _choose(x.shape[0], *weight.shape, weight.itemsize) if _fits(x, weight) else None
        if isinstance(plan, GemvPlan):
            return gemv(x, weight, bias, plan)
        if isinstance(plan, SplitKPlan) and (space := self._space(x.shape[0], weight.shape[0], plan, False)):
            return splitk_gemm(x, weight, bias, plan, *space)
        return functional.linear(x, weight, bias)

    def apply_gated(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """silu(gate) * up of the product. x: [T, inputs]; weight: [2 * width, inputs], gate first.

        Returns [T, width].
        """
        width, inputs = weight.shape[0] // 2, weight.shape[1]
        plan = _choose_gated(x.shape[0], width, inputs, weight.itemsize) if _fits(x, weight) else None
        if isinstance(plan, GemvPlan):
            return gemv_silu_mul(x, weight, bias, plan)
        if isinstance(plan, SplitKPlan) and (space := self._space(x.shape[0], width, plan, True)):
            return splitk_gemm(x, weight, bias, plan, *space, silu=True)
        return silu_mul(self.apply(x, weight, bias), pdl=x.is_cuda)

    def apply_normed(
        self,
        x: Tensor,
        residual: Tensor | None,
        norm_weight: Tensor,
        eps: float,
        weight: Tensor,
        bias: Tensor | None,
        gated: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """`apply` (gated: `apply_gated`) of the root mean square norm of the residual stream, x added to it first.

        x, residual: [T, inputs], no residual: x starts the stream; norm_weight: [inputs].
        Returns the product and the stream.
        """
        plan = _choose_normed(weight.shape[1], gated) if x.shape[0] == 1 and _fits(x, weight) else None
        if plan is not None and residual is None:
            return norm_gemv(x, norm_weight, eps, weight, bias, plan, gated), x
        if plan is not None and residual is not None and residual.is_contiguous():
            return add_norm_gemv(x, residual, norm_weight, eps, weight, bias, plan, gated)
        pdl = x.is_cuda
        if residual is None:
            normed, stream = rms_norm(x, norm_weight, eps, pdl=pdl), x
        else:
            normed, stream = add_rms_norm(x, residual, norm_weight, eps, pdl=pdl)
        return (self.apply_gated if gated else self.apply)(normed, weight, bias), stream

    def _reserve(self, outputs: int, inputs: int, device: torch.device, itemsize: int) -> None:
        """Grows the workspace to what any number of rows needs."""
        needs = [(0, 0)]
        for rows in BUCKETS:
            plans: list[tuple[Plan, int, bool]] = [(choose(rows, outputs, inputs, itemsize), outputs, False)]
            if outputs % 2 == 0:
                plans.append((choose_gated(rows, outputs // 2, inputs, itemsize), outputs // 2, True))
            for plan, columns, gated in plans:
                if isinstance(plan, SplitKPlan):
                    needs.append(workspace_size(rows, columns, plan, gated))
        floats, counters = max(need[0] for need in needs), max(need[1] for need in needs)
        self._partials = self._grown(self._partials, floats, device, torch.float32)
        self._counters = self._grown(self._counters, counters, device, torch.int32)

    def _grown(self, old: Tensor | None, size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        if old is not None and old.numel() >= size:
            return old
        if old is not None:
            # Kept: a graph captured before may hold its address.
            self._outgrown.append(old)
        return torch.zeros(size, device=device, dtype=dtype)

    def _space(self, rows: int, outputs: int, plan: SplitKPlan, gated: bool) -> tuple[Tensor, Tensor] | None:
        """None if it is too small: for weights that the instance did not allocate."""
        if self._partials is None or self._counters is None:
            return None
        floats, counters = workspace_size(rows, outputs, plan, gated)
        fits = self._partials.numel() >= floats and self._counters.numel() >= counters
        return (self._partials, self._counters) if fits else None


def _fits(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernels can read these."""
    return x.is_cuda and x.is_contiguous() and weight.is_contiguous() and x.dtype == weight.dtype
