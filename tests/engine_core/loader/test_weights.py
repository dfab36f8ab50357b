"""Checkpoints in every layout load to the same model, and every way to be wrong is named."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.layers.linear_choice import torch_build_context
from tandem.engine_core.loader import transfer as transfers
from tandem.engine_core.loader.checkpoint import Checkpoint
from tandem.engine_core.loader.weights import load_weights
from tandem.engine_core.models.registry import Model, build_model, read_config
from tests.engine_core.models.test_llama import BASE, save_random
from tests.support.paged_model import PagedRun, load
from tests.support.parity import random_tokens, reference_logits
from tests.support.refusals import numbers_in

ATTENTION = "model.layers.1.self_attn"
MLP = "model.layers.2.mlp"


def logits(model: Model) -> Tensor:
    tokens = random_tokens((19,), BASE["vocab_size"], seed=1)
    return PagedRun(model, tokens, 4, seed=1).step([(0, 0, 19)])


def checkpoint(directory: Path, **fields: Any) -> tuple[dict[str, Tensor], Tensor]:
    """Save a random model; return its tensors and the logits that transformers computes."""
    reference = save_random(directory, fields)
    tokens = random_tokens((19,), BASE["vocab_size"], seed=1)
    return load_file(directory / "model.safetensors"), reference_logits(reference, tokens)[0]


def rewrite(directory: Path, tensors: dict[str, Tensor]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")


def fuse(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    fused = dict(tensors)
    for whole, parts in {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}.items():
        for name in tensors:
            if f".{parts[0]}." in name:
                pieces = [fused.pop(name.replace(parts[0], part)) for part in parts]
                fused[name.replace(parts[0], whole)] = torch.cat(pieces)
    return fused


def unfilled(directory: Path) -> Model:
    return build_model(read_config(directory), torch_build_context(torch.device("cpu"), torch.float32))


def target(model: Model, name: str) -> Tensor:
    return next(slot.target for slot in model.weight_slots() if slot.name == name)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_sharded_checkpoint_loads_to_the_same_model(tmp_path: Path) -> None:
    reference = save_random(tmp_path, {}, max_shard_size="60KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    tokens = random_tokens((19,), BASE["vocab_size"], seed=1)
    close(logits(load(tmp_path)), reference_logits(reference, tokens)[0])


@pytest.mark.parametrize("bias", [False, True])
def test_fused_projections_load_to_the_same_model(bias: bool, tmp_path: Path) -> None:
    tensors, expected = checkpoint(tmp_path, attention_bias=bias, mlp_bias=bias)
    fused = fuse(tensors)
    assert f"{ATTENTION}.qkv_proj.weight" in fused
    assert f"{ATTENTION}.q_proj.weight" not in fused
    rewrite(tmp_path, fused)
    close(logits(load(tmp_path)), expected)


def test_progress_rises_to_all_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "PIECE_BYTES", 2**13)
    save_random(tmp_path, {}, max_shard_size="60KB")
    seen: list[int] = []
    totals: set[int] = set()

    def progress(done: int, total: int) -> None:
        seen.append(done)
        totals.add(total)

    model = unfilled(tmp_path)
    load_weights(model, Checkpoint.open(tmp_path), progress)
    assert seen == sorted(seen)
    assert totals == {seen[-1]}
    needed = [slot for slot in model.weight_slots() if not slot.is_optional]
    assert seen[-1] >= sum({id(slot.parameter): slot.target.nbytes for slot in needed}.values())
    assert len(seen) > 20


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_float_dtypes_are_cast(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors, _ = checkpoint(tmp_path)
    rewrite(tmp_path, {name: tensor.to(dtype) for name, tensor in tensors.items()})
    targets = {slot.name: slot.target for slot in load(tmp_path).weight_slots()}
    for name, tensor in tensors.items():
        assert targets[name].dtype == torch.float32
        assert torch.equal(targets[name], tensor.to(dtype).float())


def test_harmless_buffers_are_ignored(tmp_path: Path) -> None:
    tensors, expected = checkpoint(tmp_path)
    rewrite(tmp_path, {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
    close(logits(load(tmp_path)), expected)


def is_tied(model: Model) -> bool:
    return target(model, "lm_head.weight").data_ptr() == target(model, "model.embed_tokens.weight").data_ptr()


def test_tied_head_may_be_absent_equal_or_alone(tmp_path: Path) -> None:
    tensors, expected = checkpoint(tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in tensors
    table = tensors["model.embed_tokens.weight"]
    rewrite(tmp_path, {**tensors, "lm_head.weight": table.clone()})
    model = load(tmp_path)
    assert is_tied(model)
    close(logits(model), expected)
    alone = {name: tensor for name, tensor in tensors.items() if "embed_tokens" not in name}
    rewrite(tmp_path, {**alone, "lm_head.weight": table})
    close(logits(load(tmp_path)), expected)


@pytest.mark.filterwarnings("ignore")
def test_tied_head_that_differs_is_untied_as_transformers_does(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    tensors, tied = checkpoint(tmp_path, tie_word_embeddings=True)
    rewrite(tmp_path, {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].flip(0)})
    reference = LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    expected = reference_logits(reference, random_tokens((19,), BASE["vocab_size"], seed=1))[0]
    model = load(tmp_path)
    assert not is_tied(model)
    close(logits(model), expected)
    assert (expected - tied).abs().max() > 0.1


@pytest.mark.parametrize("head", ["absent", "equal", "alone"])
def test_loading_keeps_the_storage_of_every_parameter(head: str, tmp_path: Path) -> None:
    """Captured graphs hold the addresses."""
    tensors, _ = checkpoint(tmp_path, tie_word_embeddings=True)
    table = tensors["model.embed_tokens.weight"]
    if head != "absent":
        tensors["lm_head.weight"] = table.clone()
    if head == "alone":
        del tensors["model.embed_tokens.weight"]
    rewrite(tmp_path, tensors)
    model = unfilled(tmp_path)
    before = [slot.target.data_ptr() for slot in model.weight_slots()]
    load_weights(model, Checkpoint.open(tmp_path))
    assert [slot.target.data_ptr() for slot in model.weight_slots()] == before
    assert torch.equal(target(model, "lm_head.weight"), table)


def test_a_model_built_tied_refuses_a_head_that_differs_and_stays_unchanged(tmp_path: Path) -> None:
    tensors, _ = checkpoint(tmp_path, tie_word_embeddings=True)
    rewrite(tmp_path, {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].flip(0)})
    model = unfilled(tmp_path)
    before = [slot.target.data_ptr() for slot in model.weight_slots()]
    target(model, "model.norm.weight").fill_(7)
    with pytest.raises(ConfigError, match=r"tied \S*embed_tokens\.weight and lm_head\.weight"):
        load_weights(model, Checkpoint.open(tmp_path))
    assert [slot.target.data_ptr() for slot in model.weight_slots()] == before
    assert (target(model, "model.norm.weight") == 7).all()


def test_every_misfit_is_named_at_once_and_nothing_is_loaded(tmp_path: Path) -> None:
    tensors, _ = checkpoint(tmp_path)
    del tensors[f"{ATTENTION}.k_proj.weight"]
    del tensors["model.norm.weight"]
    del tensors[f"{MLP}.gate_proj.weight"]
    del tensors[f"{MLP}.up_proj.weight"]
    tensors[f"{ATTENTION}.o_proj.weight"] = torch.zeros(64, 65)
    tensors[f"{ATTENTION}.o_proj.bias"] = torch.zeros(64)
    tensors["model.layers.3.input_layernorm.weight"] = torch.zeros(64)
    rewrite(tmp_path, tensors)
    model = unfilled(tmp_path)
    target(model, "lm_head.weight").fill_(7)
    with pytest.raises(ConfigError) as caught:
        load_weights(model, Checkpoint.open(tmp_path))
    lines = [line.strip() for line in str(caught.value).splitlines()[1:]]
    assert lines == [
        f"misshaped {ATTENTION}.o_proj.weight: expected [64, 64], found [64, 65]",
        f"missing {ATTENTION}.k_proj.weight: expected [32, 64]",
        f"missing {MLP}.gate_proj.weight: expected [112, 64]",
        f"missing {MLP}.up_proj.weight: expected [112, 64]",
        "missing model.norm.weight: expected [64]",
        f"unexpected {ATTENTION}.o_proj.bias: [64]",
        "unexpected model.layers.3.input_layernorm.weight: [64]",
    ]
    assert (target(model, "lm_head.weight") == 7).all()


def test_fused_and_split_together_are_refused(tmp_path: Path) -> None:
    tensors, _ = checkpoint(tmp_path)
    fused = fuse(tensors)
    name = f"{ATTENTION}.v_proj.weight"
    rewrite(tmp_path, {**fused, name: tensors[name]})
    with pytest.raises(ConfigError, match=r"twice: \S*qkv_proj.weight and \S*v_proj.weight"):
        load(tmp_path)


def test_untied_head_must_be_there(tmp_path: Path) -> None:
    tensors, _ = checkpoint(tmp_path)
    del tensors["lm_head.weight"]
    rewrite(tmp_path, tensors)
    with pytest.raises(ConfigError, match=r"missing lm_head\.weight: expected \[157, 64\]"):
        load(tmp_path)


def test_quantized_tensors_are_refused_by_an_unquantized_model(tmp_path: Path) -> None:
    tensors, _ = checkpoint(tmp_path)
    rewrite(tmp_path, {**tensors, f"{MLP}.up_proj.weight": torch.zeros(112, 64, dtype=torch.int8)})
    with pytest.raises(ConfigError, match=r"unreadable \S*mlp\.up_proj\.weight: .*I8\b.* F64\b"):
        load(tmp_path)


def test_of_many_misfits_twenty_are_named_some_of_each_kind(tmp_path: Path) -> None:
    tensors, _ = checkpoint(tmp_path, num_hidden_layers=6)
    renamed = {name.replace("model.layers.", "model.blocks."): tensor for name, tensor in tensors.items()}
    renamed["model.norm.weight"] = torch.zeros(65)
    rewrite(tmp_path, renamed)
    with pytest.raises(ConfigError) as caught:
        load(tmp_path)
    lines = [line.strip() for line in str(caught.value).splitlines()[1:]]
    kinds = [line.partition(" ")[0] for line in lines]
    assert numbers_in(lines[-1]) == [89, 1, 54, 54]
    assert (kinds.count("misshaped"), kinds.count("missing"), kinds.count("unexpected")) == (1, 10, 9)


def test_names_of_unexpected_tensors_are_printable(tmp_path: Path) -> None:
    tensors, _ = checkpoint(tmp_path)
    rewrite(tmp_path, {**tensors, "a\x1b[2J\n" + "y" * 1000: torch.zeros(1)})
    with pytest.raises(ConfigError, match=r"unexpected a\\x1b\[2J\\ny{194}\.\.\. \(1006 characters\): \[1\]"):
        load(tmp_path)


def test_equal_tied_tensors_of_two_dtypes_stay_tied(tmp_path: Path) -> None:
    tensors, _ = checkpoint(tmp_path, tie_word_embeddings=True)
    table = tensors["model.embed_tokens.weight"].to(torch.bfloat16)
    rewrite(tmp_path, {**tensors, "model.embed_tokens.weight": table, "lm_head.weight": table.float()})
    model = load(tmp_path)
    assert is_tied(model)
    assert torch.equal(target(model, "lm_head.weight"), table.float())
