"""`tandem complete`: complete one prompt."""

import argparse
import sys
import time

from tandem.frontend.cli.connection import ServerError, connect
from tandem.frontend.cli.flags import INTERRUPTED, api_key, sampling_fields
from tandem.frontend.cli.streamed_answer import StreamedAnswer


def run_complete(arguments: argparse.Namespace) -> int:
    """Stream the continuation of a prompt to stdout and return the exit code.

    The code is 0 for success, 1 for a server error, and 130 for an interrupt.
    """
    prompt = arguments.prompt if arguments.prompt is not None else sys.stdin.read()
    answer = StreamedAnswer(sys.stdout, time.monotonic)
    try:
        with connect(arguments.url, api_key(arguments), arguments.timeout) as server:
            body = {
                "model": arguments.model or server.first_model(),
                "prompt": prompt,
                **sampling_fields(arguments),
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            is_complete = answer.follow(server.stream("/v1/completions", body))
    except ServerError as error:
        print(f"tandem: {error}", file=sys.stderr)
        return 1
    if arguments.usage:
        print(answer.summary(), file=sys.stderr)
    return 0 if is_complete else INTERRUPTED
