"""Launch a supervisor from parsed flags.

This prepares the sockets, the endpoint and the command lines of the child processes.
"""

import argparse
import errno
import importlib.util
import logging
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from tandem.frontend.access.allowed_hosts import ANY, LOOPBACK, AllowedHosts, is_loopback
from tandem.frontend.access.api_keys import ApiKeys
from tandem.frontend.access.key_sources import api_keys, key_environment
from tandem.frontend.control_channel import FromFrontend
from tandem.frontend.engine.health import EngineWatch
from tandem.frontend.flags.arguments import check_security, child_argv, http_argv
from tandem.frontend.listening import listen, url_of
from tandem.frontend.process import ManagedProcess
from tandem.frontend.run_directory import run_directory
from tandem.frontend.supervisor.addresses.port_flags import check_ports
from tandem.frontend.supervisor.addresses.service_sockets import Addresses, ServiceSockets, once_free
from tandem.frontend.supervisor.addresses.tcp_address import PortInUseError, listen_tcp, tcp_addresses
from tandem.frontend.supervisor.announcement import Announcement
from tandem.frontend.supervisor.exposition import supervisor_exposition
from tandem.frontend.supervisor.frontends.frontend_child import FrontendChild
from tandem.frontend.supervisor.frontends.frontends import Frontends
from tandem.frontend.supervisor.frontends.stall_aware_clock import StallAwareClock
from tandem.frontend.supervisor.model import AddressInUseError, LaunchError, ModelFolder
from tandem.frontend.supervisor.ops import ops_server
from tandem.frontend.supervisor.reload import Reloader
from tandem.frontend.supervisor.restart_policy import RestartPolicy
from tandem.frontend.supervisor.service_manager import ServiceManager
from tandem.frontend.supervisor.status_log import StatusLog
from tandem.frontend.supervisor.supervised_engine import SupervisedEngine
from tandem.frontend.supervisor.supervisor import StopTimes, Supervisor
from tandem.protocol.adapters_file import AdaptersFile, write_adapters
from tandem.protocol.engine_options import EngineOptions, check_numbers, engine_argv, engine_options
from tandem.protocol.installing import install_extra
from tandem.protocol.model_folder import TemplateFileError, max_positions, read_template
from tandem.protocol.sockets import Transport, check_ipc_path, check_port
from tandem.protocol.transport_options import transport, transport_argv
from tandem.protocol.usable_cores import usable_cores

logger = logging.getLogger(__name__)

DEFAULT_OPS_PORT = 8100
_OPS_PORTS = 100
"""Number of ports to try from the default ops port on."""
MAX_DEFAULT_FRONTENDS = 8
_OTHER_CORES = 2
"""CPU cores reserved for the engine core and everything else."""
MAX_IPC_PATH = 100
"""Maximum path length in bytes of a Unix socket on all systems, including the suffix `.beat`."""


def default_frontends(cores: int) -> int:
    """Return the default number of frontends for this number of CPU cores."""
    return max(1, min(MAX_DEFAULT_FRONTENDS, cores - _OTHER_CORES))


def check_engine_installed() -> None:
    """Raise LaunchError if the packages of the engine core are not installed."""
    if importlib.util.find_spec("torch") is None:
        raise LaunchError(f"the engine core needs torch, which is not installed; run {install_extra('engine')}")


def check_length(max_len: int | None, folder: Path) -> None:
    """Raise LaunchError if `--max-len` exceeds the model's context length.

    It is read from config.json. The engine checks this too, but only after it was started.
    """
    positions = max_positions(folder)
    if max_len is not None and positions is not None and max_len > positions:
        raise LaunchError(
            f"--max-len {max_len} is more than the {positions} positions of the model in {folder} "
            f"(max_position_embeddings in its config.json); give at most {positions}, or leave it out"
        )


def private_endpoint(directory: Path) -> str:
    """Return an ipc endpoint in a directory that only this user can read."""
    return f"ipc://{directory}/engine"


