"""`tandem complete`: one prompt, one answer."""

import argparse
import sys
import time

from tandem.frontend.cli.answer import Answer
from tandem.frontend.cli.connection import ServerError, connect
from tandem.frontend.cli.flags import INTERRUPTED, api_key, sampling_fields


def run_complete(arguments: argparse.Namespace) -> int:
    """Streams the continuation of a prompt to stdout. Returns the exit code: 0, 1 for an error of the server, 130."""
    prompt = arguments.prompt if arguments.prompt is not None else sys.stdin.read()
    answer = Answer(sys.stdout, time.monotonic)
    try:
        with connect(arguments.url, api_key(arguments), arguments.timeout) as server:
            body = {
                "model": arguments.model or server.first_model(),
                "prompt": prompt,
                **sampling_fields(arguments),
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            whole = answer.follow(server.stream("/v1/completions", body))
    except ServerError as error:
        print(f"tandem: {error}", file=sys.stderr)
        return 1
    if arguments.usage:
        print(answer.summary(), file=sys.stderr)
    return 0 if whole else INTERRUPTED
