"""`tandem chat`: chat in the terminal, or answer one question from stdin."""

import argparse
import sys
import time
from typing import Any

from tandem.frontend.cli.chat_terminal import LineHistory, history_path, hold_input
from tandem.frontend.cli.connection import Connection, ServerError, connect
from tandem.frontend.cli.ending import INTERRUPTED
from tandem.frontend.cli.flags import api_key, sampling_fields, trust
from tandem.frontend.cli.server_address import shown_url
from tandem.frontend.cli.stdin_prompt import NoPromptError, read_prompt
from tandem.frontend.cli.streamed_answer import StreamedAnswer
from tandem.protocol.errors import ExitCode

HELP = '''\
/system       show the system prompt
/system TEXT  set it for the questions that follow; /system "" removes it
/reset        forget the conversation, but not the system prompt; so does /clear
/help         show this help
/quit         quit, like Ctrl-D
"""           start or end a prompt of several lines
Ctrl-C        stop the answer
Up, Down      recall earlier lines
A line typed while an answer arrives is the next question.'''

BLOCK = '"""'


class ChatSession:
    """Conversation and the fields shared by all its requests."""

    def __init__(self, server: Connection, fields: dict[str, Any], system: str | None, usage: bool) -> None:
        """Initialize without messages. usage: print token counts after each answer."""
        self._server = server
        self._fields = fields
        self._usage = usage
        self.system = system
        self.messages: list[dict[str, str]] = []

    def ask(self, prompt: str) -> int:
        """Stream the answer to stdout and return the exit code for it.

        The code is 130 if an interrupt stopped the answer, and 1 for JSON that was truncated by the token limit. A
        partial answer is kept in the conversation; a prompt without any answer is dropped. Raises ServerError if the
        request fails.
        """
        question = {"role": "user", "content": prompt}
        body = {
            **self._fields,
            "messages": [*self._preamble(), *self.messages, question],
            "stream": True,
            # Requested for every chunk, so that a stopped answer has counts too.
            "stream_options": {"include_usage": True, "continuous_usage_stats": self._usage},
        }
        answer = StreamedAnswer(sys.stdout, time.monotonic)
        is_complete = answer.follow(self._server.stream("/v1/chat/completions", body))
        if answer.content:
            self.messages += [question, {"role": "assistant", "content": answer.content}]
        if self._usage:  # also reports an interrupt
            print(answer.summary(), file=sys.stderr)
        elif not is_complete:
            print("(stopped)", file=sys.stderr)
        return answer.report_cut("response_format" in self._fields) if is_complete else INTERRUPTED

    def _preamble(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": self.system}] if self.system else []


def run_chat(arguments: argparse.Namespace) -> int:
    """Run the command `chat` and return its exit code.

    The code is 0 for success, 1 if the server is unreachable or JSON was truncated, 2 if stdin has no question, and 130
    for an interrupted question.
    """
    is_terminal = sys.stdin is not None and sys.stdin.isatty()
    try:
        question = "" if is_terminal else read_prompt()
        with connect(arguments.url, api_key(arguments), arguments.timeout, trust(arguments)) as server:
            model = arguments.model or server.first_model()
            fields = {"model": model, **sampling_fields(arguments)}
            session = ChatSession(server, fields, arguments.system, arguments.usage)
            if not is_terminal:
                return session.ask(question)
            print(f"{model} on {shown_url(arguments.url)}; /help for help", file=sys.stderr)
            _run_session(session, LineHistory(None if arguments.no_history else history_path()))
    except NoPromptError as error:
        _print_error(error)
        return ExitCode.CONFIG
    except ServerError as error:
        _print_error(error)
        return 1
    return 0


def _run_session(session: ChatSession, history: LineHistory) -> None:
    """Read and answer prompts until the end of the input."""
    history.load()
    while True:
        try:
            prompt = _read_prompt(history)
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /quit leaves)")
            continue
        except EOFError:
            print()
            return
        if prompt.startswith("/"):
            if not _run_command(session, prompt):
                return
        elif prompt:
            try:
                with hold_input(sys.stdin):
                    session.ask(prompt)
            except ServerError as error:
                _print_error(error)


def _read_prompt(history: LineHistory) -> str:
    """Read one line, or the lines between two triple quotes."""
    line = _read_line(">>> ", history).strip()
    if not line.startswith(BLOCK):
        return line
    lines = [line.removeprefix(BLOCK)]
    while not lines[-1].rstrip().endswith(BLOCK):
        lines.append(_read_line("... ", history))
    lines[-1] = lines[-1].rstrip().removesuffix(BLOCK)
    return "\n".join(lines).strip("\n")


def _read_line(prompt: str, history: LineHistory) -> str:
    line = input(prompt)
    if line.strip():
        history.keep()
    return line


def _run_command(session: ChatSession, line: str) -> bool:
    """Run a slash command; return False if it ends the program."""
    command, _, rest = line.partition(" ")
    match command:
        case "/quit" | "/exit":
            return False
        case "/reset" | "/clear":
            print(f"forgot the conversation ({len(session.messages) // 2} questions)")
            session.messages.clear()
        case "/system":
            _set_system(session, rest.strip())
        case "/help":
            print(HELP)
        case _:
            print(f"{command} is not a command; /help lists them", file=sys.stderr)
    return True


def _set_system(session: ChatSession, text: str) -> None:
    """Show, set or remove the system prompt."""
    if text in ('""', "''"):
        session.system = None
        print("removed the system prompt")
    elif text:
        session.system = text
        print("set the system prompt; it applies from the next question on")
    elif session.system:
        print(f"the system prompt is: {session.system}")
    else:
        print("the system prompt is empty; /system TEXT sets one")


def _print_error(error: Exception) -> None:
    print(f"tandem: {error}", file=sys.stderr)
