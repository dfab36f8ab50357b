"""The console command `tandem`."""

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tandem.frontend.cli.flags import INTERRUPTED, add_sampling_arguments, add_server_arguments
from tandem.frontend.config import add_http_arguments, add_watch_arguments, check_bounds, frontend_config
from tandem.protocol.engine_options import add_engine_arguments
from tandem.protocol.errors import ExitCode
from tandem.protocol.sockets import make_curve
from tandem.protocol.transport_options import add_transport_arguments
from tandem.protocol.version import distribution_version

# Each command imports what it needs, so that `tandem --version` and the refusals below stay quick.

_INSPECTED = (
    "Prints what the scheduler of a running server holds: a summary, the sequences that run and wait, the sessions. "
    "PROMPT, OUTPUT and COMPUTED are tokens; CACHED, tokens of the prompt whose KV was there already. Of its PAGES of "
    "KV, SHARED lie in the prefix cache, where others find them. AGE counts from the arrival of a request, WAIT from "
    "when it last came to the queue. KEPT are the pages that a session has from turns that ended, IDLE the time since "
    "the last."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code. Usage errors and impossible settings are 2."""
    arguments = build_parser().parse_args(argv)
    logging.basicConfig(
        level=getattr(arguments, "log_level", "warning").upper(), format="%(levelname)s %(name)s: %(message)s"
    )
    try:
        check_bounds(arguments)
    except ValueError as error:
        return _refuse(str(error))
    try:
        return int(arguments.run(arguments))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # whoever read the output has enough; what is still buffered has nowhere to go
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("tandem", description="Serves large language models.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"tandem {distribution_version()}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="one engine core and one HTTP process", allow_abbrev=False)
    add_engine_arguments(serve)
    add_http_arguments(serve)
    add_watch_arguments(serve)
    _add_ops_arguments(serve)
    add_transport_arguments(serve, endpoint_required=False)
    serve.set_defaults(run=run_serve)

    engine = commands.add_parser("engine", help="an engine core alone, for frontends elsewhere", allow_abbrev=False)
    add_engine_arguments(engine)
    add_watch_arguments(engine)
    _add_ops_arguments(engine)
    add_transport_arguments(engine, endpoint_required=True)
    engine.set_defaults(run=run_engine)

    frontend = commands.add_parser("frontend", help="one HTTP process for a running engine", allow_abbrev=False)
    frontend.add_argument("--model-dir", required=True, type=Path, help="folder with the model's tokenizer.json")
    frontend.add_argument("--fd", type=int, help="listening socket to serve on, instead of --host and --port")
    add_http_arguments(frontend)
    add_watch_arguments(frontend)
    add_transport_arguments(frontend, endpoint_required=True)
    frontend.set_defaults(run=run_frontend)

    _add_client_commands(commands)

    keys = commands.add_parser("keys", help="make the keys of a tcp endpoint", allow_abbrev=False)
    keys.add_argument("directory", type=Path, metavar="DIR")
    keys.set_defaults(run=run_keys)
    return parser


def _add_client_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """The commands that speak to a running server."""
    chat = commands.add_parser("chat", help="a conversation with a running server", allow_abbrev=False)
    chat.add_argument("--system", metavar="TEXT", help="the system prompt")
    chat.set_defaults(run=run_chat)

    complete = commands.add_parser("complete", help="one completion of a running server", allow_abbrev=False)
    complete.add_argument("prompt", nargs="?", metavar="PROMPT", help="default: what stdin holds")
    complete.set_defaults(run=run_complete)

    batch = commands.add_parser("run-batch", help="a file of requests through a running server", allow_abbrev=False)
    batch.add_argument("input", type=Path, metavar="INPUT", help="OpenAI's batch format, JSONL")
    batch.add_argument("output", type=Path, metavar="OUTPUT", help="results, JSONL; a run that was interrupted goes on")
    batch.add_argument("--concurrency", type=int, default=32, help="requests at a time (default 32)")
    batch.add_argument("--retries", type=int, default=8, help="tries after the first, where the server is busy (8)")
    batch.set_defaults(run=run_batch)

    look = commands.add_parser(
        "inspect", help="what the scheduler of a running server holds", description=_INSPECTED, allow_abbrev=False
    )
    look.add_argument("--watch", type=float, metavar="SECONDS", help="shows it again and again, until Ctrl-C")
    look.set_defaults(run=run_inspect)

    for command in (chat, complete, batch, look):
        add_server_arguments(command)
    for command in (chat, complete):
        add_sampling_arguments(command)


def _add_ops_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("ops port (metrics and health of the engine)")
    group.add_argument("--ops-host", default="127.0.0.1", help="default 127.0.0.1")
    group.add_argument("--ops-port", type=int, default=8100, help="0 for any (default 8100)")


def _refuse(reason: str) -> int:
    print(f"tandem: {reason}", file=sys.stderr)
    return ExitCode.CONFIG


def run_serve(arguments: argparse.Namespace) -> int:
    return _supervise(arguments, with_frontend=True)


def run_engine(arguments: argparse.Namespace) -> int:
    return _supervise(arguments, with_frontend=False)


def _supervise(arguments: argparse.Namespace, with_frontend: bool) -> int:
    from tandem.frontend.supervisor.launch import LaunchError, check_engine_installed, supervise

    try:
        check_engine_installed()
        return asyncio.run(supervise(arguments, with_frontend))
    except LaunchError as error:
        return _refuse(str(error))


def run_frontend(arguments: argparse.Namespace) -> int:
    from tandem.frontend.chat.chat_template import ChatTemplateError
    from tandem.frontend.generation.tokenizer import TokenizerError
    from tandem.frontend.server.server import serve

    try:
        config = frontend_config(arguments)
    except ValueError as error:
        return _refuse(str(error))
    try:
        serve(config)
    except (TokenizerError, ChatTemplateError) as error:
        return _refuse(str(error))
    except OSError as error:
        return _refuse(f"cannot listen on {arguments.host}:{arguments.port}: {error.strerror or error}")
    return ExitCode.OK


def run_chat(arguments: argparse.Namespace) -> int:
    from tandem.frontend.cli.chat import run_chat

    return run_chat(arguments)


def run_complete(arguments: argparse.Namespace) -> int:
    from tandem.frontend.cli.complete import run_complete

    return run_complete(arguments)


def run_batch(arguments: argparse.Namespace) -> int:
    from tandem.frontend.cli.batch import run_batch

    return run_batch(arguments)


def run_inspect(arguments: argparse.Namespace) -> int:
    from tandem.frontend.cli.inspect import run_inspect

    return run_inspect(arguments)


def run_keys(arguments: argparse.Namespace) -> int:
    try:
        public, secret = make_curve(arguments.directory)
    except OSError as error:
        return _refuse(f"cannot write keys to {arguments.directory}: {error.strerror}")
    print(f"{secret} stays with the engine; give each frontend a folder with {public} alone")
    return ExitCode.OK
