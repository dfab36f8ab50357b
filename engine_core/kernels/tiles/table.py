"""Launch parameters measured on one kind of GPU.

`python -m benchmarks.tune` measures them. What a table lacks, the rules beside the kernels choose.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from tandem.engine_core.kernels.tiles.plan_types import DecodePlan, Plan, W8A8GemmPlan

BUCKETS = (1, 16, 32, 64, 128)
"""Row counts for which products are planned; a plan serves every number of rows up to its bucket."""
W8A8_BUCKETS = (16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
"""Row counts for which products of bytes with bytes are planned; the rules alone serve more."""
KERNEL_VERSION = 3
"""Version of the kernels that tables are measured with; raise it when a change makes other tiles the best ones."""

Operation = Literal["product", "gated", "normed", "normed_gated"]
"""Work of a kernel: a product, one with a gated activation behind it, either of them with a norm before it."""
EightBitKind = Literal["fp8", "int8"]
"""Numbers that weights of one byte are."""
Scaling = Literal["tensor", "output", "block"]
"""What shares a scale of the weights."""


class ProductKey(NamedTuple):
    """Key of a product's launch parameters."""

    operation: Operation
    bits: int
    """Bits of a weight: 16, 8 or 4. A plan of 16 serves one row of 32-bit weights, too."""
    outputs: int
    """Columns of the result."""
    inputs: int
    rows: int
    """One of `BUCKETS`."""


class W8A8GemmKey(NamedTuple):
    """Key of the launch parameters of a product of bytes with bytes."""

    kind: EightBitKind
    scaling: Scaling
    outputs: int
    inputs: int
    rows: int
    """One of `W8A8_BUCKETS`."""
    gated: bool = False
    """Whether gate and rounding are part of the product. Its outputs are what the gate leaves, half as many."""


class DecodeKey(NamedTuple):
    """Key of the launch parameters of decode attention."""

    head_dim: int
    """Width of a tile: the size of a head, rounded up to a power of two."""
    kv_bits: int
    """Bits of an element of keys and values."""
    pairs: int
    """Pairs of row and KV head, a power of two; the plan serves all numbers below the next one."""


@dataclass(frozen=True, slots=True)
class TileTable:
    """The launch parameters of one device."""

    device: str = ""
    """Name of the GPU, as CUDA gives it."""
    products: Mapping[ProductKey, Plan] = field(default_factory=dict)
    decode: Mapping[DecodeKey, DecodePlan] = field(default_factory=dict)
    byte_products: Mapping[W8A8GemmKey, W8A8GemmPlan | None] = field(default_factory=dict)
    """Plans of products of bytes with bytes; None stands for the library's, or for separate gates."""

    def __hash__(self) -> int:
        """Hash the name alone.

        Choices are cached by GPU, and are looked up for each eager product.
        """
        return hash(self.device)

    @property
    def count(self) -> int:
        """Number of plans."""
        return len(self.products) + len(self.decode) + len(self.byte_products)

    def product(self, key: ProductKey, rule: Plan) -> Plan:
        """Return the plan of a product, by the rule if it was not measured."""
        return self.products.get(key, rule)

    def attention(self, key: DecodeKey, rule: DecodePlan) -> DecodePlan:
        """Return the plan of decode attention, by the rule if it was not measured."""
        return self.decode.get(key, rule)


NO_TABLE = TileTable()
"""The table of a device on which nothing was measured."""
