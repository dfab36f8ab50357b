"""The settings of one HTTP process, and the flags they come from."""

import argparse
import re
import ssl
from pathlib import Path
from typing import Literal, get_args

from msgspec import Struct

from tandem.frontend.api_keys import add_key_arguments, api_keys
from tandem.frontend.request.limits import RequestLimits
from tandem.frontend.request.options import MAX_N, MAX_STOPS, MAX_TOP_LOGPROBS
from tandem.protocol.sockets import Transport
from tandem.protocol.transport_options import transport

DEFAULT_MAX_TOKENS = 1024

CHAT_FLAGS = ("default_max_tokens", "chat_template", "tool_parser", "reasoning_parser")
"""What a supervisor passes on."""

ToolParserName = Literal["auto", "hermes", "llama3_json", "mistral", "json"]
ReasoningParserName = Literal["auto", "think", "none"]


class ChatOptions(Struct, frozen=True):
    """`auto` goes by the model."""

    default_max_tokens: int = DEFAULT_MAX_TOKENS
    """Of a chat that does not say; less where the model has less room."""
    template: Path | None = None
    """A file, instead of the checkpoint's template."""
    tool_parser: ToolParserName = "auto"
    reasoning_parser: ReasoningParserName = "auto"


def add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("chat")
    group.add_argument(
        "--chat-template", type=Path, metavar="FILE", help="jinja template; default: the checkpoint's own, else ours"
    )
    group.add_argument(
        "--default-max-tokens",
        type=int,
        default=DEFAULT_MAX_TOKENS,
        help=f"most tokens of an answer to a chat that does not say (default {DEFAULT_MAX_TOKENS})",
    )
    group.add_argument(
        "--tool-parser",
        choices=get_args(ToolParserName),
        default="auto",
        help="the form in which the model writes calls of tools (default: by its type)",
    )
    group.add_argument(
        "--reasoning-parser",
        choices=get_args(ReasoningParserName),
        default="auto",
        help="whether <think>...</think> may open an answer (default: if the chat template knows </think>)",
    )


def chat_options(arguments: argparse.Namespace) -> ChatOptions:
    return ChatOptions(
        arguments.default_max_tokens, arguments.chat_template, arguments.tool_parser, arguments.reasoning_parser
    )


MEBIBYTE = 2**20
DEFAULT_BODY_MIB = 32
DEFAULT_QUEUED_TOKENS = 2**20

_MOST_SECONDS = 1e7
_BOUNDS: dict[str, tuple[float, float]] = {
    "port": (0, 65535),
    "ops_port": (0, 65535),
    "max_concurrent": (1, 2**31 - 1),
    "default_max_tokens": (1, 2**31 - 1),
    "max_queued_tokens": (1, 2**31 - 1),
    "max_prompt_tokens": (1, 2**31 - 1),
    "max_body": (1, 1024),
    "max_n": (1, MAX_N),
    "max_top_logprobs": (0, MAX_TOP_LOGPROBS),
    "max_stop_strings": (0, MAX_STOPS),
    "beat_timeout": (0.001, _MOST_SECONDS),
    "step_timeout": (0.001, _MOST_SECONDS),
    "drain_timeout": (0, _MOST_SECONDS),
    "concurrency": (1, 4096),
    "retries": (0, 1000),
    "timeout": (0.001, _MOST_SECONDS),
    "watch": (0.1, _MOST_SECONDS),
}


_PASSED_ON = (
    *("max_concurrent", "max_queued_tokens", "max_prompt_tokens", "max_body", "max_n", "max_top_logprobs"),
    *("max_stop_strings", "beat_timeout", "step_timeout", "drain_timeout", "log_level", "tls_cert", "tls_key"),
    *CHAT_FLAGS,
)


class FrontendConfig(Struct, frozen=True):
    """Everything a frontend needs to know. Times in seconds."""

    endpoint: str
    model_dir: Path
    transport: Transport = Transport()
    host: str = "127.0.0.1"
    port: int = 8000
    fd: int | None = None
    """A listening socket to serve on, instead of host and port."""
    max_concurrent: int = 1024
    """Sequences open at once; more are refused with 503."""
    max_queued_tokens: int = DEFAULT_QUEUED_TOKENS
    """Prompt tokens that may wait for their first output; more are refused with 503."""
    max_body: int = DEFAULT_BODY_MIB * MEBIBYTE
    """Bytes."""
    limits: RequestLimits = RequestLimits()
    chat: ChatOptions = ChatOptions()
    api_keys: tuple[str, ...] = ()
    """Without any, nobody needs one."""
    cors_origins: tuple[str, ...] = ()
    tls_cert: Path | None = None
    tls_key: Path | None = None
    beat_timeout: float = 5.0
    step_timeout: float = 60.0
    drain_timeout: float = 10.0
    log_level: str = "info"

    @property
    def load_limits(self) -> tuple[int, int]:
        """What may be open at once: sequences, and prompt tokens that wait."""
        return self.max_concurrent, self.max_queued_tokens


