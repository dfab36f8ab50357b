"""The settings of one HTTP process and the table of flags that fills them.

A new flag is a row of the table and an attribute of the struct that it fills; the argument parser, the check of its
bounds and the arguments that a supervisor passes on to HTTP processes follow from the row.
"""

import argparse
import re
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from msgspec import Struct

from tandem.frontend.api_keys import add_key_arguments, api_keys
from tandem.frontend.flag import MAX_INT32, MAX_SECONDS, Flag, add_flags
from tandem.frontend.listening import ConnectionLimits
from tandem.frontend.request.limits import RequestLimits
from tandem.frontend.request.options import MAX_N, MAX_STOPS
from tandem.frontend.store.store import StoreLimits
from tandem.protocol.engine_options import flag_name
from tandem.protocol.logs import LogLevel
from tandem.protocol.params import MAX_TOP_LOGPROBS
from tandem.protocol.sockets import Transport, check_port
from tandem.protocol.transport_options import transport

MEBIBYTE = 2**20
DEFAULT_BODY_MIB = 32
MAX_FRONTENDS = 64
FIRST_STREAM_WAIT = 5.0
"""Seconds for which a stream waits for its first output before it begins without; until then a refusal is a status."""

ToolParserName = Literal["auto", "hermes", "llama3_json", "mistral", "json"]
ReasoningParserName = Literal["auto", "think", "none"]
UnknownFields = Literal["ignore", "refuse"]
GenerationConfigSource = Literal["auto", "off"]


class ChatOptions(Struct, frozen=True):
    """Options of rendering and parsing conversations; "auto" depends on the model."""

    default_max_tokens: int = 1024
    """Limit on the tokens of an answer whose request sets none; lower if the context has less room."""
    template: Path | None = None
    """Template file to use instead of the checkpoint's template."""
    tool_parser: ToolParserName = "auto"
    reasoning_parser: ReasoningParserName = "auto"


class FrontendConfig(Struct, frozen=True):
    """The settings of one HTTP process. Times are in seconds."""

    endpoint: str
    model_dir: Path
    generation_config: GenerationConfigSource = "auto"
    """Source of sampling defaults: the checkpoint's generation_config.json, or none ("off")."""
    transport: Transport = Transport()
    host: str = "127.0.0.1"
    port: int = 8000
    listener_fds: tuple[int, ...] = ()
    """File descriptors of the inherited listening sockets, one for each slot, to serve on instead of host and port."""
    slot: int = 0
    """Index of the listening socket that this process accepts from once it serves, until it is told otherwise."""
    supervisor_fd: int | None = None
    """File descriptor of the control channel to the supervisor; None without one."""
    max_concurrent: int = 1024
    """Limit on sequences in progress; requests beyond it get a 429."""
    max_queued_tokens: int = 2**20
    """Limit on prompt tokens that wait for their first output; requests beyond it get a 429."""
    max_body: int = DEFAULT_BODY_MIB * MEBIBYTE
    """Limit on the bytes of a request body."""
    unknown_fields: UnknownFields = "ignore"
    """What happens to a field that has no effect: it is ignored and named in the response, or refused."""
    limits: RequestLimits = RequestLimits()
    connections: ConnectionLimits = ConnectionLimits()
    chat: ChatOptions = ChatOptions()
    store: bool = True
    """True if responses are stored unless their request says otherwise."""
    state_dir: Path | None = None
    """Directory of the store; None for a private one that is removed at the end."""
    store_limits: StoreLimits = StoreLimits()
    api_keys: tuple[str, ...] = ()
    """Keys that requests may present; without any, requests need no key."""
    served_names: tuple[str, ...] = ()
    """Names that requests may give for the model, `*` for any; without names it is the engine's."""
    cors_origins: tuple[str, ...] = ()
    tls_cert: Path | None = None
    tls_key: Path | None = None
    beat_timeout: float = 5.0
    step_timeout: float = 60.0
    drain_timeout: float = 25.0
    shutdown_delay: float = 0.0
    """Time for which a process that is to end still accepts requests, unready already."""
    request_timeout: float = 0.0
    """Time that a request may take from its arrival to the end of its output; 0 for any time."""
    hold_timeout: float = 60.0
    """Time that a request waits for the engine to come back if none of its answer was sent; 0 for none."""
    sse_keepalive: float = 15.0
    """Seconds after which a stream without output gets a sign of life; 0 for none."""
    stream_interval: float = 0.0
    """Shortest time between two writes of a stream; what comes in between is written together."""
    log_level: LogLevel = "info"

    @property
    def load_limits(self) -> tuple[int, int]:
        """Return the limits on open load, in sequences and in prompt tokens.

        The tokens are those of prompts that wait for their first output.
        """
        return self.max_concurrent, self.max_queued_tokens

    @property
    def stream_waits(self) -> tuple[float | None, float | None]:
        """The seconds that a stream stays silent.

        They are those before its first output, and later; None for any time.
        """
        return (FIRST_STREAM_WAIT, self.sse_keepalive) if self.sse_keepalive else (None, None)


