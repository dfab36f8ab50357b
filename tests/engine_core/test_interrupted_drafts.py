"""Pauses, sleeps and changes of the weights while steps that verify drafts are in flight."""

from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pytest

from tandem.engine_core.contracts import RunningMode
from tandem.engine_core.model_config import ModelConfig
from tandem.engine_core.models.registry import read_config
from tandem.engine_core.scheduler.step_costs import AttentionShare, StepCosts
from tandem.engine_core.startup.model_weights import ModelWeights
from tandem.protocol.commands import Abort, Pause, PauseMode, Resume, Sleep, WakeUp
from tandem.protocol.engine_options import EngineOptions
from tandem.protocol.errors import ErrorCode, FinishReason
from tandem.protocol.events import Failure, Finished
from tandem.protocol.params import SamplingParams
from tests.engine_core.models import test_llama, test_qwen3_5
from tests.engine_core.test_recurrent_drafts import LAYERS, any_kind, know
from tests.fakes.weight_change import FakeWeightChange
from tests.support.engine_driver import CLIENT, DrivenEngine
from tests.support.plan_recording import runtime_of
from tests.support.trained_engine import TrainedEngine

TOKENS = 16
PROMPTS = [list(range(3, 50)), [5, 9, 14], [7, 8] * 10]
SIZES: dict[str, Any] = {"max_rows": 2, "max_len": 128, "kv_tokens": 1024}
KINDS = {
    "dense, draft model": ("dense", "first"),
    "hybrid, known drafts": ("hybrid", "known"),
    "hybrid, draft model": ("hybrid", "other"),
    "dense, n-grams": ("dense", "ngram"),
    "hybrid, n-grams": ("hybrid", "ngram"),
}
SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if "n-grams" in kind]
"""Random models repeat little of their text."""


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(tokens, temperature=0.0, ignore_eos=True)


@dataclass
class Case:
    """Two checkpoints of one shape, and where drafts come from."""

    first: Path
    second: Path
    drafts: str

    @property
    def is_own_draft(self) -> bool:
        return self.drafts == f"model:{self.first}"

    @cached_property
    def whole(self) -> dict[Path, list[list[int]]]:
        """Tokens of all prompts, by checkpoint."""
        asked = [(prompt, TOKENS) for prompt in PROMPTS]
        return {folder: self.answers(folder, *asked) for folder in (self.first, self.second)}

    def engine(self) -> "DraftingEngine":
        return DraftingEngine(self)

    def answers(self, folder: Path, *asked: tuple[list[int], int]) -> list[list[int]]:
        """Return the tokens of prompts without drafts, each with a number of tokens."""
        driven = DrivenEngine.build(EngineOptions(model=str(folder), device="cpu", threads=1, **SIZES))
        return driven.generate([prompt for prompt, _ in asked], [greedy(tokens) for _, tokens in asked])


class DraftingEngine(TrainedEngine):
    """An engine with two steps in flight, each of which verifies up to two drafts."""

    def __init__(self, case: Case) -> None:
        speculate = "ngram" if case.drafts == "known" else case.drafts
        super().__init__(case.first, speculate=speculate, speculate_tokens=2, pipeline="on", **SIZES)
        # Chunks of prompts, and with them the tokens after some ticks, must not depend on the speed of the machine.
        self.driven.engine.scheduler.planner.costs = StepCosts({}, AttentionShare())
        if case.drafts == "known":
            found = [zip(PROMPTS, answers, strict=True) for answers in case.whole.values()]
            know(self.driven, any_kind(1), [[*prompt, *tokens] for own in found for prompt, tokens in own])

    def begin(self, known: int = 5) -> list[int]:
        """Submit all prompts; return their ids once the first has some tokens and drafts are in flight."""
        ids = [self.driven.submit(prompt, greedy(TOKENS)) for prompt in PROMPTS]
        running = self.driven.engine.scheduler.running
        while len(self.driven.tokens(ids[0])) < known or not all(seq.num_inflight_drafts for seq in running.values()):
            self.driven.engine.tick()
        return ids

    def finished(self, ids: list[int]) -> list[list[int]]:
        self.driven.run()
        assert self.driven.engine.scheduler.audit() == []
        return [self.driven.tokens(number) for number in ids]

    def change(self, folder: Path, mode: RunningMode) -> None:
        """Load another checkpoint as soon as the mode allows it."""
        runtime, config = runtime_of(self.driven), read_config(folder)
        assert isinstance(config, ModelConfig)
        weights = ModelWeights(runtime.model, runtime.kv.layout, next(iter(runtime.kv.keys)).dtype, 64)

        def load() -> str:
            weights.load(folder, config)
            return folder.name

        self.driven.engine.control.begin_change(FakeWeightChange(mode, load))
        while self.driven.engine.control.weights.change is not None:
            self.driven.engine.tick()

    def failures(self, ids: list[int]) -> list[ErrorCode | None]:
        outcomes = [self.driven.outcome(number) for number in ids]
        return [outcome.code if isinstance(outcome, Failure) else None for outcome in outcomes]

    @property
    def drafted_pages(self) -> int:
        """Number of nodes of the prefix cache whose page the draft model has computed."""
        tree = self.driven.engine.scheduler.memory.tree
        assert tree is not None
        return sum([bit for node, bit in enumerate(tree.has_draft_kv) if node not in tree._free_ids])

    @property
    def acceptance(self) -> tuple[int, int]:
        stats = self.driven.engine.stats
        return stats.spec_decode_num_draft_tokens, stats.spec_decode_num_accepted_tokens


