"""Adapters on every family and on quantized weights equal the merged models."""

from pathlib import Path

import pytest
import torch

from tests.e2e.test_families import FAMILIES
from tests.engine_core.models.test_llama import save_random as save_llama
from tests.support.engine_driver import DrivenEngine
from tests.support.lora_engine import LoraEngine
from tests.support.lora_folder import ALL, merge, modules_of, write_adapter
from tests.support.parity import SMALL, save_random
from tests.support.quantized_checkpoint import LAYOUTS, quantize_checkpoint

PROMPTS = ([5, 6, 7, 8, 9], [11, 12, 13])
FUSED = ("qkv_proj", "gate_up_proj")
DELTA_RULE = (*(f"in_proj_{part}" for part in ("qkv", "z", "b", "a", "qkvz", "ba")), "out_proj")
QUANTIZED = ("fp8_channel", "fp8_block", "int8", "awq", "gptq_act_order", "packed_act_order")
USUAL = {"hidden_size": 64, "intermediate_size": 96}


@pytest.fixture(autouse=True)
def _threads() -> object:
    before = torch.get_num_threads()
    yield None
    torch.set_num_threads(before)


def tokens_of(engine: LoraEngine, adapter: str = "") -> list[list[int]]:
    ids = [engine.ask(prompt, adapter) for prompt in PROMPTS]
    DrivenEngine.run(engine)
    return [engine.tokens(request_id) for request_id in ids]


@pytest.mark.parametrize("name", FAMILIES)
def test_adapters_of_a_family_equal_the_merged_model(name: str, tmp_path: Path) -> None:
    import transformers

    config, fields = FAMILIES[name]
    model = tmp_path / "model"
    model.mkdir()
    save_random(model, getattr(transformers, config)(**SMALL | fields), seed=len(name))
    found = modules_of(model, (*ALL, *FUSED, *DELTA_RULE))
    targets = sorted({module.rpartition(".")[2] for module in found if ".experts." not in module})
    modules = {module: shape for module, shape in found.items() if ".experts." not in module}
    adapter = write_adapter(tmp_path / "adapter", model, targets, 8, modules=modules, size=1.0)
    expected = tokens_of(LoraEngine.start(merge(model, adapter, tmp_path / "merged"), enable_lora=False))
    engine = LoraEngine.start(model, {"a": adapter})
    assert tokens_of(engine, "a") == expected
    assert tokens_of(engine) != expected


@pytest.mark.parametrize("name", QUANTIZED)
def test_adapters_of_quantized_weights_equal_the_dequantized_merged_model(name: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    save_llama(model, USUAL)
    quantize_checkpoint(model, LAYOUTS[name])
    adapter = write_adapter(tmp_path / "adapter", model / "plain", ALL, 8, size=1.0)
    merged = merge(model / "plain", adapter, tmp_path / "merged")
    expected = tokens_of(LoraEngine.start(merged, enable_lora=False))
    engine = LoraEngine.start(model, {"a": adapter})
    assert tokens_of(engine, "a") == expected
    assert tokens_of(engine) != expected
