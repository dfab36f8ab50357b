"""`tandem chat`: a conversation in the terminal, or one question from a pipe."""

import argparse
import contextlib
import sys
import time
from typing import Any

from tandem.frontend.cli.answer import Answer
from tandem.frontend.cli.connection import Connection, ServerError, connect
from tandem.frontend.cli.flags import INTERRUPTED, api_key, sampling_fields

HELP = '''\
/system TEXT  sets the system prompt, without TEXT removes it
/reset        forgets the conversation
/help         shows this
/quit         ends, as Ctrl-D does
"""           begins and ends a prompt of several lines
Ctrl-C        stops the answer'''

BLOCK = '"""'


class Conversation:
    """The messages so far and the fields that every request shares."""

    def __init__(self, server: Connection, fields: dict[str, Any], system: str | None, usage: bool) -> None:
        self._server = server
        self._fields = fields
        self._usage = usage
        self.system = system
        self.messages: list[dict[str, str]] = []

    def ask(self, prompt: str) -> bool:
        """Streams the answer to stdout; False if an interrupt stopped it.

        What was answered until then is remembered; a prompt without any answer is not. Raises ServerError.
        """
        question = {"role": "user", "content": prompt}
        body = {
            **self._fields,
            "messages": [*self._preamble(), *self.messages, question],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answer = Answer(sys.stdout, time.monotonic)
        whole = answer.follow(self._server.stream("/v1/chat/completions", body))
        if answer.content:
            self.messages += [question, {"role": "assistant", "content": answer.content}]
        if self._usage:
            print(answer.summary(), file=sys.stderr)
        return whole

    def _preamble(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": self.system}] if self.system else []


def run_chat(arguments: argparse.Namespace) -> int:
    """Returns the exit code: 0, 1 where the server could not be asked, 130 for a question that was interrupted."""
    try:
        with connect(arguments.url, api_key(arguments), arguments.timeout) as server:
            model = arguments.model or server.first_model()
            fields = {"model": model, **sampling_fields(arguments)}
            conversation = Conversation(server, fields, arguments.system, arguments.usage)
            if sys.stdin.isatty():
                print(f"{model} on {arguments.url}; /help for help", file=sys.stderr)
                _converse(conversation)
            elif not conversation.ask(sys.stdin.read()):
                return INTERRUPTED
    except ServerError as error:
        _say(error)
        return 1
    return 0


def _converse(conversation: Conversation) -> None:
    """Asks until the end of the input."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives `input` its editing and its history
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
            if not _obey(conversation, prompt):
                return
        elif prompt:
            try:
                conversation.ask(prompt)
            except ServerError as error:
                _say(error)


def _read_prompt() -> str:
    """One line, or the lines between two triple quotes."""
    line = input(">>> ").strip()
    if not line.startswith(BLOCK):
        return line
    lines = [line.removeprefix(BLOCK)]
    while not lines[-1].rstrip().endswith(BLOCK):
        lines.append(input("... "))
    lines[-1] = lines[-1].rstrip().removesuffix(BLOCK)
    return "\n".join(lines).strip("\n")


def _obey(conversation: Conversation, line: str) -> bool:
    """Runs a command; False for the one that ends the program."""
    command, _, rest = line.partition(" ")
    match command:
        case "/quit" | "/exit":
            return False
        case "/reset":
            conversation.messages.clear()
        case "/system":
            conversation.system = rest.strip() or None
        case "/help":
            print(HELP)
        case _:
            print(f"{command} is no command; /help lists them", file=sys.stderr)
    return True


def _say(error: ServerError) -> None:
    print(f"tandem: {error}", file=sys.stderr)
