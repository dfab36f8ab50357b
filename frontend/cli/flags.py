"""The flags of the commands that speak to a running server, and the request fields they become."""

import argparse
import json
import os
from pathlib import Path
from typing import Any

DEFAULT_URL = "http://127.0.0.1:8000"
KEY_VARIABLE = "TANDEM_API_KEY"
INTERRUPTED = 130
"""Exit code of a command that an interrupt ended."""

_SAMPLING: dict[str, tuple[type, str]] = {
    "max_tokens": (int, "tokens of an answer at most"),
    "temperature": (float, "0 is greedy"),
    "top_p": (float, "the likeliest tokens up to this share"),
    "top_k": (int, "so many of the likeliest tokens"),
    "min_p": (float, "tokens at least so likely, relative to the likeliest"),
    "repetition_penalty": (float, "1 changes nothing"),
    "presence_penalty": (float, "0 changes nothing"),
    "frequency_penalty": (float, "0 changes nothing"),
    "seed": (int, "same seed, same answer"),
}


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Which server, and how it is spoken to."""
    group = parser.add_argument_group("server")
    group.add_argument("--url", default=DEFAULT_URL, type=server_url, help=f"default {DEFAULT_URL}")
    group.add_argument("--api-key", help=f"default: ${KEY_VARIABLE}, which no process list shows")
    group.add_argument(
        "--timeout", type=float, default=600.0, help="seconds without a byte until an answer is given up (600)"
    )


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """How an answer is made; what is not given is left to the server."""
    group = parser.add_argument_group("answer")
    group.add_argument("--model", help="default: the server's first")
    for name, (kind, text) in _SAMPLING.items():
        group.add_argument("--" + name.replace("_", "-"), type=kind, help=text)
    group.add_argument("--stop", action="append", metavar="TEXT", help="ends the answer; may be given several times")
    group.add_argument("--json-schema", type=_schema, metavar="FILE", help="the answer is JSON of this schema")
    group.add_argument("--usage", action="store_true", help="tokens, time to the first and tokens/s, on stderr")


def sampling_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields of a request that were given as flags."""
    fields = {name: getattr(arguments, name) for name in (*_SAMPLING, "stop") if getattr(arguments, name) is not None}
    if arguments.json_schema is not None:
        form = {"name": "answer", "strict": True, "schema": arguments.json_schema}
        fields["response_format"] = {"type": "json_schema", "json_schema": form}
    return fields


def api_key(arguments: argparse.Namespace) -> str | None:
    """The key to send: the one given, or the first of those that the environment would give to a server."""
    keys = os.environ.get(KEY_VARIABLE, "").replace(",", " ").split()
    return arguments.api_key or (keys[0] if keys else None)


def server_url(text: str) -> str:
    """The root of a server; one with OpenAI's `/v1` at its end is taken, too."""
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text!r} begins with neither http:// nor https://")
    return text.rstrip("/").removesuffix("/v1")


def _schema(path: str) -> Any:
    try:
        return json.loads(Path(path).read_bytes())
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{path} is no JSON: {error}") from None
