"""PEFT's files: what an adapter may ask for, and the reason why a broken or foreign one is refused."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.kernels.kernel_set import torch_kernels
from tandem.engine_core.layers.lora_linear import LoraSlots
from tandem.engine_core.layers.torch_linear import TorchLinear
from tandem.engine_core.lora.adapter_files import HostAdapter, read_adapter
from tests.support.lora_folder import ALL, PREFIX, write_adapter

CPU = torch.device("cpu")
HIDDEN, KV, WIDTH, LAYERS = 8, 4, 12, 2
MODULES = {
    f"model.layers.{layer}.{name}": shape
    for layer in range(LAYERS)
    for name, shape in {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (KV, HIDDEN),
        "self_attn.v_proj": (KV, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (WIDTH, HIDDEN),
        "mlp.up_proj": (WIDTH, HIDDEN),
        "mlp.down_proj": (HIDDEN, WIDTH),
    }.items()
}


@pytest.fixture
def slots() -> LoraSlots:
    kernels = torch_kernels()
    found = LoraSlots(2, 8, kernels.group_tokens)
    for layer in range(LAYERS):
        attention, mlp = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
        for name, inputs, parts in (
            (f"{attention}qkv_proj", HIDDEN, {"q_proj": HIDDEN, "k_proj": KV, "v_proj": KV}),
            (f"{attention}o_proj", HIDDEN, {"o_proj": HIDDEN}),
            (f"{mlp}gate_up_proj", HIDDEN, {"gate_proj": WIDTH, "up_proj": WIDTH}),
            (f"{mlp}down_proj", WIDTH, {"down_proj": HIDDEN}),
        ):
            base = TorchLinear(torch.empty(sum(parts.values()), inputs), None, kernels)
            found.wrap(name, base, inputs, parts, torch.device("cpu"), torch.float32, kernels)
    return found


def of(targets: Any) -> dict[str, tuple[int, int]]:
    return {name: shape for name, shape in MODULES.items() if name.endswith(tuple(targets))}


def written(folder: Path, targets: tuple[str, ...] = ("q_proj", "v_proj"), **fields: Any) -> Path:
    return write_adapter(folder, Path(), targets, modules=fields.pop("modules", of(targets)), **fields)


def product(adapter: HostAdapter, linear: str, part: int, rows: slice) -> Tensor:
    """Return the update of a part of a layer as a whole matrix."""
    update = adapter.updates[linear]
    rank = int(update.ranks[part])
    return update.b[:rank, rows].t() @ update.a[part, :rank]


def expected(folder: Path, module: str, scale: float) -> Tensor:
    tensors = load_file(folder / "adapter_model.safetensors")
    return scale * tensors[f"{PREFIX}{module}.lora_B.weight"] @ tensors[f"{PREFIX}{module}.lora_A.weight"]


def test_the_update_is_scaled_by_alpha_over_rank(slots: LoraSlots, tmp_path: Path) -> None:
    folder = written(tmp_path, rank=4, lora_alpha=6)
    adapter = read_adapter(folder, slots)
    assert adapter.rank == 4 and len(adapter.updates) == LAYERS
    name = "model.layers.1.self_attn."
    torch.testing.assert_close(
        product(adapter, f"{name}qkv_proj", 2, slice(HIDDEN + KV, None)), expected(folder, f"{name}v_proj", 1.5)
    )
    assert adapter.updates[f"{name}qkv_proj"].ranks.tolist() == [4, 0, 4]


def test_rslora_is_scaled_by_the_root_of_the_rank(slots: LoraSlots, tmp_path: Path) -> None:
    folder = written(tmp_path, ("o_proj",), rank=4, lora_alpha=6, use_rslora=True)
    name = "model.layers.0.self_attn.o_proj"
    found = product(read_adapter(folder, slots), name, 0, slice(None))
    torch.testing.assert_close(found, expected(folder, name, 6 / math.sqrt(4)))


def test_patterns_give_modules_their_own_rank_and_alpha(slots: LoraSlots, tmp_path: Path) -> None:
    patterns = {"rank_pattern": {"q_proj": 2, r"layers\.1\.self_attn\.v_proj": 8}, "alpha_pattern": {"v_proj": 3}}
    folder = written(tmp_path, rank=4, lora_alpha=4, **patterns)
    adapter = read_adapter(folder, slots)
    ranks = [adapter.updates[f"model.layers.{layer}.self_attn.qkv_proj"].ranks.tolist() for layer in range(LAYERS)]
    assert ranks == [[2, 0, 4], [2, 0, 8]]
    v_proj = slice(HIDDEN + KV, None)
    for layer, rank in ((0, 4), (1, 8)):
        name = f"model.layers.{layer}.self_attn."
        torch.testing.assert_close(
            product(adapter, f"{name}qkv_proj", 2, v_proj), expected(folder, f"{name}v_proj", 3 / rank)
        )


@pytest.mark.parametrize("key", ["^model.language_model.layers.1.self_attn.q_proj", "^model.layers.1.self_attn.q_proj"])
def test_patterns_name_modules_as_a_multimodal_model_does(key: str, slots: LoraSlots, tmp_path: Path) -> None:
    modules = of(("q_proj",))
    folder = written(tmp_path, ("q_proj",), modules=modules, rank=4, rank_pattern={key: 4}, alpha_pattern={key: 3})
    adapter = read_adapter(folder, slots)
    for layer, scale in ((0, 8 / 4), (1, 3 / 4)):
        name = f"model.layers.{layer}.self_attn."
        found = product(adapter, f"{name}qkv_proj", 0, slice(0, HIDDEN))
        torch.testing.assert_close(found, expected(folder, f"{name}q_proj", scale))


@pytest.mark.parametrize(
    ("targets", "fields"),
    [
        (ALL, {"target_modules": "all-linear"}),
        (("q_proj", "k_proj"), {"target_modules": r".*\.self_attn\.(q|k)_proj"}),
        (("down_proj",), {"target_modules": ["mlp.down_proj"]}),
        (("up_proj",), {"target_modules": ["model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"]}),
        (("q_proj",), {"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["v_proj"]}),
    ],
    ids=["all-linear", "regex", "suffix", "whole", "excluded"],
)
def test_target_modules_are_a_list_a_pattern_or_all(
    targets: tuple[str, ...], fields: dict[str, Any], slots: LoraSlots, tmp_path: Path
) -> None:
    adapter = read_adapter(written(tmp_path, targets, **fields), slots)
    assert sum(int((update.ranks > 0).sum()) for update in adapter.updates.values()) == LAYERS * len(targets)


def test_layers_to_transform_leave_the_others_alone(slots: LoraSlots, tmp_path: Path) -> None:
    modules = {name: shape for name, shape in of(("q_proj",)).items() if ".1." in name}
    adapter = read_adapter(written(tmp_path, ("q_proj",), modules=modules, layers_to_transform=[1]), slots)
    assert list(adapter.updates) == ["model.layers.1.self_attn.qkv_proj"]


def test_a_fused_projection_of_the_checkpoint_changes_all_its_parts(slots: LoraSlots, tmp_path: Path) -> None:
    """As Phi-3 has it."""
    name = "model.layers.0.self_attn.qkv_proj"
    modules = {name: (HIDDEN + 2 * KV, HIDDEN)}
    folder = written(tmp_path, ("qkv_proj",), modules=modules, layers_to_transform=[0], lora_alpha=4)
    adapter = read_adapter(folder, slots)
    parts = [slice(0, HIDDEN), slice(HIDDEN, HIDDEN + KV), slice(HIDDEN + KV, None)]
    whole = torch.cat([product(adapter, name, part, rows) for part, rows in enumerate(parts)])
    torch.testing.assert_close(whole, expected(folder, name, 1.0))


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_names_of_multimodal_models_are_those_of_the_text_model(prefix: str, slots: LoraSlots, tmp_path: Path) -> None:
    modules = {name.replace("model.", prefix, 1): shape for name, shape in of(("o_proj",)).items()}
    assert len(read_adapter(written(tmp_path, ("o_proj",), modules=modules), slots).updates) == LAYERS


REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "not_lora": ({"peft_type": "IA3"}, ("peft_type", "IA3")),
    "dora": ({"use_dora": True}, ("DoRA",)),
    "bias": ({"bias": "lora_only"}, ("bias", "lora_only")),
    "lora_bias": ({"lora_bias": True}, ("lora_bias",)),
    "saved_modules": ({"modules_to_save": ["lm_head"]}, ("modules_to_save",)),
    "parameters": ({"target_parameters": ["mlp.experts.gate_up_proj"]}, ("target_parameters",)),
    "tokens": ({"trainable_token_indices": [1]}, ("trainable_token_indices",)),
    "replication": ({"layer_replication": [[0, 2], [1, 2]]}, ("layer_replication",)),
    "activated": ({"alora_invocation_tokens": [1, 2]}, ("alora_invocation_tokens",)),
    "qalora": ({"use_qalora": True}, ("QA-LoRA",)),
    "arrow": ({"arrow_config": {"top_k": 2}}, ("arrow_config",)),
    "blocks": ({"use_bdlora": {"nblocks": 2}}, ("use_bdlora",)),
    "transposed": ({"fan_in_fan_out": True}, ("fan_in_fan_out",)),
    "unknown_switch": ({"use_better_lora": True}, ("use_better_lora",)),
    "pissa": ({"init_lora_weights": "pissa_niter_4"}, ("init_lora_weights", "pissa")),
    "rank": ({"r": 0}, ("r is 0",)),
    "large_rank": ({"r": 16}, ("rank 16", "--max-lora-rank is 8")),
    "alpha": ({"lora_alpha": float("inf")}, ("lora_alpha",)),
    "huge_alpha": ({"lora_alpha": 10**400}, ("lora_alpha",)),
    "rslora": ({"use_rslora": "false"}, ("use_rslora", "'false'")),
    "many_patterns": ({"rank_pattern": {str(index): 4 for index in range(5000)}}, ("rank_pattern", "5000")),
    "slow_rank_pattern": ({"rank_pattern": {"(a+)+$": 4}}, ("rank_pattern",)),
    "flags_in_pattern": ({"alpha_pattern": {"(?i)Q_PROJ": 4}}, ("alpha_pattern",)),
    "no_targets": ({"target_modules": []}, ("target_modules",)),
    "slow_pattern": ({"target_modules": r"(a+)+$"}, ("target_modules",)),
    "broken_pattern": ({"target_modules": "("}, ("target_modules",)),
    "unknown_target": ({"target_modules": ["q_proj", "v_proj", "c_attn"]}, ("c_attn",)),
    "untrained_target": ({"target_modules": ["q_proj", "v_proj", "o_proj"]}, ("no tensors", "o_proj")),
    "other_tensors": ({"target_modules": ["q_proj"]}, ("v_proj", "target_modules")),
}


WITHOUT_EFFECT: dict[str, Any] = {
    "auto_mapping": {"base_model_class": "X"},
    "base_model_name_or_path": "another/name",
    "revision": "abc",
    "task_type": "SEQ_2_SEQ_LM",
    "inference_mode": True,
    "lora_dropout": 0.5,
    "init_lora_weights": "gaussian",
    "bias": None,
    "use_dora": False,
    "modules_to_save": [],
    "layers_pattern": "layers",
    "megatron_core": "megatron.core",
    "loftq_config": {"loftq_bits": 4},
    "eva_config": {"rho": 2.0},
    "corda_config": {"corda_method": "kpm"},
    "lora_ga_config": {"direction": "ArB2r"},
    "runtime_config": {"ephemeral_gpu_offload": False},
    "qalora_group_size": 16,
    "peft_version": "0.18.0",
    "ensure_weight_tying": True,
}


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_fields_of_training_change_nothing(
    name: str, slots: LoraSlots, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = read_adapter(written(tmp_path / "plain"), slots)
    found = read_adapter(written(tmp_path / "other", **{name: WITHOUT_EFFECT[name]}), slots)
    assert found.updates.keys() == plain.updates.keys() and not caplog.records
    for layer, update in found.updates.items():
        assert torch.equal(update.a, plain.updates[layer].a) and torch.equal(update.b, plain.updates[layer].b)


def test_an_unknown_field_is_named_in_a_warning(
    slots: LoraSlots, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    read_adapter(written(tmp_path, new_field=[1], unset=None, off=False), slots)
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "new_field" in record.getMessage()
    assert "unset" not in record.getMessage() and "off" not in record.getMessage()


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_name(name: str, slots: LoraSlots, tmp_path: Path) -> None:
    fields, words = REFUSED[name]
    written(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text()) | fields
    if "r" in fields:
        written(tmp_path, rank=max(1, fields["r"]))
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError) as caught:
        read_adapter(tmp_path, slots)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def changed(folder: Path, change: Any) -> Path:
    """Change the tensors of an adapter."""
    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


NAME = f"{PREFIX}model.layers.0.self_attn.q_proj"
EXPERT = f"{PREFIX}model.layers.0.mlp.experts.0.w1"
TENSORS: dict[str, tuple[Any, str]] = {
    "expert": (lambda t: t.update({f"{EXPERT}.lora_A.weight": torch.ones(4, 8)}), "expert weights"),
    "embedding": (lambda t: t.update({f"{PREFIX}model.embed_tokens.lora_embedding_A": torch.ones(4, 8)}), "embeddings"),
    "head": (lambda t: t.update({f"{PREFIX}lm_head.lora_A.weight": torch.ones(4, 8)}), "output head"),
    "magnitude": (lambda t: t.update({f"{NAME}.lora_magnitude_vector": torch.ones(8)}), "DoRA"),
    "bias": (lambda t: t.update({f"{NAME}.bias": torch.ones(8)}), "bias"),
    "foreign": (lambda t: t.update({f"{PREFIX}visual.blocks.0.qkv.lora_A.weight": torch.ones(4, 8)}), "visual.blocks"),
    "no_b": (lambda t: t.pop(f"{NAME}.lora_B.weight"), "no lora_B"),
    "missing": (lambda t: [t.pop(f"{NAME}.lora_{matrix}.weight") for matrix in "AB"], "no tensors"),
    "twice": (lambda t: t.update({f"{NAME}.lora_A.default.weight": torch.ones(4, 8)}), "twice"),
    "shape": (lambda t: t.update({f"{NAME}.lora_A.weight": torch.ones(4, 9)}), "[4, 9]"),
    "rank": (lambda t: t.update({f"{NAME}.lora_A.weight": torch.ones(3, 8)}), "[3, 8]"),
    "dtype": (lambda t: t.update({f"{NAME}.lora_A.weight": torch.ones(4, 8, dtype=torch.int8)}), "I8"),
    "nan": (lambda t: t[f"{NAME}.lora_B.weight"].fill_(torch.nan), "NaN"),
    "empty": (lambda t: t.clear(), "no tensors"),
}  # fmt: skip


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_do_not_fit_are_refused_by_name(name: str, slots: LoraSlots, tmp_path: Path) -> None:
    change, words = TENSORS[name]
    with pytest.raises(ConfigError) as caught:
        read_adapter(changed(written(tmp_path), change), slots)
    assert words in str(caught.value)


def test_broken_files_are_refused(slots: LoraSlots, tmp_path: Path) -> None:
    folder = written(tmp_path / "a")
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    whole, text = weights.read_bytes(), config.read_text()
    for path, content in (
        (weights, whole[:-1]),
        (weights, whole[:100]),
        (weights, b""),
        (weights, b"version https://git-lfs.github.com/spec/v1\n"),
        (weights, (16 * 2**20).to_bytes(8, "little") + b"{" + b" " * 16 * 2**20),
        (config, b"{"),
        (config, b'{"peft_type": "LORA", "target_modules": ' + b"[" * 5000),
        (config, b"[]"),
        (config, b" " * 2**21),
    ):
        weights.write_bytes(whole)
        config.write_text(text)
        path.write_bytes(content)
        with pytest.raises(ConfigError):
            read_adapter(folder, slots)
    config.write_text(text)
    weights.unlink()
    weights.mkdir()
    with pytest.raises(ConfigError):
        read_adapter(folder, slots)
    weights.rmdir()
    (folder / "adapter_model.bin").touch()
    with pytest.raises(ConfigError, match="pickle"):
        read_adapter(folder, slots)


def test_weights_in_16_bits_are_read_in_the_models_dtype(slots: LoraSlots, tmp_path: Path) -> None:
    def halve(tensors: dict[str, Tensor]) -> None:
        for name in tensors:
            tensors[name] = tensors[name].bfloat16()

    adapter = read_adapter(changed(written(tmp_path), halve), slots)
    assert {update.a.dtype for update in adapter.updates.values()} == {torch.float32}


@pytest.fixture
def _uninitialized_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)  # With `fill_uninitialized_memory`, its default.
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_uninitialized_memory_is_nan")
def test_parts_without_an_update_and_rows_above_a_rank_are_zeros(slots: LoraSlots, tmp_path: Path) -> None:
    folder = written(tmp_path, ("q_proj", "v_proj", "down_proj"), rank_pattern={"v_proj": 2})

    def cut(tensors: dict[str, Tensor]) -> None:
        for layer in range(LAYERS):
            name = f"{PREFIX}model.layers.{layer}.self_attn.v_proj"
            tensors[f"{name}.lora_A.weight"] = tensors[f"{name}.lora_A.weight"][:2].clone()
            tensors[f"{name}.lora_B.weight"] = tensors[f"{name}.lora_B.weight"][:, :2].clone()

    update = read_adapter(changed(folder, cut), slots).updates["model.layers.0.self_attn.qkv_proj"]
    rank = update.b.shape[0]
    assert update.ranks.tolist() == [rank, 0, 2]
    assert not update.a[1].any() and not update.a[2, 2:].any()
    assert not update.b[:, HIDDEN : HIDDEN + KV].any() and not update.b[2:, HIDDEN + KV :].any()
    assert update.a[0].all() and update.b[:, :HIDDEN].all() and update.b[:2, HIDDEN + KV :].all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("matrix", ["A", "B"])
def test_one_value_that_is_not_finite_is_found(
    matrix: str, value: float, dtype: torch.dtype, slots: LoraSlots, tmp_path: Path
) -> None:
    name = f"{PREFIX}model.layers.1.self_attn.v_proj.lora_{matrix}.weight"

    def change(tensors: dict[str, Tensor]) -> None:
        for key in tensors:
            tensors[key] = tensors[key].to(dtype)
        tensors[name][1, 2] = value

    with pytest.raises(ConfigError, match=rf"lora_{matrix} of model\.layers\.1\.self_attn\.v_proj "):
        read_adapter(changed(written(tmp_path), change), slots)


def test_values_that_are_infinite_once_they_are_scaled_are_refused(slots: LoraSlots, tmp_path: Path) -> None:
    folder = written(tmp_path, lora_alpha=1e30)
    with pytest.raises(ConfigError, match=r"q_proj is not finite in torch\.float32"):
        read_adapter(changed(folder, lambda tensors: [tensor.fill_(1e20) for tensor in tensors.values()]), slots)


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
def test_the_update_is_rounded_once(stored: torch.dtype, tmp_path: Path) -> None:
    kernels = torch_kernels()
    slots = LoraSlots(1, 8, kernels.group_tokens)
    base = TorchLinear(torch.empty(HIDDEN, HIDDEN), None, kernels)
    slots.wrap("model.layers.0.self_attn.o_proj", base, HIDDEN, {"o_proj": HIDDEN}, CPU, torch.bfloat16, kernels)
    name = "model.layers.0.self_attn.o_proj"
    folder = written(tmp_path, ("o_proj",), modules={name: MODULES[name]}, lora_alpha=0.3)

    def convert(tensors: dict[str, Tensor]) -> None:
        for key in tensors:
            tensors[key] = tensors[key].to(stored)

    (update,) = read_adapter(changed(folder, convert), slots).updates.values()
    tensors = load_file(folder / "adapter_model.safetensors")
    b = tensors[f"{PREFIX}{name}.lora_B.weight"]
    assert torch.equal(update.b, (b.float() * (0.3 / b.shape[1])).t().bfloat16())
    assert torch.equal(update.a[0], tensors[f"{PREFIX}{name}.lora_A.weight"].bfloat16())
