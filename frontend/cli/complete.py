"""`tandem complete`: complete one prompt."""

import argparse
import sys
import time
from typing import Any

from tandem.frontend.cli.connection import Connection, ServerError, connect
from tandem.frontend.cli.ending import INTERRUPTED
from tandem.frontend.cli.flags import api_key, sampling_fields, trust
from tandem.frontend.cli.stdin_prompt import NoPromptError, read_prompt
from tandem.frontend.cli.streamed_answer import StreamedAnswer
from tandem.protocol.errors import ErrorCode, ExitCode

DEFAULT_MAX_TOKENS = 1024
"""Default of `--max-tokens`; OpenAI's default of 16 ends within a sentence."""
_UNLIMITED = -1
_NO_ROOM = (ErrorCode.CONTEXT_LENGTH.value, ErrorCode.KV_CAPACITY.value)


def run_complete(arguments: argparse.Namespace) -> int:
    """Stream the continuation of a prompt to stdout and return the exit code.

    The code is 0 for success, 1 for a server error and for truncated JSON, 2 if stdin has no prompt, and 130 for an
    interrupt.
    """
    try:
        prompt = arguments.prompt if arguments.prompt is not None else _read_prompt()
    except NoPromptError as error:
        print(f"tandem: {error}", file=sys.stderr)
        return ExitCode.CONFIG
    answer = StreamedAnswer(sys.stdout, time.monotonic)
    try:
        with connect(arguments.url, api_key(arguments), arguments.timeout, trust(arguments)) as server:
            body = {
                "model": arguments.model or server.first_model(),
                "prompt": prompt,
                "max_tokens": DEFAULT_MAX_TOKENS,
                **sampling_fields(arguments),
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": arguments.usage},
            }
            is_complete = _follow(server, body, answer, arguments.max_tokens is None)
    except ServerError as error:
        print(f"tandem: {error}", file=sys.stderr)
        return 1
    if arguments.usage:
        print(answer.summary(), file=sys.stderr)
    if not is_complete:
        return INTERRUPTED
    return answer.report_cut(arguments.json_schema is not None)


def _read_prompt() -> str:
    """Read the prompt from stdin; on a terminal, print a hint."""
    if sys.stdin is not None and sys.stdin.isatty():
        print("type a prompt, then Ctrl-D on a line of its own", file=sys.stderr)
    return read_prompt()


def _follow(server: Connection, body: dict[str, Any], answer: StreamedAnswer, by_default: bool) -> bool:
    """Print the answer; return False if an interrupt stopped it.

    A prompt that leaves less context than the default limit gets all that is left.
    """
    try:
        return answer.follow(server.stream("/v1/completions", body))
    except ServerError as error:
        if not by_default or error.code not in _NO_ROOM:
            raise
    return answer.follow(server.stream("/v1/completions", {**body, "max_tokens": _UNLIMITED}))
