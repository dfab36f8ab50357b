"""Process of the engine core.

`tandem` starts it as `python -m tandem.engine_core --endpoint ...`.
"""

import gc

if __name__ == "__main__":
    gc.disable()  # while all is imported: looking through modules, which stay, was a sixth of the time

import argparse
import logging
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any, get_args

import zmq

from tandem.engine_core.errors import ConfigError, DeviceBusyError
from tandem.engine_core.startup.engine import build_engine
from tandem.engine_core.startup.heap import freeze_heap
from tandem.engine_core.startup.log_level_file import LogLevelFile
from tandem.engine_core.stats import new_stats
from tandem.engine_core.wire.authenticator import Authenticator
from tandem.engine_core.wire.client_keys import ClientKeys
from tandem.engine_core.wire.disconnects import Disconnects
from tandem.engine_core.wire.heartbeat import HeartbeatPublisher, Status
from tandem.engine_core.wire.launch_record import LaunchRecord
from tandem.engine_core.wire.mailbox import ZmqMailbox
from tandem.engine_core.wire.wakeup import LoopWaker
from tandem.protocol.engine_options import add_engine_arguments, engine_options
from tandem.protocol.errors import ExitCode
from tandem.protocol.events import Phase
from tandem.protocol.logs import LOG_FORMATS, LogLevel, configure_logging, refuse
from tandem.protocol.sockets import bind_router, heartbeat_endpoint
from tandem.protocol.transport_options import add_transport_arguments, transport

logger = logging.getLogger("engine_core")

SWITCH_SECONDS = 0.0005
"""Switch interval of the interpreter: with Python's 5 ms a thread that reads an adapter delays the loop by as much."""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line of the process."""
    parser = argparse.ArgumentParser(
        prog="python -m tandem.engine_core", description="Tandem's engine core.", allow_abbrev=False
    )
    add_transport_arguments(parser, endpoint_required=True)
    add_engine_arguments(parser)
    parser.add_argument(
        "--log-level", choices=get_args(LogLevel), default="info", help="least severe level of messages to log"
    )
    parser.add_argument("--log-format", choices=LOG_FORMATS, default="text", help="form of the lines of the log")
    parser.add_argument("--log-level-file", type=Path, help="file of a level that takes the place of --log-level")
    parser.add_argument(
        "--launches-dir", type=Path, help="folder of the requests that this engine and those before it launched"
    )
    parser.add_argument(
        "--weights-file", type=Path, help="file of the weights that serve since a swap, kept up to date"
    )
    parser.add_argument("--adapters-file", type=Path, help="file of the adapters to load, kept up to date")
    return parser.parse_args(argv)


UPDATED_FILE = "weights-updated"


def _updated_file(directory: Path | None) -> Path | None:
    """Return the file that marks, for the next engine, that a trainer has updated the weights of this one."""
    return None if directory is None else directory / UPDATED_FILE


def serve(arguments: argparse.Namespace) -> None:
    """Run an engine until a signal stops it.

    Heartbeats are sent from the start on; frontends send Hello only after a heartbeat with the phase READY.
    """
    context = zmq.Context()
    status = Status(int.from_bytes(os.urandom(7), "little"), new_stats())
    router, heartbeat, authenticator = _open_wire(context, arguments, status)
    wakeup = LoopWaker.open()
    disconnects = Disconnects.watch(router)
    launches = LaunchRecord(arguments.launches_dir) if arguments.launches_dir is not None else None
    try:
        mailbox = ZmqMailbox(
            router,
            wakeup,
            authenticator=authenticator,
            launches=launches,
            disconnects=disconnects,
            announce=heartbeat.announce,
        )
        engine = build_engine(
            engine_options(arguments),
            mailbox,
            status,
            adapters_file=arguments.adapters_file,
            updated_file=_updated_file(arguments.launches_dir),
            weights_file=arguments.weights_file,
        )
        if launches is not None:  # an engine that fails while it loads leaves no file
            launches.open()

        def stop(_signal: int, _frame: FrameType | None) -> None:
            status.enter(Phase.DRAINING)
            heartbeat.announce()
            engine.stopping = True
            wakeup.wake()

        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)
        freeze_heap()
        sys.setswitchinterval(SWITCH_SECONDS)
        status.stats.start_seconds = process_seconds()
        status.enter(Phase.READY, 100)
        heartbeat.announce()
        engine.run()
    except Exception as error:
        status.enter(Phase.FAILED, detail=str(error))
        raise
    finally:
        heartbeat.stop()
        if authenticator is not None:
            authenticator.stop()
        wakeup.close()
        disconnects.close()
        context.destroy(linger=500)


def process_seconds() -> float:
    """Return the seconds since this process was started, its imports included."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(") ")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def _open_wire(
    context: zmq.Context[Any], arguments: argparse.Namespace, status: Status
) -> tuple[Any, HeartbeatPublisher, Authenticator | None]:
    """Bind the ROUTER and start the heartbeat.

    Where frontends need keys, an authenticator starts before. Raises ConfigError if the endpoint cannot be bound.
    """
    endpoint = arguments.endpoint
    authenticator = None
    try:
        security = transport(arguments)
        curve = security.curve
        if endpoint.startswith("tcp://") and curve is not None and curve.clients is not None:
            authenticator = Authenticator(context, ClientKeys(curve.clients, curve.public))
            authenticator.start()
        router = bind_router(context, endpoint, security)
        keys = authenticator.keys if authenticator is not None else None
        heartbeat = HeartbeatPublisher(context, heartbeat_endpoint(endpoint), security, status, keys)
        heartbeat.start()
    except (ValueError, zmq.ZMQError) as error:
        if authenticator is not None:
            authenticator.stop()
        context.destroy(linger=0)
        text = str(error)
        raise ConfigError(text if endpoint in text else f"endpoint {endpoint}: {text}") from error
    return router, heartbeat, authenticator


def main() -> int:
    """Serve and return the exit code.

    Errors of settings, and of a device that is in use, are lines of the log.
    """
    arguments = parse()
    configure_logging("engine", arguments.log_level, arguments.log_format)
    if arguments.log_level_file is not None:
        LogLevelFile(arguments.log_level_file).start()
    try:
        serve(arguments)
    except ConfigError as error:
        for problem in error.problems:
            refuse("tandem engine", problem, is_child=True)
        return ExitCode.CONFIG
    except DeviceBusyError as error:
        refuse("tandem engine", str(error), is_child=True)
        return ExitCode.BUSY
    except Exception:
        logger.exception("the engine core failed")
        return ExitCode.FATAL
    return ExitCode.OK


def leave(code: int) -> None:
    """End the process.

    After a CUDA error it exits without destructors: destructors of pinned memory would abort it.
    """
    if code == ExitCode.FATAL:
        logging.shutdown()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    leave(main())
