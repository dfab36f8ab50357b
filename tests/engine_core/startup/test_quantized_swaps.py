"""Swaps to another quantized checkpoint and back, and a sleep, give the logits of fresh loads, in the same storage."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tandem.engine_core.kv_cache.storage import KVLayout
from tandem.engine_core.memory.backup import FileBackup
from tandem.engine_core.memory.host_memory import HostMemory
from tandem.engine_core.memory.sleeping_memory import SleepingMemory
from tandem.engine_core.models.registry import Model, read_config
from tandem.engine_core.quantization.quantization import Quantization
from tandem.engine_core.quantization.scheme import ONLINE_FP8
from tandem.engine_core.startup.model_weights import ModelWeights
from tandem.engine_core.startup.served_model import ServedModel
from tandem.engine_core.startup.sleep import tables_of
from tandem.engine_core.startup.stage_checkpoint import check_swap
from tests.engine_core.layers.quantized import test_mixed_checkpoints
from tests.engine_core.layers.quantized.test_checkpoints import SHAPES, USUAL
from tests.engine_core.layers.test_experts import FP8, GROUPS_OF_32, INT4, PARTIAL_BLOCKS
from tests.engine_core.models import test_llama, test_qwen3_5_quantized, test_qwen3_moe
from tests.support.paged_model import PagedRun, load
from tests.support.parity import random_tokens
from tests.support.quantized_checkpoint import LAYOUTS, quantize_checkpoint

Write = Callable[[Path, int], None]
"""Function that writes a checkpoint with random weights from a seed."""


def dense(name: str, fields: dict[str, Any]) -> Write:
    def write(folder: Path, seed: int) -> None:
        test_llama.save_random(folder, SHAPES.get(name, USUAL) | fields, seed=seed)
        quantize_checkpoint(folder, LAYOUTS[name])

    return write


def experts(name: str) -> Write:
    def write(folder: Path, seed: int) -> None:
        fields = GROUPS_OF_32 if name in INT4 else PARTIAL_BLOCKS if name == "fp8_block" else {}
        test_qwen3_moe.save_random(folder, fields, seed=seed)
        quantize_checkpoint(folder, LAYOUTS[name])

    return write


def mixed(name: str) -> Write:
    return lambda folder, seed: test_mixed_checkpoints.write(folder, *test_mixed_checkpoints.CASES[name], seed=seed)


def hybrid(name: str) -> Write:
    return lambda folder, seed: test_qwen3_5_quantized.write(folder, *test_qwen3_5_quantized.CASES[name], seed=seed)


def turn_groups(folder: Path) -> None:
    """Give the inputs of all layers with act-order other groups."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("g_idx") and not bool((tensor[1:] >= tensor[:-1]).all()):
            tensors[name] = tensor.roll(5)
    save_file(tensors, folder / "model.safetensors")


BIASES = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
CASES: dict[str, Write] = {
    **{name: dense(name, {}) for name in LAYOUTS},
    **{f"{name} with biases": dense(name, BIASES) for name in ("fp8_channel", "gptq_act_order", "awq", "int8")},
    **{f"experts in {name}": experts(name) for name in (*FP8, *INT4)},
    **{f"mixed: {name}": mixed(name) for name in test_mixed_checkpoints.CASES},
    **{f"hybrid: {name}": hybrid(name) for name in test_qwen3_5_quantized.CASES},
    "fp8 at load": lambda folder, seed: test_llama.save_random(folder, USUAL, seed=seed),
    "experts in fp8 at load": lambda folder, seed: test_qwen3_moe.save_random(folder, {}, seed=seed),
    "experts": lambda folder, seed: test_qwen3_moe.save_random(folder, {}, seed=seed),
}


def logits(model: Model) -> Tensor:
    tokens = random_tokens((9,), model.config.vocab_size, seed=1)
    return PagedRun(model, tokens, 4, seed=1).step([(0, 0, 9)])


def tensors_of(model: Model) -> dict[str, Tensor]:
    """Return all tensors that a model refers to, by attributes, lists, tuples and dictionaries."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()

    def walk(value: Any, path: str) -> None:
        if isinstance(value, Tensor):
            found[path] = value
            return
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, dict):
            parts = list(value.items())
        elif isinstance(value, list | tuple):
            parts = list(enumerate(value))
        elif type(value).__module__.startswith("tandem."):
            names = [*getattr(type(value), "__slots__", ()), *getattr(value, "__dict__", ())]
            parts = [(name, getattr(value, name)) for name in names if hasattr(value, name)]
        else:
            return
        for name, part in parts:
            walk(part, f"{path}.{name}")

    walk(model, "model")
    return found


def places(model: Model) -> dict[str, tuple[int, tuple[int, ...], tuple[int, ...]]]:
    return {name: (tensor.data_ptr(), tensor.shape, tensor.stride()) for name, tensor in tensors_of(model).items()}


@pytest.mark.parametrize("name", CASES)
def test_a_swap_and_back_and_a_sleep_equal_fresh_loads_in_the_same_storage(name: str, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for seed, folder in enumerate((first, second)):
        CASES[name](folder, seed)
    turn_groups(second)
    check_swap(ServedModel.read(first), second)
    quantization = Quantization(ONLINE_FP8) if name.endswith("fp8 at load") else None
    memory = HostMemory()
    model = load(first, quantization=quantization, memory=memory)
    expected = {first: logits(model), second: logits(load(second, quantization=quantization))}
    assert not torch.equal(expected[first], expected[second])
    config = read_config(first)
    layout = KVLayout.of_one_group(
        len(config.attention_layers),
        page_size=4,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        dtype=torch.float32,
    )
    weights = ModelWeights(model, layout, torch.float32, 64)
    before = places(model)
    held = {tensor.untyped_storage().data_ptr() for tensor in tensors_of(model).values()}
    kept = [slot for slot in model.weight_slots() if slot.name.endswith((".weight", "weight_packed", "qweight"))]
    addresses = {slot.parameter.untyped_storage().data_ptr() for slot in kept}
    assert held >= addresses and {tensor.data_ptr() for tensor in memory.tensors} >= addresses
    for folder in (second, first):
        weights.swap(folder, lambda: None, config)
        assert torch.equal(logits(model), expected[folder])
        assert places(model) == before
    tables = tables_of(memory, [model])
    sleeping = SleepingMemory(
        memory, HostMemory(), FileBackup(), tables, lambda: 2**40, lambda: None, lambda: True, lambda: None
    )
    sleeping.release(["weights"], keep_weights=False)
    sleeping.restore(["weights"])
    weights.load(first, config)
    assert torch.equal(logits(model), expected[first])
    assert places(model) == before
