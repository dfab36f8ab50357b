"""A thread that scrapes a service while something happens to it, as Prometheus does."""

import threading
from collections.abc import Sequence
from types import TracebackType

from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.support.scrape import counters
from tests.support.stream_client import answer

PAUSE_SECONDS = 0.5
METRICS = "/metrics"


class Scrape(Struct, frozen=True):
    """What one port answered. Status 0 is no answer."""

    port: int
    status: int
    text: str


class Scraper:
    """Scrapes ports until its end, each in a thread, and notes whatever no scrape may see.

    A text that cannot be parsed, a histogram whose buckets fall or whose greatest is not its count, a counter that is
    lower than in any scrape that was answered before this one was asked for, or has gone, and a metric that has gone.
    All ports have one source, so none may be behind what another one has told.
    """

    def __init__(self, *ports: int) -> None:
        self.losing: set[int] = set()
        """Ports that may leave a scrape unanswered, because a process behind them is killed or has to end."""
        self.problems: list[str] = []
        self.scrapes: list[Scrape] = []
        self._ports = ports
        self._greatest: dict[str, float] = {}
        self._names: set[str] = set()
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(port,), name=f"scraper {port}") for port in ports]

    def __enter__(self) -> "Scraper":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if kind is None:
            assert not self.problems, "\n".join(self.problems[:5])
            assert all(self.num_answered(port) for port in self._ports), "a port without an answer"

    def stop(self) -> None:
        """Scrape no more. Idempotent."""
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def num_answered(self, port: int) -> int:
        """Return how many scrapes of a port got metrics."""
        return sum(scrape.port == port and scrape.status == 200 for scrape in self.scrapes)

    def _run(self, port: int) -> None:
        while not self._is_over.wait(PAUSE_SECONDS):
            with self._lock:
                greatest, names = self._greatest.copy(), self._names.copy()
            status, body, _ = answer(("127.0.0.1", port), METRICS)
            scrape = Scrape(port, status, body.decode(errors="replace"))
            with self._lock:
                self.scrapes.append(scrape)
                try:
                    self._check(scrape, greatest, names)
                except Exception as error:  # the thread must not end unnoticed
                    self._note(scrape, f"{type(error).__name__}: {error}")

    def _note(self, scrape: Scrape, problem: str) -> None:
        self.problems.append(f"scrape {len(self.scrapes)}, port {scrape.port}: {problem}")

    def _check(self, scrape: Scrape, greatest: dict[str, float], names: set[str]) -> None:
        """Compare a scrape with what was known when it was asked for."""
        if scrape.status != 200:
            # A supervisor that has no time for 2 s is one that "does not answer": what a busy machine may do.
            is_right = "does not answer" in scrape.text if scrape.status == 503 else scrape.port in self.losing
            if not is_right:
                self._note(scrape, f"status {scrape.status}: {scrape.text[:300]}")
            return
        present = set()
        for family in text_string_to_metric_families(scrape.text):
            present.add(family.name)
            if family.type == "histogram":
                self._check_histogram(scrape, family.samples)
        if gone := names - present:
            self._note(scrape, f"metrics have gone: {sorted(gone)}")
        found = counters(scrape.text)
        for series, least in greatest.items():
            if series not in found:
                self._note(scrape, f"{series} has gone")
            elif found[series] < least:
                self._note(scrape, f"{series} fell from {least!r} to {found[series]!r}")
        self._names |= present
        for series, number in found.items():
            self._greatest[series] = max(number, self._greatest.get(series, number))

    def _check_histogram(self, scrape: Scrape, samples: Sequence[Sample]) -> None:
        """Compare the buckets of each series with one another and with its count."""
        series: dict[str, dict[str, list[float]]] = {}
        for sample in samples:
            labels = str(sorted((key, value) for key, value in sample.labels.items() if key != "le"))
            part = sample.name.rpartition("_")[2]
            series.setdefault(labels, {}).setdefault(part, []).append(sample.value)
        for labels, parts in series.items():
            buckets, counts = parts.get("bucket", []), parts.get("count", [])
            if set(parts) != {"bucket", "count", "sum"} or buckets != sorted(buckets) or buckets[-1:] != counts:
                self._note(scrape, f"histogram {samples[0].name} with {labels} is not whole: {parts}")
