"""Policies by table and by property: positions of each row, and no starvation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.engine_core.scheduler.policy import DECODE_RUN, MAX_STEPS_SKIPPED, POLICIES, Budget, RowDemand, choose_rows
from tandem.protocol.engine_options import POLICIES as NAMES
from tandem.protocol.engine_options import Policy


def choose(
    policy: Policy,
    pending: list[int],
    budget: Budget,
    skipped: list[int] | None = None,
    priority: list[int] | None = None,
) -> list[int]:
    zeros = [0] * len(pending)
    return choose_rows(POLICIES[policy], RowDemand(pending, skipped or zeros, priority or zeros), budget)


FCFS = [
    ("nobody", [], Budget(8, 8), []),
    ("all decode", [1, 1, 1], Budget(8, 8), [1, 1, 1]),
    ("a prompt that fits", [5], Budget(8, 8), [5]),
    ("a prompt larger than the budget", [20], Budget(8, 8), [8]),
    ("a prompt larger than a chunk", [20, 1], Budget(8, 3), [3, 1]),
    ("a prompt larger than a chunk, and nobody decodes", [20], Budget(8, 3), [8]),
    ("decode before a prompt that came first", [20, 1, 1], Budget(8, 8), [6, 1, 1]),
    ("prompts in order", [6, 6, 6], Budget(8, 8), [6, 2, 0]),
    ("two chunks in one step", [20, 1, 20], Budget(8, 3), [3, 1, 3]),
    ("a quarter for the next one", [20, 20], Budget(8, 3), [6, 2]),
    ("a quarter for the shortest", [50, 20, 30, 10], Budget(16, 16), [12, 0, 0, 4]),
    ("a quarter for all that fit it", [50, 20, 2, 3], Budget(20, 20), [15, 0, 2, 3]),
    ("what the shortest leave goes to the first", [50, 2], Budget(20, 20), [18, 2]),
    ("what the first leaves goes on in order", [7, 20, 2, 3], Budget(13, 3), [7, 3, 2, 1]),
    ("a quarter of what prompts may take", [50, 20, 1], Budget(40, 40, prompt_tokens=8), [6, 2, 1]),
    ("no more than prompts may take", [50, 1, 1], Budget(40, 40, prompt_tokens=8), [8, 1, 1]),
    ("chunks below what prompts may take", [50, 50, 50, 1], Budget(40, 4, prompt_tokens=10), [4, 4, 2, 1]),
    ("no limit for whole prompts", [5, 1, 4], Budget(12, 0, prompt_tokens=2), [5, 1, 4]),
    ("one chunk in one step", [20, 20, 1], Budget(8, 3, prompts=1), [3, 0, 1]),
    ("one chunk, and nobody decodes", [20, 20], Budget(8, 3, prompts=1), [8, 0]),
    ("a cap on prompts does not touch decode", [20, 20, 1], Budget(8, 3, prompts=1), [3, 0, 1]),
    ("budget for decode only", [20, 1, 1], Budget(2, 2), [0, 1, 1]),
    ("fewer places than decoding rows", [1, 1, 1], Budget(2, 2), [1, 1, 0]),
    ("whole prompts", [5, 1, 4], Budget(12, 0), [5, 1, 4]),
    ("no part of a whole prompt", [9, 1, 1], Budget(8, 0), [0, 1, 1]),
    ("no shorter one before it", [4, 9, 2, 1], Budget(8, 0), [4, 0, 0, 1]),
]


@pytest.mark.parametrize(("name", "pending", "budget", "lengths"), FCFS, ids=[row[0] for row in FCFS])
def test_fcfs_serves_decoding_rows_first(name: str, pending: list[int], budget: Budget, lengths: list[int]) -> None:
    assert choose("fcfs", pending, budget) == lengths, name


def test_prefill_first_serves_prompts_before_decoding_rows() -> None:
    assert choose("prefill_first", [1, 6, 1, 6], Budget(9, 9)) == [0, 6, 0, 3]
    assert choose("prefill_first", [1, 6, 1], Budget(9, 9)) == [1, 6, 1]
    assert choose("prefill_first", [1, 6, 1], Budget(9, 9), skipped=[MAX_STEPS_SKIPPED - 1, 0, 0]) == [1, 6, 1]
    assert choose("prefill_first", [1, 20, 1], Budget(9, 9), skipped=[MAX_STEPS_SKIPPED - 1, 0, 0]) == [1, 8, 0]


def test_decode_first_runs_prompts_together_and_rarely() -> None:
    assert choose("decode_first", [1, 6, 6, 1], Budget(20, 9)) == [1, 0, 0, 1], "a step without prompts"
    assert choose("decode_first", [6, 6], Budget(20, 9)) == [6, 6], "nothing decodes"
    assert choose("decode_first", [1, 6, 6], Budget(20, 9), skipped=[0, 0, DECODE_RUN]) == [1, 6, 6], "all together"


def test_decode_round_robin_shares_the_step_in_halves() -> None:
    assert choose("decode_round_robin", [1, 1, 9], Budget(20, 9)) == [1, 1, 9]
    lengths = choose("decode_round_robin", [1, 1, 1, 1, 9], Budget(4, 9), skipped=[0, 1, 0, 1, 0])
    assert lengths == [0, 1, 0, 1, 2], "half to the prompt, turns in the other half"
    assert choose("decode_round_robin", [9], Budget(4, 9)) == [4], "nothing decodes"


def test_prompts_of_lower_priority_get_no_share_of_the_higher_ones() -> None:
    assert choose("priority", [50, 4], Budget(16, 16), priority=[1, 0]) == [16, 0]
    assert choose("priority", [50, 4, 50], Budget(16, 16), priority=[0, 0, -1]) == [12, 4, 0]


def test_priority_serves_the_highest_first() -> None:
    assert choose("priority", [1, 9, 1], Budget(9, 9), priority=[0, 3, 5]) == [0, 8, 1]
    assert choose("priority", [9, 1, 1], Budget(9, 9)) == [7, 1, 1], "among equals as in fcfs"


def test_overdue_prompts_share_the_step() -> None:
    late = MAX_STEPS_SKIPPED - 1
    assert choose("fcfs", [50, 50, 50], Budget(20, 20), skipped=[0, late, late]) == [0, 10, 10]
    assert choose("fcfs", [50, 2, 50], Budget(20, 20), skipped=[0, late, late]) == [8, 2, 10]
    assert choose("fcfs", [50, 50, 50], Budget(20, 20, prompts=1), skipped=[0, late, late + 1]) == [0, 0, 20]


WANTS = st.lists(st.tuples(st.integers(1, 50), st.integers(0, 40), st.integers(-3, 3)), min_size=1, max_size=16)
NAME = st.sampled_from(NAMES)


@given(NAME, WANTS, st.integers(0, 40), st.integers(0, 60), st.integers(0, 3))
def test_every_policy_stays_within_the_budget(
    policy: Policy, wants: list[tuple[int, int, int]], more: int, chunk: int, prompts: int
) -> None:
    pending, skipped, priority = (list(column) for column in zip(*wants, strict=True))
    budget = Budget(len(pending) + more + (0 if chunk else 50), chunk, prompts)
    lengths = choose(policy, pending, budget, skipped, priority)
    assert len(lengths) == len(pending)
    assert 0 < sum(lengths) <= budget.tokens, "whatever can run makes progress"
    for length, wanted in zip(lengths, pending, strict=True):
        assert 0 <= length <= wanted
        assert not chunk or 1 not in pending or length <= max(1, chunk)
        assert chunk or length in (0, wanted), "whole or not at all"
    assert (
        not prompts
        or sum(length > 0 and wanted > 1 for length, wanted in zip(lengths, pending, strict=True)) <= prompts
    )
    for length, waited, wanted in zip(lengths, skipped, pending, strict=True):
        if waited >= MAX_STEPS_SKIPPED - 1 and wanted == 1:
            assert length == 1, "an overdue stream is served"


@given(st.lists(st.integers(1, 50), max_size=20), st.integers(1, 60), st.integers(1, 60), st.integers(0, 60))
def test_fcfs_never_delays_a_stream_for_a_prompt(pending: list[int], tokens: int, chunk: int, room: int) -> None:
    lengths = choose("fcfs", pending, Budget(tokens, chunk, prompt_tokens=room))
    decoding = sum(wanted == 1 for wanted in pending)
    served = sum(length for length, wanted in zip(lengths, pending, strict=True) if wanted == 1)
    assert served == min(decoding, tokens), "a decoding row waits only for other decoding rows"


@given(st.lists(st.integers(2, 50), min_size=1, max_size=20), st.integers(0, 2), st.integers(1, 80))
def test_prompts_share_their_room_three_to_one(prompts: list[int], decoding: int, room: int) -> None:
    """The first prompt has three quarters, one that fits the quarter alone runs at once, and nothing is left over."""
    lengths = choose("fcfs", [*prompts, *[1] * decoding], Budget(100, 100, prompt_tokens=room))[: len(prompts)]
    assert sum(lengths) == min(room, sum(prompts))
    assert lengths[0] >= min(prompts[0], room - room // 4)
    if len(prompts) > 1:
        shortest = min(prompts[1:])
        assert lengths[1 + prompts[1:].index(shortest)] >= min(shortest, room // 4)


@given(
    NAME,
    st.lists(st.tuples(st.integers(1, 400), st.integers(-3, 3)), min_size=1, max_size=12),
    st.integers(0, 20),
    st.integers(0, 20),
    st.integers(0, 2),
    st.integers(0, 12),
)
def test_every_policy_serves_every_row_within_patience(
    policy: Policy, rows: list[tuple[int, int]], more: int, chunk: int, prompts: int, room: int
) -> None:
    """The bound stated by the module holds over a long run in which prompts never end."""
    count = len(rows)
    priority = [value for _, value in rows]
    budget = Budget(count + more + (0 if chunk else 400), chunk, prompts, room)
    skipped, worst = [0] * count, 0
    for _ in range(4 * MAX_STEPS_SKIPPED + 2 * count):
        lengths = choose(policy, [wanted for wanted, _ in rows], budget, skipped, priority)
        skipped = [0 if length else waited + 1 for length, waited in zip(lengths, skipped, strict=True)]
        worst = max(worst, *skipped)
    turns = prompts or not chunk or 0 < room < count
    assert worst < MAX_STEPS_SKIPPED + (count if turns else 0)


@pytest.mark.parametrize("policy", NAMES)
def test_every_policy_serves_all_rows_of_pure_decode(policy: Policy) -> None:
    assert choose(policy, [1] * 5, Budget(5, 5), skipped=[3, 0, 9, 1, 2]) == [1] * 5


GRID = 64


def on_grid(done: list[int], totals: list[int]) -> RowDemand:
    """Demand of prompts of which some positions are computed."""
    pending = [total - begun for begun, total in zip(done, totals, strict=True)]
    zeros = [0] * len(totals)
    return RowDemand(pending, zeros, zeros, done, GRID)


@pytest.mark.parametrize("policy", NAMES)
@pytest.mark.parametrize("tokens", [1, 16, 63, 64, 65, 200])
def test_chunks_end_on_the_grid_and_prompts_advance(policy: Policy, tokens: int) -> None:
    """Each step computes something, and ends off the grid only if more than a quarter of a row would be lost."""
    totals = [300, 70, 64, 129, 33]
    done = [0, 16, 0, 5, 0]
    while done != totals:
        open_rows = [index for index in range(len(totals)) if done[index] < totals[index]]
        demand = on_grid([done[index] for index in open_rows], [totals[index] for index in open_rows])
        lengths = choose_rows(POLICIES[policy], demand, Budget(tokens, tokens))
        assert 0 < sum(lengths) <= tokens
        for index, length in zip(open_rows, lengths, strict=True):
            end = done[index] + length
            assert end == totals[index] or end % GRID == 0 or end // GRID * GRID - done[index] < 3 / 4 * length
            done[index] = end


@given(NAME, st.lists(st.integers(1, 200), min_size=1, max_size=8), st.integers(1, 150), st.data())
def test_the_grid_takes_room_from_no_other_row(
    policy: Policy, totals: list[int], tokens: int, data: st.DataObject
) -> None:
    starts = data.draw(st.lists(st.integers(0, 500), min_size=len(totals), max_size=len(totals)))
    demand = on_grid(starts, [start + total for start, total in zip(starts, totals, strict=True)])
    plain = RowDemand(demand.pending, demand.steps_skipped, demand.priority)
    lengths, without = (choose_rows(POLICIES[policy], one, Budget(tokens, tokens)) for one in (demand, plain))
    assert sum(lengths) <= tokens
    assert (sum(lengths) > 0) == (sum(without) > 0)
    for index, total in enumerate(totals):
        if total == 1:
            assert lengths[index] >= without[index]


@pytest.mark.parametrize("tokens", [1, 16, 40, 63, 64, 65, 95, 96, 127, 128, 129, 191, 255])
def test_the_grid_costs_a_prompt_at_most_a_quarter_of_its_steps(tokens: int) -> None:
    """Also where the room is just below a multiple of the grid."""
    done, total, steps = 0, 20 * tokens, 0
    while done < total:
        (length,) = choose_rows(POLICIES["fcfs"], on_grid([done], [total]), Budget(tokens, tokens))
        assert length == min(tokens, total - done) or (length >= 3 / 4 * tokens and (done + length) % GRID == 0)
        done, steps = done + length, steps + 1
    assert steps <= 27


def test_positions_that_the_grid_leaves_go_to_the_next_prompt() -> None:
    assert choose_rows(POLICIES["fcfs"], on_grid([0, 0], [300, 40]), Budget(100, 100)) == [64, 36]