@pytest.fixture(scope="module", params=[*list(KINDS)[:3], *SLOW])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family, drafts = KINDS[request.param]
    folders = [tmp_path_factory.mktemp(f"model{seed}") for seed in range(3)]
    for seed, folder in enumerate(folders):
        if family == "dense" or seed == 2:
            test_llama.save_random(folder, {"max_position_embeddings": 512}, seed=seed)
        else:
            test_qwen3_5.save_random(folder, LAYERS | {"max_position_embeddings": 512}, seed=seed)
    models = {"first": f"model:{folders[0]}", "other": f"model:{folders[2]}"}
    return Case(folders[0], folders[1], models.get(drafts, drafts))


INTERRUPTIONS: tuple[tuple[int, PauseMode], ...] = (
    (0, "keep"), (1, "keep"), (2, "abort"), (2, "keep"), (0, "abort"), (1, "wait"),
)  # fmt: skip
"""Levels of sleeps, 0 for a pause, and what becomes of requests."""


def test_pauses_and_sleeps_change_no_token(case: Case) -> None:
    """Kept rows are computed again after a sleep, also by the draft model, whose keys and values are lost too."""
    engine, expected = case.engine(), case.whole[case.first]
    for level, mode in INTERRUPTIONS:
        ids = engine.begin()
        assert engine.call(partial(Sleep, level=level, mode=mode) if level else partial(Pause, mode=mode)).ok
        assert not engine.driven.engine.pipeline.in_flight
        assert not (level and engine.drafted_pages)
        assert engine.call(WakeUp if level else Resume).ok
        found = engine.finished(ids)
        if mode == "abort":
            code = ErrorCode.ENGINE_SLEEPING if level else ErrorCode.ENGINE_PAUSED
            assert engine.failures(ids) == [code] * len(ids)
            assert all(other == tokens[: len(other)] for other, tokens in zip(found, expected, strict=True))
        else:
            assert found == expected, (level, mode)
    assert engine.finished(engine.begin()) == expected
    drafted, accepted = engine.acceptance
    assert drafted > 20 or case.drafts == "ngram", drafted
    assert accepted == drafted or not case.is_own_draft


@pytest.mark.parametrize("mode", ["restart", "keep"])
def test_requests_go_on_with_new_weights(mode: RunningMode, case: Case) -> None:
    """From their next token; nothing that was computed before is found in the cache, by either model."""
    engine = case.engine()
    ids = engine.begin()
    engine.change(case.second, mode)
    known = [list(engine.driven.tokens(number)) for number in ids]
    found = engine.finished(ids)
    if mode == "restart":
        assert [0 < len(tokens) < TOKENS for tokens in known] == [True, True, False], "two rows had begun"
        asked = [([*prompt, *tokens], TOKENS - len(tokens)) for prompt, tokens in zip(PROMPTS, known, strict=True)]
        rest = case.answers(case.second, *asked)
        assert found == [[*tokens, *others] for tokens, others in zip(known, rest, strict=True)]
    assert [len(tokens) for tokens in found] == [TOKENS] * len(ids)
    assert engine.finished(engine.begin()) == engine.finished(engine.begin()) == case.whole[case.second]


def test_no_page_keeps_the_mark_of_a_draft_model_that_computed_others(case: Case) -> None:
    engine = case.engine()
    engine.finished(engine.begin())
    assert bool(engine.drafted_pages) == case.drafts.startswith("model:")
    engine.change(case.second, "wait")
    engine.finished(engine.begin())
    engine.change(case.first, "wait")
    assert not engine.drafted_pages
    ids = [engine.driven.submit(prompt, greedy(TOKENS), speculation=False) for prompt in PROMPTS]
    assert engine.finished(ids) == case.whole[case.first]
    assert not engine.drafted_pages, "pages without drafts, in slots that had some with the other weights"
    before = engine.acceptance
    assert engine.finished(engine.begin()) == case.whole[case.first]
    drafted, accepted = (after - first for after, first in zip(engine.acceptance, before, strict=True))
    assert drafted == accepted > 20 or not case.is_own_draft


def test_new_weights_end_requests_with_drafts_in_flight(case: Case) -> None:
    engine = case.engine()
    ids = engine.begin()
    engine.change(case.second, "abort")
    found = engine.finished(ids)
    assert engine.failures(ids) == [ErrorCode.WEIGHTS_CHANGED] * 2 + [None]
    assert found[2] == case.whole[case.second][2], "it had not begun"
    assert engine.finished(engine.begin()) == case.whole[case.second]


def test_requests_end_once_at_their_deadline(case: Case) -> None:
    """The frontend ends one by an abort, in any tick; its pages come back while its last steps are in flight."""
    engine, expected = case.engine(), case.whole[case.first]
    memory = engine.driven.engine.scheduler.memory
    for ticks in range(5):
        ids = engine.begin(2)
        for _ in range(ticks):
            engine.driven.engine.tick()
        engine.driven.mailbox.inbox.append((CLIENT, Abort([ids[ticks % 2], ids[2]])))
        found = engine.finished(ids)
        for index, number in enumerate(ids):
            reason = FinishReason.LENGTH if index == 1 - ticks % 2 else FinishReason.ABORT
            assert engine.driven.outcome(number) == Finished(number, reason)
            assert found[index] == expected[index][: len(found[index])]
            assert (len(found[index]) == TOKENS) == (reason is FinishReason.LENGTH)
        assert not engine.driven.engine.scheduler.running and not list(engine.driven.engine.scheduler.held)
        assert memory.usage.in_use == 0
    assert engine.finished(engine.begin()) == expected
