"""Constrained sequences: compilation, rejected tokens and completion, and the tokens that a grammar forces."""

from array import array

import pytest

from tandem.engine_core.contracts import NO_TOKEN
from tandem.engine_core.errors import RequestError
from tandem.engine_core.plan import StepPlan
from tandem.engine_core.scheduler.admission import RowGate
from tandem.engine_core.scheduler.commit import SchedulerUpdates
from tandem.engine_core.scheduler.planner import SchedulerLimits
from tandem.engine_core.scheduler.scheduler import Scheduler
from tandem.engine_core.sequence import Sequence
from tandem.protocol.errors import ErrorCode, FinishReason
from tandem.protocol.events import Failure, Finished, Started
from tandem.protocol.params import SamplingParams
from tests.fakes.constraint import FakeConstraint
from tests.fakes.model import END
from tests.support.kv_pool import kv_memory
from tests.support.scheduling import commit, submitted

PROMPT = [10, 11, 12]


def new(rows: int = 4, step: int = 16, waiting: int = 50) -> Scheduler:
    limits = SchedulerLimits(step, step, waiting)
    return Scheduler(RowGate(rows), kv_memory(60), limits)


def sequence(
    number: int, grammar: str | None = None, max_tokens: int = 10, min_tokens: int = 0, logprobs: int | None = None
) -> Sequence:
    """Build a sequence whose grammar is compiled already, unless it is called "later"."""
    params = SamplingParams(max_tokens, min_tokens=min_tokens)
    seq = submitted(number, PROMPT, params, frozenset({END}), constraint=grammar, logprobs=logprobs)
    if grammar not in (None, "later"):
        seq.constraint, seq.compiling = FakeConstraint(grammar), False
    return seq


def sent(updates: SchedulerUpdates) -> list[int]:
    """Return the tokens of all frontends."""
    return [token for delta in updates.deltas.values() for token in delta.tokens]


def began(seq: Sequence, scheduler: Scheduler | None = None) -> tuple[Scheduler, list[int]]:
    """Return a scheduler that runs the sequence, and the tokens that its grammar forced at once."""
    scheduler = scheduler or new()
    scheduler.add(seq)
    scheduler.admit_waiting()
    return scheduler, sent(scheduler.take_updates())


def step(scheduler: Scheduler, step_id: int, *tokens: int) -> list[int]:
    """Launch a step and commit it; return the tokens that were sent."""
    plan = scheduler.plan_step(step_id)
    assert plan is not None
    scheduler.on_launch(plan)
    return sent(commit(scheduler, plan, list(tokens)))


def launched(scheduler: Scheduler, *step_ids: int) -> list[StepPlan]:
    """Launch steps one after the other, none of which is committed."""
    plans = []
    for step_id in step_ids:
        plan = scheduler.plan_step(step_id)
        assert plan is not None
        scheduler.on_launch(plan)
        plans.append(plan)
    return plans


