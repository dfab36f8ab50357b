"""Engines with hybrids that have experts: tokens of transformers from any steps, and from the prefix cache."""

from pathlib import Path
from typing import Any

import pytest

from tandem.engine_core.startup.device import open_parts
from tests.engine_core.models.test_qwen3_5_moe import save_random as save_qwen3_5_moe
from tests.engine_core.models.test_qwen3_next import save_random as save_qwen3_next
from tests.engine_core.test_recurrent_cache import Pair, prompt
from tests.engine_core.test_recurrent_engine import CONFIGURATIONS, LENGTHS, TOKENS, generate, options
from tests.fakes.recording_gpu import oracle_parts
from tests.support.parity import VOCAB, greedy_tokens, random_tokens

FAMILIES: dict[str, Any] = {"qwen3_5_moe": save_qwen3_5_moe, "qwen3_next": save_qwen3_next}
LAYERS = {"num_hidden_layers": 3, "layer_types": ["linear_attention"] * 2 + ["full_attention"]}
Checkpoint = tuple[Path, list[list[int]], list[list[int]]]


@pytest.fixture(scope="module", params=list(FAMILIES))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A random checkpoint, prompts, and the greedy tokens of transformers, without an end id with this seed."""
    folder = tmp_path_factory.mktemp(request.param)
    model = FAMILIES[request.param](folder, LAYERS | {"max_position_embeddings": 1024}, seed=6)
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
