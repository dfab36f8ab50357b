"""Cost of attackers, without an API key and with one, to a frontend and its other clients.

    python -m benchmarks.bench_attacks [--attackers 64] [--seconds 5] [--only NAME ...] [--save NAME]

A frontend runs without an engine. For each kind of attack, a separate process runs --attackers attackers, which repeat
the attack on a new connection whenever the server has closed the previous one. Meanwhile a well-behaved client requests
/health/live on a new connection every 20 ms. The table has the growth of the frontend's resident memory during the
attack, the slowest of those requests, the frontend's CPU usage, and the answers to the attackers. The limits are 64 MiB
and 0.5 s.

Attacks by a tenant with a key run against another frontend, with an engine that answers immediately and a stored
response with an item of 31 MiB. The well-behaved client is another tenant that stores a small response with each
request. The limits are 512 MiB, the memory for bodies of 31 MiB in flight, and 0.5 s.
"""

import argparse
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

from msgspec import Struct, to_builtins

from benchmarks.frontends.attackers import ATTACKS, OTHER, TENANT, Attack, large_body, request, run_attackers
from benchmarks.measuring.processes import cpu_seconds, family, stop_process
from benchmarks.measuring.results import save
from tandem.frontend.listening import raise_file_limit
from tests.fakes.engine import FakeEngine

MODEL = Path(__file__).parents[1] / "engine_core" / "default_model"
READY_SECONDS, STOP_SECONDS = 120.0, 30.0
PROBE = b"GET /health/live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
PROBE_SECONDS = 0.02
"""Seconds between two requests of the well-behaved client."""
PROBE_TIMEOUT = 60.0
STORE = b'{"model": "m", "input": "go", "max_output_tokens": 1}'
STORING_PROBE = request(OTHER, "POST", "/v1/responses", len(STORE)) + STORE
MAX_GROWTH, MAX_TENANT_GROWTH, MAX_LATENCY = 64.0, 512.0, 0.5
"""Limits of memory growth in MiB, without a key and for a tenant, and of latency in seconds."""


class Figures(Struct, frozen=True):
    """Effect of an attack on the frontend and its other clients."""

    attack: str
    seconds: float
    growth: float
    """Maximum growth of the frontend's resident memory, in MiB."""
    worst: float
    """Maximum latency of the well-behaved client, in seconds."""
    probes: int
    """Requests of the well-behaved client."""
    failed: int
    """Requests of the well-behaved client not answered with 200."""
    cpu: float
    """CPU time of the frontend divided by the duration of the attack."""
    outcomes: dict[str, int]
    """Number of attacks by answer status, or "closed"."""
    is_tenant: bool = False
    """True for attacks with an API key."""

    @property
    def is_within(self) -> bool:
        """True if the limits hold."""
        growth = MAX_TENANT_GROWTH if self.is_tenant else MAX_GROWTH
        return self.growth <= growth and self.worst <= MAX_LATENCY and not self.failed


