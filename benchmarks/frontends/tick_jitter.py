"""Jitter of a real engine's ticks with frontends inside its process and outside.

    python -m benchmarks.frontends.tick_jitter [--model FOLDER] [--device cuda] [--streams 8] [--frontends 1 4]
        [--seconds 10] [--rounds 3] [--save NAME]

The same HTTP streams are served with the frontend (detokenizing, JSON, sockets) in a thread of the engine's process,
sharing the GIL with its loop, and in separate processes. A tick of full decode steps is timed from its start to that of
the next: the ITL before any network. Clients are separate processes. Streams last as long as the context: on a GPU give
--max-len, 2,000 per second. For random weights of a shape, make a folder with `benchmarks.shapes.make_folder` and give
--load-format dummy.
"""

import argparse
import itertools
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import zmq
from msgspec import Struct, to_builtins

from benchmarks.frontends.deployment import MODEL, SERVED_NAME, STOP_SECONDS, await_ready, frontend_command
from benchmarks.frontends.load import StreamLoad
from benchmarks.measuring.processes import stop_process
from benchmarks.measuring.results import save
from tandem.frontend.cli.bench.distribution import distribution
from tandem.protocol.engine_options import EngineOptions
from tandem.protocol.events import Phase
from tests.support.serving import free_port

INSIDE = 0
"""Number of frontends that means one inside the engine's process."""
SETTLE_SECONDS = 1.0


class Figures(Struct, frozen=True):
    """Tick times of one run, in milliseconds."""

    frontends: int
    """Frontend processes; 0 for one inside the engine's process."""
    streams: int
    ticks: int
    p50: float
    p90: float
    p99: float
    p999: float
    worst: float
    tokens_per_second: float


def run_engine(options: EngineOptions, endpoint: str, model: Path, port: int, streams: int, pipe: Connection) -> None:
    """Run an engine until the pipe receives "stop", with a frontend in a thread if there is a port.

    Ticks are timed from the message "go" on.
    """
    from tandem.engine_core.startup.engine import build_engine
    from tandem.engine_core.startup.heap import freeze_heap
    from tandem.engine_core.stats import new_stats
    from tandem.engine_core.wire.heartbeat import HeartbeatPublisher, Status
    from tandem.engine_core.wire.mailbox import ZmqMailbox
    from tandem.engine_core.wire.wakeup import LoopWaker
    from tandem.protocol.sockets import Transport, bind_router, heartbeat_endpoint

    context: Any = zmq.Context()
    status = Status(int.from_bytes(os.urandom(7), "little"), new_stats())
    router = bind_router(context, endpoint)
    heartbeat = HeartbeatPublisher(context, heartbeat_endpoint(endpoint), Transport(), status)
    heartbeat.start()
    engine = build_engine(options, ZmqMailbox(router, LoopWaker.open()), status)
    if port:
        _serve_inside(endpoint, model, port)
    freeze_heap()
    status.enter(Phase.READY, 100)
    began: array[float] = array("d")
    measuring = False
    while True:
        if pipe.poll():
            if pipe.recv() == "stop":
                break
            measuring = True
        now = time.perf_counter()
        if not engine.tick():
            engine.mailbox.wait(0.01)
            began.append(0.0)  # an idle loop ends a series of ticks
        elif measuring:
            began.append(now if engine.stats.running == streams else 0.0)
    pipe.send([after - before for before, after in itertools.pairwise(began) if before and after])
    os._exit(0)  # the frontend's thread does not end by itself


def _serve_inside(endpoint: str, model: Path, port: int) -> None:
    from tandem.frontend.config import FrontendConfig
    from tandem.frontend.listening import listen
    from tandem.frontend.server.server import build_server

    config = FrontendConfig(endpoint, model, max_concurrent=8192, log_level="warning", served_names=(SERVED_NAME,))
    server, sock = build_server(config), listen("127.0.0.1", port)
    threading.Thread(target=server.run, args=([sock],), daemon=True).start()


