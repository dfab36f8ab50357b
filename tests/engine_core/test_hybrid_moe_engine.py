"""Engines with hybrids that have experts: tokens of transformers from any steps, and from the prefix cache."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tandem.engine_core.startup.device import open_parts
from tandem.protocol.codec import pack_ids
from tests.engine_core.models.test_qwen3_5_moe import save_random as save_qwen3_5_moe
from tests.engine_core.models.test_qwen3_next import save_random as save_qwen3_next
from tests.engine_core.test_recurrent_cache import Pair, prompt
from tests.engine_core.test_recurrent_drafts import DEEP, accepted, answers, any_kind, drafted, engine, greedy, know
from tests.engine_core.test_recurrent_engine import CONFIGURATIONS, LENGTHS, TOKENS, generate, options
from tests.fakes.recording_gpu import oracle_parts
from tests.support.parity import VOCAB, greedy_tokens, random_tokens


def save_stacked(folder: Path, fields: dict[str, Any], seed: int) -> Any:
    """Save a Qwen3-Next with a shared expert of the same width as the others, which is stored with them."""
    return save_qwen3_next(folder, fields | {"shared_expert_intermediate_size": 40}, seed=seed)


FAMILIES: dict[str, Any] = {"qwen3_5_moe": save_qwen3_5_moe, "qwen3_next": save_stacked}
SEEDS = {"qwen3_5_moe": 6, "qwen3_next": 12}
"""Seeds with which no most likely token is the end id, which transformers leaves out."""
LAYERS = {"num_hidden_layers": 3, "layer_types": ["linear_attention"] * 2 + ["full_attention"]}
Checkpoint = tuple[Path, list[list[int]], list[list[int]]]


@pytest.fixture(scope="module", params=list(FAMILIES))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A random checkpoint, prompts, and the greedy tokens of transformers."""
    folder = tmp_path_factory.mktemp(request.param)
    fields = LAYERS | {"max_position_embeddings": 1024}
    model = FAMILIES[request.param](folder, fields, seed=SEEDS[request.param])
    prompts = [tokens.tolist() for tokens in random_tokens(LENGTHS, VOCAB, seed=3)]
    return folder, prompts, [greedy_tokens(model, prompt, TOKENS) for prompt in prompts]


@pytest.mark.parametrize("name", ["whole prompts", "chunks of odd sizes", "two steps in flight", "preempted"])
def test_rows_in_turn_give_the_tokens_of_transformers(name: str, checkpoint: Checkpoint) -> None:
    folder, prompts, expected = checkpoint
    assert generate(options(folder, **CONFIGURATIONS[name]), prompts, open_parts) == expected


def test_graphs_give_the_tokens_of_transformers(checkpoint: Checkpoint) -> None:
    """With rows of padding, which are not routed to experts."""
    folder, prompts, expected = checkpoint
    asked = options(folder, device="cuda", max_step_tokens=64, graph_rows="2", graph_tokens="64")
    assert generate(asked, prompts * 2, oracle_parts) == expected * 2, "the second half continues cached prompts"


def test_tokens_are_equal_with_and_without_the_cache(checkpoint: Checkpoint) -> None:
    pair = Pair(checkpoint[0], max_step_tokens=40)
    system, other = prompt(90), prompt(45, seed=1)
    for _ in range(2):
        pair.ask(*[[*system, *prompt(length, seed=length)] for length in (3, 33, 70)], other, tokens=6)
    pair.ask(
        [*system, *prompt(3, seed=3), *pair.expected([*system, *prompt(3, seed=3)], 6), *other], tokens=6, preempt=5
    )
    assert pair.cached.engine.scheduler.memory.num_hit_tokens > 0


@pytest.mark.parametrize("kind", DEEP)
def test_drafts_give_the_tokens_of_transformers(kind: str, checkpoint: Checkpoint) -> None:
    """Drafts of any kind, and n-grams with a prediction of the answer."""
    folder, prompts, expected = checkpoint
    params = [greedy(TOKENS)] * len(prompts)
    with engine(folder, kind, speculate="ngram", speculate_tokens=3) as driven:
        know(driven, any_kind(1), [[*one, *found] for one, found in zip(prompts, expected, strict=True)])
        assert driven.generate(prompts, params) == expected
    assert 5 < accepted(driven) < drafted(driven)
    with engine(folder, kind, speculate="ngram", speculate_tokens=5) as driven:
        asked = zip(prompts, params, expected, strict=True)
        ids = [driven.submit(one, own, prediction=pack_ids(found)) for one, own, found in asked]
        driven.run()
        assert [driven.tokens(number) for number in ids] == expected
    assert driven.engine.scheduler.audit() == [] and accepted(driven) > 5


@pytest.fixture(scope="module")
def twins(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A hybrid whose states add nothing to its stream, and a draft model with attention alone, of equal logits.

    A draft model may have no recurrent layers.
    """
    save, folders = FAMILIES[checkpoint[0].name.rstrip("0123456789")], []
    for kinds in (LAYERS["layer_types"], ["full_attention"] * 3):
        folders.append(tmp_path_factory.mktemp("twin"))
        save(folders[-1], LAYERS | {"layer_types": kinds, "max_position_embeddings": 1024}, seed=6)
    files = [folder / "model.safetensors" for folder in folders]
    target, draft = map(load_file, files)
    for tensors in (target, draft):
        for index in range(2):
            for name in ("linear_attn.out_proj", "self_attn.o_proj"):
                if (tensor := tensors.get(f"model.layers.{index}.{name}.weight")) is not None:
                    tensor.zero_()
    draft |= {name: tensor for name, tensor in target.items() if name in draft}
    for tensors, file in zip((target, draft), files, strict=True):
        save_file(tensors, file, {"format": "pt"})
    return folders[0], folders[1]


@pytest.mark.parametrize("kind", [DEEP[0], pytest.param(DEEP[1], marks=pytest.mark.slow)])
def test_a_draft_model_of_equal_logits_is_always_right(kind: str, twins: tuple[Path, Path]) -> None:
    """After hits, turns of sessions, preemptions, chunks and phases without drafts."""
    target, draft = twins
    system = prompt(70)
    prompts = [prompt(3), [*system, 5], [*system, *prompt(20, seed=1)], prompt(40, seed=2)]
    expected = answers(target, prompts, 20)
    given: dict[str, Any] = {"speculate": f"model:{draft}", "speculate_tokens": 3, "prefill_chunk": 33}
    with engine(target, kind, **given) as driven:
        scheduler = driven.engine.scheduler
        policy, calls = scheduler.planner.drafts, iter(range(1000))
        choose = policy.choose
        policy.choose = lambda *asked: choose(*asked) if next(calls) % 9 < 7 else 0  # type: ignore[method-assign]
        for preempted in (False, True):
            ids = [driven.submit(one, greedy(20), session="" if index else "talk") for index, one in enumerate(prompts)]
            if preempted:
                for _ in range(6):
                    driven.engine.tick()
                for seq in [seq for seq in scheduler.running.values() if not seq.finishing]:
                    scheduler.preempt(seq)
            driven.run()
            assert [driven.tokens(number) for number in ids] == expected
        turn = [*prompts[0], *expected[0], 5, 6]
        number = driven.submit(turn, greedy(8), session="talk")
        driven.run()
        assert [driven.tokens(number)] == answers(target, [turn], 8)
    assert scheduler.audit() == [] and scheduler.preemptions > 1 and scheduler.memory.num_hit_tokens > 150
    assert drafted(driven) == accepted(driven) > 60
