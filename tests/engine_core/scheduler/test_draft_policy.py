"""The number of drafts of a step: its limits, and simulations against each fixed number."""

from typing import Literal
from unittest.mock import patch

import pytest

from tandem.engine_core.config import StepConfig
from tandem.engine_core.graph_sizes import DRAFT_SIZES, MAX_VERIFY_POSITIONS, decode_rows, draft_sizes
from tandem.engine_core.scheduler.acceptance import Acceptance
from tandem.engine_core.scheduler.draft_costs import DraftCosts
from tandem.engine_core.scheduler.draft_policy import DraftPolicy
from tandem.engine_core.sequence import Sequence
from tests.support.draft_simulation import PLAIN, ROWS, Simulation, best_fixed, policy_of, rows_of


@pytest.mark.parametrize("rows", [1, 8, 32, 128])
@pytest.mark.parametrize("probability", [0.0, 0.2, 0.5, 0.8, 0.95, 1.0])
def test_the_chosen_number_is_about_as_good_as_the_best(rows: int, probability: float) -> None:
    """Of all fixed numbers, in the long run; of tokens per millisecond that each would give."""
    policy = policy_of(0.9)
    steps = 4000 // rows + 1500
    simulation = Simulation(policy, rows, probability)
    simulation.run(100)
    found = simulation.run(steps)
    assert found >= 0.98 * best_fixed(policy, rows, probability)[1]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("has_model", [True, False])
def test_drafts_that_are_never_right_cost_less_than_a_percent(rows: int, has_model: bool) -> None:
    policy = policy_of(0.9 if has_model else 0.01, has_model)
    simulation = Simulation(policy, rows, 0.0)
    simulation.run(60)
    assert simulation.run(3000) >= 0.99 * rows / policy.costs.milliseconds(rows, 0, 400)


def test_verification_that_measures_say_is_free_is_not_tried_in_every_step() -> None:
    """Extrapolated to long contexts, a step with drafts may seem to take no longer than a plain one."""
    table = {(rows, size): (4.7, 5.3) for rows in ROWS for size in (0, *DRAFT_SIZES)}
    policy = DraftPolicy(DRAFT_SIZES, None, ROWS, has_model=False, costs=DraftCosts(table, (400, 4000)))
    simulation, chosen, choose = Simulation(policy, 8, 0.0), list[int](), policy.choose

    def noted(sequences: list[Sequence]) -> int:
        chosen.append(choose(sequences))
        return chosen[-1]

    with patch.object(policy, "choose", noted):
        simulation.run(360)
    assert 0 < sum(map(bool, chosen[60:])) <= 120


def test_drafts_that_become_right_are_found_and_those_that_become_wrong_are_given_up() -> None:
    simulation = Simulation(policy_of(0.9), 1, 0.0)
    simulation.run(500)
    simulation.probability = 0.9
    slow = simulation.run(1500)
    assert slow > 1.3 / PLAIN[1]
    simulation.probability = 0.0
    simulation.run(120)
    assert simulation.run(1000) >= 0.99 / PLAIN[1]


