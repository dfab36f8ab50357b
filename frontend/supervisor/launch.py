"""Start of a supervisor from parsed flags.

It prepares the sockets, the endpoint and the command lines of the child processes.
"""

import argparse
import errno
import importlib.util
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from prometheus_client import CollectorRegistry

from tandem.frontend.api_keys import api_keys, key_environment
from tandem.frontend.config import check_security, http_argv
from tandem.frontend.engine.health import EngineWatch
from tandem.frontend.engine.metrics import EngineCollector
from tandem.frontend.listening import listen
from tandem.frontend.process import ManagedProcess
from tandem.frontend.run_directory import run_directory
from tandem.frontend.supervisor.model import LaunchError, ModelFolder
from tandem.frontend.supervisor.ops import ops_server
from tandem.frontend.supervisor.supervisor import Supervisor
from tandem.protocol.engine_options import EngineOptions, check_numbers, engine_argv, engine_options
from tandem.protocol.model_folder import max_positions
from tandem.protocol.sockets import Transport
from tandem.protocol.transport_options import transport, transport_argv

DEFAULT_OPS_PORT = 8100
_OPS_PORTS = 100
"""Number of ports that are tried from the default ops port on."""
MAX_IPC_PATH = 100
"""Longest path of a socket, in bytes including the suffix `.beat`, that every system accepts."""


def check_engine_installed() -> None:
    """Raise LaunchError if the packages of the engine core are not installed."""
    if importlib.util.find_spec("torch") is None:
        raise LaunchError("the engine core needs torch, which is not installed: pip install 'tandem-llm[engine]'")


def check_length(max_len: int | None, folder: Path) -> None:
    """Raise LaunchError for a `--max-len` beyond the model's positions.

    They are those that its config.json states. The engine refuses more as well, but only after it was started.
    """
    positions = max_positions(folder)
    if max_len is not None and positions is not None and max_len > positions:
        raise LaunchError(
            f"--max-len {max_len} is more than the {positions} positions of the model in {folder} "
            f"(max_position_embeddings in its config.json); give at most {positions}, or leave it out"
        )


def private_endpoint(directory: Path) -> str:
    """Return the endpoint of an engine in a directory that only this user can read."""
    return f"ipc://{directory}/engine"


def _check_ipc_length(endpoint: str) -> None:
    path = endpoint.removeprefix("ipc://")
    if path != endpoint and len(path.encode()) + len(".beat") > MAX_IPC_PATH:
        raise LaunchError(
            f"the path of {endpoint} has {len(path.encode())} bytes, at most {MAX_IPC_PATH - len('.beat')}; "
            "choose a shorter one"
        )


def _transport(arguments: argparse.Namespace, endpoint: str) -> Transport:
    try:
        settings = transport(arguments)
        settings.check(endpoint)
    except ValueError as error:
        raise LaunchError(str(error)) from None
    return settings


def _listen(host: str, port: int, flag: str) -> socket.socket:
    try:
        return listen(host, port)
    except OSError as error:
        other = f"{flag.removesuffix('port')}host" if error.errno == errno.EADDRNOTAVAIL else flag
        reason = error.strerror or error
        raise LaunchError(f"cannot listen on {host}:{port} ({reason}); choose another {other}") from None


def listen_ops(host: str, port: int | None) -> socket.socket:
    """Listen on the ops port given, or on the first free one from the default on.

    Raises LaunchError if that is not possible.
    """
    if port is None:
        for candidate in range(DEFAULT_OPS_PORT, DEFAULT_OPS_PORT + _OPS_PORTS - 1):
            with suppress(OSError):
                return listen(host, candidate)
        port = DEFAULT_OPS_PORT + _OPS_PORTS - 1
    return _listen(host, port, "--ops-port")


