"""Start of a supervisor from parsed flags.

It prepares the sockets, the endpoint and the command lines of the child processes.
"""

import argparse
import importlib.util
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from prometheus_client import CollectorRegistry

from tandem.frontend.api_keys import api_keys, key_environment
from tandem.frontend.config import check_security, http_argv
from tandem.frontend.engine.health import EngineWatch
from tandem.frontend.engine.metrics import EngineCollector
from tandem.frontend.listening import listen
from tandem.frontend.process import ManagedProcess
from tandem.frontend.supervisor.ops import ops_server
from tandem.frontend.supervisor.supervisor import Supervisor
from tandem.protocol.engine_options import EngineOptions, engine_argv, engine_options
from tandem.protocol.sockets import Transport
from tandem.protocol.transport_options import transport, transport_argv

MAX_IPC_PATH = 100
"""Longest path of a socket, in bytes including the suffix `.beat`, that every system accepts."""


class LaunchError(Exception):
    """The requested server cannot be started; the message says what to change."""


def check_engine_installed() -> None:
    """Raise LaunchError if the packages of the engine core are not installed."""
    if importlib.util.find_spec("torch") is None:
        raise LaunchError("the engine core needs torch, which is not installed: pip install 'tandem-llm[engine]'")


def model_dir(model: str | None) -> Path:
    """Return the directory of the model to serve.

    By default it is the model that ships with the engine core. Raises LaunchError if it does not exist. The engine core
    is located, not imported.
    """
    if model is not None:
        if not Path(model).is_dir():
            raise LaunchError(f"--model {model} is not a directory; give a Hugging Face one with config.json")
        return Path(model)
    spec = importlib.util.find_spec("tandem.engine_core")
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (folder := Path(location) / "default_model").is_dir():
            return folder
    raise LaunchError("this installation has no default model; give one with --model DIR")


@contextmanager
def run_directory() -> Iterator[Path]:
    """Yield a new directory of mode 0700 for sockets and state, removed at the end."""
    # A long TMPDIR leaves no room for the name of a socket.
    parent = tempfile.gettempdir() if len(tempfile.gettempdir()) < MAX_IPC_PATH // 2 else "/tmp"
    folder = tempfile.mkdtemp(prefix="tandem-", dir=parent)
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def private_endpoint(given: str | None) -> Iterator[str]:
    """Yield the endpoint given, or a private one that is removed at the end.

    A private endpoint is in a new directory of mode 0700. Raises LaunchError for a path that is too long for a socket.
    """
    if given is not None:
        _check_ipc_length(given)
        yield given
        return
    with run_directory() as folder:
        yield f"ipc://{folder}/engine"


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
        raise LaunchError(f"cannot listen on {host}:{port} ({error.strerror}); choose another {flag}") from None


def _http_keys(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return the API keys that requests need.

    Raises LaunchError for keys, origins or TLS files that cannot work.
    """
    try:
        check_security(arguments)
        return api_keys(arguments)
    except ValueError as error:
        raise LaunchError(str(error)) from None


async def supervise(arguments: argparse.Namespace, with_frontend: bool) -> int:
    """Run an engine core until a signal and return the exit code.

    A frontend runs beside it if wanted. Raises LaunchError before anything is started.
    """
    with ExitStack() as stack:
        folder = model_dir(arguments.model)
        private = stack.enter_context(run_directory())
        endpoint = stack.enter_context(private_endpoint(arguments.endpoint or f"ipc://{private}/engine"))
        settings = _transport(arguments, endpoint)
        ops_socket = stack.enter_context(_listen(arguments.ops_host, arguments.ops_port, "--ops-port"))
        watch = EngineWatch(arguments.beat_timeout, arguments.step_timeout)
        command = engine_command(endpoint, engine_options(arguments), transport_argv(arguments))
        engine = ManagedProcess("engine core", command, on_exit=watch.forget)
        frontend: ManagedProcess | None = None
        http_socket: socket.socket | None = None
        if with_frontend:
            http_socket = stack.enter_context(_listen(arguments.host, arguments.port, "--port"))
            frontend = ManagedProcess(
                "frontend",
                frontend_command(arguments, endpoint, folder, http_socket.fileno(), arguments.state_dir or private),
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
        )
        return await supervisor.run()


def engine_command(endpoint: str, options: EngineOptions, transport_flags: Sequence[str] = ()) -> list[str]:
    """Return the command line of an engine core."""
    command = [sys.executable, "-P", "-m", "tandem.engine_core", "--endpoint", endpoint]
    return [*command, *engine_argv(options), *transport_flags]


def frontend_command(arguments: argparse.Namespace, endpoint: str, folder: Path, fd: int, state_dir: Path) -> list[str]:
    """Return the command line of an HTTP process that serves on an inherited socket.

    All HTTP processes of a service have the same `state_dir`, and with it the same stored responses.
    """
    return [
        *(sys.executable, "-P", "-m", "tandem.frontend", "--endpoint", endpoint),
        *("--model-dir", str(folder), "--fd", str(fd), "--state-dir", str(state_dir)),
        *http_argv(arguments),
        *transport_argv(arguments),
    ]
