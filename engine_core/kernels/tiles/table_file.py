"""Tile tables as JSON files, one for each type of GPU.

They are packaged next to this module. A file is an object with `device`, `kernel_version`, `measured_with` (versions of
torch and Triton), and the lists `products` (matmuls), `byte_products` (W8A8 GEMMs), `experts` and `decode`. Entries
have the fields of a `MatmulKey`, `W8A8GemmKey`, `ExpertKey` or `DecodeKey`, and a `plan`. That of a matmul is `null`
for the library's, or, for gated ones, for separate kernels.
"""

import json
import logging
import re
from dataclasses import asdict
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from tandem.engine_core.kernels.tiles.plan_types import (
    INT4_BLOCK,
    INT4_STRIDE,
    NARROW_BLOCK,
    DecodePlan,
    ExpertPlan,
    GemvPlan,
    GroupedPlan,
    Plan,
    SplitKPlan,
    Tile,
    W8A8GemmPlan,
)
from tandem.engine_core.kernels.tiles.table import (
    BUCKETS,
    EXPERT_BUCKETS,
    FEW_ROWS,
    KERNEL_VERSION,
    NO_TABLE,
    W8A8_BUCKETS,
    DecodeKey,
    EightBitKind,
    ExpertKey,
    ExpertPart,
    MatmulKey,
    Operation,
    Scaling,
    TileTable,
    W8A8GemmKey,
)

logger = logging.getLogger(__name__)

Count = Annotated[int, Meta(ge=1, le=1 << 24)]
Size = Annotated[int, Meta(ge=1, le=1 << 16)]
"""Rows, outputs, inputs or positions of a tile."""
Few = Annotated[int, Meta(ge=1, le=64)]
"""Warps, stages, splits, or consecutive tiles."""
MIN_DOT_INPUTS = 16
LOADED_BYTES, LEVEL_BLOCK = 16, 128
"""Bytes per vector load of 8-bit weights, and inputs per block of `linear.int4_layout`, if blocks divide them."""
LANES = 8
"""16-bit weights per vector load."""
SCALED_INPUTS = 128
"""Inputs per block of scales."""


class Gemv(Struct, forbid_unknown_fields=True, tag="gemv", tag_field="kernel"):
    """A `GemvPlan` in a file."""

    rows: Size
    block_k: Size
    tiles: Few
    warps: Few


class SplitK(Struct, forbid_unknown_fields=True, tag="splitk", tag_field="kernel"):
    """A `SplitKPlan` in a file."""

    block_n: Size
    block_k: Size
    split: Few
    stages: Few
    warps: Few


class MatmulEntry(Struct, forbid_unknown_fields=True):
    """One measured matmul."""

    operation: Operation
    bits: Count
    outputs: Count
    inputs: Count
    rows: Count
    plan: Gemv | SplitK | None


class W8A8Gemm(Struct, forbid_unknown_fields=True):
    """A `W8A8GemmPlan` in a file."""

    block_m: Size
    block_n: Size
    split: Few
    stages: Few
    warps: Few
    block_k: Size
    group_m: Few


class W8A8Entry(Struct, forbid_unknown_fields=True):
    """One measured W8A8 GEMM."""

    kind: EightBitKind
    scaling: Scaling
    outputs: Count
    inputs: Count
    rows: Count
    plan: W8A8Gemm | None
    gated: bool = False
    """Omitted if the matmul alone was measured."""


class Grouped(Struct, forbid_unknown_fields=True, tag="grouped", tag_field="kernel"):
    """A `GroupedPlan` in a file."""

    block_m: Size
    block_n: Size
    block_k: Size
    stages: Few
    warps: Few


class ExpertEntry(Struct, forbid_unknown_fields=True):
    """One measured matmul of experts."""

    part: ExpertPart
    weight_bits: Count
    x_bits: Count
    hidden: Count
    width: Count
    experts: Count
    top_k: Count
    tokens: Count
    plan: Gemv | Grouped