def check_unused(endpoint: str) -> None:
    """Raise LaunchError if another engine serves at an endpoint.

    A second one would take over an ipc endpoint unnoticed, and its supervisor would take the first one's heartbeat for
    its own.
    """
    scheme, _, place = endpoint.partition("://")
    if scheme == "ipc":
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(place) == 0:
                raise LaunchError(f"another engine serves at {endpoint}; stop it, or choose another --endpoint")
    elif scheme == "tcp":
        host, _, port = place.rpartition(":")
        # The heartbeat has the next port.
        for number in (int(port), int(port) + 1):
            try:
                listen(host.strip("[]").replace("*", "0.0.0.0"), number).close()
            except OSError as error:
                if error.errno == errno.EADDRINUSE:  # the engine reports others
                    raise LaunchError(
                        f"--endpoint {endpoint} needs the ports {port} and {int(port) + 1}, and {number} is in use; "
                        "stop what listens there, or choose another"
                    ) from None


def _http_keys(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return the API keys that requests need.

    Raises LaunchError for keys, origins or TLS files that cannot work.
    """
    try:
        check_security(arguments)
        return api_keys(arguments)
    except ValueError as error:
        raise LaunchError(str(error)) from None


def checked_engine_options(arguments: argparse.Namespace) -> EngineOptions:
    """Return the engine's settings.

    Raises LaunchError for numbers that no engine accepts.
    """
    options = engine_options(arguments)
    try:
        check_numbers(options)
    except ValueError as error:
        raise LaunchError(str(error)) from None
    return options


async def supervise(
    arguments: argparse.Namespace, given: EngineOptions, model: ModelFolder, with_frontend: bool
) -> int:
    """Run an engine core until a signal and return the exit code.

    `given` has the engine's settings, as the arguments state them. A frontend runs beside it if wanted. Raises
    LaunchError before anything is started.
    """
    options = model.options(given)
    with ExitStack() as stack:
        check_length(options.max_len, model.folder)
        private = stack.enter_context(run_directory())
        endpoint = arguments.endpoint or private_endpoint(private)
        _check_ipc_length(endpoint)
        settings = _transport(arguments, endpoint)
        if arguments.endpoint is not None:
            check_unused(endpoint)
        ops_socket = stack.enter_context(listen_ops(arguments.ops_host, arguments.ops_port))
        watch = EngineWatch(arguments.beat_timeout, arguments.step_timeout)
        log_level = ("--log-level", arguments.log_level)
        command = engine_command(endpoint, options, (*log_level, *transport_argv(arguments)))
        engine = ManagedProcess("engine core", command, on_exit=watch.forget)
        frontend: ManagedProcess | None = None
        http_socket: socket.socket | None = None
        if with_frontend:
            http_socket = stack.enter_context(_listen(arguments.host, arguments.port, "--port"))
            frontend = ManagedProcess(
                "frontend",
                frontend_command(
                    arguments, endpoint, model.folder, http_socket.fileno(), arguments.state_dir or private
                ),
                pass_fds=[http_socket.fileno()],
                environment=key_environment(_http_keys(arguments)),
            )
        registry = CollectorRegistry()
        registry.register(EngineCollector(watch, lambda: engine.restarts))
        supervisor = Supervisor(
            engine,
            frontend,
            http_socket,
            watch,
            endpoint,
            settings,
            ops_server(watch, registry),
            ops_socket,
            arguments.drain_timeout if with_frontend else 0.0,
            "https" if with_frontend and arguments.tls_cert is not None else "http",
            model.commit,
        )
        return await supervisor.run()


def engine_command(endpoint: str, options: EngineOptions, flags: Sequence[str] = ()) -> list[str]:
    """Return the command line of an engine core.

    `flags` are those that are not `options`.
    """
    command = [sys.executable, "-P", "-m", "tandem.engine_core", "--endpoint", endpoint]
    return [*command, *engine_argv(options), *flags]


def frontend_command(arguments: argparse.Namespace, endpoint: str, folder: Path, fd: int, state_dir: Path) -> list[str]:
    """Return the command line of an HTTP process that serves on an inherited socket.

    All HTTP processes of a service have the same `state_dir`, and with it the same stored responses.
    """
    return [
        *(sys.executable, "-P", "-m", "tandem.frontend", "--endpoint", endpoint),
        *("--model-dir", str(folder), "--listener-fds", str(fd), "--state-dir", str(state_dir)),
        *http_argv(arguments),
        *transport_argv(arguments),
    ]