class TestOtherRequests:
    """Estimates follow requests whose drafts are accepted more or less often, whatever rows came before."""

    @pytest.mark.parametrize("before", [1, 8, 64, 256])
    @pytest.mark.parametrize("rows", [1, 8, 64])
    def test_wrong_drafts_are_given_up_in_a_few_steps(self, before: int, rows: int) -> None:
        policy, chosen = policy_of(0.9), list[int]()
        Simulation(policy, before, 0.8).run(200)
        simulation = Simulation(policy, rows, 0.0)
        for _ in range(40):
            chosen.append(policy.choose(simulation.sequences))
            simulation.run(1, fixed=chosen[-1])
            if chosen[-1]:
                policy.observe({(chosen[-1], 0): rows})
        assert sum(drafts > 0 for drafts in chosen) <= 12

    @pytest.mark.parametrize("rows", [1, 8, 64])
    def test_right_drafts_are_found_within_few_probes(self, rows: int) -> None:
        policy = policy_of(0.9)
        Simulation(policy, rows, 0.0).run(400)
        probes = 0
        for _ in range(400):
            drafts = policy.choose(rows_of(rows))
            if drafts:
                policy.observe({(drafts, drafts): rows})
                probes += 1
            if drafts > 1:
                break
        assert 2 <= probes <= 4

    def test_one_row_has_more_drafts_soon_after_they_become_right(self) -> None:
        """Its later drafts were hardly ever verified: their estimates follow those before them."""
        simulation, steps = Simulation(policy_of(0.9), 1, 0.8), 0
        simulation.run(100)
        simulation.probability = 1.0
        while simulation.policy.choose(simulation.sequences) < DRAFT_SIZES[-1]:
            simulation.run(1)
            steps += 1
        assert steps <= 16

    def test_few_probes_are_saved_up(self) -> None:
        """For rows that lack no positions, while others lacked too many."""
        policy, costly, cheap = policy_of(0.9, span_ms=1000.0), rows_of(1), rows_of(1)
        policy.observe({(1, 0): 20})
        costly[0].drafts.model_lag, costly[0].drafts.model_len = 100, 0
        assert not any(policy.choose(costly) for _ in range(3000))
        assert sum(policy.choose(cheap) for _ in range(20)) == 4

    @pytest.mark.parametrize(("lag", "are_enough"), [(0, True), (400, False)])
    def test_few_right_drafts_do_not_let_many_rows_catch_up(self, lag: int, are_enough: bool) -> None:
        """Which takes 64 rows 100 ms. Drafts pay from an acceptance of 0.35 on, and the estimate is 0.6."""
        policy, rows = policy_of(0.9), rows_of(64)
        policy.observe({(1, 0): 2, (1, 1): 3})
        for seq in rows:
            seq.drafts.model_lag, seq.drafts.model_len = lag, 400 - lag
        with patch.object(policy, "_probe", return_value=0):
            assert bool(policy.choose(rows)) == are_enough
            policy.observe({(1, 0): 16, (1, 1): 48})
            assert policy.choose(rows), "as it is beyond doubt"

    def test_steps_of_one_text_contradict_no_estimate(self) -> None:
        acceptance = Acceptance(1, 0.985)
        for _ in range(100):
            for right in (1, 1, 0, 1):
                acceptance.observe([1], [right])
        assert acceptance.survival == pytest.approx([0.75], abs=0.02)


class TestLimits:
    @pytest.mark.parametrize("rows", [1, 64, 65, 85, 86, 128, 129, 170, 171, 256, 257])
    @pytest.mark.parametrize("fixed", [None, 7])
    def test_a_step_has_a_limited_number_of_positions(self, rows: int, fixed: int | None) -> None:
        costs = DraftCosts({(size, drafts): (1.0, 1.0) for size in (1, 512) for drafts in (0, *DRAFT_SIZES)}, (0, 1))
        drafts = DraftPolicy(DRAFT_SIZES, fixed, costs=costs).choose(rows_of(rows))
        fitting = [size for size in DRAFT_SIZES if rows * (1 + size) <= MAX_VERIFY_POSITIONS]
        assert drafts == max(fitting, default=0), "where drafts cost nothing"

    def test_no_step_verifies_drafts_of_more_rows_than_graphs_hold(self) -> None:
        policy = DraftPolicy((1, 2, 3), 3, row_counts=(1, 4))
        assert [policy.choose(rows_of(rows)) for rows in (0, 3, 4, 5)] == [0, 3, 3, 0]

    @pytest.mark.parametrize("tokens", ["auto", 1, 4, 7])
    @pytest.mark.parametrize("graph_rows", [decode_rows(None, 256), (1, 8, 96)])
    def test_every_step_with_drafts_fits_a_graph(
        self, tokens: int | Literal["auto"], graph_rows: tuple[int, ...]
    ) -> None:
        """One that fits none would run eagerly, at a fraction of the speed."""
        sizes, sequences = draft_sizes("ngram", tokens), rows_of(graph_rows[-1])
        config = StepConfig(
            model_name="x", device="cuda", dtype="bfloat16", depth=2, max_rows=256, max_len=4096, max_step_tokens=8192,
            prefill_chunk=512, page_size=16, max_waiting=8, graph_rows=graph_rows, draft_sizes=sizes, max_adapters=8,
        )  # fmt: skip
        for accepted in range(8):
            policy = DraftPolicy(sizes, None if tokens == "auto" else tokens, graph_rows)
            policy.observe({(7, accepted): 50}) if sizes[-1] == 7 else None
            for rows in range(1, len(sequences) + 1):
                padded = next(size for size in graph_rows if size >= rows)
                for adapted, shapes in ((False, config.verify_shapes), (True, config.adapted_verify_shapes)):
                    chosen = {policy.choose(sequences[:rows], adapted) for _ in range(3)} - {0}
                    assert all((padded, drafts) in shapes for drafts in chosen)

    def test_rows_without_drafts_count_as_rows_of_the_step(self) -> None:
        """A step has to gain enough for all."""
        policy = DraftPolicy(DRAFT_SIZES)
        policy.observe({(7, 7): 20})
        others = rows_of(400)
        for seq in others:
            seq.drafts.max_drafts = 0
        assert policy.choose([*others[:3], *rows_of(1)]) == 7
        assert policy.choose(others) == 0
        assert policy.choose([*others[:60], *rows_of(1)]) == 0

    def test_no_step_has_more_positions_than_steps_may_have(self) -> None:
        policy = DraftPolicy(DRAFT_SIZES, 7, max_positions=32)
        assert [policy.choose(rows_of(rows)) for rows in (4, 5, 8, 16, 17)] == [7, 5, 3, 1, 0]
        wide = DraftPolicy(DRAFT_SIZES, 7, max_positions=8192)
        assert [wide.choose(rows_of(rows)) for rows in (64, 65, 257)] == [7, 5, 0]


