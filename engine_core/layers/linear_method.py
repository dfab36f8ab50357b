"""The hook that decides how the weight of a linear map is kept and multiplied."""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from tandem.engine_core.kernels.kernel_set import KernelSet

MIN_ROWS_ON_CPU = 4


class LinearMethod(Protocol):
    """Chosen when a model is built; models know shapes only.

    A projection is asked for together with the norm before it and the gate behind it, because some devices do them in
    one launch.
    """

    def allocate(self, outputs: int, inputs: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """An unfilled weight of shape [outputs, inputs], in any memory layout."""

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x: [T, inputs]; weight: what `allocate` returned, filled; bias: [outputs]. Returns [T, outputs]."""

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
        """Applies the map to the root mean square norm of the residual stream, to which x is added first.

        x, residual: [T, inputs], no residual: x starts the stream; norm_weight: [inputs]; gated: the product's first
        half is a gate, silu(gate) * rest. Returns the product and the stream.
        """


class SeparateMethod:
    """Norm and gate as launches of their own; how the product is made is up to the subclass."""

    def __init__(self, kernels: KernelSet) -> None:
        self.kernels = kernels

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """As in `LinearMethod`."""
        return functional.linear(x, weight, bias)

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
        """As in `LinearMethod`."""
        if residual is None:
            normed, stream = self.kernels.rms_norm(x, norm_weight, eps), x
        else:
            normed, stream = self.kernels.add_rms_norm(x, residual, norm_weight, eps)
        product = self.apply(normed, weight, bias)
        return self.kernels.silu_mul(product) if gated else product, stream


class PlainMethod(SeparateMethod):
    """Weights in their own dtype, row after row."""

    def allocate(self, outputs: int, inputs: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        return torch.empty(outputs, inputs, device=device, dtype=dtype)


class CpuMethod(SeparateMethod):
    """Weights in their own dtype, column after column, and never fewer than 4 rows of input.

    Over this layout a small float32 product rounds each row alike whatever the number of rows, but for a single one,
    which takes a path of its own. So a token's result does not depend on how many others are in its batch. Large
    products are split by their number of rows, and equal up to rounding only.
    """

    def allocate(self, outputs: int, inputs: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        return torch.empty(inputs, outputs, device=device, dtype=dtype).t()

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.shape[0]
        if rows >= MIN_ROWS_ON_CPU:
            return functional.linear(x, weight, bias)
        padded = x.expand(MIN_ROWS_ON_CPU, -1) if rows == 1 else functional.pad(x, (0, 0, 0, MIN_ROWS_ON_CPU - rows))
        return functional.linear(padded, weight, bias)[:rows]
