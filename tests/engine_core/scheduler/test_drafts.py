"""Steps that verify drafts: the runs that they bring, the bounds of positions, and the number of drafts."""

from array import array

import pytest

from tandem.engine_core.contracts import NO_TOKEN, StepLogprobs, StepResult
from tandem.engine_core.graph_sizes import DRAFT_SIZES
from tandem.engine_core.plan import StepPlan
from tandem.engine_core.scheduler.commit import masked_tokens
from tandem.engine_core.scheduler.draft_policy import DraftPolicy
from tandem.engine_core.scheduler.policy import MAX_STEPS_SKIPPED
from tandem.engine_core.scheduler.scheduler import Scheduler
from tandem.engine_core.scheduler.step_costs import StepWork
from tandem.engine_core.sequence import Sequence
from tandem.protocol.errors import ErrorCode, FinishReason
from tandem.protocol.events import Failure, Finished, TokenLogprobs
from tandem.protocol.params import SamplingParams
from tests.fakes.constraint import FakeConstraint
from tests.support.scheduling import END, added, commit, launched, new, sequence, submitted


def drafting(fixed: int | None = 3, **options: int) -> Scheduler:
    return new(drafts=DraftPolicy(DRAFT_SIZES if fixed is None else (1, 2, 3), fixed), **options)


def began(scheduler: Scheduler, *sequences: Sequence, token: int = 50) -> StepPlan:
    """Run the sequences' prompts, and launch the first step that verifies drafts."""
    added(scheduler, *sequences)
    commit(scheduler, launched(scheduler, 1), [token] * len(sequences))
    plan = launched(scheduler, 2)
    assert plan.num_drafts
    return plan


def result_of(*runs: list[int], drafts: int = 3) -> StepResult:
    tokens = [token for run in runs for token in run]
    return StepResult([len(run) for run in runs], tokens, num_drafts=[drafts] * len(runs))


def test_runs_of_any_length_are_committed() -> None:
    scheduler, sequences = drafting(), [sequence(n, max_tokens=20, first=30 * n) for n in (1, 2, 3)]
    plan = began(scheduler, *sequences)
    assert (plan.num_drafts, plan.total_tokens, plan.max_lead) == (3, 12, 0)
    updates = scheduler.commit(plan, result_of([20, 21, 22], [23], [24, 25, 26, 27]))
    delta = updates.deltas[b"c"]
    assert delta.request_ids == [1, 1, 1, 2, 3, 3, 3, 3] and delta.tokens == list(range(20, 28))
    assert (delta.drafted, delta.drafts) == ([1, 2, 3], [3, 2, 0, 3, 0, 0, 3, 3, 0])
    assert [seq.pending for seq in sequences] == [1, 1, 1]
    assert [(seq.drafts.drafted, seq.drafts.accepted) for seq in sequences] == [(3, 2), (3, 0), (3, 3)]
    assert updates.verified == {(3, 2): 1, (3, 0): 1, (3, 3): 1}
    plan = launched(scheduler, 3)
    assert [(row.start, row.length) for row in plan.rows] == [(8, 1), (6, 1), (9, 1)]
    assert scheduler.audit() == []


def test_bounds_of_a_row_differ_by_the_drafts_in_flight() -> None:
    """And agree once nothing is in flight."""
    scheduler, seq = drafting(), sequence(1, max_tokens=20)
    first = began(scheduler, seq)
    assert (seq.min_device_len, seq.max_device_len) == (7, 10)
    second = launched(scheduler, 3)
    assert second.max_lead == 3 and second.rows[0].start == 6
    assert (seq.min_device_len, seq.max_device_len) == (8, 14)
    scheduler.commit(first, result_of([20, 21, 22, 23]))
    assert (seq.min_device_len, seq.max_device_len) == (11, 14)
    scheduler.commit(second, result_of([24]))
    assert (seq.min_device_len, seq.max_device_len) == (11, 11)


def test_pages_are_reserved_for_the_upper_bound() -> None:
    """A row may begin 3 positions later, and computes 3 more."""
    scheduler, seq = drafting(pages=60), sequence(1, max_tokens=40)
    began(scheduler, seq)
    assert len(seq.pages[0]) * 4 >= seq.num_scheduled_tokens + 6
    short = sequence(2, max_tokens=2, first=70)
    added(scheduler, short)
    scheduler.plan_step(3)
    assert len(short.pages[0]) == 2, "no page is behind the position of the last but one token"


