"""Where sequences of hybrid models begin, what they save, and for whom they wait."""

from typing import Any

import pytest

from tandem.engine_core.errors import ErrorCode
from tandem.engine_core.kv_cache.states import StateCache
from tandem.engine_core.plan import StepPlan
from tandem.engine_core.scheduler.scheduler import Scheduler
from tandem.engine_core.scheduler.step_costs import AttentionShare, StepCosts
from tandem.engine_core.sequence import Sequence
from tandem.engine_core.weight_version import WeightVersion
from tandem.protocol.errors import FinishReason
from tandem.protocol.events import Failure, Finished
from tandem.protocol.params import SamplingParams
from tests.support.scheduling import added, commit, launched, new, run, submitted


def scheduler(slots: int = 20, **fields: Any) -> Scheduler:
    usual: dict[str, Any] = {"pages": 400, "step": 512, "chunk": 512, "page_size": 16}
    return new(**usual | fields, state_slots=slots)


def states(found: Scheduler) -> StateCache:
    assert found.memory.states is not None
    return found.memory.states


def request(number: int, *tokens: int, max_tokens: int = 2, **fields: Any) -> Sequence:
    """Build a sequence whose prompt counts up from each number: (first, length) pairs."""
    prompt = [first + index for first, length in zip(tokens[::2], tokens[1::2], strict=True) for index in range(length)]
    return submitted(number, prompt, SamplingParams(max_tokens), **fields)


def chunks(found: Scheduler, seq: Sequence) -> list[StepPlan]:
    """Compute a prompt; return its steps."""
    added(found, seq)
    plans = []
    while seq.num_scheduled_tokens < seq.prompt_len:
        plans.append(launched(found, len(plans) + 100 * seq.id))
        commit(found, plans[-1], [5] * len(plans[-1].rows))
    return plans


def positions(found: Scheduler, seq: Sequence) -> list[int]:
    """Return the positions of the checkpoints on the path of a sequence."""
    return [16 * (index + 1) for index, node in enumerate(seq.cache.nodes) if node in states(found).slots]


def test_a_save_is_part_of_the_next_step_and_a_load_of_the_first_with_its_row() -> None:
    found = scheduler()
    first, second = request(1, 10, 40, max_tokens=1), request(2, 10, 50)
    added(found, first)
    plan = launched(found, 1)
    assert (plan.saves, plan.loads) == ((), ())
    row = first.row
    commit(found, plan, [5])
    assert first.outcome is not None and not list(found.held), "its row is free before the save is executed"
    added(found, second)
    assert second.num_scheduled_tokens == 32
    plan = launched(found, 2)
    (save,), (load,) = plan.saves, plan.loads
    assert (save.row, save.position) == (row, 32)
    assert (load.row, load.position, load.slot) == (second.row, 32, save.slot)
    commit(found, plan, [5])
    plan = launched(found, 3)
    assert not plan.loads
    assert [save.position for save in plan.saves] == [48]


def test_a_plan_that_is_not_launched_keeps_its_copies() -> None:
    found = scheduler()
    run(found, request(1, 10, 40, max_tokens=1))
    added(found, request(2, 10, 60))
    plans = [found.plan_step(step) for step in (5, 6)]
    assert plans[0] is not None
    assert plans[1] is not None
    assert plans[0].saves == plans[1].saves != ()
    assert plans[0].loads == plans[1].loads != ()


def test_a_slot_is_locked_until_its_load_is_launched() -> None:
    found = scheduler(slots=1)
    run(found, request(1, 10, 40, max_tokens=1))
    follower = request(2, 10, 90, max_tokens=20)
    added(found, follower)
    slots = states(found).slots
    assert slots.acquire(-999, 10**6) is None
    commit(found, launched(found, 5), [5])
    assert slots.acquire(-999, 10**6) is not None


def test_a_prompt_is_cut_where_pages_match_further_than_checkpoints() -> None:
    found = scheduler()
    chunks(found, request(1, 10, 200, 900, 50))
    second = request(2, 10, 200, 700, 150)
    plans = chunks(found, second)
    assert [plan.rows[-1].end for plan in plans] == [192, 350]
    assert positions(found, second) == [176, 336]
    third = request(3, 10, 200, 500, 150)
    added(found, third)
    assert third.num_scheduled_tokens == 176


@pytest.mark.parametrize(("length", "ends", "saved"), [
    (400, [400], [384]),  # 16 tokens behind the last boundary
    (393, [393], [384]),
    (392, [384, 392], [368, 384]),
    (385, [384, 385], [368, 384]),
    (200, [200], [192]),  # too short to be cut
])  # fmt: skip
def test_a_long_prompt_that_ends_near_a_boundary_is_cut_before(length: int, ends: list[int], saved: list[int]) -> None:
    """The next turn may lack the last tokens: then the checkpoint before is used."""
    found = scheduler()
    seq = request(1, 10, length)
    assert [plan.rows[-1].end for plan in chunks(found, seq)] == ends
    assert positions(found, seq) == saved
    follower = request(2, 10, length - 3, 900, 60)
    added(found, follower)
    assert follower.num_scheduled_tokens == max([one for one in saved if one <= length - 3])


