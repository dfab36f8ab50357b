"""Products as the tuner times them.

A graph runs one over many weights, each time behind the norm that is before it in a model.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.measuring.graph_timing import graph_seconds
from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.gated_activation import gated_activation
from tandem.engine_core.kernels.linear.gemv import add_norm_gemv, gemv
from tandem.engine_core.kernels.linear.nibble_gemv import nibble_gemv
from tandem.engine_core.kernels.linear.nibble_splitk import nibble_splitk
from tandem.engine_core.kernels.linear.pieced_gemv import normed_product
from tandem.engine_core.kernels.linear.plans import workspace_size
from tandem.engine_core.kernels.linear.splitk_gemm import splitk_gemm
from tandem.engine_core.kernels.norm import add_rms_norm
from tandem.engine_core.kernels.tiles.plan_types import GemvPlan, Plan, SplitKPlan
from tandem.engine_core.kernels.tiles.table import ProductKey

WORKING_SET = 256e6
"""Bytes of weights that one replay reads at least: several times what the second-level cache holds."""
MOST_WEIGHTS = 32
EPS, GROUP, REPLAYS = 1e-5, 128, 9


@dataclass(frozen=True)
class Weight:
    """One weight in the layout of its kernels."""

    values: Tensor
    """[N, K] in 16 bits or bytes, or [N, K / 8] words."""
    scales: Tensor | None = None
    """[N] float32 for bytes, [N, K / GROUP] for words."""
    zeros: Tensor | None = None
    """[N, K / GROUP] uint8 for words."""


def make_weight(key: ProductKey, device: str, dtype: torch.dtype = torch.bfloat16) -> Weight:
    """Make a random weight of a product."""
    outputs = key.outputs * (2 if "gated" in key.operation else 1)
    if key.bits == 16:
        return Weight(torch.empty(outputs, key.inputs, device=device, dtype=dtype).normal_(std=key.inputs**-0.5))
    if key.bits == 8:
        values = torch.randint(0, 120, (outputs, key.inputs), device=device, dtype=torch.uint8)
        return Weight(values.view(torch.float8_e4m3fn), torch.full((outputs,), 1e-3, device=device))
    groups = max(1, key.inputs // GROUP)
    words = torch.randint(-(2**31), 2**31 - 1, (outputs, key.inputs // 8), device=device, dtype=torch.int32)
    scales = torch.full((groups, outputs), 1e-3, device=device)
    return Weight(words, scales.t(), torch.full((groups, outputs), 8, device=device, dtype=torch.uint8).t())


def weights_of(key: ProductKey) -> int:
    """Return the number of weights that one replay reads."""
    outputs = key.outputs * (2 if "gated" in key.operation else 1)
    return max(1, min(MOST_WEIGHTS, int(WORKING_SET / (outputs * key.inputs * key.bits / 8)) + 1))


class Product:
    """The inputs of one product for some plans."""

    def __init__(self, key: ProductKey, device: str, pdl: bool, dtype: torch.dtype = torch.bfloat16) -> None:
        """Make the inputs of a product.

        pdl: chain its kernels.
        """
        self.key = key
        self.pdl = pdl
        self.activation = Activation.SILU if "gated" in key.operation else None
        self.x = torch.randn(key.rows, key.inputs, device=device, dtype=dtype)
        self.stream = torch.randn(key.rows, key.inputs, device=device, dtype=dtype)
        self.norm = torch.ones(key.inputs, device=device, dtype=dtype)

    def run(self, plan: Plan, weight: Weight, space: tuple[Tensor, Tensor]) -> Tensor:
        """Return the product by a plan, behind the norm before it.

        space: partial sums and counters, as `splitk_gemm` takes them.
        """
        if self.key.operation in ("normed", "normed_gated"):
            assert isinstance(plan, GemvPlan)
            return self._fused(plan, weight)
        x, _ = add_rms_norm(self.x, self.stream, self.norm, EPS, self.pdl)
        if plan is None:
            y = functional.linear(x, weight.values)
            return y if self.activation is None else gated_activation(y, self.activation, self.pdl)
        if weight.zeros is not None and weight.scales is not None:
            stored = (weight.values, weight.scales, weight.zeros, None)
            if isinstance(plan, SplitKPlan):
                return nibble_splitk(x, *stored, plan, *space, self.activation, self.pdl)
            return nibble_gemv(x, *stored, plan, self.activation, self.pdl)[0]
        if isinstance(plan, SplitKPlan):
            return splitk_gemm(x, weight.values, None, plan, *space, self.activation, self.pdl, weight.scales)
        return gemv(x, weight.values, None, plan, self.activation, self.pdl, weight.scales)

    def _fused(self, plan: GemvPlan, weight: Weight) -> Tensor:
        if weight.zeros is not None and weight.scales is not None:
            stored = (weight.values, weight.scales, weight.zeros, None)
            return nibble_gemv(self.x, *stored, plan, self.activation, self.pdl, self.norm, EPS, self.stream)[0]
        given = (self.norm, EPS, weight.values, None, plan, self.activation, self.pdl)
        if weight.scales is None:
            return normed_product(self.x, self.stream, None, *given)[0]
        return add_norm_gemv(self.x, self.stream, *given, scales=weight.scales)[0]


def space_of(key: ProductKey, plan: Plan, device: str) -> tuple[Tensor, Tensor]:
    """Allocate the partial sums and counters of a plan."""
    floats, counters = (
        workspace_size(key.rows, key.outputs, plan, "gated" in key.operation)
        if isinstance(plan, SplitKPlan)
        else (0, 0)
    )
    return torch.empty(floats, device=device), torch.zeros(counters, device=device, dtype=torch.int32)


class ProductTimer:
    """Timer of products, which keeps the weights of the last one."""

    def __init__(self, pdl: bool) -> None:
        self.pdl = pdl
        self._kept: tuple[ProductKey, Product, list[Weight]] | None = None

    def __call__(self, key: ProductKey, plan: Plan) -> float:
        """Return the microseconds of one product, with the kernel before it."""
        if self._kept is None or self._kept[0] != key:
            self._kept = None
            weights = [make_weight(key, "cuda") for _ in range(weights_of(key))]
            self._kept = key, Product(key, "cuda", self.pdl), weights
        _, product, weights = self._kept
        space = space_of(key, plan, "cuda")

        def chain() -> None:
            for weight in weights:
                product.run(plan, weight, space)

        return graph_seconds(chain, REPLAYS) * 1e6 / len(weights)


def compile_key(key: ProductKey, plan: Plan) -> tuple[object, ...]:
    """Return what the code of a product depends on.

    The number of outputs is not part of it.
    """
    return key.operation, key.bits, key.inputs, max(16, key.rows) if key.rows > 1 else 1, plan


def compile_product(key: ProductKey, plan: Plan, pdl: bool) -> None:
    """Run a plan once over a small weight.

    Its code is in Triton's cache then.
    """
    small = key._replace(outputs=256)
    run: Callable[[], Tensor] = lambda: Product(small, "cuda", pdl).run(  # noqa: E731
        plan, make_weight(small, "cuda"), space_of(small, plan, "cuda")
    )
    run()
    torch.cuda.synchronize()
