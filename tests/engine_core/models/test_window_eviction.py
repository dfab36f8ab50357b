"""An engine that gives up the pages of windows against one that keeps all positions: both give the same tokens."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.engine_core.kv_cache.groups import partition
from tandem.engine_core.startup import engine as assembly
from tandem.protocol.engine_options import EngineOptions
from tandem.protocol.params import SamplingParams
from tests.support.engine_driver import DrivenEngine
from tests.support.free_pages import poison_free_pages, windows_of
from tests.support.parity import SMALL, VOCAB, random_tokens, save_random

WINDOW, PAGE, TOKENS = 16, 4, 14
LAYERS = ["sliding_attention"] * 5 + ["full_attention"] + ["sliding_attention"]
Prompts = list[list[int]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Gemma3TextConfig

    folder = tmp_path_factory.mktemp("gemma3")
    fields = {"sliding_window": WINDOW, "head_dim": 16, "layer_types": LAYERS, "num_hidden_layers": len(LAYERS)}
    save_random(folder, Gemma3TextConfig(**SMALL | fields), seed=5, norms=(-0.5, 0.5))
    return folder


class Pair:
    """Two engines that get the same requests."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, **flags: Any) -> None:
        options = EngineOptions(
            **{"model": str(directory), "device": "cpu", "dtype": "float32", "max_rows": 4, "max_len": 256}
            | {"max_step_tokens": 48, "prefill_chunk": 7, "kv_tokens": 2048, "page_size": PAGE}
            | flags
        )
        self.evicting = DrivenEngine.build(options)
        poison_free_pages(self.evicting)
        monkeypatch.setattr(assembly, "partition", lambda windows, *heads: partition([None] * len(windows), *heads))
        self.keeping = DrivenEngine.build(options)
        assert windows_of(self.evicting) == [None, *[WINDOW] * 6]
        assert windows_of(self.keeping) == [None]

    def check(self, prompts: Prompts, tokens: int = TOKENS) -> Prompts:
        """Run the same requests in both; return the answers."""
        params = [SamplingParams(tokens, temperature=0.0, min_tokens=tokens)] * len(prompts)
        found, expected = (engine.generate(prompts, params) for engine in (self.evicting, self.keeping))
        assert found == expected and all(len(answer) == tokens for answer in found)
        return found

    def turn(self, session: str, prompt: list[int]) -> list[int]:
        """Run a turn of a session in both; return the answer."""
        params = SamplingParams(TOKENS, temperature=0.0, min_tokens=TOKENS)
        answers = []
        for engine in (self.evicting, self.keeping):
            request = engine.submit(prompt, params, session=session)
            engine.run()
            answers.append(engine.tokens(request))
        assert answers[0] == answers[1]
        return answers[0]


def prompts_of(*lengths: int, seed: int = 7) -> Iterator[list[int]]:
    return (tokens.tolist() for tokens in random_tokens(lengths, VOCAB, seed=seed))


@pytest.mark.parametrize("chunk", [3, 16, 48])
def test_lengths_around_the_window(directory: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """Twice: first computed, then from the cache."""
    pair = Pair(directory, monkeypatch, prefill_chunk=chunk, kv_tokens=4096)
    prompts = list(prompts_of(*range(WINDOW - 1, WINDOW + 18)))
    assert pair.check(prompts) == pair.check(prompts)
    assert pair.evicting.engine.stats.prefix_hits > 0


def test_prompts_that_leave_a_cached_one(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside a page, at a page, at the edge of the window, and inside the window before the old end."""
    pair = Pair(directory, monkeypatch)
    old, other = prompts_of(80, 30)
    (answer,) = pair.check([old])
    end = old + answer
    for kept in (41, 40, 80 - WINDOW, 80 - WINDOW + 1, 80 - 10, 79, 80, 88, len(end) - 10):
        pair.check([end[:kept] + other])
    hits = pair.evicting.engine.stats.prefix_hits
    pair.check([old])
    assert pair.evicting.engine.stats.prefix_hits >= hits + 76, "the end of a prompt is a match point"


def test_keys_and_values_of_8_bits(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both engines calibrate the same scales."""
    pair = Pair(directory, monkeypatch, kv_dtype="fp8")
    scales = [engine.engine.runtime.model.kv_scales.values for engine in (pair.evicting, pair.keeping)]  # type: ignore[attr-defined]
    assert torch.equal(*scales) and (scales[0] > 0).all()
    prompts = list(prompts_of(15, 33, 60))
    assert pair.check(prompts) == pair.check(prompts)


def test_sessions(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(directory, monkeypatch)
    (history,) = prompts_of(50)
    for more in prompts_of(9, 21, 1, seed=8):
        history = history + pair.turn("s", history) + more
    assert pair.evicting.engine.stats.prefix_hits > 0


def test_preempted_sequences(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short prompts with long answers; the pool that keeps all positions is small too."""
    pair = Pair(directory, monkeypatch, max_len=96, kv_tokens=96)
    pair.check(list(prompts_of(9, 5, 12, 7)), tokens=80)
    assert pair.evicting.engine.stats.preemptions > 0