class TestCatchUp:
    @pytest.mark.parametrize("span_ms", [0.0, 0.6])
    def test_a_probe_lets_only_as_many_rows_draft_as_it_can_pay_for(self, span_ms: float) -> None:
        policy = policy_of(0.9, span_ms=span_ms)
        for _ in range(40):
            policy.observe({(1, 0): 20})
        sequences = rows_of(8)
        for number, seq in enumerate(sequences):
            seq.drafts.model_lag, seq.drafts.model_len = 100, 400 - 100 * (1 + number % 4)
        found = [(policy.choose(sequences), policy.max_catch_up) for _ in range(800)]
        probes = [(index, limit) for index, (drafts, limit) in enumerate(found) if drafts]
        assert len(probes) >= 2 and all(limit is not None and 100 <= limit < 800 for _, limit in probes)
        verify = policy.costs.milliseconds(8, 1, 400) - PLAIN[8]
        spent = sum(verify + span_ms + 0.004 * (limit or 0) for _, limit in probes)
        assert spent <= 0.01 * 800 * PLAIN[8]

    def test_positions_that_the_model_lacks_keep_a_step_plain_that_gains_too_little(self) -> None:
        policy = policy_of(0.9)
        policy.observe({(3, 1): 30})
        sequences = rows_of(32)
        assert policy.choose(sequences) > 0
        for seq in sequences:
            seq.drafts.model_lag = seq.num_scheduled_tokens = 100_000
            seq.drafts.model_len = 0
        assert policy.choose(sequences) == 0


class TestStepsWithoutADraft:
    """A step for which no row has a draft has cost as much as any other."""

    def test_a_model_that_never_gives_a_draft_is_given_up(self) -> None:
        policy = policy_of(0.9)
        chosen = [policy.choose(rows_of(4))]
        while chosen[-1]:
            policy.observe({(0, 0): 4})
            chosen.append(policy.choose(rows_of(4)))
        assert 2 <= len(chosen) < 50

    def test_rows_that_lack_positions_change_no_estimate_of_others(self) -> None:
        policy = policy_of(0.9)
        policy.observe({(3, 3): 4})
        before = list(policy.acceptance.survival)
        policy.observe({(3, 3): 1, (0, 0): 3})
        assert policy.acceptance.survival >= before


def test_durations_are_positive_and_longer_contexts_take_no_less() -> None:
    """Whatever was measured: beyond the measured contexts the line goes on."""
    costs = DraftCosts({(1, 0): (4.0, 3.9), (1, 1): (0.0, 0.0)}, (256, 4096))
    assert costs.milliseconds(1, 0, 131_072) == 4.0
    assert costs.milliseconds(1, 1, 131_072) > 0
    policy = DraftPolicy((1,), costs=DraftCosts({(1, size): (0.0, 0.0) for size in (0, 1)}, (256, 4096)))
    assert policy.choose(rows_of(1)) in (0, 1)


def test_estimates_follow_each_position() -> None:
    acceptance = Acceptance(3, 0.9)
    for _ in range(200):
        acceptance.observe([10, 8, 4], [8, 4, 1])
    assert acceptance.survival == pytest.approx([0.8, 0.4, 0.1], abs=0.01)
    for _ in range(200):
        acceptance.observe([10, 0, 0], [5, 0, 0])
    assert acceptance.survival[0] == pytest.approx(0.5, abs=0.01)
    assert acceptance.survival[1] == pytest.approx(0.25, abs=0.02), "positions that were not tried follow those before"


def test_costs_lie_on_lines_between_the_measured_rows_and_contexts() -> None:
    costs = DraftCosts({(1, 0): (1.0, 2.0), (4, 0): (4.0, 8.0)}, (100, 200))
    assert [costs.milliseconds(rows, 0, 100) for rows in (1, 2, 4, 8)] == [1.0, 2.0, 4.0, 8.0]
    assert [costs.milliseconds(1, 0, context) for context in (0, 100, 150, 200, 300)] == [1.0, 1.0, 1.5, 2.0, 3.0]
