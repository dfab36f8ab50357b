"""Rows with grammars in steps that verify drafts of others: each row is sampled under its own mask, and only it."""

from pathlib import Path
from typing import Any

import pytest

from tandem.engine_core.plan import StepPlan
from tandem.protocol.codec import pack_floats, pack_ids
from tandem.protocol.params import SamplingParams
from tests.engine_core.runtime.test_recorded_graphs import MODEL
from tests.engine_core.runtime.test_speculation import KINDS, build
from tests.fakes.constraint import FakeConstraint
from tests.fakes.model import END
from tests.support.engine_driver import CLIENT, DrivenEngine
from tests.support.model_folder import write_model
from tests.support.tiny_llama import VOCAB

CLOSING = 9
"""Id that ends the reasoning of `thinks`; the model is biased towards it."""
PARITY, THINKS, JUMPS = "parity", f"thinks {CLOSING}", "runs 3"
PARAMS = SamplingParams(
    26, temperature=0.7, ignore_eos=True, logit_bias_ids=pack_ids([CLOSING]), logit_bias_values=pack_floats([2.0])
)
SPECULATING = {"speculate": "ngram", "speculate_tokens": 5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_model(path, MODEL)
    return path


class Run:
    """Requests of one engine, in the order of their rows: with a grammar, or with drafts of some kind."""

    def __init__(
        self, folder: Path, kind: str, rows: list[str], texts: list[list[int]] | None = None, **options: Any
    ) -> None:
        """Submit the requests. texts: what each generates, as found without drafts."""
        self.rows, self.plans = rows, list[StepPlan]()
        self.driven: DrivenEngine = build(folder, KINDS[kind], **options)
        scheduler = self.driven.engine.scheduler
        launched = scheduler.on_launch
        scheduler.on_launch = lambda plan: (self.plans.append(plan), launched(plan))[1]  # type: ignore[method-assign]
        for index, row in enumerate(rows):
            wanted: dict[str, Any] = {"speculation": row != "without drafts"}
            if texts is not None:
                # A row with a grammar gets the right prediction, which must not be taken.
                shift = 2 if row == "wrong drafts" else 0
                wanted["prediction"] = pack_ids([(token + shift) % VOCAB for token in texts[index]])
            if "drafts" not in row:
                wanted["constraint"] = row
            params = SamplingParams(
                **{name: getattr(PARAMS, name) for name in PARAMS.__struct_fields__} | {"seed": index}
            )
            self.driven.submit([3 + index, 11, 17 + index, 5], params, **wanted)

    def tokens(self) -> list[list[int]]:
        self.driven.run()
        scheduler = self.driven.engine.scheduler
        assert scheduler.audit() == []
        assert scheduler.memory.usage.in_use == 0
        return [self.driven.tokens(1 + index) for index in range(len(self.rows))]

    def check(self, found: list[list[int]]) -> None:
        for index, (row, tokens) in enumerate(zip(self.rows, found, strict=True)):
            if "drafts" in row:
                continue
            grammar = FakeConstraint(row)
            assert all(grammar.accept(token) for token in tokens), f"row {index}: {tokens} under {row!r}"
            assert not self.driven.mailbox.drafts[CLIENT, 1 + index]

    @property
    def num_shared(self) -> int:
        """Number of steps that verified drafts and needed masks."""
        return sum(plan.num_drafts > 0 and plan.needs_mask for plan in self.plans)

    def num_accepted(self, index: int) -> int:
        return sum(right for _, right, _ in self.driven.mailbox.drafts[CLIENT, 1 + index])


ARRANGEMENTS = [
    [PARITY, "right drafts", "without drafts"],
    ["right drafts", PARITY, "wrong drafts"],
    ["without drafts", "wrong drafts", PARITY],
    ["right drafts", THINKS, PARITY, "without drafts"],
    ["without drafts", THINKS, "right drafts", THINKS],
    [JUMPS, "right drafts", THINKS],
]


def plain(folder: Path, kind: str, rows: list[str]) -> list[list[int]]:
    with KINDS[kind].kernels():
        return Run(folder, kind, rows).tokens()


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        *[("cpu, two steps in flight", rows) for rows in ARRANGEMENTS],
        ("cpu", ARRANGEMENTS[1]),
        ("graphs", ARRANGEMENTS[4]),
    ],
)
def test_every_row_gets_its_own_mask_beside_any_number_of_drafts(kind: str, rows: list[str], folder: Path) -> None:
    """Rows without drafts have -1 for each of them, rows with wrong ones fewer tokens than positions."""
    texts = plain(folder, kind, rows)
    with KINDS[kind].kernels():
        run = Run(folder, kind, rows, texts, **SPECULATING)
        found = run.tokens()
    assert found == texts
    run.check(found)
    assert run.num_shared > 2
    for index, row in enumerate(rows):
        assert (run.num_accepted(index) > 5) == (row == "right drafts") or row == "wrong drafts"


@pytest.mark.parametrize("kind", ["cpu", "cpu, two steps in flight"])
def test_reasoning_ends_beside_accepted_runs(kind: str, folder: Path) -> None:
    """The grammar follows every token of the reasoning: no draft is verified for its row, also before it ends."""
    rows = [THINKS, "right drafts"]
    texts = plain(folder, kind, rows)
    assert CLOSING in texts[0][1:-3], "the reasoning ends within the text"
    run = Run(folder, kind, rows, texts, **SPECULATING)
    found = run.tokens()
    assert found == texts
    run.check(found)
    assert run.num_accepted(1) > 5
    after = texts[0][texts[0].index(CLOSING) + 1 :]
    assert [token % 2 for token in after if token != END] == [index % 2 for index in range(len(after))]


@pytest.mark.parametrize("kind", ["cpu, two steps in flight"])
@pytest.mark.parametrize("victim", [0, 1])
def test_preemption_with_drafts_in_flight_leaves_no_mask_or_draft_behind(kind: str, victim: int, folder: Path) -> None:
    rows = ["right drafts", THINKS, "right drafts", PARITY]
    texts = plain(folder, kind, rows)
    run = Run(folder, kind, rows, texts, **SPECULATING)
    scheduler, preempted = run.driven.engine.scheduler, 0
    for tick in range(200):
        run.driven.engine.tick()
        running = list(scheduler.running.values())
        drafting = run.plans and run.plans[-1].num_drafts and run.driven.engine.pipeline.in_flight
        if tick % 3 == 0 and preempted < 4 and drafting and victim < len(running) and not running[victim].finishing:
            scheduler.preempt(running[victim])
            preempted += 1
    found = run.tokens()
    assert preempted > 1
    assert found == texts
    run.check(found)