def add_http_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of an HTTP process that a supervisor takes and passes on."""
    group = parser.add_argument_group("http")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    group.add_argument("--port", type=int, default=8000, help="port to listen on, 0 for any (default 8000)")
    group.add_argument(
        "--max-concurrent", type=int, default=1024, help="sequences open at once, more get 503 (default 1024)"
    )
    group.add_argument(
        "--drain-timeout", type=float, default=10.0, help="seconds that open streams get at shutdown (default 10)"
    )
    add_chat_arguments(parser)
    _add_limit_arguments(parser.add_argument_group("limits of requests"))
    security = parser.add_argument_group("who may ask")
    add_key_arguments(security)
    security.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="a web origin whose pages may ask, * for all; may be given several times (default: none)",
    )
    security.add_argument("--tls-cert", type=Path, metavar="FILE", help="certificate chain, PEM; serves https")
    security.add_argument("--tls-key", type=Path, metavar="FILE", help="its private key, PEM, not encrypted")


def _add_limit_arguments(group: argparse._ArgumentGroup) -> None:
    for name, default, text in (
        ("max-body", DEFAULT_BODY_MIB, "MiB of a request's body"),
        ("max-n", MAX_N, "choices of a request"),
        ("max-top-logprobs", MAX_TOP_LOGPROBS, "alternatives reported for each token"),
        ("max-stop-strings", MAX_STOPS, "stop strings of a request"),
        ("max-queued-tokens", DEFAULT_QUEUED_TOKENS, "prompt tokens waiting for their first output, more get 503"),
    ):
        group.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default {default})")
    group.add_argument("--max-prompt-tokens", type=int, help="tokens of a prompt (default: the model's context)")


def add_watch_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of whoever judges the engine by its heartbeat."""
    group = parser.add_argument_group("watching the engine")
    group.add_argument(
        "--beat-timeout", type=float, default=5.0, help="seconds without a heartbeat until it is given up (default 5)"
    )
    group.add_argument(
        "--step-timeout",
        type=float,
        default=60.0,
        help="seconds without a step, with work pending, until it counts as hung (default 60)",
    )
    group.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info", help="default info"
    )


def http_argv(arguments: argparse.Namespace) -> list[str]:
    """The flags, less the address and the keys, that make another HTTP process behave the same."""
    argv: list[str] = []
    for name in _PASSED_ON:
        if (value := getattr(arguments, name)) is not None:
            argv += [_flag(name), str(value)]
    for origin in arguments.cors_origin:
        argv += ["--cors-origin", origin]
    return argv


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def check_bounds(arguments: argparse.Namespace) -> None:
    """Raises ValueError for a number out of range, in whichever of these flags a command has."""
    for name, (low, high) in _BOUNDS.items():
        value = getattr(arguments, name, None)
        # Written so that nan is refused, too.
        if value is not None and not low <= value <= high:
            raise ValueError(f"{_flag(name)} must be between {low:.10g} and {high:.10g}, not {value}")


def check_security(arguments: argparse.Namespace) -> None:
    """Raises ValueError for origins and TLS files that cannot work."""
    for origin in arguments.cors_origin:
        if origin != "*" and re.fullmatch(r"https?://[^/\s]+", origin) is None:
            raise ValueError(f"--cors-origin {origin} is no origin; give * or one like https://example.org")
    cert, key = arguments.tls_cert, arguments.tls_key
    if (cert is None) != (key is None):
        raise ValueError("--tls-cert and --tls-key belong together; give both or none")
    if cert is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=_no_password)
        except (OSError, ValueError) as error:
            raise ValueError(f"--tls-cert {cert} with --tls-key {key} cannot be used: {error}") from None


def _no_password() -> str:
    """Instead of a question on the terminal, which nobody may be sitting at."""
    raise ValueError("the key is encrypted")


def frontend_config(arguments: argparse.Namespace) -> FrontendConfig:
    """Raises ValueError where the flags contradict each other or name keys that are not there."""
    settings = transport(arguments)
    settings.check(arguments.endpoint)
    check_security(arguments)
    return FrontendConfig(
        endpoint=arguments.endpoint,
        model_dir=Path(arguments.model_dir),
        transport=settings,
        host=arguments.host,
        port=arguments.port,
        fd=arguments.fd,
        max_concurrent=arguments.max_concurrent,
        max_queued_tokens=arguments.max_queued_tokens,
        max_body=arguments.max_body * MEBIBYTE,
        limits=RequestLimits(
            arguments.max_n, arguments.max_top_logprobs, arguments.max_stop_strings, arguments.max_prompt_tokens
        ),
        chat=chat_options(arguments),
        api_keys=api_keys(arguments),
        cors_origins=tuple(arguments.cors_origin),
        tls_cert=arguments.tls_cert,
        tls_key=arguments.tls_key,
        beat_timeout=arguments.beat_timeout,
        step_timeout=arguments.step_timeout,
        drain_timeout=arguments.drain_timeout,
        log_level=arguments.log_level,
    )