@pytest.mark.parametrize("at", range(4))
def test_tokens_behind_an_end_id_in_a_run_are_dropped(at: int) -> None:
    """The next turn finds all full pages of the kept tokens, and none of the others."""
    scheduler, seq = drafting(), sequence(1, prompt=7, max_tokens=20, session="s")
    plan, later = began(scheduler, seq), launched(scheduler, 3)
    run = [20, 21, 22, 23]
    run[at] = END
    updates = scheduler.commit(plan, result_of(run))
    assert updates.deltas[b"c"].tokens == run[: at + 1]
    assert isinstance(seq.outcome, Finished) and seq.outcome.reason is FinishReason.STOP
    scheduler.commit(later, result_of([24, 25, 26, 27]))
    assert scheduler.memory.usage.in_use == scheduler.memory.usage.cached
    following = submitted(2, [*seq.tokens, 60, 61], SamplingParams(3), session="s")
    added(scheduler, following)
    assert following.num_scheduled_tokens == len(seq.tokens) // 4 * 4
    assert scheduler.audit() == []


@pytest.mark.parametrize("run", [[20, 21], [20, 21, 22, 23]])
def test_a_run_ends_at_the_maximum_length(run: list[int]) -> None:
    scheduler, seq = drafting(), sequence(1, max_tokens=3)
    updates = scheduler.commit(began(scheduler, seq), result_of(run))
    assert updates.deltas[b"c"].tokens == [20, 21]
    assert seq.outcome == Finished(1, FinishReason.LENGTH)
    assert updates.deltas[b"c"].drafts == [3, len(run) - 1, 0]
    assert scheduler.memory.usage.in_use == 0 and not list(scheduler.held)


def test_a_later_row_of_a_sequence_that_has_all_its_tokens_may_bring_none() -> None:
    scheduler, seq = drafting(), sequence(1, max_tokens=4)
    plan = began(scheduler, seq)
    later = launched(scheduler, 3)
    scheduler.commit(plan, result_of([20, 21, 22]))
    assert seq.outcome is not None
    assert scheduler.commit(later, result_of([], drafts=0)).num_zombies == 1
    assert not list(scheduler.held)


def test_the_number_of_drafts_may_change_between_two_steps_in_flight() -> None:
    """Each commit takes back what its own launch counted."""
    scheduler, seq, chosen = drafting(fixed=None), sequence(1, max_tokens=30), [3]
    scheduler.planner.drafts.choose = lambda *_: chosen[0]  # type: ignore[method-assign]
    first = began(scheduler, seq)
    chosen[0] = 7
    second = launched(scheduler, 3)
    assert (first.num_drafts, second.num_drafts, second.max_lead) == (3, 7, 3)
    assert (seq.min_device_len, seq.max_device_len) == (8, 18)
    scheduler.commit(first, result_of([20, 21, 22, 23], drafts=3))
    assert (seq.min_device_len, seq.max_device_len) == (11, 18)
    chosen[0] = 0
    third = launched(scheduler, 4)
    assert (third.num_drafts, third.max_lead) == (0, 7)
    scheduler.commit(second, result_of([*range(24, 32)], drafts=7))
    assert (seq.min_device_len, seq.max_device_len) == (19, 19)
    commit(scheduler, third, [33])
    assert (seq.min_device_len, seq.max_device_len) == (19, 19) and scheduler.audit() == []


