"""Int4 weights of the experts of one layer on a CUDA device."""

from functools import cache

from torch import Tensor

from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.gpu_traits import GpuTraits
from tandem.engine_core.kernels.linear.int4_layout import to_kernel_layout
from tandem.engine_core.kernels.moe.grouped_gemm import combine
from tandem.engine_core.kernels.moe.int4_gemv import int4_pair_gemv
from tandem.engine_core.kernels.moe.int4_grouped_gemm import int4_grouped_gemm
from tandem.engine_core.kernels.moe.int4_narrow_gemm import int4_narrow_gemm
from tandem.engine_core.kernels.moe.int4_weights import Int4Weights
from tandem.engine_core.kernels.moe.plans import choose_expert_plan, multiplies_pairs
from tandem.engine_core.kernels.moe.routing import Routed, SharedOutput
from tandem.engine_core.kernels.quantized_activation import QuantizedActivation
from tandem.engine_core.kernels.tiles.plan_types import INT4_STRIDE, NARROW_BLOCK, GemvPlan, GroupedPlan
from tandem.engine_core.kernels.tiles.table import ExpertKey, ExpertPart
from tandem.engine_core.layers.int4_experts import Int4Experts
from tandem.engine_core.quantization.fields import unsupported
from tandem.engine_core.quantization.int4 import pack, unpack
from tandem.engine_core.quantization.scheme import Int4Scheme

_choose = cache(choose_expert_plan)
_multiplies_pairs = cache(multiplies_pairs)
_PARTS = 8
"""Parts that are converted at a time, to limit the memory of unpacked values."""


class TritonInt4Experts(Int4Experts):
    """Int4 experts, using the kernels planned for their shape and the number of tokens.

    After loading, the words are in the layout of `kernels.linear.int4_layout`.
    """

    def __init__(
        self, gate_up: Int4Weights, down: Int4Weights, scheme: Int4Scheme, activation: Activation, gpu: GpuTraits
    ) -> None:
        """Store the weights; see `Int4Experts`. Raises ConfigError for groups that no kernel reads."""
        super().__init__(gate_up, down, scheme, activation)
        self.gpu = gpu
        for weight in (gate_up, down):
            if not weight.run:
                raise unsupported(
                    f"experts with groups of {weight.group} of {weight.part_shape[1]} inputs are not supported on a "
                    f"GPU, only groups of a multiple of {INT4_STRIDE}"
                )

    def needs_sorted(self, tokens: int, top_k: int) -> bool:
        """Implement `ExpertWeights.needs_sorted`."""
        (hidden, width), experts = self.down.part_shape, len(self.down.words)
        return not _multiplies_pairs(ExpertKey("down", 4, 16, hidden, width, experts, top_k, tokens), self.gpu)

    def run(
        self,
        x: Tensor,
        routed: Routed,
        shared: SharedOutput | None = None,
        quantized: QuantizedActivation | None = None,
    ) -> Tensor:
        """Implement `ExpertWeights.run`."""
        first, last, pdl = self._plan("gate_up", x, routed), self._plan("down", x, routed), self.gpu.pdl
        if isinstance(first, GemvPlan) and isinstance(last, GemvPlan):
            hidden = int4_pair_gemv(x, self.gate_up, routed, self.activation, first, pdl)
            return combine(int4_pair_gemv(hidden, self.down, routed, None, last, pdl), routed, pdl, shared)
        assert isinstance(first, GroupedPlan) and isinstance(last, GroupedPlan)
        hidden = _multiply(x, self.gate_up, routed, self.activation, first, pdl)
        return combine(_multiply(hidden, self.down, routed, None, last, pdl), routed, pdl, shared)

    def finish(self) -> None:
        """Implement `Int4Experts.finish`: convert the words to the kernels' layout."""
        for weight in (self.gate_up, self.down):
            rows = weight.words.flatten(0, 1)
            count = _PARTS * weight.part_shape[0]
            for start in range(0, len(rows), count):
                own = rows[start : start + count]
                own.copy_(pack(to_kernel_layout(unpack(own), weight.group)))

    def _plan(self, part: ExpertPart, x: Tensor, routed: Routed) -> GemvPlan | GroupedPlan:
        (hidden, width), (tokens, top_k) = self.down.part_shape, routed.ids.shape
        sizes = hidden, width, len(self.down.words), top_k, tokens
        return _choose(ExpertKey(part, 4, 8 * x.itemsize, *sizes), self.gpu)


def _multiply(
    x: Tensor, weight: Int4Weights, routed: Routed, activation: Activation | None, plan: GroupedPlan, pdl: bool
) -> Tensor:
    """Call the GEMM of a plan; see `int4_grouped_gemm`."""
    gemm = int4_narrow_gemm if plan.block_m == NARROW_BLOCK else int4_grouped_gemm
    return gemm(x, weight, routed, activation, plan, pdl)
