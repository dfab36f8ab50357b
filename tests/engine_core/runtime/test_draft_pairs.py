"""Draft models that differ from the model that they draft for: in vocabulary, weights and shape."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file, save_file
from torch import Tensor

from tandem.engine_core.model_config import LayerAttention, ModelConfig
from tandem.engine_core.rope_config import RopeConfig
from tandem.protocol.codec import pack_floats, pack_ids
from tandem.protocol.params import SamplingParams
from tests.engine_core.runtime.test_recorded_graphs import MODEL
from tests.engine_core.runtime.test_speculation import KINDS, build, generate
from tests.support.engine_driver import DrivenEngine
from tests.support.model_folder import write_config, write_model
from tests.support.plan_recording import runtime_of
from tests.support.quantized_checkpoint import LAYOUTS, quantize_checkpoint
from tests.support.tiny_llama import VOCAB

SLOW = pytest.param("graphs", marks=pytest.mark.slow)
PADDED = VOCAB + 8
BY_TOKEN = ("model.embed_tokens.weight", "lm_head.weight")
"""Tensors with a row for each token."""


def write_padded(folder: Path, small: bool) -> None:
    """Write the same model with a vocabulary of VOCAB or of PADDED ids, and a tokenizer of VOCAB.

    The logits of the other ids are very large.
    """
    config = structs.replace(MODEL, vocab_size=PADDED)
    folder.mkdir()
    write_model(folder, config)
    tensors: dict[str, Tensor] = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][VOCAB:] *= 40
    if small:
        tensors |= {name: tensors[name][:VOCAB].clone() for name in BY_TOKEN}
        write_config(folder, MODEL)
    save_file(tensors, folder / "model.safetensors")
    vocab = {str(number): number for number in range(VOCAB)}
    (folder / "tokenizer.json").write_bytes(msgspec.json.encode({"model": {"vocab": vocab}}))


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folders of the smaller and of the larger vocabulary."""
    both = tuple(tmp_path_factory.mktemp("padded") / name for name in ("small", "large"))
    for path in both:
        write_padded(path, path.name == "small")
    return both[0], both[1]


def acceptance(driven: DrivenEngine) -> float:
    stats = driven.engine.stats
    assert stats.spec_decode_num_draft_tokens > 30
    return stats.spec_decode_num_accepted_tokens / stats.spec_decode_num_draft_tokens


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("draft_is_small", [True, False])
def test_vocabularies_may_be_padded_to_different_sizes(
    kind: str, draft_is_small: bool, padded: tuple[Path, Path]
) -> None:
    """Drafts have the noise of the same ids, and none of them is an id that one of both lacks."""
    never = list(range(VOCAB, PADDED))
    excluded = {"logit_bias_ids": pack_ids(never), "logit_bias_values": pack_floats([-1e4] * len(never))}
    target, draft = (padded[1], padded[0]) if draft_is_small else padded
    params = [
        SamplingParams(24, temperature=1.0, seed=5, ignore_eos=True, **(excluded if draft_is_small else {})),
        SamplingParams(24, temperature=0.0, ignore_eos=True, **(excluded if draft_is_small else {})),
        SamplingParams(24, temperature=0.8, top_p=0.9, seed=7, **(excluded if draft_is_small else {})),
    ]
    prompts = [[5, 9, 14], list(range(3, 30)), [5, 9, 14, 7, 8]]
    with KINDS[kind].kernels():
        plain = build(target, KINDS[kind]).generate(prompts, params)
        driven = build(target, KINDS[kind], speculate=f"model:{draft}", speculate_tokens=3)
        assert driven.generate(prompts, params) == plain
    assert acceptance(driven) == 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_ids_that_the_draft_model_lacks_can_be_given_and_sampled(kind: str, padded: tuple[Path, Path]) -> None:
    """As a part of prompts that are chunks, and as the newest token of a row."""
    small, large = padded
    prompts = [[5, PADDED - 1, 14, VOCAB], [VOCAB] * 20, [6, 7]]
    params = [SamplingParams(24, temperature=temperature, seed=5, ignore_eos=True) for temperature in (0.0, 1.0, 4.0)]
    with KINDS[kind].kernels():
        plain = build(large, KINDS[kind]).generate(prompts, params)
        driven = build(large, KINDS[kind], speculate=f"model:{small}", speculate_tokens=3)
        assert driven.generate(prompts, params) == plain
        drafts = runtime_of(driven).tables.tokens
    assert any(token >= VOCAB for tokens in plain for token in tokens)
    assert int(drafts.max()) < PADDED
    assert driven.engine.scheduler.audit() == []
    assert acceptance(driven) < 0.5, "the model prefers ids that the draft model lacks"


@pytest.mark.parametrize(
    "layout", ["fp8_channel", "fp8_block", "gptq", "gptq_act_order", "awq", "packed_zeros", "int8"]
)
def test_quantized_draft_models_draft_what_their_weights_stand_for(layout: str, tmp_path: Path) -> None:
    """The model has the same weights in float32."""
    write_model(tmp_path, structs.replace(MODEL, intermediate_size=64))
    quantize_checkpoint(tmp_path, LAYOUTS[layout])
    params = [SamplingParams(24, temperature=temperature, seed=5, ignore_eos=True) for temperature in (0.0, 1.0)]
    prompts, target = [[5, 9, 14], list(range(3, 30))], tmp_path / "plain"
    plain = build(target, KINDS["cpu"]).generate(prompts, params)
    driven = build(target, KINDS["cpu"], speculate=f"model:{tmp_path}", speculate_tokens=3)
    assert driven.generate(prompts, params) == plain
    assert acceptance(driven) > 0.8


