"""`--quantize fp8`, and the memory of quantized weights."""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.models.registry import open_checkpoint
from tandem.engine_core.startup.device_memory import weight_bytes
from tandem.engine_core.startup.engine import DEFAULT_MODEL, resolve_engine
from tandem.protocol.engine_options import EngineOptions
from tandem.protocol.params import SamplingParams
from tests.engine_core.models.test_llama import save_random
from tests.support.engine_driver import DrivenEngine
from tests.support.quantized_checkpoint import LAYOUTS, quantize_checkpoint, quantize_layers

QUESTIONS = ("What does textwrap.dedent do?", "What is collections.Counter?")


def test_the_default_model_in_fp8_answers_the_same_and_the_log_names_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="tandem")
    tokenizer = Tokenizer.from_file(str(DEFAULT_MODEL / "tokenizer.json"))
    prompts = [tokenizer.encode(question).ids for question in QUESTIONS]
    params = [SamplingParams(30, temperature=0.0)] * len(prompts)
    said = {}
    for quantize in ("off", "fp8"):
        options = EngineOptions(device="cpu", quantize=quantize, max_rows=2, max_len=128, kv_tokens=512)
        caplog.clear()
        said[quantize] = DrivenEngine.build(options).generate(prompts, params)
        is_named = "tandem-default on cpu in float32, weights in fp8: 2 rows" in caplog.text
        is_told_to_be_slow = "quantized weights are slow on a CPU" in caplog.text
        assert (is_named, is_told_to_be_slow) == (quantize == "fp8",) * 2
    assert said["fp8"] == said["off"]
    assert all(len(ids) > 5 for ids in said["off"])


def test_a_checkpoint_that_is_quantized_already_is_refused(tmp_path: Path) -> None:
    save_random(tmp_path, {"hidden_size": 64, "intermediate_size": 96})
    quantize_checkpoint(tmp_path, LAYOUTS["int8"])
    with pytest.raises(ConfigError, match="--quantize"):
        resolve_engine(EngineOptions(model=str(tmp_path), device="cpu", quantize="fp8"), cuda=False)


def test_weights_count_as_they_are_stored(tmp_path: Path) -> None:
    save_random(tmp_path, {"hidden_size": 64, "intermediate_size": 96})
    tensors = load_file(tmp_path / "model.safetensors")
    projections = sum(tensor.numel() for name, tensor in tensors.items() if name.endswith("_proj.weight"))
    others = sum(tensor.numel() for tensor in tensors.values()) - projections

    def stored(**options: str) -> int:
        engine = EngineOptions(model=str(tmp_path), device="cpu", dtype="bfloat16", **options)  # type: ignore[arg-type]
        source = resolve_engine(engine, cuda=False).source
        return weight_bytes(source, open_checkpoint(source.directory, source.model))

    assert stored() == 2 * (projections + others)
    assert stored(quantize="fp8") == projections + 2 * others
    quantize_checkpoint(tmp_path, LAYOUTS["int8"])
    quantized = load_file(tmp_path / "model.safetensors")
    assert all(value.dtype is torch.int8 for name, value in quantized.items() if name.endswith("_proj.weight"))
    scales = sum(value.numel() for name, value in quantized.items() if name.endswith("_scale"))
    assert stored() == projections + 2 * others + 4 * scales, "scales are kept in float32"


@pytest.mark.parametrize(("quantized", "counts"), [("q_proj", (1, 7)), ("nothing", (0, 7))])
def test_the_log_counts_the_layers_of_a_mixed_checkpoint(
    quantized: str, counts: tuple[int, int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_random(tmp_path, {"hidden_size": 64, "intermediate_size": 96})
    layout = LAYOUTS["fp8_block"]
    quantize_layers(tmp_path, lambda name: layout if name.endswith(quantized) else None, layout.config)
    layers = json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"]
    caplog.set_level(logging.INFO, logger="tandem")
    DrivenEngine.build(EngineOptions(model=str(tmp_path), device="cpu", max_rows=2, max_len=32, kv_tokens=64))
    (line,) = [text for text in caplog.messages if " on cpu in float32, " in text]
    count, total = counts[0] * layers, counts[1] * layers
    assert f"{count or 'none'} of {total} " in line
    assert ("slow on" in caplog.text) == bool(count)
