"""Tile tables round-trip through files, and errors name file and entry."""

import json
import re
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.engine_core.kernels.tiles import table_file
from tandem.engine_core.kernels.tiles.plan_types import DecodePlan, GemvPlan, Plan, SplitKPlan, Tile, W8A8GemmPlan
from tandem.engine_core.kernels.tiles.table import (
    BUCKETS,
    FEW_ROWS,
    KERNEL_VERSION,
    NO_TABLE,
    W8A8_BUCKETS,
    DecodeKey,
    EightBitKind,
    MatmulKey,
    Operation,
    Scaling,
    TileTable,
    W8A8GemmKey,
)
from tandem.engine_core.kernels.tiles.table_file import (
    decode_problem,
    file_name,
    load_table,
    matmul_problem,
    read_table,
    table_text,
    w8a8_gemm_problem,
    write_table,
)
from tests.fakes.gpus import H200, SUPPORTED

POWERS = st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128, 1024, 2048, 4096])
WARPS = st.sampled_from([1, 2, 4, 8, 16, 32])
OPERATIONS: list[Operation] = ["product", "gated", "normed", "normed_gated"]
KEYS = st.builds(
    MatmulKey,
    st.sampled_from(OPERATIONS),
    st.sampled_from([4, 8, 16]),
    st.integers(1, 200000),
    st.sampled_from([128, 2048, 2560, 4096, 14336]),
    st.sampled_from([*BUCKETS, FEW_ROWS]),
)
PLANS: st.SearchStrategy[Plan] = st.one_of(
    st.none(),
    st.builds(GemvPlan, POWERS, POWERS, st.sampled_from([1, 2, 4]), WARPS),
    st.builds(SplitKPlan, POWERS, POWERS, st.integers(1, 16), st.integers(1, 8), WARPS),
)
PRODUCTS = st.lists(st.tuples(KEYS, PLANS)).map(
    lambda found: {key: plan for key, plan in found if not matmul_problem(key, plan)}
)
DECODE = st.dictionaries(
    st.builds(DecodeKey, st.sampled_from([32, 64, 128, 256]), st.sampled_from([8, 16]), POWERS),
    st.builds(
        DecodePlan,
        st.builds(Tile, st.sampled_from([16, 32, 64, 128]), st.sampled_from([1, 2, 4, 8]), st.integers(1, 6)),
        st.integers(1, 4096),
        st.integers(1, 64),
        st.booleans(),
    ),
)
KINDS: list[EightBitKind] = ["fp8", "int8"]
SCALINGS: list[Scaling] = ["tensor", "output", "block"]
BYTE_PRODUCTS = st.dictionaries(
    st.builds(
        W8A8GemmKey,
        st.sampled_from(KINDS),
        st.sampled_from(SCALINGS),
        st.integers(1, 200000),
        st.sampled_from([2048, 4096]),
        st.sampled_from(W8A8_BUCKETS),
        st.booleans(),
    ),
    st.one_of(
        st.none(),
        st.builds(W8A8GemmPlan, POWERS, POWERS, st.integers(1, 16), st.integers(1, 8), WARPS, st.just(128), WARPS),
    ),
).map(lambda found: {key: plan for key, plan in found.items() if not w8a8_gemm_problem(key, plan)})


@settings(max_examples=40)
@given(PRODUCTS, DECODE, BYTE_PRODUCTS)
def test_a_written_table_is_read_back(
    tmp_path_factory: pytest.TempPathFactory,
    products: dict[MatmulKey, Plan],
    decode: dict[DecodeKey, DecodePlan],
    byte_products: dict[W8A8GemmKey, W8A8GemmPlan | None],
) -> None:
    path = tmp_path_factory.mktemp("tables") / "a.json"
    write_table(path, TileTable("NVIDIA Test", products, decode, byte_products), {"torch": "2.11"})
    found = read_table(path)
    assert (found.device, dict(found.products), dict(found.decode)) == ("NVIDIA Test", products, decode)
    assert dict(found.byte_products) == byte_products
    assert found.count == len(products) + len(decode) + len(byte_products)
    assert [entry.name for entry in path.parent.iterdir()] == ["a.json"]