class TestCompiling:
    def test_compiling_sequence_blocks_no_other_and_keeps_its_position(self) -> None:
        scheduler = new(rows=1)
        for number, grammar in enumerate([None, None, "later", None]):
            scheduler.add(sequence(number, grammar))
        assert [seq.id for seq in scheduler.admit_waiting()] == [0]
        assert [seq.id for seq in scheduler.waiting] == [1, 3]
        constraint = FakeConstraint("parity")
        scheduler.set_constraint(2, constraint)
        assert [seq.id for seq in scheduler.waiting] == [1, 2, 3]
        assert list(scheduler.waiting)[1].constraint is constraint
        assert not scheduler.compiling

    def test_failed_compilation_ends_only_its_request(self) -> None:
        scheduler = new()
        scheduler.add(sequence(1, "later"))
        scheduler.add(sequence(2))
        scheduler.set_constraint(1, RequestError(ErrorCode.OVERLOADED, "no", retry_after=10))
        assert [seq.outcome for seq in scheduler.take_updates().ended] == [Failure(1, ErrorCode.OVERLOADED, "no", 10)]
        assert scheduler.num_open == 1
        assert not scheduler.compiling

    def test_result_for_an_aborted_sequence_is_ignored(self) -> None:
        scheduler = new()
        scheduler.add(sequence(1, "later"))
        scheduler.abort(b"c", 1)
        assert [seq.outcome for seq in scheduler.take_updates().ended] == [Finished(1, FinishReason.ABORT)]
        scheduler.set_constraint(1, FakeConstraint("parity"))
        scheduler.set_constraint(1, RequestError(ErrorCode.INVALID_GRAMMAR, "no"))
        assert scheduler.num_open == 0
        assert not scheduler.waiting
        assert scheduler.take_updates().ended == []

    def test_shutdown_ends_compiling_sequences(self) -> None:
        scheduler = new()
        scheduler.add(sequence(1, "later"))
        scheduler.fail_all(ErrorCode.SHUTTING_DOWN, "bye")
        assert [seq.outcome for seq in scheduler.take_updates().ended] == [Failure(1, ErrorCode.SHUTTING_DOWN, "bye")]
        assert not scheduler.compiling

    def test_compiling_sequences_count_as_waiting(self) -> None:
        scheduler = new(rows=1, waiting=2)
        for number in range(3):
            scheduler.add(sequence(number, "later"))
        with pytest.raises(RequestError, match=r"\b3 requests\b"):
            scheduler.add(sequence(4))


class TestStepsWithPrompts:
    def test_tokens_ends_and_chunks_of_one_step_are_committed_alike(self) -> None:
        """The step holds a token, the end of a sequence, and a chunk of a prompt that is not sampled from."""
        scheduler = new(step=9)
        one, two = sequence(1, max_tokens=3), sequence(2)
        began(one, scheduler)
        began(two, scheduler)
        assert step(scheduler, 1, 20, 21) == [20, 21]
        long = submitted(3, list(range(10, 30)), SamplingParams(10), frozenset({END}))
        began(long, scheduler)
        (plan,) = launched(scheduler, 2)
        assert [row.seq_id for row in plan.chunk_rows] == [3] and plan.is_unconstrained
        updates = commit(scheduler, plan, [22, END, 0])
        assert sent(updates) == [22, END] and [seq.id for seq in updates.ended] == [2]
        assert (one.inflight, long.inflight, one.num_inflight_samples) == (0, 0, 0)
        assert step(scheduler, 3, 23, 0) == [23]
        assert list(one.tokens) == [*PROMPT, 20, 22, 23] and one.outcome is not None

    def test_a_chunk_of_an_aborted_prompt_gives_back_its_row(self) -> None:
        scheduler = new(step=9)
        began(sequence(1), scheduler)
        step(scheduler, 1, 20)
        long = submitted(2, list(range(10, 30)), SamplingParams(10), frozenset({END}))
        began(long, scheduler)
        (plan,) = launched(scheduler, 2)
        scheduler.abort(long.client, long.request_id)
        free = scheduler.rows.free
        updates = commit(scheduler, plan, [21, 0])
        assert updates.num_zombies == 1 and scheduler.rows.free == free + 1


