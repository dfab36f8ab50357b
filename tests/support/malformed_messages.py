"""Messages that no frontend sends: random, truncated, nested, out of range, replayed, huge."""

import random
from collections.abc import Iterator

from msgspec import msgpack, structs

from tandem.protocol.codec import encode, pack_floats, pack_ids
from tandem.protocol.commands import (
    Abort,
    AnyCommand,
    EndSession,
    Goodbye,
    Hello,
    Inspect,
    Renew,
    SetPolicy,
    Submit,
)
from tandem.protocol.params import SamplingParams
from tandem.protocol.version import PROTOCOL_VERSION

HUGE_BYTES = 4 * 2**20
"""Size of the huge messages."""
_EDGES = (-(2**63), -(2**31), -1, 0, 1, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**64 - 1)


class MalformedMessages:
    """Endless messages of a seed, each the frames of one message of a hostile peer."""

    def __init__(self, seed: int, epoch: int, vocab_size: int) -> None:
        self._random = random.Random(seed)
        self._epoch = epoch
        self._vocab_size = vocab_size
        self._sent: list[bytes] = [encode(Hello(PROTOCOL_VERSION, epoch, "hostile"))]

    def __iter__(self) -> Iterator[list[bytes]]:
        kinds = (
            self._noise, self._truncated, self._nested, self._out_of_range, self._replayed, self._flipped,
            self._wrong_types, self._calls,
        )  # fmt: skip
        while True:
            if self._random.random() < 0.02:
                yield [self._random.randbytes(3) for _ in range(self._random.randrange(2, 40))]
            elif self._random.random() < 0.001:
                yield [self._huge()]
            else:
                yield [self._random.choice(kinds)()]

    def _valid(self) -> AnyCommand:
        chance = self._random
        prompt = [chance.randrange(self._vocab_size) for _ in range(chance.randrange(1, 8))]
        submit = Submit(chance.randrange(2**20), pack_ids(prompt), SamplingParams(chance.randrange(1, 20)))
        return chance.choice(
            [submit, submit, Abort([chance.randrange(2**20)]), Renew(), Hello(PROTOCOL_VERSION, self._epoch, "again")]
        )

    def _noise(self) -> bytes:
        return self._random.randbytes(self._random.randrange(200))

    def _truncated(self) -> bytes:
        data = encode(self._valid())
        return data[: self._random.randrange(len(data))]

    def _nested(self) -> bytes:
        depth = self._random.randrange(1, 5000)
        return self._random.choice([b"\x91", b"\x81\x01", b"\x92\x01"]) * depth

    def _out_of_range(self) -> bytes:
        """Build a Submit whose numbers are at the edges of their types."""
        chance = self._random
        params = structs.replace(
            SamplingParams(chance.choice(_EDGES)),
            temperature=chance.choice([float("nan"), float("inf"), -1.0, 1e308]),
            seed=chance.choice(_EDGES),
            choice=chance.choice(_EDGES),
            min_tokens=chance.choice(_EDGES),
            stop_token_ids=pack_ids([chance.choice((-1, self._vocab_size, 2**31 - 1))] * chance.randrange(100)),
            logit_bias_ids=chance.randbytes(chance.randrange(9)),
            logit_bias_values=pack_floats([float("nan")] * chance.randrange(3)),
        )
        prompt = [chance.choice((-(2**31), -1, self._vocab_size, 2**31 - 1))] * chance.randrange(5)
        return encode(
            Submit(
                chance.choice(_EDGES), pack_ids(prompt), params, logprobs=chance.choice(_EDGES),
                priority=chance.choice(_EDGES), session="s" * chance.randrange(600),
            )
        )  # fmt: skip

    def _replayed(self) -> bytes:
        """Repeat a message of before, or send one that is repeated later."""
        if self._random.random() < 0.5:
            self._sent.append(encode(self._valid()))
            self._sent = self._sent[-100:]
        return self._random.choice(self._sent)

    def _flipped(self) -> bytes:
        data = bytearray(encode(self._valid()))
        for _ in range(self._random.randrange(1, 4)):
            data[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
        return bytes(data)

    def _wrong_types(self) -> bytes:
        """Build an array with a known tag, and fields of other types."""
        values = (None, True, -1, 1.5, "x\ny", b"\0", [], {}, [[["deep"]]], "\u2028" * 50)
        return msgpack.encode([self._random.randrange(9), *self._random.choices(values, k=self._random.randrange(16))])

    def _calls(self) -> bytes:
        chance = self._random
        call = chance.choice(_EDGES)
        return encode(
            chance.choice(
                [
                    SetPolicy(call, "no\nsuch policy" * chance.randrange(100)),
                    EndSession(call, "no\nsuch session" * chance.randrange(100)),
                    SetPolicy(call, "fcfs"),
                    Inspect(call),
                    Goodbye(),
                    Hello(chance.choice(_EDGES[2:]), self._epoch, "name\nERROR forged line"),
                    Hello(PROTOCOL_VERSION, chance.choice(_EDGES), "name\nERROR forged line"),
                ]
            )
        )

    def _huge(self) -> bytes:
        """Build a message that would take long to unpack."""
        count = HUGE_BYTES.to_bytes(4, "big")
        return self._random.choice(
            [
                b"\x92\x02\xdd" + count + b"\x01" * HUGE_BYTES,
                encode(Submit(1, bytes(HUGE_BYTES), SamplingParams(1))),
                encode(Submit(1, bytes(4), SamplingParams(1, stop_token_ids=bytes(HUGE_BYTES)))),
                encode(Submit(1, bytes(4), SamplingParams(1), constraint="x" * HUGE_BYTES)),
                encode(SetPolicy(1, "p" * HUGE_BYTES)),
                encode(EndSession(1, "s" * HUGE_BYTES)),
                bytes(HUGE_BYTES),
            ]
        )
