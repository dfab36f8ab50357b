"""Flags of the HTTP service, its chats and its shutdown."""

import argparse
import re
from pathlib import Path
from typing import get_args

from tandem.frontend.config import (
    FIRST_STREAM_WAIT,
    MAX_FRONTENDS,
    ChatOptions,
    FrontendConfig,
    GenerationConfigSource,
    ReasoningParserName,
    ToolParserName,
)
from tandem.frontend.flags.flag import COUNT, MAX_SECONDS, Flag
from tandem.protocol.engine_options import parse_count

_HTTP, _CHAT = "http", "chat"


def _served_name(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("a name of the model must have at least one character that is not blank")
    return text


def _permissions(text: str) -> int:
    if re.fullmatch(r"(0o?)?[0-7]{3}", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} must be permissions in octal, such as 660")
    return int(text.removeprefix("0o"), 8)


# fmt: off
HTTP_FLAGS = (
    Flag("host", _HTTP, "address or name to listen on, :: for all of IPv6 and IPv4; may be given several times",
         metavar="HOST", is_everyday=True, is_repeated=True, default=[], default_text="127.0.0.1", is_forwarded=False),
    Flag("port", _HTTP, "port to listen on, 0 for any free port", int, (0, 65535), metavar="PORT", default_text="8000",
         is_everyday=True, is_forwarded=False),
    Flag("uds", _HTTP, "path of a Unix socket to listen on, without TLS; in place of the default host and port, or "
         "beside those that are given", Path, metavar="PATH", is_forwarded=False, default_text="none"),
    Flag("uds_mode", _HTTP, "permissions of the Unix socket, in octal", _permissions, metavar="MODE", default=0o600,
         default_text="600: only the user of the server may connect", is_forwarded=False),
    Flag("served_model_name", _HTTP, "names by which requests select the model; the name * stands for any, quoted in a "
         "shell", _served_name, metavar="NAME", is_list=True, is_everyday=True, default=[],
         default_text="the one that the engine reports, its directory's",
         struct=FrontendConfig, field="served_names", to_field=tuple),
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
    Flag("generation_config", _HTTP, "auto takes the sampling defaults (temperature, top_p, top_k, min_p, penalties) "
         "of the checkpoint's generation_config.json; off takes neutral ones",
         choices=get_args(GenerationConfigSource), struct=FrontendConfig),
    Flag("tool_parser", _CHAT, "format in which the model writes tool calls; auto takes that of the chat template, or "
         "else that of the model's type",
         choices=get_args(ToolParserName), is_everyday=True, struct=ChatOptions),
    Flag("reasoning_parser", _CHAT, "parsing of reasoning at the start of an answer: in <think>...</think>, or with "
         "mistral in [THINK]...[/THINK]; auto parses the tags that the chat template writes",
         choices=get_args(ReasoningParserName), is_everyday=True, struct=ChatOptions),
)
# fmt: on