def check_ipc_length(endpoint: str) -> None:
    """Raise LaunchError for an ipc endpoint whose path is too long for a socket."""
    path = endpoint.removeprefix("ipc://")
    if path != endpoint and len(path.encode()) + len(".beat") > MAX_IPC_PATH:
        raise LaunchError(
            f"the path of {endpoint} has {len(path.encode())} bytes, at most {MAX_IPC_PATH - len('.beat')}; "
            "choose a shorter one"
        )


def check_endpoint_path(endpoint: str) -> None:
    """Raise LaunchError for an ipc endpoint that other users could reach.

    Also for a path of another type of file.
    """
    try:
        check_ipc_path(endpoint)
    except ValueError as error:
        raise LaunchError(str(error)) from None


def checked_transport(arguments: argparse.Namespace, endpoint: str) -> Transport:
    """Return the transport security of the link to the engine.

    Raises LaunchError for unusable keys, and for an endpoint that the flags do not allow.
    """
    try:
        settings = transport(arguments)
        settings.check(endpoint)
        check_port(endpoint)
    except ValueError as error:
        raise LaunchError(str(error)) from None
    return settings


def listen_ops(host: str, port: int | None) -> socket.socket:
    """Listen on the given ops port, or on the first free one from the default on.

    Raises LaunchError if that is not possible.

    """
    address = tcp_addresses([host], "--ops-host")[:1]
    if port is None:
        for candidate in range(DEFAULT_OPS_PORT, DEFAULT_OPS_PORT + _OPS_PORTS - 1):
            with suppress(AddressInUseError):
                return listen_tcp(address, candidate, 1, "--ops-port")[0][0]
        port = DEFAULT_OPS_PORT + _OPS_PORTS - 1
    return listen_tcp(address, port, 1, "--ops-port")[0][0]


def check_unused(endpoint: str) -> None:
    """Raise LaunchError if another engine uses the endpoint.

    A second engine would take over an ipc endpoint unnoticed, and its supervisor would mistake the first one's
    heartbeat for its own.
    """
    scheme, _, address = endpoint.partition("://")
    if scheme == "ipc":
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(address) == 0:
                raise AddressInUseError(f"another engine serves at {endpoint}; stop it, or choose another --endpoint")
    elif scheme == "tcp":
        host, _, port = address.rpartition(":")
        # The heartbeat uses the next port.
        for number in (int(port), int(port) + 1):
            try:
                listen(host.strip("[]").replace("*", "0.0.0.0"), number).close()
            except OSError as error:
                if error.errno in (errno.EACCES, errno.EADDRNOTAVAIL):
                    raise LaunchError(
                        f"--endpoint {endpoint} cannot be listened on ({error.strerror}); give an address of this "
                        "machine, and a port that this user may use"
                    ) from None
                if error.errno == errno.EADDRINUSE:  # other errors are reported by the engine
                    raise PortInUseError(
                        number,
                        f"--endpoint {endpoint} needs the ports {port} and {int(port) + 1}, and {number} is in use by",
                        "; stop what listens there, or choose another",
                    ) from None


