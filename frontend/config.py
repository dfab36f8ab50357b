"""The settings of one HTTP process, and the flags they come from."""

import argparse
from pathlib import Path

from msgspec import Struct

from protocol.sockets import Transport
from protocol.transport_options import transport

MEBIBYTE = 2**20

_MOST_SECONDS = 1e7
_BOUNDS: dict[str, tuple[float, float]] = {
    "port": (0, 65535),
    "ops_port": (0, 65535),
    "max_concurrent": (1, 2**31 - 1),
    "beat_timeout": (0.001, _MOST_SECONDS),
    "step_timeout": (0.001, _MOST_SECONDS),
    "drain_timeout": (0, _MOST_SECONDS),
}


class FrontendConfig(Struct, frozen=True):
    """Everything a frontend needs to know. Times in seconds."""

    endpoint: str
    model_dir: Path
    transport: Transport = Transport()
    host: str = "127.0.0.1"
    port: int = 8000
    fd: int | None = None
    """A listening socket to serve on, instead of host and port."""
    max_concurrent: int = 1024
    """Sequences open at once; more are refused with 503."""
    max_body: int = 32 * MEBIBYTE
    beat_timeout: float = 5.0
    step_timeout: float = 60.0
    drain_timeout: float = 10.0
    log_level: str = "info"


def add_http_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of an HTTP process that a supervisor takes and passes on."""
    group = parser.add_argument_group("http")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    group.add_argument("--port", type=int, default=8000, help="port to listen on, 0 for any (default 8000)")
    group.add_argument(
        "--max-concurrent", type=int, default=1024, help="sequences open at once, more get 503 (default 1024)"
    )
    group.add_argument(
        "--drain-timeout", type=float, default=10.0, help="seconds that open streams get at shutdown (default 10)"
    )


def add_watch_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of whoever judges the engine by its heartbeat."""
    group = parser.add_argument_group("watching the engine")
    group.add_argument(
        "--beat-timeout", type=float, default=5.0, help="seconds without a heartbeat until it is given up (default 5)"
    )
    group.add_argument(
        "--step-timeout",
        type=float,
        default=60.0,
        help="seconds without a step, with work pending, until it counts as hung (default 60)",
    )
    group.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info", help="default info"
    )


def http_argv(arguments: argparse.Namespace) -> list[str]:
    """The flags, less the address, that make another HTTP process behave the same."""
    argv: list[str] = []
    for name in ("max_concurrent", "beat_timeout", "step_timeout", "drain_timeout", "log_level"):
        argv += ["--" + name.replace("_", "-"), str(getattr(arguments, name))]
    return argv


def check_bounds(arguments: argparse.Namespace) -> None:
    """Raises ValueError for a number out of range, in whichever of these flags a command has."""
    for name, (low, high) in _BOUNDS.items():
        value = getattr(arguments, name, None)
        # Written so that nan is refused, too.
        if value is not None and not low <= value <= high:
            raise ValueError(f"--{name.replace('_', '-')} must be between {low:.10g} and {high:.10g}, not {value}")


def frontend_config(arguments: argparse.Namespace) -> FrontendConfig:
    """Raises ValueError where the flags contradict each other or name keys that are not there."""
    settings = transport(arguments)
    settings.check(arguments.endpoint)
    return FrontendConfig(
        endpoint=arguments.endpoint,
        model_dir=Path(arguments.model_dir),
        transport=settings,
        host=arguments.host,
        port=arguments.port,
        fd=arguments.fd,
        max_concurrent=arguments.max_concurrent,
        beat_timeout=arguments.beat_timeout,
        step_timeout=arguments.step_timeout,
        drain_timeout=arguments.drain_timeout,
        log_level=arguments.log_level,
    )
