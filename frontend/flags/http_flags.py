"""Flags of an HTTP process, in a table for each topic.

Each flag sets an attribute of a struct; see `arguments`. The flags of API keys without names are in
`access.key_sources`.
"""

import argparse
import re
from pathlib import Path
from typing import get_args

from tandem.frontend.config import (
    DEFAULT_BODY_MIB,
    FIRST_STREAM_WAIT,
    MAX_FRONTENDS,
    MEBIBYTE,
    ChatOptions,
    FrontendConfig,
    GenerationConfigSource,
    PrefixCacheScope,
    ReasoningParserName,
    ToolParserName,
    UnknownFields,
)
from tandem.frontend.flags.flag import COUNT, MAX_INT32, MAX_SECONDS, SECONDS, Flag
from tandem.frontend.listening import ConnectionLimits
from tandem.frontend.request.limits import RequestLimits
from tandem.frontend.request.options import MAX_N, MAX_STOPS
from tandem.frontend.store.store import StoreLimits
from tandem.protocol.engine_options import parse_count
from tandem.protocol.logs import LOG_FORMATS, LogLevel
from tandem.protocol.params import MAX_TOP_LOGPROBS

ACCESS = "access control"
"""Title of the group that also has the flags of `access.key_sources`."""
_HTTP, _CHAT, _LIMITS, _CONNECTIONS = "http", "chat", "request limits", "connections"
_STORE, _TRACES, _WATCHDOG, _LOG = "stored responses", "log and traces of requests", "engine watchdog", "log"


