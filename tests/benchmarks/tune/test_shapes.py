"""What is tuned are the products of a model's layer, by the names under which the engine looks them up."""

from pathlib import Path

import pytest
from msgspec import structs

from benchmarks.tune.shapes import decode_keys, layer_key, matmul_keys, model_folder, read_models, runs_on
from tandem.engine_core.kernels.tiles.table import DecodeKey, MatmulKey, W8A8GemmKey
from tests.fakes.gpus import A100, H200


def test_the_products_of_a_layer_are_those_of_its_step() -> None:
    (model,) = read_models(["1b"])
    assert matmul_keys(layer_key(model, "16 bits", 64), H200) == {
        "gate_up": MatmulKey("gated", 16, 8192, 2048, 64),
        "down": MatmulKey("product", 16, 2048, 8192, 64),
        "qkv": MatmulKey("product", 16, 3072, 2048, 64),
        "o": MatmulKey("product", 16, 2048, 2048, 64),
        "head": MatmulKey("product", 16, 128256, 2048, 64),
    }
    assert matmul_keys(layer_key(model, "blocks", 64), H200) == {
        "gate_up": W8A8GemmKey("fp8", "block", 16384, 2048, 64),
        "down": W8A8GemmKey("fp8", "block", 2048, 8192, 64),
        "qkv": W8A8GemmKey("fp8", "block", 3072, 2048, 64),
        "o": W8A8GemmKey("fp8", "block", 2048, 2048, 64),
    }


def test_norms_are_part_of_a_product_where_the_engine_fuses_them() -> None:
    small, large = read_models(["1b", "8b"])
    found = [
        [key.operation for key in matmul_keys(layer_key(model, name, rows), H200).values()]  # type: ignore[union-attr]
        for model, name, rows in (
            (large, "8 bits", 1),
            (small, "4 bits", 1),
            (large, "4 bits", 1),
            (large, "4 bits", 16),
        )
    ]
    fused = ["normed_gated", "product", "normed", "product"]
    assert found == [fused, fused, fused, ["gated", "product", "product", "product"]]


def test_gate_and_rounding_are_part_of_a_product_where_the_engine_fuses_them() -> None:
    small, large = read_models(["1b", "8b"])
    for model, name, rows, fused in (
        (large, "blocks", 64, True), (large, "tensor", 16, True), (large, "int8", 64, True),
        (large, "int8", 128, False), (small, "blocks", 64, False),
    ):  # fmt: skip
        key = matmul_keys(layer_key(model, name, rows), H200)["gate_up"]
        assert isinstance(key, W8A8GemmKey)
        assert key.gated is fused, (name, rows)
        assert key.outputs == model.intermediate_size * (1 if fused else 2)


@pytest.mark.parametrize(("name", "fused"), [("int8", False), ("blocks", False), ("tensor", True)])
def test_no_gate_rounds_where_down_takes_no_bytes(name: str, fused: bool) -> None:
    """The width is no multiple of 128: only the library multiplies such bytes, with one scale for all."""
    model = structs.replace(read_models(["8b"])[0], intermediate_size=14_400)
    keys = matmul_keys(layer_key(model, name, 64), H200)
    assert isinstance(keys["down"], W8A8GemmKey) is fused
    gate_up = keys["gate_up"]
    assert isinstance(gate_up, W8A8GemmKey)
    assert (gate_up.gated, gate_up.outputs) == (fused, 14_400 * (1 if fused else 2))


@pytest.mark.parametrize("name", ["blocks", "tensor", "outputs"])
@pytest.mark.parametrize("rows", [2, 64, 128])
def test_float8_keeps_its_inputs_where_the_gpu_does_not_multiply_it(name: str, rows: int) -> None:
    layer = layer_key(read_models(["8b"])[0], name, rows)
    old, new = (matmul_keys(layer, gpu) for gpu in (A100, H200))
    operations = [key.operation for key in old.values() if isinstance(key, MatmulKey)]
    assert operations == ["gated", "product", "product", "product"]
    assert {type(key) for key in new.values()} == {W8A8GemmKey}


def test_bytes_keep_the_inputs_that_the_gpu_multiplies() -> None:
    layer = layer_key(read_models(["8b"])[0], "int8", 16)
    assert {type(key) for key in matmul_keys(layer, A100).values()} == {W8A8GemmKey}
    assert [runs_on(name, A100) for name in ("int8", "blocks", "tensor")] == [True, False, False]
    assert runs_on("blocks", H200)


def test_decode_attention_is_named_by_pairs() -> None:
    (model,) = read_models(["1b"])
    assert [key.pairs for key in decode_keys(model, [1, 64, 256])] == [8, 512, 2048]
    assert decode_keys(model, [64], [16, 8]) == [DecodeKey(64, 16, 512), DecodeKey(64, 8, 512)]


def test_models_are_named_shortly_by_shape_or_by_folder(tmp_path: Path) -> None:
    assert model_folder("8b").name == "llama-3.1-8b"
    assert model_folder("qwen2.5-7b").name == "qwen2.5-7b"
    assert model_folder(str(tmp_path)) == tmp_path
