"""The matrix: which servers and loads it compares, and how its figures come about."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from benchmarks.matrix.capacity import Reading, while_waiting
from benchmarks.matrix.configurations import Configuration, matrix, with_chunk, with_policy
from benchmarks.matrix.figures import Figures, PrefillTrial, figures, medians, prefill_medians
from benchmarks.matrix.long_prompts import gaps_during_prefill
from benchmarks.matrix.parts import all_flags, held
from benchmarks.matrix.scenarios import MAX_LEN, scenarios
from benchmarks.matrix.server import Server, ServerDiedError
from benchmarks.run_matrix import settings
from tandem.engine_core.config import ModelShape, StepConfig, resolve
from tandem.frontend.cli.bench.record import Record
from tandem.frontend.cli.main import build_parser
from tandem.protocol import engine_options

SERVERS = [*matrix(1), *map(with_policy, engine_options.POLICIES), with_chunk(256)]


def resolved(configuration: Configuration) -> StepConfig:
    sizes = ["--max-rows", "64", "--max-len", str(MAX_LEN), "--max-step-tokens", str(MAX_LEN + 64)]
    options = engine_options.engine_options(build_parser().parse_args(["serve", *sizes, *configuration.flags]))
    return resolve(options, ModelShape("m", 8192), "cuda", "bfloat16")


@pytest.mark.parametrize("configuration", SERVERS, ids=lambda configuration: configuration.name)
def test_every_configuration_starts_a_server(configuration: Configuration) -> None:
    assert resolved(configuration).max_len == MAX_LEN


@pytest.mark.parametrize(
    ("place", "differs"),
    [
        (1, {"static_batching": (True, False)}),
        (2, {"page_size": (MAX_LEN, 16)}),
        (3, {"prefill_chunk": (0, 256)}),
        (4, {"prefix_cache": (False, True), "max_sessions": (0, 256)}),
    ],
)
def test_configurations_differ_by_one_switch(place: int, differs: dict[str, tuple[object, object]]) -> None:
    one, other = (structs.asdict(resolved(matrix(1)[index])) for index in (place - 1, place))
    assert {name: (one[name], other[name]) for name in one.keys() - {"options"} if one[name] != other[name]} == differs


def test_with_policy_sets_the_policy_flag() -> None:
    policies = engine_options.POLICIES
    assert [resolved(with_policy(policy)).policy for policy in policies] == list(policies)


def test_all_flags_omits_only_paths_and_secrets() -> None:
    flags = all_flags(["--max-rows", "3", "--tls-cert", "x"])
    assert flags["max_rows"] == 3 and flags["tls_cert"] == "x" and flags["policy"] == "fcfs"
    assert flags["prefill_chunk"] is None
    assert not flags.keys() & {"model", "port", "api_key", "run"}
    assert flags.keys() >= set(engine_options.EngineOptions.__struct_fields__) - {"model"}


class TestScenarios:
    def test_scenario_lengths_match_their_loads(self) -> None:
        one, two, cold, warm = scenarios(1)
        assert (str(one.input_len), str(one.output_len)) == ("256", "256")
        assert (str(two.input_len), str(two.output_len), two.streams) == ("32:1024", "64:256", 16)
        assert cold.shared == warm.shared == 1024 and cold.streams == 16

    def test_cold_and_warm_loads_differ_only_in_the_cache(self) -> None:
        _, _, cold, warm = scenarios(1, requests=5)
        assert (cold.streams, cold.requests, cold.input_len, cold.output_len) == (
            warm.streams, warm.requests, warm.input_len, warm.output_len,
        )  # fmt: skip
        assert warm.requests == 1

    @pytest.mark.parametrize("scale", [1, 3, 8, 64, 5000])
    def test_scale_divides_all_lengths(self, scale: int) -> None:
        for whole, small in zip(scenarios(1), scenarios(scale), strict=True):
            assert small.input_len.high == max(1, whole.input_len.high // scale)
            assert small.output_len.low == max(1, whole.output_len.low // scale)
            assert small.shared == whole.shared // scale
            longest = small.shared + small.input_len.high + small.output_len.high
            assert longest <= max(3, MAX_LEN // scale)

    def test_warm_load_shares_the_prefix_of_its_trials_cold_load(self) -> None:
        _, _, cold, warm = scenarios(8)

        def prompts(trial: int) -> list[list[int]]:
            loads = [(load.workload(0, trial), load.load(trial).label) for load in (cold, warm)]
            return [workload.request(label, index).prompt for workload, label in loads for index in range(5)]

        first, second = prompts(0), prompts(1)
        assert len({tuple(prompt[:128]) for prompt in first}) == 1
        assert first[0][:128] != second[0][:128], "another trial, another system prompt"
        assert len({tuple(prompt[128:]) for prompt in first}) == 10, "questions of their own"
        assert {len(prompt) for prompt in first} == {128 + 8}


def record(start: float, first: float, gaps: list[float], error: str | None = None, priority: int = 0) -> Record:
    end, tokens = first + sum(gaps), len(gaps) + 1
    return Record(
        0, 9, start=start, first=first, last=end, end=end, tokens=tokens, gaps=gaps, error=error, priority=priority
    )


class TestFigures:
    def test_figures_of_one_trial(self) -> None:
        records = [record(0.0, 0.5, [0.1, 0.1]), record(0.0, 1.0, [0.1, 0.3]), record(0.0, 1.0, [], "HTTP 503")]
        found = figures(records, {"p50": 0.25}, starved_ms=200.0)
        assert (found.completed, found.errors, found.starved) == (2, 1, 1)
        assert found.output_tokens_per_s == pytest.approx(6 / 1.4)
        assert found.ttft["p50"] == pytest.approx(750.0)
        assert found.itl["p50"] == pytest.approx(100.0)
        assert found.longest_gap == pytest.approx(300.0)
        assert found.queue_wait == {"p50": 250.0}
        assert found.request_tokens_per_s["p50"] == pytest.approx((3 / 0.7 + 3 / 1.4) / 2)
        assert found.tpot["p50"] == pytest.approx(150.0)
        assert found.ttft_by_priority == {}, "all of them have the same"

    def test_figures_report_ttft_by_priority(self) -> None:
        records = [record(0.0, 0.5, [], priority=2), record(0.0, 0.1, []), record(0.0, 0.3, [], priority=2)]
        found = figures(records, {}, 1.0).ttft_by_priority
        assert {priority: sample["p50"] for priority, sample in found.items()} == pytest.approx({0: 100.0, 2: 400.0})

    def test_figures_without_records(self) -> None:
        found = figures([], {}, 100.0)
        assert (found.completed, found.output_tokens_per_s, found.ttft, found.longest_gap) == (0, 0.0, {}, 0.0)

    def test_medians_are_taken_for_each_figure(self) -> None:
        def trial(speed: float, ttft: dict[str, float]) -> Figures:
            return Figures(1, 0, speed, ttft, {"p50": speed}, {}, {}, {}, 0, 0.0, {1: {"p50": 10 * speed}})

        found = medians([trial(3, {"p50": 1, "p99": 9}), trial(1, {"p50": 5, "p99": 7}), trial(2, {"p50": 2})])
        assert found.output_tokens_per_s == 2
        assert found.ttft == {"p50": 2}, "what one trial lacks has no median"
        assert found.itl == {"p50": 2}
        assert found.ttft_by_priority == {1: {"p50": 20}}


class TestGapsBesideLongPrompts:
    STREAMS = (record(0.0, 1.0, [1.0, 2.0, 3.0]), record(0.0, 0.5, [0.125]))

    @pytest.mark.parametrize(
        ("prompts", "expected"),
        [
            ([], []),
            ([(1.5, 3.5)], [1.0, 2.0]),
            ([(2.0, 4.0)], [2.0]),
            ([(4.0, 4.5)], [3.0]),
            ([(1.25, 1.5), (1.75, 1.9), (6.5, 6.75)], [1.0, 3.0]),
            ([(6.5, 6.75), (0.55, 0.6)], [3.0, 0.125]),
            ([(7.0, 9.0), (0.0, 0.5)], []),
        ],
    )
    def test_loaded_gaps_overlap_a_prompt(self, prompts: list[tuple[float, float]], expected: list[float]) -> None:
        """The gaps are from 1 to 2, 4 and 7, and from 0.5 to 0.625."""
        assert gaps_during_prefill(self.STREAMS, [record(start, first, []) for start, first in prompts]) == expected

    @given(
        st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), max_size=5),
        st.lists(st.integers(1, 9), max_size=8),
    )
    def test_loaded_gaps_match_a_direct_search_for_any_prompts(
        self, prompts: list[tuple[int, int]], gaps: list[int]
    ) -> None:
        times = [(start, start + length) for start, length in prompts]
        ends = [sum(gaps[: index + 1]) for index in range(len(gaps))]
        expected = [
            gap
            for gap, end in zip(gaps, ends, strict=True)
            if any(start < end and end - gap < first for start, first in times)
        ]
        stream = record(0.0, 0.0, [float(gap) for gap in gaps])
        assert gaps_during_prefill([stream], [record(start, first, []) for start, first in times]) == expected

    def test_medians_keep_the_factor_of_each_trial(self) -> None:
        def trial(p50: float, p99: float, loaded: dict[str, float]) -> PrefillTrial:
            return PrefillTrial({"p50": p50, "p99": p99}, loaded, 3, {"p50": 7.0})

        found = prefill_medians(
            [
                trial(1.0, 2.0, {"count": 9, "p99": 4.0}),
                trial(2.0, 4.0, {"count": 5, "p99": 6.0}),
                trial(3.0, 9.0, {"count": 0}),
            ]
        )
        assert (found.gaps, found.prompts, found.alone["p50"], found.loaded) == (14, 9, 2.0, {"count": 5})
        assert found.over == {"p50": [4.0, 3.0], "p99": [2.0, 1.5]}


class TestSequencesAtOnce:
    @staticmethod
    def reading(at: float, running: float, waiting: float, preemptions: float = 0, steps: float = 0) -> Reading:
        return Reading(at, running, waiting, preemptions, steps, 3 * steps)

    def test_means_cover_the_time_with_waiting_sequences(self) -> None:
        found = while_waiting(
            [
                self.reading(0, 1, 0),
                self.reading(1, 9, 5, preemptions=1, steps=10),
                self.reading(2, 4, 5, preemptions=3, steps=20),
                self.reading(5, 4, 1, preemptions=4, steps=50),
                self.reading(6, 2, 0, preemptions=9, steps=60),
            ]
        )
        assert found == {"seconds": 4, "peak": 9, "running": (9 * 1 + 4 * 3) / 4, "preemptions": 3, "step_rows": 3}

    def test_no_means_without_waiting_sequences(self) -> None:
        assert while_waiting([self.reading(0, 7, 0), self.reading(1, 5, 0)]) == {"seconds": 0, "peak": 7}
        assert while_waiting([]) == {"seconds": 0, "peak": 0}

    def test_capacity_is_the_median_over_trials(self) -> None:
        trials = [{"seconds": 1.0, "running": value, "peak": 9.0} for value in (5.0, 1.0, 3.0)]
        found = held("paged", 64, 8, trials)
        assert (found.running, found.seconds, found.preemptions, found.rows) == (3.0, 1.0, 0.0, 8)


def test_server_that_rejects_its_flags_is_reported_with_its_message(tmp_path: Path) -> None:
    with (
        pytest.raises(ServerDiedError, match=r"(?s)--no-such-flag: .*\b2\n.*unknown flag"),
        Server(["--no-such-flag"], tmp_path / "log"),
    ):
        raise AssertionError("it started")


class TestSettings:
    def test_defaults_depend_on_cpu_or_shape(self) -> None:
        assert settings(["--save", "x"]).scale == 8
        assert settings(["--save", "x", "--shape", "benchmarks/shapes/llama-3.2-1b"]).scale == 1

    def test_quick_runs_one_short_trial(self) -> None:
        found = settings(["--save", "x", "--quick", "--scale", "16"])
        assert (found.trials, found.requests, found.streams, found.scale) == (1, 1, 4, 16)

    @pytest.mark.parametrize("wrong", [["--trials", "0"], ["--rows", "4"], ["--scale", "-1"], ["--parts", "w9"]])
    def test_invalid_arguments_are_rejected(self, wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            settings(["--save", "x", *wrong])
        assert "error:" in capsys.readouterr().err
