"""`--check` of the serving commands: report whether they would start.

It uses the checks of a start, without starting or changing anything; only small files of a model from the hub are
downloaded. Resources in use by another process, such as the ports and the memory of a running service with an older
configuration, are warnings.
"""

import argparse
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from msgspec import structs

from tandem.frontend.access.api_keys import ApiKeys
from tandem.frontend.access.key_sources import ENVIRONMENT, api_keys
from tandem.frontend.chat.chat_template import ChatTemplateError, load_chat_template
from tandem.frontend.cli.flags import hub_options
from tandem.frontend.flags.arguments import check_origins, check_tls, check_traces
from tandem.frontend.generation.tokenizer import TokenizerError, load_tokenizer
from tandem.frontend.hub.options import HubOptions
from tandem.frontend.listening import url_of
from tandem.frontend.store.sqlite_file import check_store
from tandem.frontend.store.store import StoreError
from tandem.frontend.supervisor.adapters import check_modules, check_path
from tandem.frontend.supervisor.addresses.service_sockets import Addresses
from tandem.frontend.supervisor.addresses.tcp_address import TcpAddress, listen_tcp, tcp_addresses
from tandem.frontend.supervisor.addresses.unix_socket import listening_unix_socket
from tandem.frontend.supervisor.launch import (
    check_engine_installed,
    check_ipc_length,
    check_length,
    check_swap_root,
    check_unused,
    checked_transport,
    listen_ops,
    open_host_warning,
)
from tandem.frontend.supervisor.model import (
    AddressInUseError,
    LaunchError,
    ModelFolder,
    NotDownloadedError,
    find_draft_model,
    find_model,
    preview_model,
)
from tandem.frontend.supervisor.preflight import RunPreflight, run_preflight
from tandem.frontend.supervisor.tokenizer import ConversionError, cache_folder, with_tokenizer
from tandem.protocol.engine_options import EngineOptions, engine_options, flag_name, wrong_numbers
from tandem.protocol.errors import ExitCode
from tandem.protocol.model_folder import TemplateFileError, max_positions, read_template
from tandem.protocol.preflight import PreflightReport, Section
from tandem.protocol.sockets import check_ipc_path, check_server_keys

_MAX_PORT = 65_535
_REFUSALS = (LaunchError, ConversionError, ValueError, StoreError, TokenizerError, ChatTemplateError, TemplateFileError)
"""Exceptions for invalid settings."""
_PRIVATE_ENDPOINT = "ipc:///private"
"""Placeholder for the endpoint that a start would create."""