class TestVerdicts:
    def test_rejected_token_ends_only_its_request_and_is_not_sent(self) -> None:
        scheduler, _ = began(one := sequence(1, "breaks 1"))
        began(other := sequence(2, "parity"), scheduler)
        assert step(scheduler, 1, 20, 30) == [20, 30]
        assert step(scheduler, 2, 21, 31) == [31]
        message = "the grammar cannot be followed any further after 1 tokens: 21 cannot follow 1 tokens"
        assert one.outcome == Failure(1, ErrorCode.GRAMMAR_FAILED, message)
        assert other.outcome is None

    def test_complete_grammar_stops_despite_min_tokens(self) -> None:
        scheduler, _ = began(seq := sequence(1, "stops 2", min_tokens=9))
        step(scheduler, 1, 20)
        assert seq.outcome is None
        assert step(scheduler, 2, 21) == [21]
        assert seq.outcome == Finished(1, FinishReason.STOP)

    def test_grammar_complete_at_the_length_limit_is_a_stop(self) -> None:
        scheduler, _ = began(seq := sequence(1, "stops 1", max_tokens=1))
        step(scheduler, 1, 20)
        assert seq.outcome == Finished(1, FinishReason.STOP)

    def test_end_id_allowed_by_the_grammar_stops(self) -> None:
        scheduler, _ = began(seq := sequence(1, "parity"))
        assert step(scheduler, 1, END) == [END]
        assert seq.outcome == Finished(1, FinishReason.STOP, END)

    def test_constrained_sequence_ends_at_its_length_limit(self) -> None:
        scheduler, _ = began(seq := sequence(1, "parity", max_tokens=1))
        step(scheduler, 1, 20)
        assert seq.outcome == Finished(1, FinishReason.LENGTH)

    def test_zombie_needs_no_mask_and_advances_no_constraint(self) -> None:
        scheduler, _ = began(seq := sequence(1, "parity"))
        plan = scheduler.plan_step(1)
        assert plan is not None
        scheduler.on_launch(plan)
        scheduler.abort(b"c", 1)
        assert scheduler.masks(plan) == []
        assert commit(scheduler, plan, [21]).num_zombies == 1
        assert seq.constraint is not None
        assert seq.constraint.problem == ""