def test_a_quantized_model_takes_drafts_of_its_unquantized_form(tmp_path: Path) -> None:
    """And --quantize quantizes the draft model alone if the model is a quantized checkpoint: it is refused before."""
    write_model(tmp_path, structs.replace(MODEL, intermediate_size=64))
    quantize_checkpoint(tmp_path, LAYOUTS["gptq"])
    params = [SamplingParams(24, temperature=temperature, seed=5, ignore_eos=True) for temperature in (0.0, 1.0)]
    prompts = [[5, 9, 14], list(range(3, 30))]
    plain = build(tmp_path, KINDS["cpu"]).generate(prompts, params)
    driven = build(tmp_path, KINDS["cpu"], speculate=f"model:{tmp_path / 'plain'}", speculate_tokens=3)
    assert driven.generate(prompts, params) == plain
    assert acceptance(driven) > 0.8


SHAPES: dict[str, dict[str, Any]] = {
    "more heads": {"heads": 6, "kv_heads": 2, "hidden_size": 48},
    "larger heads": {"heads": 2, "kv_heads": 2, "head_dim": 64, "ropes": (RopeConfig(64),)},
    "more layers": {"attention": (LayerAttention(32**-0.5),) * 3},
}


CASES = [
    *(("cpu, two steps in flight", shape) for shape in SHAPES),
    pytest.param("graphs", "larger heads", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("kind", "shape"), CASES)
def test_tokens_do_not_depend_on_the_shape_of_the_draft_model(kind: str, shape: str, tmp_path: Path) -> None:
    target, draft = tmp_path / "target", tmp_path / "draft"
    for folder, model in ((target, MODEL), (draft, structs.replace(MODEL, **SHAPES[shape]))):
        folder.mkdir()
        write_model(folder, model)
    found = generate(target, KINDS[kind], 1, speculate=f"model:{draft}", speculate_tokens=3)
    assert found.tokens == generate(target, KINDS[kind], 1).tokens
    assert any(plan.num_drafts for plan in found.plans)


def write_tied(folder: Path, model: ModelConfig) -> None:
    """Write a model whose head has the weights of its embedding, without a tensor of its own."""
    folder.mkdir()
    write_model(folder, model)
    tensors: dict[str, Tensor] = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    write_config(folder, model, tie_word_embeddings=True)


@pytest.mark.parametrize("kind", ["cpu", SLOW])
def test_a_draft_model_may_have_tied_embeddings_and_another_dtype(kind: str, tmp_path: Path) -> None:
    """The model has the same weights, in float32 and with a head of its own."""
    target, draft = tmp_path / "target", tmp_path / "draft"
    write_tied(draft, MODEL)
    tensors: dict[str, Tensor] = {
        name: tensor.bfloat16() for name, tensor in load_file(draft / "model.safetensors").items()
    }
    save_file(tensors, draft / "model.safetensors")
    write_config(draft, MODEL, tie_word_embeddings=True, dtype="bfloat16")
    target.mkdir()
    write_model(target, MODEL)
    wide = {name: tensor.float() for name, tensor in tensors.items()}
    save_file(wide | {"lm_head.weight": wide["model.embed_tokens.weight"].clone()}, target / "model.safetensors")
    params = [SamplingParams(24, temperature=temperature, seed=5, ignore_eos=True) for temperature in (0.0, 1.0)]
    prompts = [[5, 9, 14], list(range(3, 30))]
    with KINDS[kind].kernels():
        plain = build(target, KINDS[kind]).generate(prompts, params)
        driven = build(target, KINDS[kind], speculate=f"model:{draft}", speculate_tokens=3)
        assert driven.generate(prompts, params) == plain
    drafter = runtime_of(driven).speculator
    assert drafter is not None and drafter.model is not None
    assert {slot.target.dtype for slot in drafter.model.model.weight_slots()} == {torch.float32}
    assert acceptance(driven) == 1.0, "the weights are loaded in the dtype of the model"


WINDOW = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 9}


@pytest.mark.parametrize("kind", ["cpu, two steps in flight", SLOW])
@pytest.mark.parametrize("page_size", [8, "max"])
def test_a_draft_model_may_have_windows(kind: str, page_size: int | str, tmp_path: Path) -> None:
    """The model may have some too, as long as it keeps all pages."""
    target, draft = tmp_path / "target", tmp_path / "draft"
    for folder in (target, draft):
        folder.mkdir()
        write_model(folder, MODEL)
    write_config(draft, MODEL, **WINDOW)
    if page_size == "max":
        write_config(target, MODEL, **WINDOW)
    params = [SamplingParams(24, temperature=temperature, seed=5, ignore_eos=True) for temperature in (0.0, 1.0)]
    prompts = [[5, 9, 14], list(range(3, 30))]
    with KINDS[kind].kernels():
        plain = build(target, KINDS[kind], page_size=page_size).generate(prompts, params)
        given = {"speculate": f"model:{draft}", "speculate_tokens": 3, "page_size": page_size}
        driven = build(target, KINDS[kind], **given)
        assert driven.generate(prompts, params) == plain
    assert acceptance(driven) == 1.0 if page_size == "max" else acceptance(driven) < 1.0
