"""Server under test with its streams during a fault."""

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct

from tandem.frontend.cli.bench.distribution import percentile
from tests.support.serving import Serving
from tests.support.stream_client import Stream, StreamClient, Summary, answer, completion, summary

ENDLESS, ENDLESS_REAL = 1900, 900
"""Tokens of a stream that stays open until the fault, with a scripted and a real engine."""
BEFORE_SECONDS, AFTER_SECONDS = 3.0, 8.0
"""Seconds before and after a fault over which the ITL of the other streams is compared."""
WAIT_SECONDS = 120.0


class Setup(Struct, frozen=True):
    """Settings of a measurement."""

    streams: int
    frontends: int
    tokens_per_second: float
    """Tokens per second of each stream from a scripted engine."""
    real: tuple[str, ...] | None = None
    """Flags of `tandem serve` for a real engine; None for a scripted one."""
    tokens: int | None = None
    """Tokens of a stream that stays open until the fault; None for the default model's limit."""

    def endpoint(self, folder: Path) -> str:
        """Return the engine endpoint of a server with this run directory."""
        return f"ipc://{folder}/engine"

    @property
    def endless(self) -> int:
        """Tokens of a stream that stays open until the fault."""
        return self.tokens or (ENDLESS if self.real is None else ENDLESS_REAL)


class Outcome(Struct, frozen=True):
    """Cost of one fault."""

    fault: str
    streams: int
    goal: str
    seconds: dict[str, float]
    counts: dict[str, float]
    leaked_rows: float
    leaked_pages: float


class Drill:
    """Server under test with its streams during a fault."""

    def __init__(self, serving: Serving, client: StreamClient, setup: Setup) -> None:
        self.serving = serving
        self.client = client
        self.setup = setup
        self.seconds: dict[str, float] = {}
        self.counts: dict[str, float] = {}
        self.streams: list[Stream] = []
        self._at = 0.0

    def load(self, tokens: int = 0) -> list[Stream]:
        """Open streams, endless by default, and wait until each has received a token."""
        self.streams = self.client.open(completion(tokens or self.setup.endless), self.setup.streams)
        self.client.until_streaming(self.streams, WAIT_SECONDS)
        assert all(not stream.outcome for stream in self.streams), summary(self.streams)
        return self.streams

    def await_rows(self, count: int) -> None:
        """Wait until the engine's last heartbeat counts `rows` rows."""
        self.note("a row for each", lambda: self.serving.engine_metric("tandem_num_requests_running") == count)
        self.seconds.clear()

    def strike(self, act: Callable[[], object]) -> None:
        """Inject the fault and start the clock."""
        self._at = time.monotonic()
        act()

    def note(self, name: str, condition: Callable[[], object]) -> None:
        """Record the seconds from the fault until a condition holds, polled ten times a second."""
        asked = 0.0

        def holds() -> bool:
            nonlocal asked
            if time.monotonic() - asked < 0.1:
                return False
            asked = time.monotonic()
            return bool(condition())

        self.client.until(holds, name, WAIT_SECONDS)
        self.seconds[name] = round(time.monotonic() - self._at, 3)

    def note_ends(self, streams: Sequence[Stream], name: str = "last stream told") -> None:
        """Record when the last of these streams ended."""
        self.client.until_ended(streams, WAIT_SECONDS)
        self.seconds[name] = round(max(stream.ended for stream in streams) - self._at, 3)

    def count(self, streams: Sequence[Stream], what: str) -> None:
        """Count streams by outcome, and check that no token is lost or repeated."""
        found = Summary.of(streams)
        assert not found.problems, summary(streams)
        self.counts |= {
            f"{what}: {name}": number
            for name, number in (("done", found.done), ("error", found.error), ("cut", found.cut), ("open", found.open))
            if number
        }

    def note_gaps(self) -> None:
        """Record the p99 ITL of the open streams before and after the fault."""
        living = [stream for stream in self.streams if not stream.outcome]
        before = _gaps(living, self._at - BEFORE_SECONDS, self._at)
        after = _gaps(living, self._at, self._at + AFTER_SECONDS)
        if before and after:
            self.seconds["ITL p99 before"] = round(percentile(before, 99), 4)
            self.seconds["ITL p99 after"] = round(percentile(after, 99), 4)

    def is_whole(self) -> bool:
        """Return whether every frontend is running and the service is ready."""
        return self.serving.num_serving() == self.setup.frontends and self.is_ready()

    def is_ready(self) -> bool:
        return answer(self.serving.address, "/health/ready")[0] == 200

    def outcome(self, fault: str, goal: str) -> Outcome:
        """Disconnect all clients, and count leaked rows and pages."""
        for stream in self.client.streams:
            self.client.drop(stream)
        deadline = time.monotonic() + 10
        while not (free := self.serving.rows_and_pages_are_free()) and time.monotonic() < deadline:
            time.sleep(0.1)
        share = self.serving.engine_metric("tandem_kv_cache_usage_perc")
        pages = 0.0 if free else share * self.serving.engine_metric("tandem_kv_cache_pages")
        rows = self.serving.engine_metric("tandem_num_requests_running")
        return Outcome(fault, self.setup.streams, goal, self.seconds, self.counts, rows, round(pages))


def _gaps(streams: Sequence[Stream], since: float, until: float) -> list[float]:
    gaps = []
    for stream in streams:
        times = [at for at in stream.arrivals if since <= at <= until]
        gaps += [after - before for before, after in itertools.pairwise(times)]
    return sorted(gaps)