def test_an_equal_prompt_whose_checkpoint_is_there_saves_none() -> None:
    found = scheduler()
    run(found, request(1, 10, 100, max_tokens=1))
    again = request(2, 10, 100)
    copies = [save for plan in chunks(found, again) for save in plan.saves]
    assert [copy.position for copy in copies] == [96], "of the first"
    run(found, request(3, 700, 20, max_tokens=1), first_step=900)
    assert states(found).slots.used == 2


def test_a_prompt_waits_for_the_checkpoint_of_another_and_no_longer() -> None:
    found = scheduler(step=64, chunk=64)
    first = request(1, 10, 300)
    added(found, first)
    launched(found, 1)
    same, longer = request(2, 10, 300), request(3, 10, 330)
    other, lower = request(4, 10, 200, 900, 100), request(5, 700, 100)
    added(found, same, longer, other, lower)
    assert same.row == longer.row == -1
    assert other.row > 0, "it shares pages, but no checkpoint that is to be saved"
    assert lower.row > 0
    assert found.memory.follows(same)
    found.abort(b"c", 1)
    found.admit_waiting()
    assert same.row == -1, "now it waits for the checkpoint that another saves where their pages match no further"
    for step in (2, 3):
        launched(found, step)
    found.admit_waiting()
    assert same.num_scheduled_tokens == 48
    assert longer.row == -1, "and this one for the checkpoint of the former"


def test_a_prompt_waits_for_none_of_lower_priority() -> None:
    found = scheduler(step=64, chunk=64, policy="priority")
    first = request(1, 10, 300)
    added(found, first)
    launched(found, 1)
    higher = request(2, 10, 300, priority=4)
    added(found, higher)
    assert higher.row > 0


def test_prompts_of_different_salts_share_no_checkpoint() -> None:
    found = scheduler()
    run(found, request(1, 10, 100, cache_salt="a"))
    second, third = request(2, 10, 100, cache_salt="b"), request(3, 10, 100, cache_salt="a")
    added(found, second, third)
    assert (second.num_scheduled_tokens, third.num_scheduled_tokens) == (0, 96)


def test_a_failed_model_leaves_no_checkpoint_on_its_path() -> None:
    found = scheduler()
    run(found, request(1, 10, 100))
    broken = request(2, 10, 150, max_tokens=5)
    added(found, broken)
    assert broken.num_scheduled_tokens == 96
    commit(found, launched(found, 500), [5])
    found.end(broken, Failure(2, ErrorCode.MODEL_FAILED, "NaN"))
    assert not states(found).slots.used
    assert found.audit() == []


def test_a_failed_model_leaves_the_checkpoint_that_another_is_about_to_load() -> None:
    found = scheduler()
    run(found, request(1, 10, 100))
    broken, other = request(2, 10, 150), request(3, 10, 120)
    added(found, broken)
    commit(found, launched(found, 500), [5])
    added(found, other)
    found.end(broken, Failure(2, ErrorCode.MODEL_FAILED, "NaN"))
    assert found.audit() == []
    assert states(found).slots.used == 1
    plan = launched(found, 501)
    assert [load.row for load in plan.loads] == [other.row]
    assert found.audit() == []


def test_a_row_whose_load_is_not_launched_saves_nothing() -> None:
    """It still has the state of the sequence before."""
    found = scheduler()
    run(found, request(1, 10, 100))
    second = request(2, 10, 150)
    used = states(found).slots.used
    added(found, second)
    found.end(second, Finished(2, FinishReason.ABORT))
    assert states(found).slots.used == used
    third = request(3, 10, 100)
    added(found, third)
    found.preempt(third)
    assert third.cache.restart == 0
    assert states(found).slots.used == used
    assert found.audit() == []


def test_a_preempted_prompt_has_a_checkpoint_for_itself() -> None:
    found = scheduler(step=128, chunk=128)
    seq = request(1, 10, 300)
    added(found, seq)
    commit(found, launched(found, 1), [5])
    found.preempt(seq)
    assert seq.cache.restart == 112
    other = request(2, 10, 200, 900, 10)
    added(found, other)
    assert other.num_scheduled_tokens == 0, "it is not shared"
    assert seq.num_scheduled_tokens == 112
    plan = launched(found, 2)
    assert [load.position for load in plan.loads] == [112]
    assert [save.position for save in plan.saves] == [112]
    assert found.audit() == []


def test_a_preempted_sequence_shares_the_checkpoint_that_its_path_has() -> None:
    found = scheduler()
    seq = request(1, 10, 100, max_tokens=9)
    chunks(found, seq)
    found.preempt(seq)
    assert (seq.cache.restart, states(found).slots.used) == (0, 1)
    found.admit_waiting()
    assert seq.num_scheduled_tokens == 96
    assert found.audit() == []


