"""Every weight format of the benchmarks is one that the engine serves."""

from pathlib import Path

import pytest

from benchmarks.measuring.weight_formats import FORMATS, write_shape
from tandem.engine_core.models.registry import read_config
from tandem.engine_core.quantization.scheme import Activations, EightBitScheme, Int4Scheme

SHAPE = Path(__file__).parents[2] / "benchmarks" / "shapes" / "llama-3.1-8b"
EXPECTED = {
    "16-bit": None,
    "fp8-channel": EightBitScheme("fp8", Activations.TOKEN),
    "fp8-tensor": EightBitScheme("fp8", Activations.STATIC, per_tensor=True),
    "fp8-blocks": EightBitScheme("fp8", Activations.TOKEN, "weight_scale_inv", block=(128, 128)),
    "int8": EightBitScheme("int8", Activations.TOKEN),
    "gptq": Int4Scheme("gptq", 128, True, zero_offset=1),
    "gptq-act-order": Int4Scheme("gptq", 128, True, ordered=True, zero_offset=1),
    "awq": Int4Scheme("awq", 128, False),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_shape_in_a_format_has_its_scheme(name: str, tmp_path: Path) -> None:
    directory = write_shape(SHAPE, name, tmp_path)
    assert directory.name == SHAPE.name
    config = read_config(directory)
    found = config.quantization and config.quantization.scheme_for("model.layers.0.mlp.down_proj")
    assert found == EXPECTED[name]
    assert (config.hidden_size, config.layers) == (4096, 32)


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "16-bit"])
def test_a_shape_may_leave_layers_in_sixteen_bits(name: str, tmp_path: Path) -> None:
    exclude = ["o_proj"] if name == "awq" else [r".*\.o_proj"]
    quantization = read_config(write_shape(SHAPE, name, tmp_path, exclude)).quantization
    assert quantization is not None
    assert quantization.scheme_for("model.layers.0.self_attn.o_proj") is None
    assert quantization.scheme_for("model.layers.0.mlp.down_proj") == EXPECTED[name]
    assert quantization.scheme_for("lm_head") is None