_COUNT = (1, MAX_INT32)
_SECONDS = (0.001, MAX_SECONDS)
_HTTP, _CHAT, _LIMITS, _ACCESS, _WATCH = "http", "chat", "request limits", "access control", "engine watchdog"
_STORE = "stored responses"
_CONNECTIONS = "connections"


def _served_name(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("a name of the model must have at least one character that is not blank")
    return text


# fmt: off
HTTP_FLAGS = (
    Flag("host", _HTTP, "address to listen on", metavar="HOST", is_everyday=True, struct=FrontendConfig,
         is_forwarded=False),
    Flag("port", _HTTP, "port to listen on, 0 for any free port", int, (0, 65535), metavar="PORT",
         is_everyday=True, struct=FrontendConfig, is_forwarded=False),
    Flag("served_model_name", _HTTP, "names by which requests select the model; the name * stands for any, quoted in a "
         "shell", _served_name, metavar="NAME", is_list=True, is_everyday=True, default=[],
         default_text="the one that the engine reports, its directory's",
         struct=FrontendConfig, field="served_names", to_field=tuple),
    Flag("max_concurrent", _HTTP, "maximum number of sequences in progress, of all frontends together; further "
         "requests get a 429; a frontend on its own can only lower its engine's limit", int, _COUNT,
         struct=FrontendConfig),
    Flag("frontends", _HTTP, "number of frontend processes behind the port", int, (1, MAX_FRONTENDS), is_everyday=True,
         default_text="the usable CPU cores less 2, between 1 and 8", is_forwarded=False),
    Flag("drain_timeout", _HTTP, "seconds that open streams may take to finish at shutdown", float, (0, MAX_SECONDS),
         struct=FrontendConfig),
    Flag("shutdown_delay", _HTTP, "seconds at shutdown for which requests are still accepted, while /health/ready says "
         "503", float, (0, MAX_SECONDS), struct=FrontendConfig),
    Flag("request_timeout", _HTTP, "seconds after its arrival at which a request that is not answered in full ends "
         "with an error, 0 for never", float, (0, MAX_SECONDS), struct=FrontendConfig),
    Flag("hold_timeout", _HTTP, "seconds that a request waits for an engine to come back if nothing of its answer was "
         "sent, 0 for none; then it is submitted again", float, (0, MAX_SECONDS), struct=FrontendConfig),
    Flag("sse_keepalive", _HTTP, "seconds after which a stream without output gets a comment or ping, 0 for never; its "
         f"headers are sent after {FIRST_STREAM_WAIT:g} s even without output", float, (0, MAX_SECONDS),
         struct=FrontendConfig),
    Flag("stream_interval_ms", _HTTP, "milliseconds of a stream whose tokens are sent together, after its first token; "
         "0 sends each token at once", float, (0, 60_000), metavar="N", struct=FrontendConfig, field="stream_interval",
         to_field=lambda milliseconds: milliseconds / 1000),
    Flag("chat_template", _CHAT, "Jinja chat template", Path, metavar="FILE", is_everyday=True,
         struct=ChatOptions, field="template", default_text="the checkpoint's, or else a built-in one for its type"),
    Flag("default_max_tokens", _CHAT, "maximum number of tokens of an answer whose request sets no limit", int, _COUNT,
         struct=ChatOptions),
    Flag("generation_config", _HTTP, "auto takes the sampling defaults (temperature, top_p, top_k, min_p, penalties) "
         "of the checkpoint's generation_config.json; off takes neutral ones",
         choices=get_args(GenerationConfigSource), struct=FrontendConfig),
    Flag("tool_parser", _CHAT, "format in which the model writes tool calls; auto depends on the model's type",
         choices=get_args(ToolParserName), is_everyday=True, struct=ChatOptions),
    Flag("reasoning_parser", _CHAT, "parsing of <think>...</think> at the start of an answer; auto parses it if the "
         "chat template mentions </think>", choices=get_args(ReasoningParserName), is_everyday=True,
         struct=ChatOptions),
    Flag("max_body", _LIMITS, "maximum size of a request body in MiB", int, (1, 1024), struct=FrontendConfig,
         default=DEFAULT_BODY_MIB, to_field=lambda size: size * MEBIBYTE),
    Flag("max_n", _LIMITS, "maximum number of choices of a request", int, (1, MAX_N), struct=RequestLimits),
    Flag("max_top_logprobs", _LIMITS, "maximum number of alternatives reported for each token", int,
         (0, MAX_TOP_LOGPROBS), struct=RequestLimits),
    Flag("max_stop_strings", _LIMITS, "maximum number of stop strings of a request", int, (0, MAX_STOPS),
         struct=RequestLimits),
    Flag("max_queued_tokens", _LIMITS, "maximum number of prompt tokens that wait for their first output, of all "
         "frontends together; further requests get a 429; a frontend on its own can only lower its engine's limit", int,
         _COUNT, struct=FrontendConfig),
    Flag("unknown_fields", _LIMITS, "what to do with request fields that have no effect: ignore them and name them in "
         "the header x-tandem-ignored, or refuse the request", choices=get_args(UnknownFields), struct=FrontendConfig),
    Flag("max_prompt_tokens", _LIMITS, "maximum number of tokens of a prompt", int, _COUNT, struct=RequestLimits,
         default_text="the model's context length"),
    Flag("limit_concurrency", _CONNECTIONS, "maximum number of open connections, of which an eighth (1 to 64) is kept "
         "from requests; beyond it the oldest one without a request is closed", int, (2, MAX_INT32),
         struct=ConnectionLimits, field="max_connections", default_text="16384, or what ulimit -n has room for"),
    Flag("timeout_keep_alive", _CONNECTIONS, "seconds for which a connection waits for its next request", float,
         _SECONDS, struct=ConnectionLimits, field="keep_alive_timeout"),
    Flag("client_header_timeout", _CONNECTIONS, "seconds in which all headers of a request, or a TLS handshake, must "
         "arrive", float, _SECONDS, struct=ConnectionLimits, field="header_timeout"),
    Flag("client_body_timeout", _CONNECTIONS, "seconds in which a body must arrive, plus 1 s for each 16 KiB received",
         float, _SECONDS, struct=ConnectionLimits, field="body_timeout"),
    Flag("send_timeout", _CONNECTIONS, "seconds after which a client that reads nothing of its answer is given up",
         float, _SECONDS, struct=ConnectionLimits),
)
STORE_FLAGS = (
    Flag("store", _STORE, "on: store the responses of /v1/responses unless a request says otherwise; off: store none",
         choices=("on", "off"), default="on", struct=FrontendConfig, to_field=lambda word: word == "on"),
    Flag("state_dir", _STORE, "directory of the store, which survives a restart; all frontends of a service on one "
         "machine share it", Path, metavar="DIR", struct=FrontendConfig, is_forwarded=False,
         default_text="a private directory that is removed at the end"),
    Flag("store_size", _STORE, "maximum size of the store in MiB; conversations unused for longest make room", int,
         (1, 2**20), default=StoreLimits().max_bytes // MEBIBYTE, struct=StoreLimits, field="max_bytes",
         to_field=lambda size: size * MEBIBYTE),
    Flag("store_size_per_key", _STORE, "maximum size in MiB of what one API key stores; its own conversations make "
         "room", int, (1, 2**20), default_text="no limit but --store-size", struct=StoreLimits, field="max_owner_bytes",
         to_field=lambda size: size and size * MEBIBYTE),
    Flag("store_ttl", _STORE, "seconds that a conversation is stored after its last response", float,
         (1, 1e10), struct=StoreLimits, field="ttl"),
)
ACCESS_FLAGS = (
    Flag("cors_origin", _ACCESS, "web origin whose pages may send requests, * for all; may be given several times",
         metavar="ORIGIN", is_everyday=True, is_repeated=True, default=[], default_text="none", struct=FrontendConfig,
         field="cors_origins", to_field=tuple),
    Flag("tls_cert", _ACCESS, "certificate chain in PEM format; enables https", Path, metavar="FILE", is_everyday=True,
         struct=FrontendConfig),
    Flag("tls_key", _ACCESS, "unencrypted private key of the certificate in PEM format", Path, metavar="FILE",
         is_everyday=True, struct=FrontendConfig),
)
WATCH_FLAGS = (
    Flag("beat_timeout", _WATCH, "seconds without a heartbeat after which the engine counts as lost", float, _SECONDS,
         struct=FrontendConfig),
    Flag("hang_timeout", _WATCH, "seconds without a heartbeat after which the engine or a frontend is killed and "
         "started again", float, _SECONDS, default=8.0, is_forwarded=False),
    Flag("step_timeout", _WATCH, "seconds without a completed step, with work pending, after which the engine counts "
         "as hung", float, _SECONDS, struct=FrontendConfig),
    Flag("log_level", _WATCH, "least severe level of messages to log", choices=get_args(LogLevel), is_everyday=True,
         struct=FrontendConfig),
)
# fmt: on
FRONTEND_FLAGS = (*HTTP_FLAGS, *STORE_FLAGS, *ACCESS_FLAGS, *WATCH_FLAGS)
"""All flags of an HTTP process but those of its keys and its link to the engine."""


def add_http_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of an HTTP process that a supervisor takes as well."""
    add_flags(parser, (*HTTP_FLAGS, *STORE_FLAGS))
    access = parser.add_argument_group(_ACCESS)
    add_key_arguments(access)
    for flag in ACCESS_FLAGS:
        flag.add_to(access)


def add_watch_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a process that watches the engine's heartbeat."""
    add_flags(parser, WATCH_FLAGS)


def add_child_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that only a supervisor gives to its frontend processes."""
    parser.add_argument("--listener-fds", type=_descriptors, default=(), help=argparse.SUPPRESS)
    parser.add_argument("--slot", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--supervisor-fd", type=int, help=argparse.SUPPRESS)


def _descriptors(text: str) -> tuple[int, ...]:
    """Parse file descriptors that are separated by commas."""
    return tuple(map(int, text.split(",")))


def child_argv(slot: int, listener_fds: Sequence[int], supervisor_fd: int) -> list[str]:
    """Build the flags of `add_child_arguments` for the process of a slot."""
    fds = ",".join(map(str, listener_fds))
    return ["--listener-fds", fds, "--slot", str(slot), "--supervisor-fd", str(supervisor_fd)]


def http_argv(arguments: argparse.Namespace) -> list[str]:
    """Build the flags that give another HTTP process the same settings.

    Its address and keys are left out.
    """
    argv: list[str] = []
    for flag in FRONTEND_FLAGS:
        value = getattr(arguments, flag.name)
        if not flag.is_forwarded or value in (None, []):
            continue
        if flag.is_list:
            argv += [f"{flag_name(flag.name)}={item}" for item in value]
            continue
        for item in value if flag.is_repeated else (value,):
            argv += [flag_name(flag.name), str(item)]
    return argv


def check_security(arguments: argparse.Namespace) -> None:
    """Raise ValueError for invalid CORS origins and unusable TLS files."""
    for origin in arguments.cors_origin:
        if origin != "*" and re.fullmatch(r"https?://[^/\s]+", origin) is None:
            raise ValueError(f"--cors-origin {origin} is not an origin; give * or one like https://example.org")
    cert, key = arguments.tls_cert, arguments.tls_key
    if (cert is None) != (key is None):
        raise ValueError("--tls-cert and --tls-key belong together; give both or neither")
    if cert is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=_no_password)
        except ssl.SSLError as error:
            why = "they are not a pair" if error.reason == "KEY_VALUES_MISMATCH" else "both must be in PEM format"
            raise ValueError(f"--tls-cert {cert} with --tls-key {key} cannot be used: {why}") from None
        except (OSError, ValueError) as error:
            why = str(error.strerror if isinstance(error, OSError) else error)
            raise ValueError(f"--tls-cert {cert} with --tls-key {key} cannot be used: {why}") from None


def _no_password() -> str:
    """Fail instead of prompting for the key's password on the terminal."""
    raise ValueError("the key is encrypted")


def frontend_config(arguments: argparse.Namespace) -> FrontendConfig:
    """Build the settings from parsed arguments.

    Raises ValueError for flags that contradict each other and for key files that cannot be read.
    """
    settings = transport(arguments)
    settings.check(arguments.endpoint)
    check_port(arguments.endpoint)
    check_security(arguments)
    return FrontendConfig(
        endpoint=arguments.endpoint,
        model_dir=Path(arguments.model_dir),
        transport=settings,
        listener_fds=arguments.listener_fds,
        slot=arguments.slot,
        supervisor_fd=arguments.supervisor_fd,
        limits=RequestLimits(**_fields(arguments, RequestLimits)),
        connections=ConnectionLimits(**_fields(arguments, ConnectionLimits)),
        chat=ChatOptions(**_fields(arguments, ChatOptions)),
        store_limits=StoreLimits(**_fields(arguments, StoreLimits)),
        api_keys=api_keys(arguments),
        **_fields(arguments, FrontendConfig),
    )


def _fields(arguments: argparse.Namespace, struct: type[Struct]) -> dict[str, Any]:
    """Collect the attributes of a struct that flags fill."""
    fields: dict[str, Any] = {}
    for flag in FRONTEND_FLAGS:
        if flag.struct is struct:
            value = getattr(arguments, flag.name)
            fields[flag.field_name] = value if flag.to_field is None else flag.to_field(value)
    return fields