def test_only_plans_that_load_early_write_it() -> None:
    """Files from before there were such plans stay valid."""
    key, plan = DecodeKey(128, 16, 512), DecodePlan(Tile(64, 4, 2), 1024)
    plain, early = (
        json.loads(table_text(TileTable("a", {}, {key: one}), {}))["decode"][0]["plan"]
        for one in (plan, plan._replace(early=True))
    )
    assert plain == {"positions": 64, "warps": 4, "stages": 2, "least": 1024, "splits": 1}
    assert early == plain | {"early": True}


def test_only_gated_w8a8_gemms_write_it() -> None:
    """Files from before there were such entries stay valid."""
    key = W8A8GemmKey("fp8", "block", 14336, 4096, 64)
    plain, gated = (
        json.loads(table_text(TileTable("a", byte_products={one: None}), {}))["byte_products"][0]
        for one in (key, key._replace(gated=True))
    )
    assert plain == {"kind": "fp8", "scaling": "block", "outputs": 14336, "inputs": 4096, "rows": 64, "plan": None}
    assert gated == plain | {"gated": True}


def test_tables_differ_by_what_was_measured_though_they_hash_by_name() -> None:
    key = MatmulKey("product", 16, 64, 64, 1)
    tables = [TileTable("a"), TileTable("a", {key: GemvPlan(2, 1024)}), TileTable("a", {key: GemvPlan(4, 1024)})]
    assert len(set(tables)) == 3
    assert len({hash(table) for table in tables}) == 1
    assert tables[1].matmul(key, None) == GemvPlan(2, 1024)
    assert tables[0].matmul(key, None) is None


def entry(**changes: object) -> dict[str, object]:
    plan = {"kernel": "splitk", "block_n": 64, "block_k": 128, "split": 2, "stages": 4, "warps": 4}
    return {"operation": "product", "bits": 16, "outputs": 64, "inputs": 2048, "rows": 16, "plan": plan} | changes


def gemv(rows: int = 4, block_k: int = 1024, tiles: int = 1, warps: int = 4) -> dict[str, object]:
    return {"kernel": "gemv", "rows": rows, "block_k": block_k, "tiles": tiles, "warps": warps}


def splitk(block_n: int = 64, block_k: int = 128, split: int = 2) -> dict[str, object]:
    return {"kernel": "splitk", "block_n": block_n, "block_k": block_k, "split": split, "stages": 4, "warps": 4}