class Findings:
    """Problems, warnings and facts."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.warnings: list[str] = []
        self.facts: Section = {}
        self._ports: set[int] = set()

    @contextmanager
    def caught(self, *ports: int) -> Iterator[None]:
        """Record the exceptions of a check instead of raising them.

        ports: ports checked; one that is in use is a warning.
        """
        try:
            yield
            self._ports.update(ports)
        except AddressInUseError as error:
            if own := self._ports.intersection(ports):
                self.problems.append(f"{error}: this command has {min(own)} for another of its addresses")
                return
            self.warnings.append(str(error))
        except _REFUSALS as error:
            self.problems.append(str(error))


def run_check(arguments: argparse.Namespace, problems: Collection[str] = (), ask: RunPreflight = run_preflight) -> int:
    """Print problems and warnings on stderr and a summary on stdout.

    Each has a line, and indented continuation lines. Returns the exit code.

    problems: already known ones. ask: returns the preflight report; by default from a child process.
    """
    found = Findings()
    found.problems += problems
    command = arguments.command
    if command == "frontend":
        model, _ = _find_model(arguments.model_dir, arguments, False, found)
    else:
        model = _check_engine(arguments, ask, found)
        _check_roots(arguments, model, found)
    _check_addresses(arguments, found)
    if command != "engine":
        _check_access(arguments, found)
        _check_chat(arguments.chat_template, model, found)
        _check_state(arguments.state_dir, found)
    return _print(command, found)


def _print(command: str, found: Findings) -> int:
    for kind, texts in (("problem", found.problems), ("warning", found.warnings)):
        for text in dict.fromkeys(texts):
            first, *others = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
            print("\n    ".join([f"{kind}: {first}", *others]), file=sys.stderr)
    for name, text in found.facts.items():
        print(f"{name:<18}{text}")
    problems, warnings = _counted("problem", found.problems), _counted("warning", found.warnings)
    verdict = f"would not start: {problems}" if problems else "would start"
    if warnings and not problems:
        verdict += f", with {warnings}"
    print(f"tandem {command} {verdict}")
    return ExitCode.CONFIG if problems else ExitCode.OK


def _counted(noun: str, texts: list[str]) -> str:
    """Return the number of distinct texts, as "2 warnings"; empty for none."""
    count = len(dict.fromkeys(texts))
    return f"{count} {noun}{'s' if count > 1 else ''}" if count else ""


def _check_engine(arguments: argparse.Namespace, ask: RunPreflight, found: Findings) -> ModelFolder | None:
    """Check the engine's settings and its model.

    The engine's code does so in a child process.
    """
    options = engine_options(arguments)
    has_draft = False
    with found.caught():
        options = find_draft_model(options, hub_options(arguments), may_download=False)
        has_draft = True
    invalid = wrong_numbers(options)
    # Some flags are shared with the frontends and have the same bounds.
    reported = {text.partition(" ")[0] for text in found.problems}
    found.problems += [text for name, text in invalid.items() if flag_name(name) not in reported]
    if not has_draft:
        invalid["speculate"] = ""
    model, weight_bytes = _find_model(options.model, arguments, True, found)
    installed: list[bool] = []
    with found.caught():
        check_engine_installed()
        installed.append(True)
    if model is None or not installed:
        return model
    positions = max_positions(model.folder)
    with found.caught():
        check_length(options.max_len, model.folder)
    if options.max_len is not None and positions is not None and options.max_len > positions:
        invalid["max_len"] = ""
    with found.caught():
        _add_findings(_ask(options, model, weight_bytes, ask, invalid), found, invalid)
    return model


def _check_roots(arguments: argparse.Namespace, model: ModelFolder | None, found: Findings) -> None:
    """Check the adapters of the flags, and the folders from which adapters and checkpoints may be loaded later.

    Adapters of the hub are not downloaded.
    """
    options, lora_root, names = engine_options(arguments), None, set[str]()
    if model is not None:
        names.add(options.served_model_name or model.served_name)
    if arguments.command == "serve":
        lora_root = arguments.lora_root
        names.update(arguments.served_model_name)
        with found.caught():
            check_swap_root(arguments.swap_root, options.enable_weight_updates)
    with found.caught():
        check_modules(arguments.lora_modules, names, options.enable_lora, lora_root)
    for name, given in arguments.lora_modules if options.enable_lora else ():
        with found.caught():
            check_path(name, given)


def _ask(
    options: EngineOptions, model: ModelFolder, weight_bytes: int | None, ask: RunPreflight, invalid: Collection[str]
) -> PreflightReport:
    """Get the preflight report, with defaults in place of invalid values."""
    defaults = EngineOptions()
    usual = {name: getattr(defaults, name) for name in invalid}
    return ask(structs.replace(options, **usual, model=str(model.folder)), weight_bytes)


def _add_findings(engine: PreflightReport, found: Findings, invalid: Collection[str]) -> None:
    """Record the preflight report.

    Invalid values were not passed to it, so its messages about their flags are skipped.
    """
    replaced = [re.compile(rf"{flag_name(name)}(?![\w-])") for name in invalid]
    found.problems += [text for text in engine.problems if not any(flag.search(text) for flag in replaced)]
    if invalid:
        return
    if engine.shortage:
        found.warnings.append(f"{engine.shortage} now; it would fit if nothing else used the memory")
    found.facts |= {name: text for name, text in engine.model.items() if name != "supported"} | engine.choices


def _find_model(
    model: str | None, arguments: argparse.Namespace, with_weights: bool, found: Findings
) -> tuple[ModelFolder | None, int | None]:
    """Return the model's folder, or None if it is not found, and the bytes of weights still to be downloaded.

    A cached model is used without asking the hub.
    """
    hub = hub_options(arguments)
    with found.caught():
        try:
            folder = find_model(model, hub, with_weights=with_weights, may_download=False)
        except NotDownloadedError:
            assert model is not None, "it has a name on the hub"
            if with_weights:
                return _preview(model, hub, found)
            folder = find_model(model, hub, with_weights=False)
        found.facts["model"] = f"{folder.folder}{f', commit {folder.commit}' if folder.commit else ''}"
        return folder, None
    return None, None


def _preview(model: str, hub: HubOptions, found: Findings) -> tuple[ModelFolder, int | None]:
    """Download the small files of a model, as a start does before the weights."""
    seen = preview_model(model, hub)
    commit = seen.rows["commit"]
    found.facts["model"] = f"{seen.folder}, commit {commit}"
    found.facts["download"] = seen.rows["download"]
    folder = with_tokenizer(seen.folder, cache_folder())
    return ModelFolder(folder, model, commit), seen.weight_bytes


def _check_addresses(arguments: argparse.Namespace, found: Findings) -> None:
    """Listen on all addresses briefly.

    They are open simultaneously, which detects duplicates.
    """
    with ExitStack() as stack:
        if arguments.command != "engine":
            _listen_api(arguments, stack, found)
        port = arguments.ops_port
        if _is_possible(port or 0):
            with found.caught(port or 0):
                sock = stack.enter_context(listen_ops(arguments.ops_host, port))
                found.facts["ops port"] = url_of(sock) if port != 0 else "any free port"
        _check_endpoint(arguments, found)


def _listen_api(arguments: argparse.Namespace, stack: ExitStack, found: Findings) -> None:
    addresses = Addresses(arguments.host, arguments.port, arguments.uds, arguments.uds_mode)
    port, scheme = addresses.tcp_port, "https" if arguments.tls_cert is not None else "http"
    urls: list[str] = []
    known: list[str] = []
    for host in addresses.tcp_hosts:
        with found.caught():
            tcp_addresses([host])
            known.append(host)
    resolved: list[TcpAddress] = tcp_addresses(known)
    for given in dict.fromkeys(address.given for address in resolved if _is_possible(port)):
        with found.caught(port):
            opened = listen_tcp([address for address in resolved if address.given == given], port, 1)
            urls += [url_of(stack.enter_context(sock), scheme) for group in opened for sock in group]
    if arguments.uds is not None:
        with found.caught():
            urls.append(url_of(stack.enter_context(listening_unix_socket(arguments.uds, arguments.uds_mode))))
    has_keys = bool(arguments.api_keys or arguments.api_key or arguments.api_key_file or os.environ.get(ENVIRONMENT))
    shown = [address.host for address in resolved]
    if warning := open_host_warning(shown, has_keys, [f"{host}:{port}" for host in shown]):
        found.warnings.append(warning)
    if urls:
        found.facts["API"] = ", ".join(urls) if port else "any free port"


def _is_possible(port: int) -> bool:
    """Return True for a valid port number.

    Others are reported by the bounds of the flag.
    """
    return 0 <= port <= _MAX_PORT


def _check_endpoint(arguments: argparse.Namespace, found: Findings) -> None:
    """Check the link between engine and frontends.

    An engine must be able to listen there, on an address of its own.
    """
    endpoint = arguments.endpoint
    with found.caught():
        check_ipc_length(endpoint or _PRIVATE_ENDPOINT)
        settings = checked_transport(arguments, endpoint or _PRIVATE_ENDPOINT)
        if endpoint is None:
            return
        found.facts["endpoint"] = endpoint
        if arguments.command == "frontend":
            return
        check_ipc_path(endpoint)
        ports: tuple[int, ...] = ()
        if endpoint.startswith("tcp://"):
            check_server_keys(settings)
            first = int(endpoint.rpartition(":")[2])
            ports = (first, first + 1)
        else:
            _check_missing(Path(endpoint.removeprefix("ipc://")).parent, "--endpoint", found)
        with found.caught(*ports):
            check_unused(endpoint)


def _check_access(arguments: argparse.Namespace, found: Findings) -> None:
    """Check keys, certificate, origins and the collector of traces."""
    checks: list[Callable[[], Any]] = [
        lambda: check_tls(arguments.tls_cert, arguments.tls_key),
        lambda: check_origins(arguments.cors_origin),
        lambda: check_traces(arguments.otlp_traces_endpoint),
    ]
    for check in checks:
        with found.caught():
            check()
    given: tuple[str, ...] = ()
    with found.caught():
        given = api_keys(arguments)
    with found.caught():
        keys = ApiKeys(given, arguments.api_keys)
        keys.load()
        found.facts["API keys"] = str(len(keys.ring)) if keys.is_required else "none needed"


def _check_chat(file: Path | None, model: ModelFolder | None, found: Findings) -> None:
    """Check the tokenizer and the chat template."""
    with ExitStack() as stack:
        tokenizer = None
        if model is not None:
            with found.caught():
                tokenizer = load_tokenizer(model.folder, threads=1)
                stack.callback(tokenizer.close)
        with found.caught():
            if model is not None and tokenizer is not None:
                template = load_chat_template(model.folder, file, tokenizer)
                found.facts["chat"] = "with a template" if template is not None else "no template, so it cannot chat"
            elif file is not None:
                read_template(file)


def _check_state(folder: Path | None, found: Findings) -> None:
    """Check the directory of stored responses."""
    if folder is None:
        return
    found.facts["state"] = str(folder)
    if not folder.exists():
        _check_missing(folder, "--state-dir", found)
        return
    with found.caught():
        check_store(folder)


def _check_missing(folder: Path, flag: str, found: Findings) -> None:
    """Record a folder that does not exist and cannot be created."""
    if folder.exists():
        return
    parent = next(parent for parent in folder.absolute().parents if parent.exists())
    if not parent.is_dir():
        found.problems.append(f"{flag}: {folder} cannot be created, because {parent} is not a directory")
    elif not os.access(parent, os.W_OK | os.X_OK):
        found.warnings.append(
            f"{flag}: {folder} does not exist, and this user may not create it in {parent}; create it, unless a "
            "service manager does"
        )
