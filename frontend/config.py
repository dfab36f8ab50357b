"""The settings of one HTTP process. The flags that fill them are in `flags/`."""

from pathlib import Path
from typing import Literal

from msgspec import Struct

from tandem.frontend.listening import ConnectionLimits
from tandem.frontend.request.limits import RequestLimits
from tandem.frontend.store.store import StoreLimits
from tandem.protocol.logs import LogFormat, LogLevel
from tandem.protocol.sockets import Transport

MEBIBYTE = 2**20
DEFAULT_BODY_MIB = 32
MAX_FRONTENDS = 64
FIRST_STREAM_WAIT = 5.0
"""Seconds for which a stream waits for its first output before it begins without; until then a refusal is a status."""

ToolParserName = Literal["auto", "hermes", "llama3_json", "mistral", "json"]
ReasoningParserName = Literal["auto", "think", "mistral", "none"]
PrefixCacheScope = Literal["key", "server"]
UnknownFields = Literal["ignore", "refuse"]
GenerationConfigSource = Literal["auto", "off"]


def frontend_name(slot: int) -> str:
    """Return the name of a frontend in logs, metrics and towards the engine."""
    return f"frontend-{slot}"


class ChatOptions(Struct, frozen=True):
    """Options of rendering and parsing conversations; "auto" depends on the model."""

    default_max_tokens: int | None = None
    """Limit on the tokens of an answer whose request sets none; None for the rest of the context."""
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
    listener_fds: tuple[tuple[int, ...], ...] = ()
    """File descriptors of the inherited listening sockets, those of each slot."""
    slot: int = 0
    """Index of the listening sockets that this process accepts from once it serves, until it is told otherwise."""
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
    no_special_tokens_in_text: bool = False
    """True if text that clients send never becomes special tokens."""
    limits: RequestLimits = RequestLimits()
    connections: ConnectionLimits = ConnectionLimits()
    chat: ChatOptions = ChatOptions()
    store: bool = True
    """True if responses are stored unless their request says otherwise."""
    state_dir: Path | None = None
    """Directory of the store; None for a private one that is removed at the end."""
    store_limits: StoreLimits = StoreLimits()
    api_keys: tuple[str, ...] = ()
    """Keys that requests may present, without names; without any keys, requests need none."""
    api_keys_file: Path | None = None
    """File of keys with names, rights and limits."""
    prefix_cache_scope: PrefixCacheScope = "key"
    """Who shares cached prefixes: requests of one API key, or of the whole server."""
    served_names: tuple[str, ...] = ()
    """Names that requests may give for the model, `*` for any; without names it is the engine's."""
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    """Names that the Host header may have, each perhaps several with commas between; any without names."""
    forwarded_allow_ips: tuple[str, ...] = ("127.0.0.1", "::1", "unix")
    """Proxies whose headers on the client are believed: addresses, networks, `unix` or `*`."""
    root_path: str = ""
    """Prefix of paths in a proxy; requests may have it or not."""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    beat_timeout: float = 5.0
    hang_timeout: float = 8.0
    """Seconds without a heartbeat after which the engine's supervisor kills it."""
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
    log_format: LogFormat = "text"
    access_log: bool = True
    """True if each request has a line of the log."""
    otlp_traces_endpoint: str = ""
    """URL of a collector that gets the traces of requests; "" for no traces."""
    log_requests: bool = False
    """True if prompts and parameters are logged."""
    max_log_len: int = 2048
    """Most characters of a prompt in the log."""

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