def _served_name(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("a name of the model must have at least one character that is not blank")
    return text


def _permissions(text: str) -> int:
    if re.fullmatch(r"(0o?)?[0-7]{3}", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} must be permissions in octal, such as 660")
    return int(text.removeprefix("0o"), 8)


def _prefix(text: str) -> str:
    if text and (not text.startswith("/") or text.startswith("//")):
        raise argparse.ArgumentTypeError(f"{text!r} must begin with a slash, such as /tandem")
    return text.rstrip("/")


# fmt: off
HTTP_FLAGS = (
    Flag("host", _HTTP, "address or name to listen on, :: for all of IPv6 and IPv4; may be given several times",
         metavar="HOST", is_everyday=True, is_repeated=True, default=[], default_text="127.0.0.1", is_forwarded=False),
    Flag("port", _HTTP, "port to listen on, 0 for any free port", int, (0, 65535), metavar="PORT", default_text="8000",
         is_everyday=True, is_forwarded=False),
    Flag("uds", _HTTP, "path of a Unix socket to listen on, without TLS; replaces the default host and port, but not "
         "given ones", Path, metavar="PATH", is_forwarded=False, default_text="none"),
    Flag("uds_mode", _HTTP, "permissions of the Unix socket, in octal", _permissions, metavar="MODE", default=0o600,
         default_text="600: only the user of the server may connect", is_forwarded=False),
    Flag("served_model_name", _HTTP, "model names that requests may use; * (quoted in a shell) accepts any name",
         _served_name, metavar="NAME", is_list=True, is_everyday=True, default=[],
         default_text="the engine's, which is the name of the model's directory", struct=FrontendConfig,
         field="served_names", to_field=tuple),
    Flag("lora_root", _HTTP, "folder of adapters that keys with the right admin may load while the server runs, by "
         "POST /v1/load_lora_adapter", Path, metavar="DIR", struct=FrontendConfig,
         default_text="none: the routes do not exist"),
    Flag("swap_root", _HTTP, "folder of checkpoints to which keys with the right admin may swap the weights, with "
         "--enable-weight-updates", Path, metavar="DIR", struct=FrontendConfig,
         default_text="none: swaps are refused"),
    Flag("max_concurrent", _HTTP, "maximum number of sequences in progress, of all frontends together; further "
         "requests get a 429; a frontend on its own can only lower its engine's limit", int, COUNT,
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
    Flag("default_max_tokens", _CHAT, "maximum number of tokens of an answer whose request sets no limit", parse_count,
         COUNT, is_everyday=True, struct=ChatOptions, default_text="the rest of the context, as in vLLM"),
    Flag("generation_config", _HTTP, "auto takes the defaults of sampling parameters from the checkpoint's "
         "generation_config.json; off takes neutral ones",
         choices=get_args(GenerationConfigSource), struct=FrontendConfig),
    Flag("tool_parser", _CHAT, "format in which the model writes tool calls; auto takes that of the chat template, or "
         "else that of the model's type",
         choices=get_args(ToolParserName), is_everyday=True, struct=ChatOptions),
    Flag("reasoning_parser", _CHAT, "parsing of reasoning at the start of an answer: in <think>...</think>, or with "
         "mistral in [THINK]...[/THINK]; auto parses the tags that the chat template writes",
         choices=get_args(ReasoningParserName), is_everyday=True, struct=ChatOptions),
)

LIMIT_FLAGS = (
    Flag("max_body", _LIMITS, "maximum size of a request body in MiB", int, (1, 1024), struct=FrontendConfig,
         default=DEFAULT_BODY_MIB, to_field=lambda size: size * MEBIBYTE),
    Flag("max_n", _LIMITS, "maximum number of choices of a request", int, (1, MAX_N), struct=RequestLimits),
    Flag("max_top_logprobs", _LIMITS, "maximum number of alternatives reported for each token", int,
         (0, MAX_TOP_LOGPROBS), struct=RequestLimits),
    Flag("max_stop_strings", _LIMITS, "maximum number of stop strings of a request", int, (0, MAX_STOPS),
         struct=RequestLimits),
    Flag("max_queued_tokens", _LIMITS, "maximum number of prompt tokens that wait for their first output, of all "
         "frontends together; further requests get a 429; a frontend on its own can only lower its engine's limit",
         parse_count, COUNT, struct=FrontendConfig),
    Flag("unknown_fields", _LIMITS, "what to do with request fields that have no effect: ignore them and name them in "
         "the header x-tandem-ignored, or refuse the request", choices=get_args(UnknownFields), struct=FrontendConfig),
    Flag("max_prompt_tokens", _LIMITS, "maximum number of tokens of a prompt", parse_count, COUNT, struct=RequestLimits,
         default_text="the model's context length"),
    Flag("limit_concurrency", _CONNECTIONS, "maximum number of open connections, of which an eighth (1 to 64) is kept "
         "from requests; beyond it the oldest one without a request is closed", int, (2, MAX_INT32),
         struct=ConnectionLimits, field="max_connections", default_text="16384, or what ulimit -n has room for"),
    Flag("timeout_keep_alive", _CONNECTIONS, "seconds for which a connection waits for its next request", float,
         SECONDS, struct=ConnectionLimits, field="keep_alive_timeout"),
    Flag("client_header_timeout", _CONNECTIONS, "seconds in which all headers of a request, or a TLS handshake, must "
         "arrive", float, SECONDS, struct=ConnectionLimits, field="header_timeout"),
    Flag("client_body_timeout", _CONNECTIONS, "seconds in which a body must arrive, plus 1 s for each 16 KiB received",
         float, SECONDS, struct=ConnectionLimits, field="body_timeout"),
    Flag("send_timeout", _CONNECTIONS, "seconds after which a client that reads nothing of its answer is given up",
         float, SECONDS, struct=ConnectionLimits),
)

STORE_FLAGS = (
    Flag("store", _STORE, "on: store the responses of /v1/responses unless a request says otherwise; off: store none",
         choices=("on", "off"), default="on", struct=FrontendConfig, to_field=lambda word: word == "on"),
    Flag("state_dir", _STORE, "directory of the store, which survives a restart; all frontends of a service on one "
         "machine share it", Path, metavar="DIR", struct=FrontendConfig, is_forwarded=False,
         default_text="a private directory that is removed at the end"),
    Flag("store_size", _STORE, "maximum size of the store in MiB; the API key that has stored most makes room", int,
         (1, 2**20), default=StoreLimits().max_bytes // MEBIBYTE, struct=StoreLimits, field="max_bytes",
         to_field=lambda size: size * MEBIBYTE),
    Flag("store_size_per_key", _STORE, "maximum size in MiB of what one API key stores; its own conversations make "
         "room", int, (1, 2**20), default_text="no limit but --store-size", struct=StoreLimits, field="max_owner_bytes",
         to_field=lambda size: size and size * MEBIBYTE),
    Flag("store_ttl", _STORE, "seconds that a conversation is stored after its last response", float,
         (1, 1e10), struct=StoreLimits, field="ttl"),
)

ACCESS_FLAGS = (
    Flag("api_keys", ACCESS, "API keys with names, rights and limits, in TOML; followed while the server runs. `tandem "
         "api-key NAME` prints a key and its table", Path, metavar="FILE", is_everyday=True, struct=FrontendConfig,
         field="api_keys_file"),
    Flag("prefix_cache_scope", ACCESS, "who shares cached prefixes: key, requests with the same API key; server, all "
         "requests, so that a user can find out by time or usage whether others sent a prefix. A cache_salt counts "
         "within its key", choices=get_args(PrefixCacheScope), struct=FrontendConfig),
    Flag("no_special_tokens_in_text", ACCESS, "encode special tokens that clients write in messages, tools and prompts "
         "as plain text, and refuse them in prompts of ids; those of the chat template stay", is_everyday=True,
         is_switch=True, struct=FrontendConfig),
    Flag("cors_origin", ACCESS, "web origin whose pages may send requests, * for all; may be given several times",
         metavar="ORIGIN", is_everyday=True, is_repeated=True, default=[], default_text="none", struct=FrontendConfig,
         field="cors_origins", to_field=tuple),
    Flag("allowed_hosts", ACCESS, "names that the Host header of a request may have, separated by commas, *.DOMAIN for "
         "all below one, * for all; may be given several times", metavar="NAMES", is_everyday=True, is_repeated=True,
         default=[], default_text="localhost and loopback addresses if all hosts are such addresses, otherwise *",
         struct=FrontendConfig, to_field=tuple),
    Flag("forwarded_allow_ips", ACCESS, "addresses and networks, separated by commas, of proxies whose X-Forwarded-For "
         "and X-Forwarded-Proto are trusted; unix for the peers of a Unix socket, * for all",
         metavar="ADDRESSES", struct=FrontendConfig, to_field=lambda text: tuple(text.replace(" ", "").split(",")),
         default="127.0.0.1,::1,unix"),
    Flag("root_path", ACCESS, "prefix of the paths in a proxy that passes it on or removes it, such as /tandem",
         _prefix, metavar="PATH", default="", default_text="none", struct=FrontendConfig),
    Flag("tls_cert", ACCESS, "certificate chain in PEM format; enables https", Path, metavar="FILE", is_everyday=True,
         struct=FrontendConfig),
    Flag("tls_key", ACCESS, "unencrypted private key of the certificate in PEM format", Path, metavar="FILE",
         is_everyday=True, struct=FrontendConfig),
)

LOG_FLAGS = (
    Flag("access_log", _TRACES, "on: log a line at the end of each request, but for health checks and scrapes, which "
         "have one at --log-level debug", choices=("on", "off"), default="on", struct=FrontendConfig,
         to_field=lambda word: word == "on"),
    Flag("log_requests", _TRACES, "on: log the prompt and the parameters of each request; off: log no part of a "
         "prompt", choices=("on", "off"), default="off", struct=FrontendConfig, to_field=lambda word: word == "on"),
    Flag("max_log_len", _TRACES, "maximum number of characters of a prompt that --log-requests logs", int, (1, 2**20),
         struct=FrontendConfig),
    Flag("otlp_traces_endpoint", _TRACES, "http or https URL of an OpenTelemetry collector, which gets a trace of "
         "each sampled request over OTLP/HTTP; OTEL_TRACES_SAMPLER chooses among requests without traceparent",
         metavar="URL", struct=FrontendConfig, default_text="none"),
)

WATCH_FLAGS = (
    Flag("beat_timeout", _WATCHDOG, "seconds without a heartbeat after which the engine counts as lost", float, SECONDS,
         struct=FrontendConfig),
    Flag("hang_timeout", _WATCHDOG, "seconds without a heartbeat after which the engine or a frontend is killed and "
         "started again", float, SECONDS, struct=FrontendConfig),
    Flag("step_timeout", _WATCHDOG, "seconds without a completed step, with work pending, after which the engine "
         "counts as hung", float, SECONDS, struct=FrontendConfig),
    Flag("log_level", _LOG, "least severe level of messages to log", choices=get_args(LogLevel), is_everyday=True,
         struct=FrontendConfig),
    Flag("log_format", _LOG, "form of the lines of the log, in all processes: text, or a JSON object a line",
         choices=LOG_FORMATS, struct=FrontendConfig),
)
# fmt: on

FRONTEND_FLAGS = (*HTTP_FLAGS, *LIMIT_FLAGS, *STORE_FLAGS, *ACCESS_FLAGS, *LOG_FLAGS, *WATCH_FLAGS)
"""All flags of an HTTP process except those of its keys and its link to the engine."""
