"""Flags of the endpoint between two processes and of its security."""

import argparse
from pathlib import Path

from tandem.protocol.curve import load_curve
from tandem.protocol.sockets import Transport


def add_transport_arguments(parser: argparse.ArgumentParser, endpoint_required: bool) -> None:
    """Declare the transport flags on a parser."""
    group = parser.add_argument_group("transport")
    group.add_argument(
        "--endpoint",
        required=endpoint_required,
        help="ipc://PATH or tcp://HOST:PORT of the engine core; tcp takes PORT and PORT+1, the second for heartbeats"
        + ("" if endpoint_required else " (default: a private ipc endpoint)"),
    )
    group.add_argument(
        "--curve-keys",
        type=Path,
        metavar="DIR",
        help="keys of a tcp endpoint: the engine's folder, made with `tandem keys`, or that of a frontend, made with "
        "`tandem keys DIR --client NAME`",
    )
    group.add_argument(
        "--curve-any-client",
        action="store_true",
        help="let the engine accept every frontend that has engine.key, whether or not its own key is in DIR/clients",
    )
    group.add_argument("--insecure-tcp", action="store_true", help="allow tcp without encryption")


def transport(arguments: argparse.Namespace) -> Transport:
    """Build the transport from parsed flags.

    Raises ValueError if the key directory contains no keys.
    """
    curve = load_curve(arguments.curve_keys, arguments.curve_any_client) if arguments.curve_keys else None
    return Transport(curve, arguments.insecure_tcp)


def transport_argv(arguments: argparse.Namespace) -> list[str]:
    """Return the flags that make another process use the same transport.

    The endpoint is not among them.
    """
    argv = ["--curve-keys", str(arguments.curve_keys)] if arguments.curve_keys else []
    argv += ["--curve-any-client"] if arguments.curve_any_client else []
    return argv + (["--insecure-tcp"] if arguments.insecure_tcp else [])