class Frontend:
    """Context manager that runs a frontend, without an engine or with `engine` and the keys of two tenants."""

    def __init__(self, log: Path, engine: FakeEngine | None = None) -> None:
        self._log = log
        self._engine = engine
        self.target = ""
        """Id of a stored response with a large item."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address: tuple[str, int] = probe.getsockname()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Frontend":
        endpoint = f"ipc://{self._log.parent}/e" if self._engine is None else self._engine.endpoint
        command = [sys.executable, "-m", "tandem.frontend", "--endpoint", endpoint]
        command += ["--model-dir", str(MODEL), "--port", str(self.address[1]), "--frontends", "1"]
        with self._log.open("wb") as log:
            keys = {"TANDEM_API_KEY": f"{TENANT},{OTHER}"} if self._engine is not None else {}
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | keys)
        deadline = time.monotonic() + READY_SECONDS
        while probe(self.address) is None:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the frontend did not come up:\n{self._log.read_text()[-2000:]}")
            time.sleep(0.1)
        if self._engine is not None:
            self._engine.start()
            self.target = self._store_large(deadline)
        return self

    def _store_large(self, deadline: float) -> str:
        """Store a response with a large item for the attacking tenant, once the engine is connected."""
        while probe(self.address, STORING_PROBE) is None:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the frontend stores nothing:\n{self._log.read_text()[-2000:]}")
            time.sleep(0.1)
        body = b"".join(large_body("rs_1"))
        with socket.create_connection(self.address, timeout=PROBE_TIMEOUT) as client:
            client.sendall(request(TENANT, "POST", "/v1/responses", len(body)) + body)
            answer = client.makefile("rb").read()
        return str(json.loads(answer.partition(b"\r\n\r\n")[2])["id"])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        stop_process(self._process, STOP_SECONDS)
        if self._engine is not None:
            self._engine.die()

    def memory(self) -> float:
        """Return the resident memory of the frontend, its supervisor and its helpers, in MiB."""
        assert self._process is not None
        return sum(process.memory_info().rss for process in family(self._process.pid)) / 2**20

    def cpu(self) -> float:
        """Return the CPU time of the same processes, in seconds."""
        assert self._process is not None
        return sum(cpu_seconds(process.pid) for process in family(self._process.pid))


def probe(address: tuple[str, int], sent: bytes = PROBE) -> float | None:
    """Send a request on a new connection; return its latency in seconds, None unless the status is 200."""
    started = time.monotonic()
    try:
        with socket.create_connection(address, timeout=PROBE_TIMEOUT) as client:
            client.sendall(sent)
            answer = client.makefile("rb").read()
    except OSError:
        return None
    return time.monotonic() - started if answer.startswith(b"HTTP/1.1 200 ") else None


def measure(frontend: Frontend, attack: Attack, attackers: int, seconds: float) -> Figures:
    """Run an attack for `seconds`, or for its minimum duration."""
    seconds = max(seconds, attack.seconds)
    before, cpu = frontend.memory(), frontend.cpu()
    receiver, sender = multiprocessing.Pipe(duplex=False)
    arguments = (frontend.address, attack.name, frontend.target, attackers, seconds, sender)
    process = multiprocessing.get_context("spawn").Process(target=run_attackers, args=arguments)
    started = time.monotonic()
    process.start()
    largest, latencies = before, []
    while not receiver.poll(PROBE_SECONDS):
        latencies.append(probe(frontend.address, STORING_PROBE if attack.is_tenant else PROBE))
        largest = max(largest, frontend.memory())
    outcomes = receiver.recv()
    taken = time.monotonic() - started
    cpu = frontend.cpu() - cpu
    process.join()
    worst = max((latency for latency in latencies if latency is not None), default=PROBE_TIMEOUT)
    return Figures(
        attack=attack.name,
        seconds=round(taken, 1),
        growth=round(largest - before, 1),
        worst=round(worst, 4),
        probes=len(latencies),
        failed=latencies.count(None),
        cpu=round(cpu / taken, 2),
        outcomes=dict(sorted(outcomes.items())),
        is_tenant=attack.is_tenant,
    )


def table(figures: list[Figures]) -> str:
    """Format a table with a line per attack."""
    lines = [f"{'attack':28} {'MiB':>6} {'worst ms':>9} {'probes':>7} {'failed':>7} {'CPU':>5}  answers"]
    for row in figures:
        answers = ", ".join(f"{name}: {count}" for name, count in row.outcomes.items())
        lines.append(
            f"{row.attack:28} {row.growth:6.1f} {row.worst * 1000:9.1f} {row.probes:7} {row.failed:7} {row.cpu:5.0%}"
            f"  {answers}"
        )
    for name, growth in (("(ceiling)", MAX_GROWTH), ("(ceiling, tenant)", MAX_TENANT_GROWTH)):
        lines.append(f"{name:28} {growth:6.1f} {MAX_LATENCY * 1000:9.1f} {'':7} {0:7}")
    return "\n".join(lines)


def run(attackers: int, seconds: float, names: list[str]) -> list[Figures]:
    """Measure the named attacks in order, those of tenants against a separate frontend."""
    raise_file_limit()
    figures: list[Figures] = []
    for is_tenant in (False, True):
        attacks = [attack for attack in ATTACKS if attack.name in names and attack.is_tenant is is_tenant]
        if not attacks:
            continue
        with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
            engine = FakeEngine(f"ipc://{folder}/engine", name="m", vocab_size=4096) if is_tenant else None
            with Frontend(Path(folder) / "log", engine) as frontend:
                for _ in range(20):
                    probe(frontend.address)
                figures += [measure(frontend, attack, attackers, seconds) for attack in attacks]
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [attack.name for attack in ATTACKS]
    parser.add_argument("--attackers", type=int, default=64, help="(default %(default)s)")
    parser.add_argument("--seconds", type=float, default=5.0, help="least duration of an attack (default %(default)s)")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--save", metavar="NAME", help="write benchmarks/results/NAME.json")
    arguments = parser.parse_args()
    figures = run(arguments.attackers, arguments.seconds, arguments.only)
    print(table(figures))
    if arguments.save:
        config = {"attackers": arguments.attackers, "seconds": arguments.seconds}
        print(save(arguments.save, config, to_builtins(figures)))
    return int(not all(row.is_within for row in figures))


if __name__ == "__main__":
    sys.exit(main())
