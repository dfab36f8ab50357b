"""The client's own HTTP and SSE, cut at any byte."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.frontend.cli.bench.completion import DONE, Meter, RequestFailedError
from tandem.frontend.cli.bench.connection import Endpoint, framing_of, parse_head
from tandem.frontend.cli.bench.framing import Chunked, Sized, UntilClose
from tandem.frontend.cli.bench.record import Record
from tandem.frontend.cli.bench.sse import SseDecoder

CUTS = st.lists(st.integers(1, 40), min_size=1, max_size=30)
PAYLOADS = st.lists(st.binary(max_size=60).map(lambda data: data.replace(b"\n", b"n").replace(b"\r", b"r")), max_size=8)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    """Cut the data into pieces of these lengths, repeated as often as needed."""
    parts, at, turn = [], 0, 0
    while at < len(data):
        parts.append(data[at : at + cuts[turn % len(cuts)]])
        at, turn = at + len(parts[-1]), turn + 1
    return parts


def chunked(parts: list[bytes], extension: bytes = b"", trailer: bytes = b"") -> bytes:
    chunks = b"".join(b"%x%b\r\n%b\r\n" % (len(part), extension, part) for part in parts)
    return chunks + b"0%b\r\n%b\r\n" % (extension, trailer)


def sse(payloads: list[bytes], newline: bytes) -> bytes:
    return b"".join(b": ping" + newline + b"id: 1" + newline + b"data: " + p + newline * 2 for p in payloads)


@given(PAYLOADS, CUTS, CUTS, st.sampled_from([b"\n", b"\r\n"]), st.sampled_from([b"", b";a=b"]))
@settings(deadline=None, max_examples=50)
def test_event_parser_does_not_depend_on_the_chunks(
    payloads: list[bytes], inner: list[int], outer: list[int], newline: bytes, extension: bytes
) -> None:
    body = sse(payloads, newline)
    wire = chunked(pieces(body, inner), extension, b"x-time: 1\r\n")
    framing, decoder = Chunked(), SseDecoder()
    received, events = b"", []
    for piece in pieces(wire, outer):
        assert not framing.done
        data = framing.feed(piece)
        received += data
        events += decoder.feed(data)
    assert framing.done and framing.clean
    assert received == body
    assert events == payloads


@given(st.binary(max_size=80), CUTS)
@settings(deadline=None, max_examples=50)
def test_sized_body_ends_at_its_content_length(body: bytes, cuts: list[int]) -> None:
    framing = Sized(len(body))
    assert b"".join(framing.feed(piece) for piece in pieces(body, cuts)) == body
    assert framing.done and framing.clean


def test_connection_with_bytes_after_the_body_is_not_reused() -> None:
    chunks, sized = Chunked(), Sized(2)
    assert chunks.feed(chunked([b"ab"]) + b"HTTP/1.1") == b"ab" and chunks.done and not chunks.clean
    assert sized.feed(b"abc") == b"ab" and sized.done and not sized.clean


@pytest.mark.parametrize("wire", [b"x\r\n", b"-1\r\n", b"\r\n", b"0x2\r\nab\r\n", b"2\r\nabc\r\n", b"1_0\r\n"])
def test_malformed_chunks_are_rejected(wire: bytes) -> None:
    with pytest.raises(ValueError, match="chunk"):
        Chunked().feed(wire)


def test_several_data_lines_form_one_event() -> None:
    assert SseDecoder().feed(b"data: a\ndata:b\n\ndata:  c\n\n\n\ndata: unfinished\n") == [b"a\nb", b" c"]


def test_parse_head_reads_status_and_headers() -> None:
    status, headers = parse_head(b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nX-Colon:a:b")
    assert status == 503 and headers == {"retry-after": "1", "x-colon": "a:b"}
    with pytest.raises(ValueError, match="HTTP/1"):
        parse_head(b"SSH-2.0-x")
    assert isinstance(framing_of({"transfer-encoding": "Chunked"}), Chunked)
    assert isinstance(framing_of({"content-length": "3"}), Sized)
    assert isinstance(framing_of({}), UntilClose)


def test_endpoint_parses_urls() -> None:
    assert Endpoint.parse("http://host:81") == Endpoint("host", 81, "/v1/completions")
    assert Endpoint.parse("http://host/proxy/v1/") == Endpoint("host", 80, "/proxy/v1/completions")
    assert b"host: [::1]:80\r\n" in Endpoint.parse("http://[::1]").head(3)
    with pytest.raises(ValueError, match="http://"):
        Endpoint.parse("ftp://host")


def metered(*events: tuple[bytes, float]) -> Record:
    record = Record(0, asked=5, start=1.0)
    meter = Meter(record)
    for payload, at in events:
        meter.take(payload, at)
    meter.finish()
    return record


def test_gap_is_divided_over_the_tokens_of_its_chunk() -> None:
    record = metered(
        (b'{"choices":[{"text":"a","token_ids":[1,2],"finish_reason":null}]}', 2.0),
        (b'{"choices":[{"text":"b","token_ids":[3]}],"usage":null}', 2.5),
        (b'{"choices":[{"text":"cd","token_ids":[4,5],"finish_reason":"length"}]}', 3.5),
        (DONE, 4.0),
    )
    assert (record.tokens, record.counted_by) == (5, "token_ids")
    assert record.gaps == [0.5, 0.5, 0.5]
    assert (record.ttft, record.tpot) == (1.0, 1.5 / 4)


def test_gap_counts_once_and_usage_counts_tokens_without_ids() -> None:
    record = metered(
        (b'{"choices":[{"text":""}]}', 2.0),
        (b'{"choices":[{"text":"abc"}]}', 3.0),
        (b'{"choices":[{"text":"","finish_reason":"stop"}]}', 3.5),
        (b'{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":6,"total_tokens":15}}', 3.6),
    )
    assert (record.tokens, record.prompt_tokens, record.counted_by) == (6, 9, "usage")
    assert record.gaps == [1.0]
    assert (record.first, record.last, record.tpot) == (2.0, 3.5, 0.3)


@pytest.mark.parametrize(
    ("events", "kind"),
    [
        ([b'{"choices":[{"text":"a"}]}'], "cut off"),
        ([DONE], "no output"),
        ([b'{"error":{"message":"engine lost"}}', DONE], "error event"),
    ],
)
def test_incomplete_reply_is_a_failure(events: list[bytes], kind: str) -> None:
    with pytest.raises(RequestFailedError) as failure:
        metered(*((event, 2.0) for event in events))
    assert failure.value.kind == kind
