"""Measure a server under load: trials of a scenario, capacity, and streams during long prompts."""

from concurrent.futures import ThreadPoolExecutor

from benchmarks.matrix.capacity import Watch, while_waiting
from benchmarks.matrix.figures import PERCENTS, Figures, PrefillTrial, figures
from benchmarks.matrix.long_prompts import LongPrompts, gaps_during_prefill
from benchmarks.matrix.scenarios import PROMPT_IDS, Scenario
from benchmarks.matrix.server import Server
from benchmarks.measuring.scrape import histogram_summary
from tandem.frontend.cli.bench.client import Job
from tandem.frontend.cli.bench.clients import Clients
from tandem.frontend.cli.bench.completion import Dialect
from tandem.frontend.cli.bench.connection import Endpoint
from tandem.frontend.cli.bench.distribution import distribution
from tandem.frontend.cli.bench.record import Record
from tandem.frontend.cli.bench.workloads import Load, Span, Workload
from tandem.frontend.progress import Progress

QUEUE_TIME = "tandem_request_queue_time_seconds"
TIMEOUT = 600.0
QUANTILES = tuple(int(percent[1:]) for percent in PERCENTS)


class Bench:
    """Client of a run. Its processes load all servers one after the other."""

    def __init__(self, model: str, seed: int, starved_ms: float, clients: Clients, others: Clients) -> None:
        """Initialize with the model, the bounds and the client processes.

        others: clients of the load that arrives while `clients` run theirs.
        """
        self._dialect = Dialect(model, token_ids=True)
        self._seed, self._starved_ms = seed, starved_ms
        self._clients, self._others = clients, others

    def trial(self, server: Server, scenario: Scenario, trial: int) -> Figures:
        before = server.scrape()
        load = scenario.load(trial)
        records = self._send(self._clients, server, load, scenario.workload(self._seed, trial))
        server.await_heartbeats()
        waits = histogram_summary(before, server.scrape(), QUEUE_TIME, QUANTILES)
        return figures(records, waits, self._starved_ms)

    def held(self, server: Server, scenario: Scenario, trial: int) -> dict[str, float]:
        """Return the figures of a trial, by field of `Held`.

        `running` is missing if no sequence was seen waiting.
        """
        load = scenario.load(trial)
        watch = Watch(load, server)
        records = self._send(self._clients, server, load, scenario.workload(self._seed, trial), watch)
        server.await_heartbeats()
        speed = figures(records, {}, self._starved_ms).output_tokens_per_s
        return while_waiting(watch.readings) | {"output_tokens_per_s": speed}

    def long_prompts(self, server: Server, sizes: LongPrompts, trial: int) -> PrefillTrial:
        """Run the same streams without, then with the long prompts."""
        streams = Workload(self._seed, Span(16, 16), Span(sizes.stream_tokens, sizes.stream_tokens), PROMPT_IDS)
        prompts = Workload(self._seed, Span(sizes.prompt_tokens, sizes.prompt_tokens), Span(1, 1), PROMPT_IDS)
        alone = self._send(self._clients, server, Load(f"alone {trial}", sizes.streams, requests=1), streams)
        load = Load(f"streams {trial}", sizes.streams, requests=1)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(self._send, self._clients, server, load, streams)
            arriving = Load(f"long prompts {trial}", 1, requests=sizes.prompts)
            arrived = self._send(self._others, server, arriving, prompts)
            loaded = running.result()
        return PrefillTrial(
            distribution((gap for record in alone for gap in record.gaps), 1e3),
            distribution(gaps_during_prefill(loaded, arrived), 1e3),
            len(arrived),
            distribution((record.ttft for record in arrived if record.ttft is not None), 1e3),
        )

    def _send(
        self, clients: Clients, server: Server, load: Load, workload: Workload, progress: Progress | None = None
    ) -> list[Record]:
        """Send a load and return its records.

        Raises ConnectionError if a request failed, since the load was not complete.
        """
        progress = progress or Progress(load.label, load.total(), load.duration)
        shares = clients.run(Job([Endpoint.parse(server.url)], self._dialect, workload, load, TIMEOUT), progress)
        progress.clear()
        records = [record for share in shares for record in share.records]
        failed = [record for record in records if record.error is not None]
        if failed:
            raise ConnectionError(f"{load.label}: {len(failed)} requests failed: {failed[0].error} {failed[0].detail}")
        return records
