"""Columns of a step output, and ids and floats as bytes."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.protocol.codec import (
    decode_event,
    encode,
    pack_floats,
    pack_ids,
    read_drafts,
    read_logprobs,
    runs,
    step_output,
    unpack_floats,
    unpack_ids,
    with_details,
)
from tandem.protocol.errors import ProtocolError
from tandem.protocol.events import DetailedOutput, StepOutput, TokenLogprobs
from tests.support.messages import FLOAT32, INT32, UINT64

RUNS = st.lists(st.tuples(UINT64, st.lists(INT32, max_size=6)), max_size=8)


@given(st.lists(INT32, max_size=50))
def test_ids_round_trip(ids: list[int]) -> None:
    assert unpack_ids(pack_ids(ids)) == ids
    assert pack_ids(ids) == b"".join(token.to_bytes(4, "little", signed=True) for token in ids)


@given(st.lists(FLOAT32, max_size=50))
def test_floats_round_trip(values: list[float]) -> None:
    assert unpack_floats(pack_floats(values)) == values


def test_infinities_and_nan_round_trip() -> None:
    values = unpack_floats(pack_floats([math.nan, math.inf, -math.inf, -0.0]))
    assert math.isnan(values[0])
    assert values[1:3] == [math.inf, -math.inf]
    assert math.copysign(1.0, values[3]) == -1.0


@pytest.mark.parametrize("token", [2**31 - 1, -(2**31), 0])
def test_the_bounds_of_int32_round_trip(token: int) -> None:
    assert unpack_ids(pack_ids([token])) == [token]


@pytest.mark.parametrize("token", [2**31, -(2**31) - 1, 2**63, 2**64])
def test_an_id_outside_int32_overflows(token: int) -> None:
    with pytest.raises(OverflowError):
        pack_ids([token])


@given(st.binary(max_size=41))
def test_lengths_that_are_no_multiple_of_four_are_protocol_errors(data: bytes) -> None:
    for unpack in (unpack_ids, unpack_floats):
        if len(data) % 4:
            with pytest.raises(ProtocolError, match=rf"\b{len(data)}\b"):
                unpack(data)
        else:
            assert len(unpack(data)) == len(data) // 4


@given(RUNS, st.integers(0, 2**40))
def test_runs_round_trip(expected: list[tuple[int, list[int]]], step_id: int) -> None:
    output = step_output(
        step_id,
        [request_id for request_id, _ in expected],
        [token for _, tokens in expected for token in tokens],
        [len(tokens) for _, tokens in expected],
    )
    received = decode_event(encode(output))
    assert isinstance(received, StepOutput)
    assert received.step_id == step_id
    assert (received.finished, received.failures) == ([], [])
    assert list(runs(received)) == expected


def test_the_longest_run_has_65535_tokens() -> None:
    tokens = list(range(65_535))
    assert list(runs(step_output(1, [7], tokens, [65_535]))) == [(7, tokens)]
    with pytest.raises(OverflowError):
        step_output(1, [7], [], [65_536])


DISAGREEING = [
    ("a count too few", StepOutput(1, bytes(16), bytes(2), b"")),
    ("a count too many", StepOutput(1, bytes(8), bytes(4), b"")),
    ("a token missing", StepOutput(1, bytes(8), b"\2\0", bytes(4))),
    ("a token too many", StepOutput(1, bytes(8), b"\1\0", bytes(8))),
    ("tokens without a request", StepOutput(1, b"", b"", bytes(4))),
    ("half a request id", StepOutput(1, bytes(7), bytes(2), b"")),
    ("half a count", StepOutput(1, bytes(8), bytes(3), b"")),
    ("half a token", StepOutput(1, bytes(8), b"\1\0", bytes(5))),
]


@pytest.mark.parametrize("output", [output for _, output in DISAGREEING], ids=[name for name, _ in DISAGREEING])
def test_columns_that_disagree_are_protocol_errors(output: StepOutput) -> None:
    with pytest.raises(ProtocolError):
        list(runs(output))


@given(st.binary(max_size=40), st.binary(max_size=12), st.binary(max_size=40))
def test_hostile_columns_yield_runs_or_a_protocol_error(ids: bytes, counts: bytes, tokens: bytes) -> None:
    try:
        received = list(runs(StepOutput(1, ids, counts, tokens)))
    except ProtocolError:
        return
    assert 8 * len(received) == len(ids)
    assert 4 * sum(len(run) for _, run in received) == len(tokens)


@st.composite
def scored(draw: st.DrawFn) -> tuple[int, list[tuple[float, list[int], list[float]]]]:
    """Draw a number of alternatives, and tokens with that many."""
    top = draw(st.integers(0, 20))
    alternatives = {"min_size": top, "max_size": top}
    line = st.tuples(FLOAT32, st.lists(INT32, **alternatives), st.lists(FLOAT32, **alternatives))
    return top, draw(st.lists(line, max_size=5))


@given(scored(), UINT64, st.integers(0, 2**40))
def test_logprobs_round_trip(
    expected: tuple[int, list[tuple[float, list[int], list[float]]]], request_id: int, start: int
) -> None:
    top, tokens = expected
    lines = b"".join([pack_floats([own, *values]) + pack_ids(ids) for own, ids, values in tokens])
    output = step_output(1, [], [])
    output.logprobs.append(TokenLogprobs(request_id, start, top, lines))
    received = decode_event(encode(output))
    assert isinstance(received, StepOutput)
    (found,) = received.logprobs
    assert (found.request_id, found.start, found.top) == (request_id, start, top)
    assert read_logprobs(found) == tokens


@pytest.mark.parametrize(("top", "size"), [(0, 3), (1, 4), (20, 41), (-1, 4), (-1, 0)])
def test_partial_logprob_records_are_protocol_errors(top: int, size: int) -> None:
    with pytest.raises(ProtocolError, match=rf"\b{size}\b"):
        read_logprobs(TokenLogprobs(1, 0, top, bytes(size)))


BYTE = st.integers(0, 255)


@given(st.lists(st.tuples(UINT64, BYTE, BYTE, BYTE), max_size=8))
def test_drafts_round_trip(verified: list[tuple[int, int, int, int]]) -> None:
    numbers = [number for row in verified for number in row[1:]]
    output = with_details(step_output(1, [], []), [], [row[0] for row in verified], numbers)
    decoded = decode_event(encode(output))
    assert isinstance(decoded, DetailedOutput) and [*read_drafts(decoded)] == verified


@pytest.mark.parametrize(("drafted", "drafts"), [(b"", b"\x01"), (bytes(8), b"\x01\x01"), (bytes(9), bytes(3))])
def test_columns_of_drafts_that_disagree_are_protocol_errors(drafted: bytes, drafts: bytes) -> None:
    with pytest.raises(ProtocolError):
        read_drafts(DetailedOutput(1, b"", b"", b"", drafted=drafted, drafts=drafts))
