"""`tandem chat`: chat in the terminal, or answer one question from a pipe."""

import argparse
import contextlib
import sys
import time
from typing import Any

from tandem.frontend.cli.connection import Connection, ServerError, connect
from tandem.frontend.cli.flags import INTERRUPTED, api_key, sampling_fields
from tandem.frontend.cli.streamed_answer import StreamedAnswer

HELP = '''\
/system TEXT  set the system prompt; without TEXT, remove it
/reset        forget the conversation
/help         show this help
/quit         quit, like Ctrl-D
"""           start or end a prompt of several lines
Ctrl-C        stop the answer'''

BLOCK = '"""'


class ChatSession:
    """The conversation so far, and the fields that all its requests share."""

    def __init__(self, server: Connection, fields: dict[str, Any], system: str | None, usage: bool) -> None:
        self._server = server
        self._fields = fields
        self._usage = usage
        self.system = system
        self.messages: list[dict[str, str]] = []

    def ask(self, prompt: str) -> bool:
        """Stream the answer to stdout; return False if an interrupt stopped it.

        An interrupted answer is kept in the conversation as far as it came; a prompt without any answer is dropped.
        Raises ServerError if the request fails.
        """
        question = {"role": "user", "content": prompt}
        body = {
            **self._fields,
            "messages": [*self._preamble(), *self.messages, question],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answer = StreamedAnswer(sys.stdout, time.monotonic)
        is_complete = answer.follow(self._server.stream("/v1/chat/completions", body))
        if answer.content:
            self.messages += [question, {"role": "assistant", "content": answer.content}]
        if self._usage:
            print(answer.summary(), file=sys.stderr)
        return is_complete

    def _preamble(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": self.system}] if self.system else []


def run_chat(arguments: argparse.Namespace) -> int:
    """Run the command `chat` and return its exit code.

    The code is 0 for success, 1 if the server could not be reached, and 130 for an interrupted question.
    """
    try:
        with connect(arguments.url, api_key(arguments), arguments.timeout) as server:
            model = arguments.model or server.first_model()
            fields = {"model": model, **sampling_fields(arguments)}
            session = ChatSession(server, fields, arguments.system, arguments.usage)
            if sys.stdin.isatty():
                print(f"{model} on {arguments.url}; /help for help", file=sys.stderr)
                _run_session(session)
            elif not session.ask(sys.stdin.read()):
                return INTERRUPTED
    except ServerError as error:
        _print_error(error)
        return 1
    return 0


def _run_session(session: ChatSession) -> None:
    """Read and answer prompts until the end of the input."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives `input` line editing and a history
    while True:
        try:
            prompt = _read_prompt()
        except KeyboardInterrupt:
            print()
            continue
        except EOFError:
            print()
            return
        if prompt.startswith("/"):
            if not _run_command(session, prompt):
                return
        elif prompt:
            try:
                session.ask(prompt)
            except ServerError as error:
                _print_error(error)


def _read_prompt() -> str:
    """Read one line, or the lines between two triple quotes."""
    line = input(">>> ").strip()
    if not line.startswith(BLOCK):
        return line
    lines = [line.removeprefix(BLOCK)]
    while not lines[-1].rstrip().endswith(BLOCK):
        lines.append(input("... "))
    lines[-1] = lines[-1].rstrip().removesuffix(BLOCK)
    return "\n".join(lines).strip("\n")


def _run_command(session: ChatSession, line: str) -> bool:
    """Run a slash command; return False if it ends the program."""
    command, _, rest = line.partition(" ")
    match command:
        case "/quit" | "/exit":
            return False
        case "/reset":
            session.messages.clear()
        case "/system":
            session.system = rest.strip() or None
        case "/help":
            print(HELP)
        case _:
            print(f"{command} is not a command; /help lists them", file=sys.stderr)
    return True


def _print_error(error: ServerError) -> None:
    print(f"tandem: {error}", file=sys.stderr)
