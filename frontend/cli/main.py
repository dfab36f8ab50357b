"""The console command `tandem`."""

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tandem.frontend.cli.flags import (
    BATCH_FLAGS,
    CLIENT_FLAGS,
    INSPECT_FLAGS,
    INTERRUPTED,
    add_sampling_arguments,
    add_server_arguments,
)
from tandem.frontend.config import (
    FRONTEND_FLAGS,
    Flag,
    add_flags,
    add_http_arguments,
    add_watch_arguments,
    check_bounds,
    frontend_config,
)
from tandem.protocol.engine_options import add_engine_arguments
from tandem.protocol.errors import ExitCode
from tandem.protocol.logs import configure_logging
from tandem.protocol.sockets import make_curve
from tandem.protocol.transport_options import add_transport_arguments
from tandem.protocol.version import distribution_version

# Each command imports its modules itself, so that `tandem --version` and usage errors stay fast.

_INSPECT_DESCRIPTION = (
    "Print the scheduler state of a running server: a summary, the running and waiting sequences, and the sessions. "
    "PROMPT, OUTPUT and COMPUTED count tokens; CACHED counts the prompt tokens whose KV was found in the cache. PAGES "
    "counts a sequence's KV pages; SHARED those of them that are in the prefix cache, where other sequences find them. "
    "AGE is the time since a request arrived, WAIT the time since it last joined the queue. KEPT counts the pages that "
    "a session keeps from earlier turns; IDLE is the time since its last turn."
)
_OPS = "ops port (metrics and health of the engine)"
# fmt: off
OPS_FLAGS = (
    Flag("ops_host", _OPS, "address to listen on", default="127.0.0.1"),
    Flag("ops_port", _OPS, "port to listen on, 0 for any free port", int, (0, 65535),
         default_text="8100, or the next free one"),
)
# fmt: on
_BOUNDED_FLAGS = (*FRONTEND_FLAGS, *OPS_FLAGS, *CLIENT_FLAGS, *BATCH_FLAGS, *INSPECT_FLAGS)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    The code is 2 for usage errors and invalid settings.
    """
    arguments = build_parser().parse_args(argv)
    configure_logging(arguments.command, getattr(arguments, "log_level", "warning"))
    try:
        check_bounds(arguments, _BOUNDED_FLAGS)
    except ValueError as error:
        return _refuse(str(error))
    try:
        return int(arguments.run(arguments))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # The reader of stdout is gone: discard the buffered output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all commands; each sets `run` to its function."""
    parser = argparse.ArgumentParser("tandem", description="Serve large language models.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"tandem {distribution_version()}")
    commands = parser.add_subparsers(title="commands", dest="command", required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="start an engine core and an HTTP process", allow_abbrev=False)
    _add_model_argument(serve)
    # The frontend takes several names, and the engine the first of them.
    add_engine_arguments(serve, without=["served_model_name"])
    add_http_arguments(serve)
    add_watch_arguments(serve)
    add_flags(serve, OPS_FLAGS)
    add_transport_arguments(serve, endpoint_required=False)
    serve.set_defaults(run=run_serve)

    engine = commands.add_parser("engine", help="start an engine core for frontends elsewhere", allow_abbrev=False)
    _add_model_argument(engine)
    add_engine_arguments(engine)
    add_watch_arguments(engine)
    add_flags(engine, OPS_FLAGS)
    add_transport_arguments(engine, endpoint_required=True)
    engine.set_defaults(run=run_engine)

    frontend = commands.add_parser("frontend", help="start an HTTP process for a running engine", allow_abbrev=False)
    frontend.add_argument(
        "--model-dir", "--model", required=True, type=Path, help="directory with the model's tokenizer.json"
    )
    frontend.add_argument("--fd", type=int, help="descriptor of a listening socket, instead of --host and --port")
    add_http_arguments(frontend)
    add_watch_arguments(frontend)
    add_transport_arguments(frontend, endpoint_required=True)
    frontend.set_defaults(run=run_frontend)

    _add_client_commands(commands)

    keys = commands.add_parser("keys", help="create the key pair of an encrypted tcp endpoint", allow_abbrev=False)
    keys.add_argument("directory", type=Path, metavar="DIR", help="directory to write the keys to")
    keys.set_defaults(run=run_keys)
    return parser


def _add_model_argument(command: argparse.ArgumentParser) -> None:
    command.add_argument("positional_model", nargs="?", metavar="MODEL", help="the same as --model MODEL")


def _add_client_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the commands that talk to a running server."""
    chat = commands.add_parser("chat", help="chat with a running server in the terminal", allow_abbrev=False)
    chat.add_argument("--system", metavar="TEXT", help="system prompt of the conversation")
    chat.set_defaults(run=run_chat)

    complete = commands.add_parser("complete", help="complete one prompt on a running server", allow_abbrev=False)
    complete.add_argument("prompt", nargs="?", metavar="PROMPT", help="prompt to complete (default: read from stdin)")
    complete.set_defaults(run=run_complete)

    batch = commands.add_parser("run-batch", help="send a file of requests to a running server", allow_abbrev=False)
    batch.add_argument("input", type=Path, metavar="INPUT", help="requests in OpenAI's batch format, JSONL")
    batch.add_argument("output", type=Path, metavar="OUTPUT", help="results, JSONL; an interrupted run is resumed")
    add_flags(batch, BATCH_FLAGS)
    batch.set_defaults(run=run_batch)

    inspect = commands.add_parser(
        "inspect",
        help="show the scheduler state of a running server",
        description=_INSPECT_DESCRIPTION,
        allow_abbrev=False,
    )
    add_flags(inspect, INSPECT_FLAGS)
    inspect.set_defaults(run=run_inspect)

    for command in (chat, complete, batch, inspect):
        add_server_arguments(command)
    for command in (chat, complete):
        add_sampling_arguments(command)


def _refuse(reason: str) -> int:
    print(f"tandem: {reason}", file=sys.stderr)
    return ExitCode.CONFIG


def run_serve(arguments: argparse.Namespace) -> int:
    return _supervise(arguments, with_frontend=True)


def run_engine(arguments: argparse.Namespace) -> int:
    return _supervise(arguments, with_frontend=False)


def _supervise(arguments: argparse.Namespace, with_frontend: bool) -> int:
    from tandem.frontend.supervisor.launch import LaunchError, check_engine_installed, supervise

    given = arguments.positional_model
    if given is not None:
        if arguments.model not in (None, given):
            return _refuse(f"the model is given twice, as {given} and as --model {arguments.model}; leave one out")
        arguments.model = given
    try:
        check_engine_installed()
        return asyncio.run(supervise(arguments, with_frontend))
    except LaunchError as error:
        return _refuse(str(error))


def run_frontend(arguments: argparse.Namespace) -> int:
    from tandem.frontend.chat.chat_template import ChatTemplateError
    from tandem.frontend.generation.tokenizer import TokenizerError
    from tandem.frontend.server.server import serve
    from tandem.frontend.store.store import StoreError

    try:
        config = frontend_config(arguments)
    except ValueError as error:
        return _refuse(str(error))
    try:
        serve(config)
    except (TokenizerError, ChatTemplateError, StoreError) as error:
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
    print(f"{secret} stays with the engine; give each frontend a directory with only {public}")
    return ExitCode.OK
