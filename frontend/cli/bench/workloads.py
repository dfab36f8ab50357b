"""Workloads: prompts, lengths and arrival times that follow from a seed.

Every request is drawn from its own generator, seeded by (seed, label, index), so that the same requests are sent
whatever the number of client processes and whichever of them sends one. The label differs between load levels: no
level finds its prompts in a prefix cache that an earlier one filled. Two runs with one seed against one living server
do repeat each other; change the seed between them.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, takewhile


@dataclass(frozen=True)
class Span:
    """Integers from `low` to `high`, inclusive.

    Written as `256` or `128:512`.
    """

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ValueError(f"a span needs 1 <= low <= high, not {self.low}:{self.high}")

    @classmethod
    def parse(cls, text: str) -> "Span":
        low, _, high = text.partition(":")
        return cls(int(low), int(high or low))

    def draw(self, generator: random.Random) -> int:
        return self.low if self.low == self.high else generator.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"


@dataclass(frozen=True)
class Request:
    """Prompt as token ids, and the number of tokens to generate."""

    prompt: list[int]
    max_tokens: int
    priority: int = 0


@dataclass(frozen=True)
class Workload:
    """Requests by index.

    Token ids are uniform over `prompt_ids`, lengths over their spans. Every prompt begins with the same `shared`
    tokens, which follow from the seed and `shared_label` alone and come on top of `input_len`: a system prompt.
    `priorities` are given out in turn, by the request's index.
    """

    seed: int
    input_len: Span
    output_len: Span
    prompt_ids: Span
    shared: int = 0
    shared_label: str = ""
    priorities: tuple[int, ...] = (0,)

    def request(self, label: str, index: int) -> Request:
        generator = random.Random(f"{self.seed}/{label}/{index}")
        length, max_tokens = self.input_len.draw(generator), self.output_len.draw(generator)
        common = self._ids(random.Random(f"{self.seed}/shared/{self.shared_label}"), self.shared)
        priority = self.priorities[index % len(self.priorities)]
        return Request(common + self._ids(generator, length), max_tokens, priority)

    def _ids(self, generator: random.Random, count: int) -> list[int]:
        return generator.choices(range(self.prompt_ids.low, self.prompt_ids.high + 1), k=count)


@dataclass(frozen=True)
class Load:
    """Load level, from streams or arrivals.

    Each of `streams` sends its next request at once; `rate` is the number of Poisson arrivals per second. It ends by
    number (`requests` per stream; in total, with a rate) or after `duration` seconds.
    """

    label: str
    streams: int = 0
    rate: float | None = None
    requests: int | None = None
    duration: float | None = None
    most: int | None = None
    """Maximum number of requests of all streams; None for no limit besides `requests`."""
    in_flight: int | None = None
    """Maximum number of requests in flight with a rate; None for no limit. Later arrivals wait in the client."""

    def __post_init__(self) -> None:
        if (self.streams > 0) == (self.rate is not None):
            raise ValueError("a load has either streams or a rate")
        if (self.requests is None) == (self.duration is None):
            raise ValueError("a load ends either by number of requests or after a duration")

    def total(self) -> int | None:
        """Return the number of requests, or None if it is not known in advance."""
        if self.requests is None:
            return None
        total = self.requests * max(1, self.streams)
        return total if self.most is None else min(total, self.most)

    def in_flight_of(self, process: int, processes: int) -> int | None:
        """Return the share of `in_flight` of one of several client processes.

        Each has at least 1, unless there are more processes than `in_flight`.

        """
        return None if self.in_flight is None else len(range(process, self.in_flight, processes))

    def streams_of(self, process: int, processes: int) -> range:
        """Return the streams run by one of several client processes."""
        return range(process, self.streams, processes)

    def indices_of(self, stream: int) -> Iterator[int]:
        """Yield the indices of the requests of a stream in order.

        Infinite with a duration.
        """
        turns = count() if self.requests is None else range(self.requests)
        indices = (turn * self.streams + stream for turn in turns)
        return indices if self.most is None else takewhile(lambda index: index < (self.most or 0), indices)

    def arrivals(self, seed: int) -> list[float]:
        """Yield when each request of an open loop is due, in seconds from the start."""
        if self.rate is None:
            raise ValueError("only a load with a rate has arrivals")
        generator = random.Random(f"{seed}/{self.label}/arrivals")
        due: list[float] = []
        at = generator.expovariate(self.rate)
        while len(due) < self.requests if self.requests is not None else at < (self.duration or 0.0):
            due.append(at)
            at += generator.expovariate(self.rate)
        return due

    def arrivals_of(self, process: int, processes: int, seed: int) -> list[tuple[int, float]]:
        """Yield index and due time of the requests sent by one of several client processes."""
        return list(enumerate(self.arrivals(seed)))[process::processes]