@pytest.mark.parametrize("prompt", [1, 2, 3])
def test_a_prompt_may_be_shorter_than_its_drafts(prompt: int) -> None:
    scheduler, seq = drafting(), sequence(1, prompt=prompt, max_tokens=20)
    plan = began(scheduler, seq)
    scheduler.commit(plan, result_of([20, 21, 22, 23]))
    assert len(seq.tokens) == prompt + 5 and launched(scheduler, 3).rows[0].start == prompt + 4
    assert scheduler.audit() == []


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_row_without_a_page_at_its_upper_bound_preempts_a_later_one(page_size: int) -> None:
    """Its run may cross the edge of the last page while the host knows of one token only."""
    scheduler = drafting(pages=24 // page_size, page_size=page_size, cache=False)
    sequences = [sequence(n, prompt=4, max_tokens=14, first=30 * n) for n in (1, 2)]
    added(scheduler, *sequences)
    commit(scheduler, launched(scheduler, 1), [50] * len(list(scheduler.held)))
    for step in range(2, 40):
        plan = scheduler.plan_step(step)
        if plan is None:
            break
        scheduler.on_launch(plan)
        counts = [int(row.samples) for row in plan.rows]
        if plan.num_drafts:
            open_rows = [
                min(4, seq.total_len - len(seq.tokens))
                for seq in map(scheduler.running.get, [r.seq_id for r in plan.rows])
                if seq
            ]
            scheduler.commit(plan, result_of(*[[20] * count for count in open_rows]))
        else:
            commit(scheduler, plan, [20] * len(counts))
        scheduler.admit_waiting()
        assert scheduler.audit() == []
    assert all(isinstance(seq.outcome, Finished) and seq.generated == 14 for seq in sequences)
    assert scheduler.preemptions > 0 and scheduler.memory.usage.in_use == 0


def test_late_runs_of_a_preempted_row_are_committed_before_it_is_computed_again() -> None:
    """It waits until no step holds it. Then all of its tokens are uploaded."""
    scheduler, seq = drafting(), sequence(1, max_tokens=20)
    first = began(scheduler, seq)
    second = launched(scheduler, 3)
    scheduler.preempt(seq)
    scheduler.commit(first, result_of([20, 21, 22]))
    assert seq.row >= 0 and not list(scheduler.waiting)
    scheduler.commit(second, result_of([23, 24]))
    assert [*scheduler.waiting] == [seq] and (seq.num_inflight_drafts, seq.min_device_len) == (0, len(seq.tokens))
    scheduler.admit_waiting()
    plan = launched(scheduler, 4)
    assert len(array("i", plan.rows[0].tokens)) + plan.rows[0].start - plan.rows[0].skipped == len(seq.tokens) == 11
    assert plan.num_drafts == 0 and scheduler.audit() == []


@pytest.mark.parametrize("inflight", [1, 2])
def test_an_aborted_row_returns_the_pages_of_its_drafts(inflight: int) -> None:
    """Once no step holds it, whatever the device had accepted."""
    scheduler, seq = drafting(), sequence(1, max_tokens=20)
    plans = [began(scheduler, seq), *[launched(scheduler, step) for step in range(3, 2 + inflight)]]
    scheduler.abort(b"c", 1)
    for plan in plans:
        assert list(scheduler.held) == [seq]
        assert scheduler.commit(plan, result_of([20, 21, 22, 23])).num_tokens == 0
    assert not list(scheduler.held) and scheduler.memory.usage.in_use == 0 and scheduler.audit() == []


@pytest.mark.parametrize("before", [0, 2])
def test_a_row_without_usable_logits_fails_behind_its_right_drafts(before: int) -> None:
    scheduler, seq = drafting(), sequence(1, max_tokens=20)
    updates = scheduler.commit(began(scheduler, seq), result_of([*range(20, 20 + before), NO_TOKEN]))
    assert isinstance(seq.outcome, Failure) and seq.outcome.code is ErrorCode.MODEL_FAILED
    assert sum(len(delta.tokens) for delta in updates.deltas.values()) == before


def test_steps_with_prompts_verify_no_drafts() -> None:
    scheduler = drafting()
    assert began(scheduler, sequence(1, max_tokens=20)).num_drafts == 3
    added(scheduler, sequence(2, max_tokens=20, first=30))
    plan = launched(scheduler, 3)
    assert (plan.num_drafts, plan.max_lead, plan.total_tokens) == (0, 3, 1 + 5)


def test_a_step_with_a_choice_among_all_rows_counts_the_drafts_in_flight() -> None:
    """Such as one with a prompt that is overdue."""
    scheduler, late = drafting(), sequence(2, max_tokens=20, first=30)
    began(scheduler, sequence(1, max_tokens=20))
    added(scheduler, late)
    late.steps_skipped = MAX_STEPS_SKIPPED
    plan = launched(scheduler, 3)
    assert (len(plan.rows), plan.num_drafts, plan.max_lead, plan.total_tokens) == (2, 0, 3, 1 + 5)


def test_a_row_with_a_grammar_gets_one_token_of_a_step_in_which_others_verify_drafts() -> None:
    """Its position stays exact: nothing that it may get is in flight but one token a step."""
    scheduler, seq, other = drafting(), sequence(1, max_tokens=20), sequence(2, max_tokens=20, first=30)
    seq.constraint = FakeConstraint("stops 9")
    plan = began(scheduler, seq, other, token=22)
    assert (plan.num_drafts, plan.needs_mask) == (3, True)
    assert [row.constrained for row in plan.rows] == [True, False]
    masks = scheduler.masks(plan)
    assert [row for row, _ in masks] == [seq.row]
    assert (seq.max_device_len, other.max_device_len) == (seq.min_device_len, other.min_device_len + 3)
    result = StepResult([1, 3], [20, 24, 25, 26], num_drafts=[0, 3])
    assert masked_tokens(plan, result, masks) == [20]
    updates = scheduler.commit(plan, result)
    delta = updates.deltas[b"c"]
    assert (delta.tokens, delta.drafted, delta.drafts) == ([20, 24, 25, 26], [2], [3, 2, 0])
    assert updates.verified == {(3, 2): 1}
    assert (seq.num_scheduled_tokens, seq.drafts.drafted) == (len(seq.tokens) - 1, 0)
    assert launched(scheduler, 3).num_drafts == 3 and scheduler.audit() == []


def test_a_grammar_that_rejects_its_token_ends_its_row_alone() -> None:
    scheduler, seq, other = drafting(), sequence(1, max_tokens=20), sequence(2, max_tokens=20, first=30)
    seq.constraint = FakeConstraint("stops 9")
    plan = began(scheduler, seq, other, token=22)
    scheduler.masks(plan)
    scheduler.commit(plan, StepResult([1, 2], [NO_TOKEN, 24, 25], num_drafts=[0, 3]))
    assert isinstance(seq.outcome, Failure) and other.outcome is None and other.generated == 3


def test_every_token_of_a_run_has_its_own_log_probabilities() -> None:
    """Up to the one that ends the sequence; a row that wants none gets none."""
    scheduler, asked = drafting(), submitted(1, range(5), SamplingParams(20), frozenset({END}), logprobs=0)
    plan = began(scheduler, asked, sequence(2, max_tokens=20, first=30))
    assert (plan.num_drafts, plan.logprobs) == (3, 0)
    later = launched(scheduler, 3)
    records = [array("f", [value]).tobytes() for value in (-0.5, -1.0, -1.5, -2.0, -2.5)]
    run = [20, END, 22]
    result = StepResult([3, 2], [*run, 30, 31], StepLogprobs(0, b"".join(records)), num_drafts=[3, 3])
    assert scheduler.commit(plan, result).deltas[b"c"].logprobs == [TokenLogprobs(1, 6, 0, b"".join(records[:2]))]
    result = StepResult([1, 1], [23, 32], StepLogprobs(0, b"".join(records[:2])), num_drafts=[3, 3])
    updates = scheduler.commit(later, result)
    assert updates.deltas[b"c"].logprobs == []
    assert updates.verified == {(3, 0): 1}, "a sequence that has ended is counted"


def test_a_request_may_ask_for_no_drafts() -> None:
    """The others of its step have theirs."""
    scheduler, asked = drafting(), submitted(1, range(5), SamplingParams(20), speculation=False)
    plan = began(scheduler, asked, sequence(2, max_tokens=20, first=30))
    assert plan.num_drafts == 3 and asked.max_device_len == asked.min_device_len
    assert [seq.drafts.max_drafts for seq in scheduler.held] == [0, 3]
    updates = scheduler.commit(plan, StepResult([1, 2], [20, 24, 25], num_drafts=[0, 3]))
    assert updates.verified == {(3, 1): 1}
    assert scheduler.planner.drafts.choose(list(scheduler.held)) == 3


def test_a_sequence_with_all_its_tokens_in_flight_keeps_no_other_from_its_drafts() -> None:
    scheduler = drafting()
    began(scheduler, sequence(1, max_tokens=2), sequence(2, max_tokens=20, first=30))
    plan = launched(scheduler, 3)
    assert (len(plan.rows), plan.num_drafts) == (1, 3)


def test_work_counts_the_positions_of_drafts_but_not_their_context() -> None:
    scheduler = drafting()
    plan = began(scheduler, sequence(1, max_tokens=20))
    assert StepWork.of(plan.rows, plan.num_drafts) == StepWork(4, 5)