def written(path: Path, *products: dict[str, object], decode: tuple[dict[str, object], ...] = ()) -> Path:
    head = {"device": "NVIDIA Test", "kernel_version": KERNEL_VERSION, "measured_with": {}}
    path.write_text(json.dumps(head | {"products": products, "decode": decode}))
    return path


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (entry(rows=17), r"rows 17\b.* 1, 4, 16, 32, 64, 128\b"),
        (entry(bits=5), r"\b5 bits\b.*\b4, 8 or 16\b"),
        (entry(operation="sum"), "'sum'"),
        (entry(outputs="64"), "Expected `int`, got `str`"),
        (entry(outputs=0), "Expected `int` >= 1"),
        (entry(colour="red"), "`colour`"),
        (entry(plan={"kernel": "magic"}), "'magic'"),
        (entry(plan=splitk(block_k=96)), r"block_k 96\b.*\bpowers of two\b"),
        (entry(inputs=2112), r"\b2112 inputs\b.*\b2 parts\b.*\b128\b"),
        (entry(plan=splitk(split=32)), r"\b2048 inputs\b.*\b32 parts\b"),
        (entry(bits=8, plan=splitk(block_k=256)), r"block_k 256\b.*\b128 inputs\b.*\bscales\b"),
        (entry(plan=gemv()), r"gemv plan\b.* 16\b"),
        (entry(rows=1), r": one row\b.*\bgemv plan\b"),
        (entry(rows=1, plan=gemv(rows=3)), r"rows 3, block_k 1024 and warps 4\b"),
        (entry(rows=1, bits=4, plan=gemv(16, 64)), r"block_k 64\b.* 128\b.* 4 bits\b"),
        (entry(bits=4, plan=splitk(block_k=16)), r"block_k 16\b.* 32 inputs\b"),
        (entry(rows=1, operation="gated", plan=gemv()), r"block_k 1024\b.* 2048 inputs\b"),
        (entry(rows=1, plan=gemv(tiles=2)), r"block_k 1024\b.* 2048 inputs\b"),
        (entry(rows=1, bits=8, plan=gemv(32, 2048)), r"\b32 rows\b.* 16 rows\b.*\bscales\b"),
        (entry(rows=1, bits=4, plan=splitk()), r": one row\b.*\bgemv plan\b"),
        (entry(rows=1, bits=4, operation="gated", plan=splitk()), r": one row\b.*\bgemv plan\b"),
        (
            entry(rows=1, bits=8, inputs=72, plan=gemv(8, 128)),
            r"\b72 inputs\b.* 8 bits\b.* 16\b",
        ),
        (
            entry(rows=1, bits=4, inputs=48, plan=gemv(8, 64)),
            r"\b48 inputs\b.* 4 bits\b.* 32\b",
        ),
        (entry(rows=1, bits=8, plan=gemv(16, 8)), r"block_k 8\b.* 16\b.* 8 bits\b"),
        (entry(rows=1, bits=4, operation="gated", plan=gemv(16, 1024)), r"block_k 1024\b.* 2048 inputs\b"),
        (entry(operation="normed"), r"\bnorm\b"),
        (entry(rows=1, operation="normed_gated", plan=None), r"\bnorm\b"),
        (entry(rows=4), r"\b4 rows\b.*\bgemv plan\b"),
        (entry(rows=4, plan=None), r"\b4 rows\b.*\bgemv plan\b"),
        (entry(rows=4, bits=8, plan=gemv()), r"\b4 rows\b.*\b16-bit\b"),
        (entry(rows=4, operation="gated", plan=gemv(4, 2048)), r"\b4 rows\b.*\bgated\b"),
        (entry(rows=4, plan=gemv(4, 4)), r"block_k 4\b.* 8 elements\b"),
        (entry(), "same key"),
    ],
)
def test_a_malformed_matmul_is_named_by_file_and_entry(wrong: dict[str, object], message: str, tmp_path: Path) -> None:
    path = written(tmp_path / "nvidia-test.json", entry(), wrong)
    with pytest.raises(ValueError, match=r"nvidia-test\.json is malformed") as raised:
        read_table(path)
    assert re.search(message, str(raised.value))
    assert "$.products[1]" in str(raised.value)


def attention(**changes: object) -> dict[str, object]:
    plan = {"positions": 64, "warps": 4, "stages": 3, "least": 64, "splits": 1}
    return {"head_dim": 64, "kv_bits": 16, "pairs": 512, "plan": plan | changes}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (attention(positions=8), r"positions 8\b.* 16\b"),
        (attention(positions=48), "positions 48"),
        (attention(splits=65), r"splits 65\b.* 64\b"),
        (attention() | {"pairs": 500}, r"head_dim 64 and pairs 500\b"),
        (attention(stages=0), "Expected `int` >= 1"),
        (attention(stages=65), "Expected `int` <= 64"),
        (attention(positions=1 << 17), "Expected `int` <= 65536"),
    ],
)
def test_a_malformed_decode_plan_is_named_by_file_and_entry(
    wrong: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"nvidia-test\.json is malformed") as raised:
        read_table(written(tmp_path / "nvidia-test.json", decode=(wrong,)))
    assert re.search(message, str(raised.value))
    assert "$.decode[0]" in str(raised.value)


