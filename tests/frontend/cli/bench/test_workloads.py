"""Workloads that depend only on the seed, not on the number of client processes."""

from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.frontend.cli.bench.workloads import Load, Span, Workload

WORKLOAD = Workload(seed=7, input_len=Span(4, 32), output_len=Span(1, 9), prompt_ids=Span(100, 199))


def test_requests_repeat_for_a_seed_and_differ_by_index() -> None:
    requests = [WORKLOAD.request("a", index) for index in range(50)]
    assert requests == [WORKLOAD.request("a", index) for index in range(50)]
    assert len({tuple(request.prompt) for request in requests}) == 50
    assert requests != [WORKLOAD.request("b", index) for index in range(50)]
    other = Workload(8, WORKLOAD.input_len, WORKLOAD.output_len, WORKLOAD.prompt_ids)
    assert requests != [other.request("a", index) for index in range(50)]


def test_request_lengths_cover_their_spans() -> None:
    requests = [WORKLOAD.request("spans", index) for index in range(600)]
    assert {len(request.prompt) for request in requests} == set(range(4, 33))
    assert {request.max_tokens for request in requests} == set(range(1, 10))
    assert {token for request in requests for token in request.prompt} == set(range(100, 200))


@given(streams=st.integers(1, 40), processes=st.integers(1, 9), requests=st.integers(1, 5))
@settings(deadline=None, max_examples=50)
def test_closed_loop_does_not_depend_on_the_number_of_processes(streams: int, processes: int, requests: int) -> None:
    load = Load("closed", streams, requests=requests)
    sent = [
        index
        for process in range(processes)
        for stream in load.streams_of(process, processes)
        for index in load.indices_of(stream)
    ]
    assert sorted(sent) == list(range(streams * requests))
    assert load.total() == len(sent)


@given(seed=st.integers(0, 2**32), processes=st.integers(1, 9), requests=st.integers(1, 60))
@settings(deadline=None, max_examples=50)
def test_arrivals_do_not_depend_on_the_number_of_processes(seed: int, processes: int, requests: int) -> None:
    load = Load("open", rate=5.0, requests=requests)
    whole = load.arrivals(seed)
    shares = [share for process in range(processes) for share in load.arrivals_of(process, processes, seed)]
    assert sorted(shares) == list(enumerate(whole))
    assert whole == sorted(whole) and len(whole) == requests


def test_arrivals_are_poisson() -> None:
    """For exponential gaps mean and standard deviation agree: 1 / rate both."""
    arrivals = Load("open", rate=20.0, requests=20_000).arrivals(1)
    gaps = [after - before for before, after in zip([0.0, *arrivals], arrivals, strict=False)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(0.05, rel=0.03)
    assert deviation == pytest.approx(0.05, rel=0.03)


def test_duration_bounds_arrivals_but_not_streams() -> None:
    arrivals = Load("open", rate=50.0, duration=4.0).arrivals(3)
    assert 150 < len(arrivals) < 250 and arrivals[-1] < 4.0
    # A longer run begins as the shorter one did.
    assert Load("open", rate=50.0, duration=8.0).arrivals(3)[: len(arrivals)] == arrivals
    closed = Load("closed", 3, duration=4.0)
    assert list(islice(closed.indices_of(1), 4)) == [1, 4, 7, 10]
    assert closed.total() is None


@pytest.mark.parametrize(("text", "span"), [("256", Span(256, 256)), ("128:512", Span(128, 512))])
def test_span_round_trips_through_text(text: str, span: Span) -> None:
    assert Span.parse(text) == span and str(span) == text


@pytest.mark.parametrize("text", ["0", "9:3", "x", "", "1:2:3"])
def test_span_rejects_malformed_text(text: str) -> None:
    with pytest.raises(ValueError, match=r"span|invalid literal"):
        Span.parse(text)


@pytest.mark.parametrize(
    "fields",
    [{}, {"streams": 1, "rate": 2.0, "requests": 3}, {"streams": 1}, {"rate": 1.0, "requests": 1, "duration": 1}],
)
def test_load_rejects_ambiguous_settings(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="a load"):
        Load("bad", **fields)  # type: ignore[arg-type]


def test_shared_prefix_is_prepended_to_every_prompt() -> None:
    chats = Workload(7, Span(4, 4), Span(1, 9), Span(100, 199), shared=50, shared_label="x")
    requests = [chats.request(label, index) for label in "ab" for index in range(10)]
    assert len({tuple(request.prompt[:50]) for request in requests}) == 1
    assert len({tuple(request.prompt[50:]) for request in requests}) == 20
    assert {len(request.prompt) for request in requests} == {54}
    other = Workload(7, Span(4, 4), Span(1, 9), Span(100, 199), shared=50, shared_label="y")
    assert other.request("a", 0).prompt[:50] != requests[0].prompt[:50]
    assert other.request("a", 0).prompt[50:] == requests[0].prompt[50:]


def test_priorities_are_assigned_in_turn() -> None:
    spans = (Span(4, 32), Span(1, 9), Span(100, 199))
    classes = Workload(7, *spans, priorities=(0, 1, 2))
    requests = [classes.request("a", index) for index in range(6)]
    assert [request.priority for request in requests] == [0, 1, 2, 0, 1, 2]
    plain = [WORKLOAD.request("a", index) for index in range(6)]
    assert [request.prompt for request in requests] == [request.prompt for request in plain]
    assert {request.priority for request in plain} == {0}