def test_a_preempted_sequence_that_is_aborted_leaves_no_checkpoint() -> None:
    found = scheduler(step=128, chunk=128)
    seq = request(1, 10, 300)
    added(found, seq)
    commit(found, launched(found, 1), [5])
    found.preempt(seq)
    assert states(found).slots.used == 1
    found.abort(b"c", 1)
    assert states(found).slots.used == 0
    assert found.audit() == []


def test_without_slots_every_prompt_is_computed_whole() -> None:
    found = scheduler(slots=0)
    for number in (1, 2):
        seq = request(number, 10, 100)
        run(found, seq, first_step=100 * number)
        assert seq.cache.num_cached_tokens == 0


def test_a_long_conversation_keeps_a_late_checkpoint_between_single_requests() -> None:
    """When those before it are given up, it saves all tokens, not only those of the last turn."""
    found, step, computed = scheduler(slots=8, pages=1500), 1, []
    for turn in range(1, 25):
        talk = request(100 * turn, 10, 64 * turn)
        step = run(found, talk, first_step=step)
        computed.append(talk.prompt_len - talk.cache.num_cached_tokens)
        singles = [request(100 * turn + number, 10_000 * turn + 1000 * number, 200) for number in range(1, 7)]
        for single in singles:
            step = run(found, single, first_step=step)
    assert max(computed[8:]) <= 2 * 64 + 16
    assert found.audit() == []


def test_without_slots_equal_prompts_do_not_wait_and_are_not_cut() -> None:
    """No checkpoint will ever be saved for the second."""
    found = scheduler(slots=0)
    assert [plan.rows[-1].end for plan in chunks(found, request(1, 10, 392))] == [392]
    pair = [request(number, 900, 392) for number in (2, 3)]
    added(found, *pair)
    assert [seq.row > 0 for seq in pair] == [True, True]
    assert found.audit() == []


def test_a_prompt_does_not_wait_for_one_that_has_more_to_compute() -> None:
    """A prompt with log-probabilities is computed from its first token on, whatever the cache holds."""
    found = scheduler(step=128, chunk=128)
    run(found, request(1, 10, 300))
    first = submitted(2, range(10, 410), SamplingParams(2), prompt_logprobs=0)
    second, third = request(3, 10, 400), request(4, 10, 400)
    added(found, first)
    assert first.num_scheduled_tokens == 0
    added(found, second)
    assert second.num_scheduled_tokens == 288, "it has 112 tokens to compute, the first one 400"
    added(found, third)
    assert third.row == -1, "it waits for the second, which has got as far as it could begin"
    assert third.cache.awaited_state == (3, 384)


def test_a_prompt_that_waits_begins_at_a_checkpoint_that_leaves_it_less_to_compute() -> None:
    found = scheduler(step=64, chunk=64, policy="priority")
    first, second, other = request(1, 10, 2000), request(2, 10, 2000), request(3, 10, 300, 5000, 1, priority=4)
    added(found, first)
    launched(found, 1)
    added(found, second, other)
    assert (second.row, first.num_scheduled_tokens) == (-1, 64)
    step = 2
    while other.num_scheduled_tokens < 300:
        launched(found, step)
        step += 1
    found.admit_waiting()
    assert second.num_scheduled_tokens == 288 > first.num_scheduled_tokens
    assert found.audit() == []


def test_steps_with_copies_compute_fewer_positions_of_prompts() -> None:
    table = {(1, 0): 1.0, (4, 0): 1.0} | {(rows, size): size / 64 for rows in (0, 1, 4) for size in (64, 128, 256, 512)}
    lengths = []
    for copy_ms in (0.0, 3.0):
        costs = StepCosts(table, AttentionShare(), copy_ms)
        found = scheduler(max_itl=8.0, costs=costs)
        chunks(found, request(1, 10, 40, max_tokens=20))
        assert states(found).num_copies == 1, "the checkpoint of its prompt"
        added(found, request(2, 900, 512))
        plan = launched(found, 500)
        assert [row.length for row in plan.steady_rows] == [1]
        lengths.append(plan.other_rows[-1].length)
        assert states(found).num_copies == 0
    assert lengths == [448, 256]


def test_a_prompt_whose_weights_change_is_cut_no_more_and_saves_nothing() -> None:
    """It goes on with the state that it has; others do not wait for its checkpoints."""
    found = scheduler(step=128, chunk=128)
    first = request(1, 10, 392)
    added(found, first)
    commit(found, launched(found, 1), [5])
    assert first.cache.cuts == [384]
    found.change_weights(WeightVersion(1, "new"), keeps_rows=True)
    second = request(2, 10, 392)
    added(found, second)
    assert (second.row > 0, second.num_scheduled_tokens) == (True, 0)
    assert first.cache.cuts == [] and second.cache.cuts == [384]
    step = 2
    while found.num_open:
        plan = launched(found, step)
        commit(found, plan, [5] * len(plan.rows))
        step += 1
        assert step < 50
    assert first.generated == second.generated == 2
    third = request(3, 10, 392)
    added(found, third)
    assert third.num_scheduled_tokens == 384, "from the second's checkpoint"
    assert found.audit() == []
