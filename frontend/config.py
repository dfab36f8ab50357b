"""Settings of an HTTP process, set by the flags in `flags/`."""

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
"""Seconds that a stream waits for its first output before its headers are sent; until then a refusal is an HTTP
status."""

ToolParserName = Literal["auto", "hermes", "qwen3_coder", "llama3_json", "mistral", "json"]
ReasoningParserName = Literal["auto", "think", "mistral", "none"]
PrefixCacheScope = Literal["key", "server"]
UnknownFields = Literal["ignore", "refuse"]
GenerationConfigSource = Literal["auto", "off"]


def frontend_name(slot: int) -> str:
    """Return the name of a frontend in logs, metrics and the link to the engine."""
    return f"frontend-{slot}"


class ChatOptions(Struct, frozen=True):
    """Options for rendering and parsing conversations; "auto" depends on the model."""

    default_max_tokens: int | None = None
    """Default of `max_tokens`; None for the rest of the context."""
    template: Path | None = None
    """Template file to use instead of the checkpoint's template."""
    tool_parser: ToolParserName = "auto"
    reasoning_parser: ReasoningParserName = "auto"


class FrontendConfig(Struct, frozen=True):
    """Settings of an HTTP process. Times are in seconds."""

    endpoint: str
    model_dir: Path
    generation_config: GenerationConfigSource = "auto"
    """Source of sampling defaults: the checkpoint's generation_config.json, or none ("off")."""
    transport: Transport = Transport()
    listener_fds: tuple[tuple[int, ...], ...] = ()
    """File descriptors of the inherited listening sockets, by slot."""
    slot: int = 0
    """Slot that this process accepts from at first; the supervisor may assign others."""
    supervisor_fd: int | None = None
    """File descriptor of the control channel to the supervisor; None without one."""
    max_concurrent: int = 1024
    """Maximum sequences in progress; further requests get a 429."""
    max_queued_tokens: int = 2**20
    """Maximum prompt tokens that wait for their first output; further requests get a 429."""
    max_body: int = DEFAULT_BODY_MIB * MEBIBYTE
    """Maximum bytes of a request body."""
    unknown_fields: UnknownFields = "ignore"
    """What happens to a field without effect: it is ignored and named in the response, or refused."""
    no_special_tokens_in_text: bool = False
    """True to prevent special tokens in text from clients."""
    limits: RequestLimits = RequestLimits()
    connections: ConnectionLimits = ConnectionLimits()
    chat: ChatOptions = ChatOptions()
    store: bool = True
    """True to store responses unless their request says otherwise."""
    state_dir: Path | None = None
    """Directory of the store; None for a private one that is removed at the end."""
    store_limits: StoreLimits = StoreLimits()
    api_keys: tuple[str, ...] = ()
    """API keys without names; without any keys, requests need none."""
    api_keys_file: Path | None = None
    """File of API keys with names, rights and limits."""
    prefix_cache_scope: PrefixCacheScope = "key"
    """Who shares cached prefixes: requests with the same API key, or all requests."""
    lora_root: Path | None = None
    """Folder of the adapters that clients may load; None: they may load none."""
    swap_root: Path | None = None
    """Folder of the checkpoints to which the weights may be swapped; None: they may not."""
    served_names: tuple[str, ...] = ()
    """Model names that requests may use, `*` for any; by default the engine's."""
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    """Allowed Host headers, each possibly several separated by commas; empty to allow all."""
    forwarded_allow_ips: tuple[str, ...] = ("127.0.0.1", "::1", "unix")
    """Proxies whose forwarding headers are trusted: addresses, networks, `unix` or `*`."""
    root_path: str = ""
    """Path prefix of a proxy; requests may have it or not."""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    beat_timeout: float = 5.0
    hang_timeout: float = 8.0
    """Seconds without a heartbeat after which the engine's supervisor kills it."""
    step_timeout: float = 60.0
    drain_timeout: float = 25.0
    shutdown_delay: float = 0.0
    """Seconds at shutdown during which requests are still accepted, while the process reports unready."""
    request_timeout: float = 0.0
    """Maximum seconds from the arrival of a request to the end of its output; 0 for no limit."""
    hold_timeout: float = 60.0
    """Maximum seconds that a request waits for a lost engine to return if none of its output was sent; 0 to disable."""
    sse_keepalive: float = 15.0
    """Seconds after which a silent stream gets a keep-alive; 0 to disable."""
    stream_interval: float = 0.0
    """Minimum seconds between two writes of a stream; output in between is written together."""
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"
    access_log: bool = True
    """True to log each request."""
    otlp_traces_endpoint: str = ""
    """URL of a collector of traces; "" to disable them."""
    log_requests: bool = False
    """True to log prompts and parameters."""
    max_log_len: int = 2048
    """Maximum characters of a prompt in the log."""

    @property
    def load_limits(self) -> tuple[int, int]:
        """Return the limits on open sequences and on prompt tokens.

        The tokens are of prompts that wait for their first output.
        """
        return self.max_concurrent, self.max_queued_tokens

    @property
    def stream_waits(self) -> tuple[float | None, float | None]:
        """Keep-alive intervals of a stream.

        They are the seconds before its first output, and later; None for no keep-alive.
        """
        return (FIRST_STREAM_WAIT, self.sse_keepalive) if self.sse_keepalive else (None, None)