def http_keys(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return the API keys without names that requests may use.

    Raises LaunchError for invalid keys, CORS origins or TLS files.
    """
    try:
        check_security(arguments)
        given = api_keys(arguments)
        ApiKeys(given, arguments.api_keys).load()
        return given
    except ValueError as error:
        raise LaunchError(str(error)) from None


def check_template(file: Path | None) -> None:
    """Raise LaunchError for a `--chat-template` that cannot be read.

    It is compiled later, when a frontend loads it.
    """
    if file is not None:
        try:
            read_template(file)
        except TemplateFileError as error:
            raise LaunchError(f"{error}; correct --chat-template") from None


def check_swap_root(root: Path | None, is_enabled: bool) -> None:
    """Raise LaunchError for a --swap-root that no swap could use. is_enabled: True with --enable-weight-updates."""
    if root is None:
        return
    if not is_enabled:
        raise LaunchError("--swap-root needs --enable-weight-updates; add it, or leave --swap-root out")
    if not root.is_dir():
        raise LaunchError(f"--swap-root {root} is not a folder")


def checked_engine_options(arguments: argparse.Namespace) -> EngineOptions:
    """Return the settings of the engine.

    Raises LaunchError for numbers out of bounds.
    """
    options = engine_options(arguments)
    try:
        check_numbers(options)
    except ValueError as error:
        raise LaunchError(str(error)) from None
    return options


async def supervise(
    arguments: argparse.Namespace,
    given: EngineOptions,
    model: ModelFolder,
    with_frontends: bool,
    adapters: Mapping[str, str],
) -> int:
    """Run an engine core until a signal and return the exit code.

    given: the engine's settings from the arguments; adapters: folders by name. Frontends run as well if requested.
    Raises LaunchError before anything is started.
    """
    options = model.options(given)
    with ExitStack() as stack:
        check_length(options.max_len, model.folder)
        private = stack.enter_context(run_directory())
        endpoint = arguments.endpoint or private_endpoint(private)
        check_ipc_length(endpoint)
        settings = checked_transport(arguments, endpoint)
        api = _addresses(arguments) if with_frontends else None
        check_ports(api, arguments.ops_host, arguments.ops_port, arguments.endpoint)
        if arguments.endpoint is not None:
            check_endpoint_path(endpoint)
            once_free(lambda: check_unused(endpoint))
        # Before the ops port, so that a default ops port avoids a port that was given.
        listeners = _open_listeners(arguments, stack) if with_frontends else ServiceSockets(())
        ops_socket = stack.enter_context(listen_ops(arguments.ops_host, arguments.ops_port))
        watch = EngineWatch(arguments.beat_timeout, arguments.step_timeout, hang_timeout=arguments.hang_timeout)
        log = ("--log-level", arguments.log_level, "--log-format", arguments.log_format)
        level_file = private / "log-level"
        files = ["--log-level-file", str(level_file), "--launches-dir", str(private / "launches")]
        files += ("--weights-file", str(private / "weights.json")) if options.enable_weight_updates else ()
        files += adapters_argv(private, adapters) if options.enable_lora else ()
        command = engine_command(endpoint, options, (*log, *files, *transport_argv(arguments)))
        process = ManagedProcess("engine core", command)
        engine = SupervisedEngine(
            process, watch, endpoint, settings, arguments.hang_timeout, RestartPolicy(), StatusLog(watch), level_file
        )
        frontends: Frontends | None = None
        if with_frontends:
            frontends = _frontends(arguments, endpoint, model.folder, listeners, private)
        name = options.served_model_name or model.served_name
        return await _supervisor(arguments, engine, frontends, listeners, ops_socket, model.commit, name).run()


async def supervise_frontends(arguments: argparse.Namespace, model: ModelFolder) -> int:
    """Run frontends of a remote engine until a signal and return the exit code.

    Raises LaunchError before anything is started.

    """
    with ExitStack() as stack:
        private = stack.enter_context(run_directory())
        checked_transport(arguments, arguments.endpoint)
        check_ports(_addresses(arguments), arguments.ops_host, arguments.ops_port, None)
        listeners = _open_listeners(arguments, stack)
        ops_socket = stack.enter_context(listen_ops(arguments.ops_host, arguments.ops_port))
        frontends = _frontends(arguments, arguments.endpoint, model.folder, listeners, private)
        supervisor = _supervisor(arguments, None, frontends, listeners, ops_socket, model.commit, model.served_name)
        return await supervisor.run()


def default_allowed_hosts(hosts: Sequence[str]) -> list[str]:
    """Return the default of `--allowed-hosts` for these addresses."""
    return [LOOPBACK if all(map(is_loopback, hosts)) else ANY]


def _addresses(arguments: argparse.Namespace) -> Addresses:
    return Addresses(arguments.host, arguments.port, arguments.uds, arguments.uds_mode)


def _open_listeners(arguments: argparse.Namespace, stack: ExitStack) -> ServiceSockets:
    """Open the listening sockets of all frontends; the stack closes them."""
    count = arguments.frontends or default_frontends(usable_cores())
    opened = ServiceSockets.open(_addresses(arguments), count, stack)
    hosts = opened.tcp_hosts
    arguments.allowed_hosts = arguments.allowed_hosts or default_allowed_hosts(hosts)
    has_keys = bool(http_keys(arguments) or arguments.api_keys)
    if warning := open_host_warning(hosts, has_keys, opened.urls(arguments.tls_cert is not None)):
        logger.warning("%s", warning)
    return opened


def open_host_warning(hosts: Sequence[str], has_keys: bool, urls: Sequence[str]) -> str:
    """Return a warning if a service without API keys is reachable from other machines.

    Otherwise return "".
    """
    if has_keys or all(map(is_loopback, hosts)):
        return ""
    return (
        f"everyone who reaches {' and '.join(urls)} may use the service: it needs no API key; give --api-keys, or "
        "listen on a loopback address"
    )


def _frontends(
    arguments: argparse.Namespace, endpoint: str, folder: Path, listeners: ServiceSockets, private: Path
) -> Frontends:
    """Create the frontends that serve on these sockets, without starting them."""
    fds = listeners.descriptors()
    environment = key_environment(http_keys(arguments))
    inherited = [sock.fileno() for sock in listeners.all]
    state_dir = arguments.state_dir or private

    def command(slot: int, supervisor_fd: int) -> list[str]:
        return frontend_command(arguments, endpoint, folder, state_dir, child_argv(slot, fds, supervisor_fd))

    def start_child(
        slot: int, on_message: Callable[[FromFrontend], None], on_exit: Callable[[int], None]
    ) -> FrontendChild:
        child = FrontendChild(slot, command, inherited, environment, on_message, on_exit)
        child.start()
        return child

    return Frontends(len(fds), start_child, arguments.hang_timeout, arguments.drain_timeout, StallAwareClock())


def _supervisor(
    arguments: argparse.Namespace,
    engine: SupervisedEngine | None,
    frontends: Frontends | None,
    listeners: ServiceSockets,
    ops_socket: socket.socket,
    commit: str,
    model_name: str,
) -> Supervisor:
    """Create the supervisor, with its ops port and announcement."""
    exposition = supervisor_exposition(engine, frontends, model_name, arguments.metric_aliases == "vllm")
    times = StopTimes(arguments.shutdown_delay, arguments.drain_timeout) if frontends is not None else StopTimes(0, 0)
    is_tls = frontends is not None and arguments.tls_cert is not None
    names = [*default_allowed_hosts([ops_socket.getsockname()[0]]), *(getattr(arguments, "allowed_hosts", None) or ())]
    urls = listeners.urls(is_tls)
    is_early = ops_socket.getsockname()[1] != (arguments.ops_port or DEFAULT_OPS_PORT)
    announcement = Announcement(engine, frontends, urls, url_of(ops_socket), commit, arguments.endpoint, is_early)
    ops = ops_server(engine.watch if engine is not None else None, frontends, exposition, AllowedHosts(names), urls)
    manager = ServiceManager()
    reloader = Reloader(arguments, engine, frontends, manager)
    return Supervisor(engine, frontends, listeners.all, times, announcement, ops, ops_socket, manager, reloader)


def adapters_argv(directory: Path, adapters: Mapping[str, str]) -> tuple[str, ...]:
    """Write the file of an engine's adapters to a directory, and return the flags that name it.

    adapters: folders by name.
    """
    file = directory / "adapters.json"
    write_adapters(file, AdaptersFile.initial(dict(adapters)))
    return "--adapters-file", str(file)


def engine_command(endpoint: str, options: EngineOptions, flags: Sequence[str] = ()) -> list[str]:
    """Return the command line of an engine core.

    flags: those that are not `options`.
    """
    command = [sys.executable, "-P", "-m", "tandem.engine_core", "--endpoint", endpoint]
    return [*command, *engine_argv(options), *flags]


def frontend_command(
    arguments: argparse.Namespace, endpoint: str, folder: Path, state_dir: Path, child_flags: Sequence[str]
) -> list[str]:
    """Return the command line of a frontend process.

    child_flags: flags that only a supervisor passes (`child_argv`). All frontends of a service share a `state_dir`, and
    with it the stored responses.
    """
    return [
        *(sys.executable, "-P", "-m", "tandem.frontend", "--endpoint", endpoint),
        *("--model-dir", str(folder), "--state-dir", str(state_dir)),
        *child_flags,
        *http_argv(arguments),
        *transport_argv(arguments),
    ]
