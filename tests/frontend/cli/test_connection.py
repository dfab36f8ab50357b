"""Server-sent events split into chunks at any byte."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.frontend.cli.connection import event_data

STREAM = (
    b': a comment\n\ndata: {"a": 1}\n\ndata:{"b": "\xe2\x80\xa8 \xc2\x85"}\r\n\r\n'
    b"event: x\ndata: 3\n\ndata: [DONE]\n\ndata: 4\n\n"
)
EVENTS = [b'{"a": 1}', b'{"b": "\xe2\x80\xa8 \xc2\x85"}', b"3"]


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_event_data_does_not_depend_on_the_chunks(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    chunks = [STREAM[start:end] for start, end in itertools.pairwise(edges)]
    assert list(event_data(chunks)) == EVENTS


def test_event_data_raises_for_a_stream_without_done() -> None:
    events = event_data([b"data: 1\n\nda"])
    assert next(events) == b"1"
    with pytest.raises(EOFError, match="without"):
        next(events)
