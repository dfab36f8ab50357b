"""Codec of messages and packed columns.

The format is msgpack, without pickle; malformed bytes raise `ProtocolError`.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate

import msgspec

from tandem.protocol.commands import AnyCommand
from tandem.protocol.errors import ProtocolError
from tandem.protocol.events import AnyEvent, DetailedOutput, SequenceTimes, StepOutput, TokenLogits, TokenLogprobs

ID_BYTES = 4
"""Bytes of one token id, or of one float, on the wire."""

_ONE = b"\x01\x00"
"""A count of one token."""

_encoder = msgspec.msgpack.Encoder()
_command_decoder: msgspec.msgpack.Decoder[AnyCommand] = msgspec.msgpack.Decoder(AnyCommand)
_event_decoder: msgspec.msgpack.Decoder[AnyEvent] = msgspec.msgpack.Decoder(AnyEvent)


def encode(message: AnyCommand | AnyEvent) -> bytes:
    """Encode one message."""
    return _encoder.encode(message)


def decode_command(data: bytes) -> AnyCommand:
    """Decode one command.

    Raises ProtocolError if the bytes are not a well-formed one.
    """
    try:
        return _command_decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"undecodable command of {len(data)} bytes: {error}") from error


def decode_event(data: bytes) -> AnyEvent:
    """Decode one event.

    Raises ProtocolError if the bytes are not a well-formed one.
    """
    try:
        return _event_decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"undecodable event of {len(data)} bytes: {error}") from error


def _pack(typecode: str, values: Sequence[int] | Sequence[float]) -> bytes:
    column = array(typecode, values)
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()


def _unpack(typecode: str, data: bytes) -> list[int]:
    column: array[int] = array(typecode)
    if len(data) % column.itemsize:
        raise ProtocolError(f"a column of {len(data)} bytes is not a multiple of its item size of {column.itemsize}")
    column.frombytes(data)
    if sys.byteorder == "big":
        column.byteswap()
    return column.tolist()


def pack_ids(ids: Sequence[int]) -> bytes:
    """Pack token ids as little-endian int32.

    Raises OverflowError for an id outside int32.
    """
    return _pack("i", ids)


def unpack_ids(data: bytes) -> list[int]:
    """Unpack little-endian int32 ids.

    Raises ProtocolError unless the length is a multiple of 4.
    """
    return _unpack("i", data)


def pack_floats(values: Sequence[float]) -> bytes:
    """Pack floats as little-endian float32."""
    return _pack("f", values)


def unpack_floats(data: bytes) -> list[float]:
    """Unpack little-endian float32 values.

    Raises ProtocolError unless the length is a multiple of 4.
    """
    return [float(value) for value in _unpack("f", data)]


def step_output(
    step_id: int,
    request_ids: Sequence[int],
    tokens: Sequence[int],
    counts: Sequence[int] | None = None,
) -> StepOutput:
    """Build a StepOutput from columns, without terminal events.

    By default each request has one token.
    """
    packed_counts = _ONE * len(request_ids) if counts is None else _pack("H", counts)
    return StepOutput(step_id, _pack("Q", request_ids), packed_counts, _pack("i", tokens))


def runs(output: StepOutput) -> Iterable[tuple[int, list[int]]]:
    """Return each request id of a step output with its tokens.

    Raises ProtocolError if the columns disagree.
    """
    request_ids = _unpack("Q", output.request_ids)
    tokens = _unpack("i", output.tokens)
    if len(request_ids) == len(tokens) and output.counts == _ONE * len(tokens):  # as of most steps
        return zip(request_ids, [[token] for token in tokens], strict=True)
    counts = _unpack("H", output.counts)
    if len(request_ids) != len(counts) or sum(counts) != len(tokens):
        raise ProtocolError(
            f"columns disagree: {len(request_ids)} requests, {len(counts)} counts summing to {sum(counts)}, "
            f"{len(tokens)} tokens"
        )
    ends = list(accumulate(counts))
    return zip(request_ids, [tokens[end - count : end] for end, count in zip(ends, counts, strict=True)], strict=True)


def with_details(
    output: StepOutput,
    times: list[SequenceTimes],
    drafted: Sequence[int] = (),
    drafts: Sequence[int] = (),
    logits: Sequence[TokenLogits] = (),
) -> DetailedOutput:
    """Return an output with the times of sequences, the columns `drafted` and `drafts`, and logits."""
    columns = output.request_ids, output.counts, output.tokens
    drafted_ids, numbers = _pack("Q", drafted), bytes(drafts)
    return DetailedOutput(
        output.step_id, *columns, times=times, drafted=drafted_ids, drafts=numbers, logits=list(logits)
    )


def read_drafts(output: DetailedOutput) -> Iterable[tuple[int, int, int, int]]:
    """Return the columns `drafted` and `drafts` of a step output, row by row.

    Raises ProtocolError if the columns disagree.
    """
    ids, numbers = _unpack("Q", output.drafted), output.drafts
    if len(numbers) != 3 * len(ids):
        raise ProtocolError(f"columns disagree: {len(ids)} requests with drafts, {len(numbers)} bytes about them")
    return zip(ids, numbers[::3], numbers[1::3], numbers[2::3], strict=True)


def read_logprobs(logprobs: TokenLogprobs) -> list[tuple[float, list[int], list[float]]]:
    """Unpack the log-probabilities of tokens and of their alternatives.

    Each token has its own, then the ids of the most probable tokens and theirs. Raises ProtocolError unless the length
    of `lines` is a multiple of one token's record.
    """
    top = logprobs.top
    size = 4 * (1 + 2 * top)
    if top < 0 or len(logprobs.lines) % size:
        raise ProtocolError(f"{len(logprobs.lines)} bytes do not divide into lines of {top} alternatives")
    fields = struct.iter_unpack(f"<{1 + top}f{top}i", logprobs.lines)
    return [(values[0], list(values[1 + top :]), list(values[1 : 1 + top])) for values in fields]