class Attention(Struct, forbid_unknown_fields=True):
    """A `DecodePlan` in a file."""

    positions: Size
    warps: Few
    stages: Few
    least: Count
    splits: Count
    early: bool = False
    """Omitted without early loads."""


class DecodeEntry(Struct, forbid_unknown_fields=True):
    """One measured kind of decode attention."""

    head_dim: Count
    kv_bits: Count
    pairs: Count
    plan: Attention


class TableFile(Struct, forbid_unknown_fields=True):
    """A whole file."""

    device: str
    kernel_version: int
    measured_with: dict[str, str]
    products: list[MatmulEntry]
    decode: list[DecodeEntry]
    byte_products: list[W8A8Entry] = []
    """Missing in files from before these were measured."""
    experts: list[ExpertEntry] = []
    """Likewise."""


class AnyVersion(Struct):
    """Fields that every version of a file has."""

    kernel_version: int


def file_name(device: str) -> str:
    """Return the name of a device's file, such as nvidia-h200.json."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") + ".json"


def packaged(device: str) -> Traversable:
    """Return the path of a device's file among the packaged ones."""
    return files("tandem.engine_core.kernels.tiles") / "devices" / file_name(device)


def load_table(device: str) -> TileTable:
    """Read the packaged table of a device.

    Empty, with a log message, for a device without one, and for a table measured on another device or with another
    version of the kernels. Raises ValueError for a malformed file.
    """
    path = packaged(device)
    return read_table(path, device) if path.is_file() else NO_TABLE


def read_table(path: Traversable, device: str | None = None) -> TileTable:
    """Read a table from a file.

    Empty, with a log message, if it was measured with another version of the kernels, or on another device than the
    given one (None: any). Raises ValueError, with file and entry, for a malformed one.
    """
    text = path.read_bytes()
    try:
        version = msgspec.json.decode(text, type=AnyVersion).kernel_version
        if version != KERNEL_VERSION:
            logger.warning(
                "%s is ignored: its tiles were measured with version %d of the kernels, these are version %d; "
                "measure again with python -m benchmarks.tune",
                path,
                version,
                KERNEL_VERSION,
            )
            return NO_TABLE
        found = msgspec.json.decode(text, type=TableFile)
    except msgspec.DecodeError as error:
        raise ValueError(f"the tile table {path} is malformed: {error}") from None
    if device is not None and found.device != device:
        logger.warning(
            "%s is ignored: its tiles were measured on %s, this GPU is %s; measure with python -m benchmarks.tune",
            path,
            found.device,
            device,
        )
        return NO_TABLE
    return _table(path, found)


def _table(path: Traversable, found: TableFile) -> TileTable:
    others = _decode(path, found), _byte_products(path, found), _experts(path, found)
    return TileTable(found.device, _products(path, found), *others)


def _products(path: Traversable, found: TableFile) -> dict[MatmulKey, Plan]:
    plans: dict[MatmulKey, Plan] = {}
    for number, entry in enumerate(found.products):
        key = MatmulKey(entry.operation, entry.bits, entry.outputs, entry.inputs, entry.rows)
        plans[key] = _plan(entry.plan)
        _check(path, f"products[{number}]", matmul_problem(key, plans[key]), len(plans) == number + 1)
    return plans


def _decode(path: Traversable, found: TableFile) -> dict[DecodeKey, DecodePlan]:
    plans: dict[DecodeKey, DecodePlan] = {}
    for number, entry in enumerate(found.decode):
        key = DecodeKey(entry.head_dim, entry.kv_bits, entry.pairs)
        tile = Tile(entry.plan.positions, entry.plan.warps, entry.plan.stages)
        plans[key] = DecodePlan(tile, entry.plan.least, entry.plan.splits, entry.plan.early)
        _check(path, f"decode[{number}]", decode_problem(key, plans[key]), len(plans) == number + 1)
    return plans


