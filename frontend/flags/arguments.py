"""Parse the arguments of an HTTP process and build its settings.

A new flag is a row in one of the tables of `http_flags` and an attribute of the struct that it fills. The argument
parser, the bounds check and the arguments that a supervisor passes on to HTTP processes are derived from the row.
"""

import argparse
import importlib.util
import re
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from tandem.frontend.access.api_keys import ApiKeys
from tandem.frontend.access.key_sources import add_key_arguments, api_keys
from tandem.frontend.config import ChatOptions, FrontendConfig
from tandem.frontend.flags.flag import add_flags
from tandem.frontend.flags.http_flags import (
    ACCESS,
    ACCESS_FLAGS,
    FRONTEND_FLAGS,
    HTTP_FLAGS,
    LIMIT_FLAGS,
    LOG_FLAGS,
    STORE_FLAGS,
    WATCH_FLAGS,
)
from tandem.frontend.listening import ConnectionLimits
from tandem.frontend.request.limits import RequestLimits
from tandem.frontend.store.store import StoreLimits
from tandem.protocol.engine_options import flag_name
from tandem.protocol.installing import install_extra
from tandem.protocol.sockets import check_port
from tandem.protocol.transport_options import transport


def add_http_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of an HTTP process that a supervisor takes as well."""
    add_flags(parser, (*HTTP_FLAGS, *LIMIT_FLAGS, *STORE_FLAGS))
    access = parser.add_argument_group(ACCESS)
    add_key_arguments(access)
    for flag in ACCESS_FLAGS:
        flag.add_to(access)
    add_flags(parser, LOG_FLAGS)


def add_watch_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a process that watches the engine's heartbeat."""
    add_flags(parser, WATCH_FLAGS)


def add_child_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that only a supervisor passes to its frontend processes."""
    parser.add_argument("--listener-fds", type=_descriptors, default=(), help=argparse.SUPPRESS)
    parser.add_argument("--slot", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--supervisor-fd", type=int, help=argparse.SUPPRESS)


def _descriptors(text: str) -> tuple[tuple[int, ...], ...]:
    """Parse file descriptors: commas separate slots, colons the descriptors of a slot."""
    return tuple(tuple(map(int, slot.split(":"))) for slot in text.split(","))


def child_argv(slot: int, listener_fds: Sequence[Sequence[int]], supervisor_fd: int) -> list[str]:
    """Build the flags of `add_child_arguments` for the process of a slot."""
    fds = ",".join(":".join(map(str, descriptors)) for descriptors in listener_fds)
    return ["--listener-fds", fds, "--slot", str(slot), "--supervisor-fd", str(supervisor_fd)]


def http_argv(arguments: argparse.Namespace) -> list[str]:
    """Build the flags that pass the same settings to another HTTP process.

    The address and keys are omitted.
    """
    argv: list[str] = []
    for flag in FRONTEND_FLAGS:
        value = getattr(arguments, flag.name)
        if not flag.is_forwarded or value in (None, []):
            continue
        if flag.is_switch:
            argv += [flag_name(flag.name)] if value else []
            continue
        if flag.is_list:
            argv += [f"{flag_name(flag.name)}={item}" for item in value]
            continue
        for item in value if flag.is_repeated else (value,):
            argv += [flag_name(flag.name), str(item)]
    return argv


def check_security(arguments: argparse.Namespace) -> None:
    """Raise ValueError for invalid access or trace settings.

    These are invalid CORS origins, unusable TLS files, and traces that cannot be exported.
    """
    check_traces(arguments.otlp_traces_endpoint)
    check_origins(arguments.cors_origin)
    check_tls(arguments.tls_cert, arguments.tls_key)


def check_origins(origins: Sequence[str]) -> None:
    """Raise ValueError for anything but an origin or `*`."""
    for origin in origins:
        if origin != "*" and re.fullmatch(r"https?://[^/\s]+", origin) is None:
            raise ValueError(f"--cors-origin {origin} is not an origin; give * or one like https://example.org")


def check_tls(cert: Path | None, key: Path | None) -> None:
    """Raise ValueError for an unusable certificate or key."""
    if (cert is None) != (key is None):
        raise ValueError("--tls-cert and --tls-key belong together; give both or neither")
    if cert is not None and key is not None:
        _check_readable("--tls-cert", cert)
        _check_readable("--tls-key", key)
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=_no_password)
        except ssl.SSLError as error:
            reason = "they are not a pair" if error.reason == "KEY_VALUES_MISMATCH" else "both must be in PEM format"
            raise ValueError(f"--tls-cert {cert} with --tls-key {key} cannot be used: {reason}") from None
        except (OSError, ValueError) as error:
            raise ValueError(f"--tls-cert {cert} with --tls-key {key} cannot be used: {error}") from None


def _check_readable(flag: str, file: Path) -> None:
    """Raise ValueError, with the flag and the reason, for a file that cannot be read."""
    try:
        file.open("rb").close()
    except OSError as error:
        raise ValueError(
            f"{flag} {file} cannot be read: {error.strerror}; give a file that exists and that this user may read"
        ) from None


def check_traces(endpoint: str) -> None:
    """Raise ValueError if traces are enabled but cannot be exported.

    This requires the URL of a collector and the optional packages.
    """
    if not endpoint:
        return
    if re.fullmatch(r"https?://[^/\s]+(/\S*)?", endpoint) is None:
        raise ValueError(
            f"--otlp-traces-endpoint {endpoint} is not a URL of OTLP/HTTP; give one like http://localhost:4318/v1/traces"
        )
    try:
        missing = importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is None
    except ModuleNotFoundError:
        missing = True
    if missing:
        raise ValueError(f"--otlp-traces-endpoint needs packages that are not installed; run {install_extra('otel')}")


def _no_password() -> str:
    """Fail instead of prompting for the key's password on the terminal."""
    raise ValueError("the key is encrypted")


def frontend_config(arguments: argparse.Namespace) -> FrontendConfig:
    """Build the settings from parsed arguments.

    Raises ValueError for conflicting flags and unreadable key files.
    """
    settings = transport(arguments)
    settings.check(arguments.endpoint)
    check_port(arguments.endpoint)
    check_security(arguments)
    given = api_keys(arguments)
    ApiKeys(given, arguments.api_keys).load()
    return FrontendConfig(
        endpoint=arguments.endpoint,
        model_dir=Path(arguments.model_dir or ""),  # `run_frontend` replaces it by the resolved folder
        transport=settings,
        listener_fds=arguments.listener_fds,
        slot=arguments.slot,
        supervisor_fd=arguments.supervisor_fd,
        limits=RequestLimits(**_fields(arguments, RequestLimits)),
        connections=ConnectionLimits(**_fields(arguments, ConnectionLimits)),
        chat=ChatOptions(**_fields(arguments, ChatOptions)),
        store_limits=StoreLimits(**_fields(arguments, StoreLimits)),
        api_keys=given,
        **_fields(arguments, FrontendConfig),
    )


def _fields(arguments: argparse.Namespace, struct: type[Struct]) -> dict[str, Any]:
    """Collect the attributes of a struct from its flags."""
    fields: dict[str, Any] = {}
    for flag in FRONTEND_FLAGS:
        if flag.struct is struct:
            value = getattr(arguments, flag.name)
            fields[flag.field_name] = value if flag.to_field is None else flag.to_field(value)
    return fields