def of_bytes(**changes: object) -> dict[str, object]:
    plan = {"block_m": 64, "block_n": 128, "split": 2, "stages": 4, "warps": 4, "block_k": 128, "group_m": 8}
    return {"kind": "fp8", "scaling": "block", "outputs": 64, "inputs": 2048, "rows": 128, "plan": plan | changes}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (of_bytes() | {"rows": 100}, r"rows 100\b.* 16, 32, 64, 128, 256\b"),
        (of_bytes() | {"kind": "fp4"}, "'fp4'"),
        (of_bytes() | {"kind": "int8"}, r"int8 weights\b.* output\b.* block\b"),
        (of_bytes() | {"kind": "int8", "scaling": "output", "plan": None}, r"int8\b.* plan\b"),
        (of_bytes(block_m=96), r"block_m 96, block_n 128\b"),
        (of_bytes(block_n=8), r"block_n 8\b.* 16\b"),
        (of_bytes(block_k=64), r"block_k 64\b.* 128 inputs\b.*\bscales\b"),
        (of_bytes(block_k=192) | {"scaling": "output"}, r"block_k 192\b.*\bpower of two\b.* 128\b"),
        (of_bytes(split=17), r"\b2048 inputs\b.* 17 parts\b.* 128\b"),
        (of_bytes() | {"inputs": 2064}, r"\b2064 inputs\b.* 2 parts\b"),
        (of_bytes(block_m=128) | {"gated": True}, r"\b128 rows: split 2\b"),
        (of_bytes(split=1) | {"gated": True}, r"\b128 rows: split 1\b.*block_m 64\b"),
        (of_bytes(split=1, block_m=128, block_n=256) | {"gated": True}, r"block_n 256\b.* 128 outputs\b"),
        (of_bytes(), "same key"),
    ],
)
def test_a_malformed_w8a8_gemm_is_named_by_file_and_entry(
    wrong: dict[str, object], message: str, tmp_path: Path
) -> None:
    head = {"device": "NVIDIA Test", "kernel_version": KERNEL_VERSION, "measured_with": {}}
    path = tmp_path / "nvidia-test.json"
    path.write_text(json.dumps(head | {"products": [], "decode": [], "byte_products": [of_bytes(), wrong]}))
    with pytest.raises(ValueError, match=r"nvidia-test\.json is malformed") as raised:
        read_table(path)
    assert re.search(message, str(raised.value))
    assert "$.byte_products[1]" in str(raised.value)


def test_a_file_without_w8a8_gemms_is_read(tmp_path: Path) -> None:
    assert dict(read_table(written(tmp_path / "a.json", entry())).byte_products) == {}


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"kernel_version": "1"}', f'{{"kernel_version": {KERNEL_VERSION}}}', "no json"]
)
def test_a_file_that_is_no_table_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=r"tile table .*/a\.json "):
        read_table(tmp_path / "a.json")


def test_a_table_of_other_kernels_is_ignored_with_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The rest of an old file is not read."""
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"kernel_version": KERNEL_VERSION - 1, "tiles": [1]}))
    assert read_table(path) is NO_TABLE
    (record,) = caplog.records
    assert "python -m benchmarks.tune" in record.getMessage()
    assert str(path) in record.getMessage()


def test_a_table_of_another_device_is_ignored_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Names that differ only in punctuation share a file name."""
    path = written(tmp_path / "nvidia-test.json", entry())
    monkeypatch.setattr(table_file, "packaged", lambda _device: path)
    assert load_table("NVIDIA Test").count == 1
    assert caplog.records == []
    assert load_table("NVIDIA-Test") is NO_TABLE
    (record,) = caplog.records
    assert str(path) in record.getMessage()
    assert re.search(r"\bNVIDIA Test,.* NVIDIA-Test;", record.getMessage())


def test_a_device_without_a_table_has_the_rules_alone(caplog: pytest.LogCaptureFixture) -> None:
    assert load_table("NVIDIA GeForce RTX 9999") is NO_TABLE
    assert caplog.records == []


def test_file_names_come_from_the_names_of_devices() -> None:
    names = {name: file_name(name) for name in ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "AMD/ATI (x)")}
    assert list(names.values()) == ["nvidia-h200.json", "nvidia-h100-80gb-hbm3.json", "amd-ati-x.json"]


def test_packaged_tables_are_those_of_their_devices() -> None:
    folder = files(table_file.__package__) / "devices"
    found = [read_table(place) for place in folder.iterdir()]
    assert H200.name in {table.device for table in found}
    for place, table in zip(folder.iterdir(), found, strict=True):
        assert place.name == file_name(table.device)
        assert table.count
        text = table_text(table, json.loads(place.read_text())["measured_with"])
        assert place.read_text() == text, "written by write_table"
        assert not any(matmul_problem(*item) for item in table.products.items())
        assert not any(decode_problem(*item) for item in table.decode.items())


def test_only_measured_devices_have_a_table() -> None:
    assert {gpu.name for gpu in SUPPORTED if gpu.tiles is not NO_TABLE} <= {H200.name}