class TestJumps:
    """Under "runs", 3 is followed by 5 8 11 14 (3 * 1 to 4, and 2), 12 by 14, 21 by 23 6 and the end."""

    def test_forced_tokens_follow_the_sampled_one_and_form_one_row(self) -> None:
        scheduler, _ = began(seq := sequence(1, "runs"))
        assert step(scheduler, 1, 3) == [3, 5, 8, 11, 14]
        plan = scheduler.plan_step(2)
        assert plan is not None
        (row,) = plan.rows
        assert (row.start, row.length, row.samples, row.constrained) == (3, 5, True, True)
        assert array("i", row.tokens).tolist() == [3, 5, 8, 11, 14]
        assert not plan.is_unconstrained_decode
        assert step(scheduler, 2, 20) == [20]
        plan = scheduler.plan_step(3)
        assert plan is not None
        assert (plan.rows[0].start, plan.rows[0].length, plan.rows[0].tokens) == (8, 1, b"")
        assert list(seq.tokens) == [*PROMPT, 3, 5, 8, 11, 14, 20]

    def test_long_jump_is_computed_in_chunks(self) -> None:
        scheduler, _ = began(sequence(1, "runs"), new(step=3))
        assert step(scheduler, 1, 3) == [3, 5, 8, 11, 14]
        lengths = []
        for step_id in (2, 3):
            plan = scheduler.plan_step(step_id)
            assert plan is not None
            scheduler.on_launch(plan)
            lengths.append([(row.start, array("i", row.tokens).tolist(), row.samples) for row in plan.rows])
            assert commit(scheduler, plan, [20]).num_tokens == int(plan.rows[0].samples)
        assert lengths == [[(3, [3, 5, 8], False)], [(6, [11, 14], True)]]

    @pytest.mark.parametrize(("others", "jumped"), [(3, [5, 8, 11, 14]), (15, [5, 8, 11, 14]), (16, [])])
    def test_few_forced_tokens_do_not_end_the_steady_decode_of_many_rows(self, others: int, jumped: list[int]) -> None:
        """Four tokens are worth a step of another kind to 16 rows; to 17 it is decoded one by one."""
        scheduler = new(rows=20, step=80)
        for number in range(2, 2 + others):
            began(sequence(number), scheduler)
        began(sequence(1, "runs"), scheduler)
        assert step(scheduler, 1, *[20] * others, 20) == [20] * (others + 1)
        assert step(scheduler, 2, *[20] * others, 3) == [*[20] * others, 3, *jumped]
        plan = scheduler.plan_step(3)
        assert plan is not None
        assert plan.is_decode_only is (not jumped)

    def test_forced_tokens_join_a_step_that_computes_prompts_anyway(self) -> None:
        scheduler = new(rows=20, step=80)
        for number in range(2, 18):
            began(sequence(number), scheduler)
        began(sequence(1, "runs"), scheduler)
        assert step(scheduler, 1, *[20] * 17) == [20] * 17
        plans = launched(scheduler, 2)
        began(sequence(30), scheduler)
        assert sent(commit(scheduler, plans[0], [*[20] * 16, 3])) == [*[20] * 16, 3, 5, 8, 11, 14]

    def test_tokens_forced_at_the_beginning_are_computed_with_the_prompt(self) -> None:
        scheduler, forced = began(seq := sequence(1, "runs 2"))
        assert forced == [2, 9]
        plan = scheduler.plan_step(1)
        assert plan is not None
        (row,) = plan.rows
        assert (row.start, row.length, array("i", row.tokens).tolist()) == (0, 5, [*PROMPT, 2, 9])
        assert [admission.prompt_len for admission in plan.admitted] == [3]
        assert seq.generated == 2

    def test_forced_tokens_count_against_the_length_limit(self) -> None:
        scheduler, forced = began(seq := sequence(1, "runs 9", max_tokens=4))
        assert len(forced) == 4
        assert seq.outcome == Finished(1, FinishReason.LENGTH)
        assert scheduler.memory.usage.in_use == 0
        assert scheduler.plan_step(1) is None

    def test_preempted_sequence_uploads_forced_tokens_again(self) -> None:
        scheduler, forced = began(seq := sequence(1, "runs 2"))
        assert step(scheduler, 1, 4) == [4]
        scheduler.preempt(seq)
        assert [moved.id for moved in scheduler.admit_waiting()] == [1]
        assert sent(scheduler.take_updates()) == []
        plan = scheduler.plan_step(2)
        assert plan is not None
        (row,) = plan.rows
        assert (row.constrained, row.samples) == (True, True)
        assert (row.start, row.length, row.skipped) == (4, 2, 4), "the first page stayed in the cache"
        assert array("i", row.tokens).tolist() == [*PROMPT, *forced, 4]

    def test_start_is_reported_with_the_first_forced_tokens(self) -> None:
        prompt, params, ends = [*PROMPT, 13, 14], SamplingParams(9), frozenset({END})
        scheduler = new()
        scheduler.add(submitted(1, prompt, params, ends))
        scheduler.admit_waiting()
        step(scheduler, 1, END)
        again = submitted(2, prompt, params, ends)
        again.constraint = FakeConstraint("runs 2")
        scheduler.add(again)
        scheduler.admit_waiting()
        updates = scheduler.take_updates()
        assert (updates.started, sent(updates)) == ([(b"c", Started(2, 4))], [2, 9])
        plan = scheduler.plan_step(2)
        assert plan is not None
        scheduler.on_launch(plan)
        updates = commit(scheduler, plan, [4])
        assert (updates.started, sent(updates)) == ([], [4])

    def test_forced_end_id_ends_the_sequence(self) -> None:
        scheduler, _ = began(seq := sequence(1, "runs"))
        assert step(scheduler, 1, 21) == [21, 23, 6, END]
        assert seq.outcome == Finished(1, FinishReason.STOP, END)

    def test_end_id_is_not_forced_before_min_tokens(self) -> None:
        scheduler, _ = began(seq := sequence(1, "runs", min_tokens=5))
        assert step(scheduler, 1, 21) == [21, 23, 6]
        assert seq.outcome is None
        assert step(scheduler, 2, 0) == []
        assert isinstance(seq.outcome, Failure), "nothing was left to sample"

    def test_forced_tokens_replace_the_sample_in_flight(self) -> None:
        """Step 2 computed 3, so step 3 begins with the first forced token, and what step 2 samples is dropped."""
        scheduler, _ = began(seq := sequence(1, "runs"))
        plans = launched(scheduler, 1, 2)
        masks = scheduler.masks(plans[1])
        assert len(masks) == 1 and scheduler.masks(plans[1]) is masks
        assert sent(commit(scheduler, plans[0], [3])) == [3, 5, 8, 11, 14]
        assert len(masks) == 1, "what was given out stays as it is"
        assert scheduler.masks(plans[1]) == [], "its token is known"
        plans += launched(scheduler, 3)
        (row,) = plans[2].rows
        assert (row.start, row.length, row.samples) == (4, 4, True)
        assert array("i", row.tokens).tolist() == [5, 8, 11, 14]
        assert sent(commit(scheduler, plans[1], [29])) == []
        assert len(scheduler.masks(plans[2])) == 1
        assert sent(commit(scheduler, plans[2], [20])) == [20]
        assert list(seq.tokens) == [*PROMPT, 3, 5, 8, 11, 14, 20]
        assert (seq.inflight, seq.num_inflight_samples, seq.pending) == (0, 0, 1)

    def test_forced_end_drops_the_sample_in_flight(self) -> None:
        scheduler, _ = began(seq := sequence(1, "runs"))
        plans = launched(scheduler, 1, 2)
        assert sent(commit(scheduler, plans[0], [21])) == [21, 23, 6, END]
        assert seq.outcome == Finished(1, FinishReason.STOP, END)
        assert sent(commit(scheduler, plans[1], [29])) == []
        assert not list(scheduler.held) and scheduler.audit() == []

    def test_preempted_sequence_keeps_what_was_forced_while_in_flight(self) -> None:
        scheduler, _ = began(seq := sequence(1, "runs"))
        plans = launched(scheduler, 1, 2)
        scheduler.preempt(seq)
        assert sent(commit(scheduler, plans[0], [3])) == [3, 5, 8, 11, 14]
        assert sent(commit(scheduler, plans[1], [29])) == []
        assert [moved.id for moved in scheduler.admit_waiting()] == [1]
        assert list(seq.tokens) == [*PROMPT, 3, 5, 8, 11, 14]
        assert step(scheduler, 3, 20) == [20]

    def test_broken_logits_of_a_dropped_sample_end_the_request(self) -> None:
        scheduler, _ = began(seq := sequence(1, "runs"))
        plans = launched(scheduler, 1, 2)
        commit(scheduler, plans[0], [3])
        commit(scheduler, plans[1], [NO_TOKEN])
        assert isinstance(seq.outcome, Failure) and seq.outcome.code is ErrorCode.MODEL_FAILED

    def test_one_forced_token_is_left_to_the_sample_in_flight(self) -> None:
        scheduler, _ = began(seq := sequence(1, "runs"))
        plans = launched(scheduler, 1, 2)
        assert commit(scheduler, plans[0], [12]).deltas[b"c"].tokens == [12]
        assert seq.constraint is not None
        assert seq.constraint.fast_forward_tokens() == [14]
        assert commit(scheduler, plans[1], [14]).deltas[b"c"].tokens == [14]

    def test_no_jump_where_log_probabilities_are_wanted(self) -> None:
        scheduler, forced = began(sequence(1, "runs 2", logprobs=0))
        assert forced == []
        assert step(scheduler, 1, 2) == [2]

    def test_rejected_forced_token_ends_the_request(self) -> None:
        class Liar(FakeConstraint):
            def fast_forward_tokens(self) -> list[int]:
                return [4, 5]

        seq = sequence(1)
        seq.constraint = Liar("breaks 1")
        _, forced = began(seq)
        assert forced == [], "nothing is appended of a run that is rejected"
        assert isinstance(seq.outcome, Failure)
        assert seq.outcome.code is ErrorCode.GRAMMAR_FAILED
