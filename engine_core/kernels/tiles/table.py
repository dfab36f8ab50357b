"""Launch parameters measured on one type of GPU.

`python -m benchmarks.tune` measures them. The kernels' own rules are used for missing entries.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from tandem.engine_core.kernels.tiles.plan_types import DecodePlan, ExpertPlan, Plan, W8A8GemmPlan

BUCKETS = (1, 16, 32, 64, 128)
"""Row counts for which matmuls are planned; a plan is used for all row counts up to its bucket."""
FEW_ROWS = 4
"""Rows from 2 on for which a GEMV of 16-bit weights may be measured; without one the plan for 16 rows is used."""
W8A8_BUCKETS = (16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
"""Row counts for which W8A8 GEMMs are planned; above, the rules are used."""
EXPERT_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Numbers of tokens for which matmuls of experts are planned; above, the rules are used."""
KERNEL_VERSION = 3
"""Version of the kernels that tables are measured with; increase it when a change makes other tiles the best ones."""

Operation = Literal["product", "gated", "normed", "normed_gated"]
"""Operation of a kernel: a matmul, a gated one, or either with a fused norm before it."""
EightBitKind = Literal["fp8", "int8"]
"""Dtype of 8-bit weights."""
Scaling = Literal["tensor", "output", "block"]
"""Granularity of weight scales."""

ExpertPart = Literal["gate_up", "down"]
"""Matmul of an expert: the gated one of gate and up, or that of down."""


class MatmulKey(NamedTuple):
    """Key of a matmul's launch parameters."""

    operation: Operation
    bits: int
    """Bits of a weight: 16, 8 or 4. A plan for 16 is also used for one row of 32-bit weights."""
    outputs: int
    """Columns of the result."""
    inputs: int
    rows: int
    """One of `BUCKETS` or `FEW_ROWS`."""


class W8A8GemmKey(NamedTuple):
    """Key of a W8A8 GEMM's launch parameters."""

    kind: EightBitKind
    scaling: Scaling
    outputs: int
    inputs: int
    rows: int
    """One of `W8A8_BUCKETS`."""
    gated: bool = False
    """Whether gate and quantization are fused. Outputs are then those of the gate, half as many."""


class ExpertKey(NamedTuple):
    """Key of the launch parameters of one of the matmuls of a mixture of experts."""

    part: ExpertPart
    weight_bits: int
    x_bits: int
    """Bits of an activation."""
    hidden: int
    width: int
    """Inputs of an expert's down projection."""
    experts: int
    top_k: int
    tokens: int
    """One of `EXPERT_BUCKETS`."""


class DecodeKey(NamedTuple):
    """Key of the launch parameters of decode attention."""

    head_dim: int
    """Tile width: head_dim padded to a power of two."""
    kv_bits: int
    """Bits of an element of keys and values."""
    pairs: int
    """Number of (row, KV head) pairs, a power of two; the plan is used for all numbers below the next one."""


@dataclass(frozen=True, slots=True)
class TileTable:
    """The launch parameters of one device."""

    device: str = ""
    """Name of the GPU, as reported by CUDA."""
    products: Mapping[MatmulKey, Plan] = field(default_factory=dict)
    decode: Mapping[DecodeKey, DecodePlan] = field(default_factory=dict)
    byte_products: Mapping[W8A8GemmKey, W8A8GemmPlan | None] = field(default_factory=dict)
    """Plans of W8A8 GEMMs; None means the library's, or a separate gate."""
    experts: Mapping[ExpertKey, ExpertPlan] = field(default_factory=dict)

    def __hash__(self) -> int:
        """Hash the name only.

        Plans are cached by GPU, and looked up for each eager matmul.
        """
        return hash(self.device)

    @property
    def count(self) -> int:
        """Number of plans."""
        return len(self.products) + len(self.decode) + len(self.byte_products) + len(self.experts)

    def matmul(self, key: MatmulKey, rule: Plan) -> Plan:
        """Return the plan of a matmul, the rule's if it was not measured."""
        return self.products.get(key, rule)

    def attention(self, key: DecodeKey, rule: DecodePlan) -> DecodePlan:
        """Return the plan of decode attention, the rule's if it was not measured."""
        return self.decode.get(key, rule)


NO_TABLE = TileTable()
"""Table of a device without measurements."""
