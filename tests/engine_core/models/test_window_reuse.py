"""Matches, preemptions and turns in models with windows, against an engine that keeps all pages."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tandem.engine_core.config import StepConfig
from tandem.engine_core.kv_cache.groups import KVGroup, partition
from tandem.engine_core.model_config import ModelConfig
from tandem.engine_core.startup import engine as startup
from tandem.protocol.engine_options import EngineOptions
from tandem.protocol.params import SamplingParams
from tests.support.engine_driver import DrivenEngine
from tests.support.free_pages import poison_free_pages, windows_of
from tests.support.parity import SMALL, VOCAB, random_tokens, save_random

WINDOW, PAGE, TOKENS = 18, 4, 10
MODELS: dict[str, tuple[str, dict[str, Any], list[int | None]]] = {
    "one layer without a window": (
        "Gemma3TextConfig",
        {
            "sliding_window": WINDOW,
            "head_dim": 16,
            "layer_types": [*["sliding_attention"] * 3, "full_attention"],
            "num_hidden_layers": 4,
        },
        [None, WINDOW, WINDOW, WINDOW],
    ),
    "all layers with a window": ("MistralConfig", {"sliding_window": WINDOW}, [WINDOW]),
}


def kept_groups(model: ModelConfig, _: StepConfig) -> tuple[KVGroup, ...]:
    """Return one group that keeps all positions; the layers attend to their windows all the same."""
    return partition([None] * model.layers, model.kv_heads, model.head_dim)


class Pair:
    """Two engines of one model, which get the same requests; free pages are full of NaN."""

    def __init__(self, evicting: DrivenEngine, keeping: DrivenEngine) -> None:
        self.evicting = evicting
        self.keeping = keeping
        for driven in (evicting, keeping):
            poison_free_pages(driven)

    def check(self, prompts: Sequence[Sequence[int]], session: str = "", preempt_every: int = 0) -> list[list[int]]:
        """Check that both engines return the same tokens; return them.

        preempt_every: ticks between two preemptions of a running sequence; 0: none.
        """
        params, found = SamplingParams(TOKENS, temperature=0.0, min_tokens=TOKENS), []
        for driven in (self.evicting, self.keeping):
            ids = [driven.submit(prompt, params, session=session) for prompt in prompts]
            scheduler = driven.engine.scheduler
            for tick in range(1, 5000):
                driven.engine.tick()
                running = [seq for seq in scheduler.running.values() if not seq.finishing]
                if running and preempt_every and tick % preempt_every == 0:
                    scheduler.preempt(running[tick % len(running)])
                if not scheduler.num_open and tick > 2:
                    break
            driven.run()
            found.append([driven.tokens(number) for number in ids])
            assert driven.engine.scheduler.audit() == []
        assert found[0] == found[1]
        assert all(len(tokens) == TOKENS for tokens in found[0])
        return found[0]


Build = Callable[..., Pair]


@pytest.fixture(params=MODELS)
def build(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Build:
    import transformers

    kind, fields, windows = MODELS[request.param]
    norms = (-0.5, 0.5) if kind.startswith("Gemma") else (0.5, 1.5)
    save_random(
        tmp_path, getattr(transformers, kind)(**SMALL | {"max_position_embeddings": 2048} | fields), norms=norms
    )

    def build(**options: Any) -> Pair:
        given: dict[str, Any] = {"max_rows": 4, "max_len": 1024, "max_step_tokens": 64, "prefill_chunk": 24}
        given |= {"kv_memory": 3 << 20, "model": str(tmp_path), "device": "cpu", "dtype": "float32", "page_size": PAGE}
        settings = EngineOptions(**given | options)
        evicting = DrivenEngine.build(settings)
        assert windows_of(evicting) == windows
        with monkeypatch.context() as patched:
            patched.setattr(startup, "_kv_groups", kept_groups)
            keeping = DrivenEngine.build(settings)
        assert windows_of(keeping) == [None]
        return Pair(evicting, keeping)

    return build


def drawn(*lengths: int, seed: int = 0) -> list[list[int]]:
    return [tokens.tolist() for tokens in random_tokens(lengths, VOCAB, seed)]


def test_prompts_that_leave_a_long_cached_one(build: Build) -> None:
    """Inside a page, at one, at the window's edge and 640 tokens before the old end, with and without their pages."""
    pair, (old, other) = build(), drawn(720, 60)
    pair.check([old])
    for at in (702, 700, 720 - WINDOW, 720 - WINDOW + 1, 720 - 640):
        pair.check([old[:at] + other])
    memory = pair.evicting.engine.scheduler.memory
    before, hits = memory.num_hit_tokens, list[int]()
    for at in (702, 700, 720 - 640):
        assert memory.tree is not None
        memory.pages.release(-1, memory.tree.evict(sum([len(pages.loose) for pages in memory.tree.classes])))
        pair.check([old[:at] + other[::-1]])
        hits.append(memory.num_hit_tokens - before)
        before = memory.num_hit_tokens
    assert all(hits), "each of them is a node with two children by now"


def test_prompts_of_which_only_the_full_pages_are_cached(build: Build) -> None:
    pair, (old, other) = build(), drawn(300, 20)
    pair.check([old])
    memory = pair.evicting.engine.scheduler.memory
    assert memory.tree is not None
    tails = memory.tree.classes[1:]
    while any(any(pages.held) for pages in tails):
        memory.pages.release(-1, memory.tree.evict(1))
    pair.check([old, old + other])


def test_preempted_sequences(build: Build) -> None:
    pair, prompts = build(), drawn(60, 61, 62, 63, 64, 65, 66)
    pair.check(prompts, preempt_every=5)
    assert min(driven.engine.scheduler.preemptions for driven in (pair.evicting, pair.keeping)) > 3


def test_turns_of_sessions(build: Build) -> None:
    pair, turns = build(), drawn(50, 30, 41, 5)
    prompt: list[int] = []
    for turn in turns:
        prompt = prompt + turn
        (tokens,) = pair.check([prompt], session="talk")
        prompt = prompt + tokens
    pair.check([prompt[:70] + turns[0]], session="talk")
    assert pair.evicting.engine.stats.prefix_hits > 0
