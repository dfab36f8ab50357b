"""Every message round-trips, and malformed bytes raise ProtocolError."""

from collections.abc import Callable
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.protocol.codec import decode_command, decode_event, encode
from tandem.protocol.commands import Abort, AnyCommand, Goodbye, Hello, Submit
from tandem.protocol.errors import ProtocolError
from tandem.protocol.events import AnyEvent, Failure, Finished, StepOutput
from tandem.protocol.params import SamplingParams
from tandem.protocol.stats import EngineStats
from tests.support.messages import ANY_INT, COMMANDS, EVENTS, STATS

KINDS: dict[Callable[[bytes], Any], tuple[type, ...]] = {
    decode_command: get_args(AnyCommand),
    decode_event: get_args(AnyEvent),
}
"""The decoders, with the messages of each."""


def pack(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


def builtins(value: Any) -> list[Any]:
    fields: list[Any] = msgspec.to_builtins(value, builtin_types=(bytes,))
    return fields


def check_decoded_or_refused(decode: Callable[[bytes], Any], data: bytes) -> None:
    """Check that bytes are a message that round-trips, or a ProtocolError; any other exception is a bug."""
    try:
        message = decode(data)
    except ProtocolError:
        return
    assert isinstance(message, KINDS[decode])
    # The bytes are compared, because NaN equals nothing.
    assert encode(decode(encode(message))) == encode(message)


@given(COMMANDS)
def test_commands_round_trip(command: AnyCommand) -> None:
    decoded = decode_command(encode(command))
    assert decoded == command
    assert type(decoded) is type(command)


@given(EVENTS)
def test_events_round_trip(event: AnyEvent) -> None:
    decoded = decode_event(encode(event))
    assert decoded == event
    assert type(decoded) is type(event)


@pytest.mark.parametrize("decode", KINDS)
@given(st.binary(max_size=80))
def test_random_bytes_decode_or_raise_a_protocol_error(decode: Callable[[bytes], Any], data: bytes) -> None:
    check_decoded_or_refused(decode, data)


@settings(deadline=None)
@given(COMMANDS)
def test_truncated_commands_are_protocol_errors(command: AnyCommand) -> None:
    data = encode(command)
    for cut in range(len(data)):
        with pytest.raises(ProtocolError):
            decode_command(data[:cut])


@given(COMMANDS)
def test_bytes_after_a_command_are_protocol_errors(command: AnyCommand) -> None:
    with pytest.raises(ProtocolError):
        decode_command(encode(command) + b"\x00")


@settings(deadline=None)
@given(EVENTS)
def test_truncated_events_are_protocol_errors(event: AnyEvent) -> None:
    data = encode(event)
    for cut in range(0, len(data), max(1, len(data) // 40)):
        with pytest.raises(ProtocolError):
            decode_event(data[:cut])


@given(COMMANDS, st.data())
def test_flipped_bytes_decode_or_raise_a_protocol_error(command: AnyCommand, data: st.DataObject) -> None:
    raw = bytearray(encode(command))
    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    check_decoded_or_refused(decode_command, bytes(raw))


PLAIN = st.recursive(
    st.none() | st.booleans() | ANY_INT | st.floats() | st.text(max_size=4) | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


@pytest.mark.parametrize("decode", KINDS)
@given(st.integers(-2, 5), st.lists(PLAIN, max_size=7))
def test_msgpack_of_any_types_decodes_or_raises_a_protocol_error(
    decode: Callable[[bytes], Any], tag: int, fields: list[Any]
) -> None:
    check_decoded_or_refused(decode, pack([tag, *fields]))


WRONG = [
    ("nothing", b""),
    ("no array", pack({"t": 0})),
    ("no tag", pack([])),
    ("an unknown tag", pack([99, 1, 2])),
    ("a negative tag", pack([-1])),
    ("a tag of another type", pack(["0", 1, 2, "x"])),
    ("too few fields", pack([0, 1])),
    ("text for a number", pack([0, "1", 2, "x"])),
    ("a float for a number", pack([0, 1.5, 2, "x"])),
    ("nil for a number", pack([0, None, 2, "x"])),
    ("text for bytes", pack([1, 1, "abcd", [1]])),
    ("an object for an array", pack([2, {}])),
    ("invalid UTF-8", b"\x94\x00\x01\x01\xa2\xff\xfe"),
    ("half a surrogate", b"\x94\x00\x01\x01\xa3\xed\xa0\x80"),
    ("a reserved byte", b"\xc1"),
    ("arrays nested deeply", b"\x92\x02" + b"\x91" * 200_000),
    ("arrays nested deeply in a field that is skipped", b"\x93\x03\x01" + b"\x91" * 200_000),
    ("objects nested deeply in a field that is skipped", b"\x93\x03\x01" + b"\x81\xa1a" * 200_000),
    ("an array of 2^32-1", b"\x92\x02\xdd\xff\xff\xff\xff"),
    ("bytes of 2^32-1", b"\x94\x01\x01\xc6\xff\xff\xff\xff"),
    ("text of 2^32-1", b"\x94\x00\x01\x01\xdb\xff\xff\xff\xff"),
    ("an extension of 2^32-1", b"\x92\x02\xc9\xff\xff\xff\xff\x01"),
    ("a timestamp out of range", b"\x92\x02\xc7\x0c\xff" + b"\xff" * 12),
]


@pytest.mark.parametrize("data", [data for _, data in WRONG], ids=[name for name, _ in WRONG])
def test_hostile_commands_are_protocol_errors(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_command(data)


@pytest.mark.parametrize("data", [data for _, data in WRONG], ids=[name for name, _ in WRONG])
def test_hostile_events_are_protocol_errors(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_event(data)


def test_a_message_of_the_other_direction_is_a_protocol_error() -> None:
    params = SamplingParams(4)
    for command in (Hello(1, 2, "a"), Submit(1, b"\0\0\0\0", params), Abort([1])):
        with pytest.raises(ProtocolError):
            decode_event(encode(command))
    for event in (StepOutput(1, b"", b"", b""), StepOutput(1, b"", b"", b"", [Finished(1, "stop")])):  # type: ignore[arg-type]
        with pytest.raises(ProtocolError):
            decode_command(encode(event))


@pytest.mark.parametrize(("kind", "value"), [("reason", "exploded"), ("code", "no_such_code")])
def test_unknown_enum_values_are_protocol_errors(kind: str, value: str) -> None:
    row = [[1, value]] if kind == "reason" else [[1, value, "text"]]
    columns: list[Any] = [2, 1, b"", b"", b""]
    data = pack([*columns, row]) if kind == "reason" else pack([*columns, [], row])
    with pytest.raises(ProtocolError):
        decode_event(data)


class TestAppendedFields:
    """Compatibility with older and newer peers: fields are only appended, with a default."""

    def test_sampling_params_of_an_older_frontend_decode_with_defaults(self) -> None:
        defaults = builtins(SamplingParams(7))
        for length in range(1, len(defaults) + 1):
            decoded = decode_command(pack([1, 5, b"\1\0\0\0", defaults[:length]]))
            assert decoded == Submit(5, b"\1\0\0\0", SamplingParams(7))

    def test_terminal_events_of_an_older_engine_decode_with_defaults(self) -> None:
        data = pack([2, 3, b"", b"", b""])
        assert decode_event(data) == StepOutput(3, b"", b"", b"")
        data = pack([2, 3, b"", b"", b"", [[9, "stop"]], [[8, "overloaded", "later"]]])
        output = decode_event(data)
        assert isinstance(output, StepOutput)
        assert output.finished == [Finished(9, "stop", None)]  # type: ignore[arg-type]
        assert output.failures == [Failure(8, "overloaded", "later")]  # type: ignore[arg-type]

    @given(STATS)
    def test_stats_of_an_older_engine_decode_with_defaults(self, stats: EngineStats) -> None:
        fields = builtins(stats)
        for length in range(len(fields) + 1):
            decoded = msgspec.convert(fields[:length], EngineStats)
            for name in EngineStats.__struct_fields__[:length]:
                assert getattr(decoded, name) == getattr(stats, name)

    def test_fields_of_a_newer_peer_are_skipped(self) -> None:
        assert decode_command(pack([3, "new", [1, {"a": None}]])) == Goodbye()
        newer = builtins(SamplingParams(7))
        assert decode_command(pack([1, 5, b"", [*newer, "new"]])) == Submit(5, b"", SamplingParams(7))