def _byte_products(path: Traversable, found: TableFile) -> dict[W8A8GemmKey, W8A8GemmPlan | None]:
    plans: dict[W8A8GemmKey, W8A8GemmPlan | None] = {}
    for number, entry in enumerate(found.byte_products):
        key = W8A8GemmKey(entry.kind, entry.scaling, entry.outputs, entry.inputs, entry.rows, entry.gated)
        plans[key] = None if entry.plan is None else W8A8GemmPlan(**msgspec.structs.asdict(entry.plan))
        _check(path, f"byte_products[{number}]", w8a8_gemm_problem(key, plans[key]), len(plans) == number + 1)
    return plans


def _experts(path: Traversable, found: TableFile) -> dict[ExpertKey, ExpertPlan]:
    plans: dict[ExpertKey, ExpertPlan] = {}
    for number, entry in enumerate(found.experts):
        fields = msgspec.structs.asdict(entry)
        stored = msgspec.structs.asdict(fields.pop("plan"))
        key = ExpertKey(**fields)
        plans[key] = GemvPlan(**stored) if isinstance(entry.plan, Gemv) else GroupedPlan(**stored)
        _check(path, f"experts[{number}]", expert_problem(key, plans[key]), len(plans) == number + 1)
    return plans


def table_text(table: TileTable, measured_with: dict[str, str]) -> str:
    """Return a table as the text of a file, one entry per line, sorted."""
    products = [{**key._asdict(), "plan": _written(plan)} for key, plan in sorted(table.products.items(), key=_first)]
    decode = [
        {**key._asdict(), "plan": _written_attention(plan)} for key, plan in sorted(table.decode.items(), key=_first)
    ]
    byte_products = [
        {**_written_key(key), "plan": None if plan is None else asdict(plan)}
        for key, plan in sorted(table.byte_products.items(), key=_first)
    ]
    experts = [{**key._asdict(), "plan": _written_expert(plan)} for key, plan in sorted(table.experts.items())]
    head = {"device": table.device, "kernel_version": KERNEL_VERSION, "measured_with": measured_with}
    lines = [f' "{name}": {json.dumps(value)}' for name, value in head.items()]
    for name, entries in (
        ("products", products),
        ("byte_products", byte_products),
        ("experts", experts),
        ("decode", decode),
    ):
        if name == "experts" and not entries:
            continue
        inner = ",\n".join(f"  {json.dumps(entry)}" for entry in entries)
        lines.append(f' "{name}": [\n{inner}\n ]' if entries else f' "{name}": []')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def write_table(path: Path, table: TileTable, measured_with: dict[str, str]) -> None:
    """Write a table to a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(table_text(table, measured_with))
    partial.replace(path)


def matmul_problem(key: MatmulKey, plan: Plan) -> str:
    """Return the reason for which kernels reject a plan, empty if they accept it."""
    if key.bits not in (4, 8, 16):
        return f"weights of {key.bits} bits have no kernel; bits must be 4, 8 or 16"
    sizes = sorted({*BUCKETS, FEW_ROWS})
    if key.rows not in sizes:
        return f"rows {key.rows} must be one of {', '.join(map(str, sizes))}"
    one_row, normed = key.rows == 1, key.operation in ("normed", "normed_gated")
    if key.rows == FEW_ROWS and (key.bits != 16 or key.operation == "gated" or not isinstance(plan, GemvPlan)):
        return f"{key.rows} rows take a gemv plan of 16-bit weights, gated only after a norm"
    if normed and not (key.rows in (1, FEW_ROWS) and isinstance(plan, GemvPlan)):
        return f"a norm is fused with a matmul of up to {FEW_ROWS} rows, by a gemv plan"
    if isinstance(plan, GemvPlan):
        return _gemv_problem(key, plan, normed)
    if isinstance(plan, SplitKPlan):
        if one_row:
            return "one row takes a gemv plan"
        if not _powers_of_two(plan.block_n, plan.block_k, plan.warps) or plan.block_k < MIN_DOT_INPUTS:
            return f"block_n {plan.block_n}, block_k {plan.block_k} and warps must be powers of two, block_k from 16 on"
        if key.inputs % plan.block_k or plan.split * plan.block_k > key.inputs:
            return f"{key.inputs} inputs are not divisible into {plan.split} parts of blocks of {plan.block_k}"
        if key.bits < 16 and 128 % plan.block_k:
            return f"block_k {plan.block_k} does not divide the 128 inputs of a block of scales"
        if key.bits == 4 and plan.block_k % INT4_STRIDE:
            return f"block_k {plan.block_k} must be a multiple of the {INT4_STRIDE} inputs whose words lie together"
    return ""


def _gemv_problem(key: MatmulKey, plan: GemvPlan, normed: bool) -> str:
    if key.rows not in (1, FEW_ROWS):
        return f"a gemv plan serves up to {FEW_ROWS} rows, not {key.rows}"
    if key.rows > 1 and plan.block_k < LANES:
        return f"block_k {plan.block_k} must hold the {LANES} elements that a thread loads at once"
    if not _powers_of_two(plan.rows, plan.block_k, plan.warps):
        return f"rows {plan.rows}, block_k {plan.block_k} and warps {plan.warps} must be powers of two"
    whole = plan.block_k >= key.inputs or (normed and key.bits == 16)
    if (key.operation != "product" or plan.tiles > 1) and not whole:
        return f"block_k {plan.block_k} must hold all {key.inputs} inputs of a fused or tiled matmul"
    if key.bits == 8 and 16 % plan.rows:
        return f"{plan.rows} rows do not divide the 16 rows of a block of scales"
    divisor = {16: 1, 8: LOADED_BYTES, 4: INT4_STRIDE}[key.bits]
    if key.inputs % divisor:
        return f"{key.inputs} inputs with weights of {key.bits} bits are not divisible by {divisor}"
    fewest = LEVEL_BLOCK if key.bits == 4 and key.inputs % LEVEL_BLOCK == 0 else divisor
    if plan.block_k < fewest:
        return f"block_k {plan.block_k} must be at least {fewest} with weights of {key.bits} bits"
    return ""


def w8a8_gemm_problem(key: W8A8GemmKey, plan: W8A8GemmPlan | None) -> str:
    """Return the reason for which the W8A8 GEMM rejects a plan, empty if it accepts it."""
    if key.rows not in W8A8_BUCKETS:
        return f"rows {key.rows} must be one of {', '.join(map(str, W8A8_BUCKETS))}"
    if key.kind == "int8" and key.scaling != "output":
        return f"int8 weights have a scale for each output, not for each {key.scaling}"
    if plan is None:
        needed = key.kind == "int8" and not key.gated
        return "the library's sums of int8 are not scaled; int8 needs a plan" if needed else ""
    if key.gated and (plan.split > 1 or plan.block_m < key.rows):
        return f"one program gates all of {key.rows} rows: split {plan.split} must be 1, block_m {plan.block_m} as many"
    if not _powers_of_two(plan.block_m, plan.block_n, plan.warps) or min(plan.block_m, plan.block_n) < 16:
        return f"block_m {plan.block_m}, block_n {plan.block_n} and warps must be powers of two, blocks from 16 on"
    if key.scaling == "block" and plan.block_k != SCALED_INPUTS:
        return f"block_k {plan.block_k} must be the {SCALED_INPUTS} inputs of a block of scales"
    if key.gated and key.scaling == "block" and SCALED_INPUTS % plan.block_n:
        return f"block_n {plan.block_n} must divide the {SCALED_INPUTS} outputs of a gate that share their scales"
    if plan.block_k % SCALED_INPUTS or not _powers_of_two(plan.block_k):
        return f"block_k {plan.block_k} must be a power of two from {SCALED_INPUTS} on"
    if key.inputs % plan.block_k or plan.split * plan.block_k > key.inputs:
        return f"{key.inputs} inputs are not divisible into {plan.split} parts of blocks of {plan.block_k}"
    return ""


def expert_problem(key: ExpertKey, plan: ExpertPlan) -> str:
    """Return the reason for which the kernels of experts reject a plan, empty if they accept it."""
    if key.tokens not in EXPERT_BUCKETS:
        return f"tokens {key.tokens} must be one of {', '.join(map(str, EXPERT_BUCKETS))}"
    if (key.weight_bits, key.x_bits) not in ((16, 16), (8, 16), (8, 8), (4, 16)):
        return f"weights of {key.weight_bits} bits and activations of {key.x_bits} have no kernel"
    if isinstance(plan, GemvPlan):
        if not _powers_of_two(plan.rows, plan.block_k, plan.warps) or plan.rows > 128 or plan.block_k < 16:
            return f"rows {plan.rows}, block_k {plan.block_k} and warps must be powers of two, rows at most 128"
        if key.weight_bits == 4 and plan.block_k < INT4_BLOCK:
            return f"block_k {plan.block_k} must hold a block of {INT4_BLOCK} inputs of int4 weights"
        return ""
    least = NARROW_BLOCK if key.weight_bits == 4 else 16
    powers = _powers_of_two(plan.block_m, plan.block_n, plan.block_k, plan.warps)
    if not powers or plan.block_m < least or plan.block_n < 16:
        return (
            f"block_m {plan.block_m}, block_n {plan.block_n}, block_k {plan.block_k} must be powers of two, "
            f"block_m from {least} on, block_n from 16 on"
        )
    if key.weight_bits == 4 and not INT4_STRIDE <= plan.block_k <= INT4_BLOCK:
        return f"block_k {plan.block_k} of int4 weights must be from {INT4_STRIDE} to {INT4_BLOCK}"
    if key.weight_bits == 8 and max(plan.block_n, plan.block_k) > SCALED_INPUTS:
        return f"block_n {plan.block_n} and block_k {plan.block_k} must be in one block of scales of {SCALED_INPUTS}"
    if key.x_bits == 8 and (plan.block_k, plan.block_n) != (SCALED_INPUTS, SCALED_INPUTS) and key.part == "gate_up":
        return f"tiles of quantized activations have {SCALED_INPUTS} outputs and inputs"
    return ""


def decode_problem(key: DecodeKey, plan: DecodePlan) -> str:
    """Return the reason for which decode attention rejects a plan, empty if it accepts it."""
    if not _powers_of_two(key.head_dim, key.pairs):
        return f"head_dim {key.head_dim} and pairs {key.pairs} must be powers of two"
    if not _powers_of_two(plan.tile.positions, plan.tile.warps) or plan.tile.positions < MIN_DOT_INPUTS:
        return f"positions {plan.tile.positions} and warps must be powers of two, positions at least 16"
    return "" if plan.splits <= 64 else f"splits {plan.splits} must be at most 64"


def _powers_of_two(*numbers: int) -> bool:
    return all(number & (number - 1) == 0 for number in numbers)


def _check(path: Traversable, entry: str, problem: str, new: bool) -> None:
    if problem or not new:
        raise ValueError(
            f"the tile table {path} is malformed: {problem or 'the same key as an earlier entry'} - at $.{entry}"
        )


def _plan(stored: Gemv | SplitK | None) -> Plan:
    if isinstance(stored, Gemv):
        return GemvPlan(stored.rows, stored.block_k, stored.tiles, stored.warps)
    if isinstance(stored, SplitK):
        return SplitKPlan(stored.block_n, stored.block_k, stored.split, stored.stages, stored.warps)
    return None


def _written(plan: Plan) -> dict[str, object] | None:
    if plan is None:
        return None
    return {"kernel": "gemv" if isinstance(plan, GemvPlan) else "splitk", **asdict(plan)}


def _written_expert(plan: ExpertPlan) -> dict[str, object]:
    return {"kernel": "gemv" if isinstance(plan, GemvPlan) else "grouped", **asdict(plan)}


def _written_key(key: W8A8GemmKey) -> dict[str, object]:
    fields = key._asdict()
    if not key.gated:
        del fields["gated"]
    return fields


def _written_attention(plan: DecodePlan) -> dict[str, object]:
    fields = {**plan.tile._asdict(), "least": plan.least, "splits": plan.splits}
    return {**fields, "early": True} if plan.early else fields


def _first(item: tuple[tuple[object, ...], object]) -> tuple[object, ...]:
    return item[0]
