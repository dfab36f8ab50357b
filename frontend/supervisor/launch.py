"""From parsed flags to a running supervisor: sockets, endpoint, argument lists of the children."""

import argparse
import importlib.util
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from prometheus_client import CollectorRegistry

from tandem.frontend.api_keys import api_keys, key_environment
from tandem.frontend.config import check_security, http_argv
from tandem.frontend.engine.health import EngineWatch
from tandem.frontend.engine.metrics import EngineCollector
from tandem.frontend.engine.monitor import EngineMonitor
from tandem.frontend.listening import listen
from tandem.frontend.supervisor.ops import ops_server
from tandem.frontend.supervisor.process import Child
from tandem.frontend.supervisor.supervisor import Supervisor
from tandem.protocol.engine_options import engine_argv, engine_options
from tandem.protocol.sockets import Transport
from tandem.protocol.transport_options import transport, transport_argv

MAX_IPC_PATH = 100
"""Bytes of a socket's path, with `.beat` behind it, that every system takes."""


class LaunchError(Exception):
    """What was asked for cannot be started; the text says what to change."""


def check_engine_installed() -> None:
    """Raises LaunchError where the packages of the engine core are missing."""
    if importlib.util.find_spec("torch") is None:
        raise LaunchError("the engine core needs torch, which is not installed: pip install 'tandem-llm[engine]'")


def model_dir(model: str | None) -> Path:
    """The folder of the model to serve; without a name, the one that ships with the engine core.

    Raises LaunchError if there is none. The engine core is located, not imported.
    """
    if model is not None:
        if not Path(model).is_dir():
            raise LaunchError(f"--model {model} is no folder; give a Hugging Face folder with config.json")
        return Path(model)
    spec = importlib.util.find_spec("tandem.engine_core")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    for place in places:
        if (folder := Path(place) / "default_model").is_dir():
            return folder
    raise LaunchError("this installation holds no default model; give one with --model DIR")


@contextmanager
def private_endpoint(given: str | None) -> Iterator[str]:
    """The endpoint given, or one in a new directory of this user alone that is removed in the end.

    Raises LaunchError for a path too long for a socket.
    """
    if given is not None:
        _check_ipc_length(given)
        yield given
        return
    # A long TMPDIR would not leave room for the name of a socket.
    parent = tempfile.gettempdir() if len(tempfile.gettempdir()) < MAX_IPC_PATH // 2 else "/tmp"
    folder = tempfile.mkdtemp(prefix="tandem-", dir=parent)
    try:
        yield f"ipc://{folder}/engine"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


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
    """The keys that requests must bring, once the rest of who may ask is known to work."""
    try:
        check_security(arguments)
        return api_keys(arguments)
    except ValueError as error:
        raise LaunchError(str(error)) from None


async def supervise(arguments: argparse.Namespace, with_frontend: bool) -> int:
    """Runs an engine core, and a frontend if wanted, until a signal; returns the exit code.

    Raises LaunchError before anything was started.
    """
    with ExitStack() as stack:
        folder = model_dir(arguments.model)
        endpoint = stack.enter_context(private_endpoint(arguments.endpoint))
        settings = _transport(arguments, endpoint)
        ops_socket = stack.enter_context(_listen(arguments.ops_host, arguments.ops_port, "--ops-port"))
        monitor = EngineMonitor(endpoint, settings, EngineWatch(arguments.beat_timeout, arguments.step_timeout))
        engine = Child("engine core", engine_command(arguments, endpoint), on_exit=monitor.forget)
        frontend: Child | None = None
        http_socket: socket.socket | None = None
        if with_frontend:
            http_socket = stack.enter_context(_listen(arguments.host, arguments.port, "--port"))
            command = frontend_command(arguments, endpoint, folder, http_socket.fileno())
            environment = key_environment(_http_keys(arguments))
            frontend = Child("frontend", command, [http_socket.fileno()], environment=environment)
        registry = CollectorRegistry()
        registry.register(EngineCollector(monitor, lambda: engine.restarts))
        ops = ops_server(monitor, registry)
        supervisor = Supervisor(
            engine,
            frontend,
            http_socket,
            monitor,
            ops,
            ops_socket,
            arguments.drain_timeout if with_frontend else 0.0,
            "https" if with_frontend and arguments.tls_cert is not None else "http",
        )
        return await supervisor.run()


def engine_command(arguments: argparse.Namespace, endpoint: str) -> list[str]:
    """How an engine core is started."""
    options = engine_argv(engine_options(arguments))
    command = [sys.executable, "-P", "-m", "tandem.engine_core", "--endpoint", endpoint]
    return [*command, *options, *transport_argv(arguments)]


def frontend_command(arguments: argparse.Namespace, endpoint: str, folder: Path, fd: int) -> list[str]:
    """How an HTTP process is started on a socket that it inherits."""
    return [
        *(sys.executable, "-P", "-m", "tandem.frontend", "--endpoint", endpoint),
        *("--model-dir", str(folder), "--fd", str(fd)),
        *http_argv(arguments),
        *transport_argv(arguments),
    ]
