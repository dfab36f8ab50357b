"""Pools with the pages of one sequence, which `held_pages` counts, compute any sequence that they accept."""

import random
from contextlib import nullcontext
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.engine_core.contracts import StepResult
from tandem.engine_core.errors import RequestError
from tandem.engine_core.kv_cache.manager import KVManager
from tandem.engine_core.kv_cache.pages import PageAllocator
from tandem.engine_core.page_counts import held_pages
from tandem.engine_core.plan import PADDING_PAGE, StepPlan
from tandem.engine_core.scheduler.draft_policy import DraftPolicy
from tandem.engine_core.scheduler.scheduler import Scheduler
from tandem.protocol.params import SamplingParams
from tests.support.effort import EFFORT
from tests.support.scheduling import new, submitted


class Case(NamedTuple):
    windows: tuple[int | None, ...]
    page_size: int
    prompt: int
    max_tokens: int
    step: int
    chunk: int
    depth: int
    num_drafts: int
    cache: bool
    seed: int

    @property
    def max_lead(self) -> int:
        return 2 * self.num_drafts

    @property
    def pages(self) -> int:
        return held_pages(self.windows, self.prompt + self.max_tokens - 1, self.page_size, self.max_lead)


CASES = st.builds(
    Case,
    windows=st.lists(st.sampled_from([None, 1, 2, 5, 9, 16, 17]), min_size=1, max_size=3).map(tuple),
    page_size=st.sampled_from([1, 4, 16]),
    prompt=st.integers(1, 70),
    max_tokens=st.integers(1, 50),
    step=st.integers(2, 40),
    chunk=st.integers(1, 40),
    depth=st.sampled_from([1, 2]),
    num_drafts=st.sampled_from([0, 1, 3, 7]),
    cache=st.booleans(),
    seed=st.integers(0, 99),
)


def committed(scheduler: Scheduler, plan: StepPlan, rng: random.Random) -> None:
    """Commit a step of which the device accepts any number of drafts."""
    if not plan.num_drafts:
        counts = [int(row.samples) for row in plan.rows]
        scheduler.commit(plan, StepResult(counts, [7] * sum(counts)))
        return
    sequences = [next(seq for seq in scheduler.held if seq.id == row.seq_id) for row in plan.rows]
    counts = [min(rng.randint(1, 1 + plan.num_drafts), seq.total_len - len(seq.tokens)) for seq in sequences]
    counts = [count if seq.outcome is None else 0 for count, seq in zip(counts, sequences, strict=True)]
    scheduler.commit(plan, StepResult(counts, [7] * sum(counts), num_drafts=[plan.num_drafts] * len(counts)))


def computed(case: Case, count: int) -> int:
    """Compute sequences in the pool of one; return the maximum number of pages of a sequence in decoding."""
    drafts = DraftPolicy((case.num_drafts,), case.num_drafts) if case.num_drafts else None
    scheduler = new(
        2, case.pages + 1, case.step, case.chunk, page_size=case.page_size, cache=case.cache, windows=case.windows,
        drafts=drafts,
    )  # fmt: skip
    rng, flights, step, most = random.Random(case.seed), list[StepPlan](), 0, 0
    for number in range(count):
        prompt = [100 + number, *range(case.prompt - 1)]
        scheduler.add(submitted(number, prompt, SamplingParams(case.max_tokens, ignore_eos=True)))
    while scheduler.num_open or flights:
        scheduler.admit_waiting()
        plan = scheduler.plan_step(step := step + 1)
        if plan is not None:
            scheduler.on_launch(plan)
            flights.append(plan)
            for seq in [seq for seq in scheduler.held if seq.in_steady_decode]:
                most = max(most, sum(len(table) - table.count(PADDING_PAGE) for table in seq.pages))
        if plan is None or len(flights) == case.depth:
            committed(scheduler, flights.pop(0), rng)
        assert step < 1000 * count, f"no end: {list(scheduler.held)}, {list(scheduler.waiting)}"
    assert scheduler.audit() == []
    return most


@settings(deadline=None, max_examples=150 * EFFORT)
@given(CASES)
def test_one_after_the_other(case: Case) -> None:
    assert computed(case, 1) <= case.pages


@settings(deadline=None, max_examples=75 * EFFORT)
@given(CASES)
def test_that_preempt_each_other(case: Case) -> None:
    assert computed(case, 2) <= case.pages


@settings(deadline=None, max_examples=75 * EFFORT)
@given(CASES)
def test_that_a_sequence_holds_all_of_them(case: Case) -> None:
    """Without drafts, at some step of a sequence that is longer than its windows."""
    longer = case._replace(num_drafts=0, prompt=1, max_tokens=80)
    assert computed(longer, 1) == longer.pages


@pytest.mark.parametrize(("windows", "needed"), [((None,), 16), ((9,), 3 + 4), ((None, 9), 16 + 7)])
def test_a_sequence_is_refused_if_the_pages_ahead_of_the_host_do_not_fit(
    windows: tuple[int | None, ...], needed: int
) -> None:
    """Rows of a window hold those of 14 drafts in flight too."""
    seq, lead = submitted(1, range(4), SamplingParams(61)), 14
    for total in (needed, needed - 1):
        manager = KVManager(PageAllocator(total + 1), 4, windows=windows, max_lead=lead)
        assert manager.pages.total == total
        refused = pytest.raises(RequestError, match=rf"\b{needed} KV pages\b.*\b{total};")
        with nullcontext() if total == needed else refused:
            manager.check_fits(seq)