def measure(options: EngineOptions, frontends: int, streams: int, seconds: float, clients: int) -> Figures:
    """Measure the ticks of an engine under the same load, with frontends inside or outside."""
    model = Path(options.model) if options.model else MODEL
    port = free_port()
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
        endpoint = f"ipc://{folder}/engine"
        ours, theirs = multiprocessing.Pipe()
        inside = port if frontends == INSIDE else 0
        spawn = multiprocessing.get_context("spawn")
        arguments = (options, endpoint, model, inside, streams, theirs)
        engine = spawn.Process(target=run_engine, args=arguments, daemon=True)
        engine.start()
        try:
            if frontends != INSIDE:
                processes.append(subprocess.Popen(frontend_command(frontends, endpoint, model, port)))
            await_ready(("127.0.0.1", port), processes)
            load = StreamLoad(("127.0.0.1", port), streams, clients, tokens=_room(options), has_letters=False)
            load.await_start()
            time.sleep(SETTLE_SECONDS)
            load.mark()
            ours.send("go")
            time.sleep(seconds)
            load.mark()
            ours.send("stop")
            ticks: list[float] = ours.recv()
            load.end()
        finally:
            for process in processes:
                stop_process(process, STOP_SECONDS)
            engine.join(STOP_SECONDS)
            engine.kill()
    found = distribution(ticks, 1e3)
    assert found["count"], "no tick had all streams; lower --streams or --seconds"
    names = ("p50", "p90", "p99", "p99.9", "max")
    numbers = [round(found[name], 3) for name in names]
    return Figures(frontends, streams, len(ticks), *numbers, round(streams * len(ticks) / sum(ticks), 1))


def _room(options: EngineOptions) -> int:
    """Return `max_tokens` of each stream: the context less a short prompt."""
    return (options.max_len or 2048) - 64


def line(figures: Figures) -> str:
    """Format one row of the table."""
    where = "inside" if figures.frontends == INSIDE else f"{figures.frontends} outside"
    return (
        f"{where:>10} {figures.streams:7} {figures.ticks:7} {figures.p50:8.3f} {figures.p90:8.3f} {figures.p99:8.3f} "
        f"{figures.p999:8.3f} {figures.worst:8.3f} {figures.tokens_per_second:9.0f}"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a model with a tokenizer (default: the one that ships with Tandem)")
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"))
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--max-len", type=int, help="context, which bounds the length of a run")
    parser.add_argument("--streams", type=int, nargs="+", default=[8])
    parser.add_argument("--frontends", type=int, nargs="+", default=[1], metavar="N", help="processes outside")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=1, help="measurements per setting, alternating")
    parser.add_argument("--clients", type=int, default=max(1, min(4, (os.cpu_count() or 1) // 2)), metavar="N")
    parser.add_argument("--save", metavar="NAME", help="write benchmarks/results/NAME.json")
    arguments = parser.parse_args(argv)
    print(
        f"{'frontends':>10} {'streams':>7} {'ticks':>7} {'p50 ms':>8} {'p90':>8} {'p99':>8} {'p99.9':>8} {'max':>8} "
        f"{'tokens/s':>9}"
    )
    found = []
    for streams in arguments.streams:
        options = EngineOptions(
            model=arguments.model,
            load_format=arguments.load_format,
            device=arguments.device,
            max_len=arguments.max_len,
            max_rows=streams,
            max_concurrent=8192,
        )
        for _ in range(arguments.rounds):
            for frontends in (INSIDE, *arguments.frontends):
                found.append(measure(options, frontends, streams, arguments.seconds, arguments.clients))
                print(line(found[-1]), flush=True)
    if arguments.save:
        config = {name: value for name, value in vars(arguments).items() if name != "save"} | {"cores": os.cpu_count()}
        print(save(arguments.save, config, to_builtins(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
