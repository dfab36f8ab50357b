"""The console command `tandem`."""

import argparse
import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

from msgspec import structs

from tandem.frontend.cli.bench.flags import BENCH_ALIASES, BENCH_FLAGS, FOREIGN_BENCH_FLAGS, add_bench_arguments
from tandem.frontend.cli.ending import INTERRUPTED, write_out
from tandem.frontend.cli.flags import (
    API_KEY_FLAGS,
    BATCH_FLAGS,
    CLIENT_FLAGS,
    HUB_FLAGS,
    INSPECT_FLAGS,
    LORA_FLAGS,
    SWAP_FLAGS,
    add_sampling_arguments,
    add_server_arguments,
    hub_options,
)
from tandem.frontend.cli.parsing.command_help import COMMANDS, TANDEM
from tandem.frontend.cli.parsing.foreign_flags import ALIASES, ForeignFlag
from tandem.frontend.cli.parsing.parser import CommandParser
from tandem.frontend.config import ChatOptions, FrontendConfig, frontend_name
from tandem.frontend.flags.arguments import (
    add_child_arguments,
    add_http_arguments,
    add_watch_arguments,
    frontend_config,
)
from tandem.frontend.flags.flag import Flag, add_flags, out_of_bounds
from tandem.frontend.flags.http_flags import FRONTEND_FLAGS
from tandem.frontend.flags.speculative_config import SpeculativeConfig
from tandem.frontend.supervisor.termination import TERMINATED, Terminated, ignored_sighup, raised_sigterm
from tandem.protocol.curve import make_client, make_curve
from tandem.protocol.engine_options import EngineOptions, add_engine_arguments, rare_engine_flags, wrong_numbers
from tandem.protocol.errors import ExitCode
from tandem.protocol.logs import LogLevel, configure_logging, refuse
from tandem.protocol.transport_options import add_transport_arguments
from tandem.protocol.version import distribution_version

# Each command imports its modules itself, so that `tandem --version` and usage errors stay fast.

_OPS = "ops port (metrics and health of the engine)"
# fmt: off
OPS_FLAGS = (
    Flag("ops_host", _OPS, "address to listen on", metavar="HOST", default="127.0.0.1"),
    Flag("ops_port", _OPS, "port to listen on, 0 for any free port", int, (0, 65535), is_everyday=True,
         metavar="PORT", default_text="8100, or the next free one"),
    Flag("metric_aliases", _OPS, "repeat the metrics that vLLM has too under vLLM's names, on both ports",
         choices=("none", "vllm"), default="none"),
)
# fmt: on
_RARE_FLAGS = rare_engine_flags() | {flag.name for flag in (*FRONTEND_FLAGS, *OPS_FLAGS) if not flag.is_everyday}
_COMMAND_FLAGS = (*CLIENT_FLAGS, *BATCH_FLAGS, *BENCH_FLAGS, *INSPECT_FLAGS, *SWAP_FLAGS, *API_KEY_FLAGS)
_BOUNDED_FLAGS = (*FRONTEND_FLAGS, *OPS_FLAGS, *_COMMAND_FLAGS)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    The code is 2 for usage errors and invalid settings.
    """
    try:
        return write_out(partial(_run, argv))
    except KeyboardInterrupt as interrupt:
        return TERMINATED if isinstance(interrupt, Terminated) else INTERRUPTED


def _run(argv: Sequence[str] | None) -> int:
    arguments = build_parser().parse_args(argv)
    arguments.reread = partial(build_parser().parse_args, argv)
    process = arguments.command
    if getattr(arguments, "supervisor_fd", None) is not None:
        process = frontend_name(arguments.slot)
    elif process in ("serve", "engine", "frontend"):
        process = "supervisor"
    is_check = getattr(arguments, "check", False)  # it has printed its messages
    level: LogLevel = "error" if is_check else getattr(arguments, "log_level", "warning")
    configure_logging(process, level, getattr(arguments, "log_format", "text"))
    problems = out_of_bounds(arguments, _BOUNDED_FLAGS)
    try:
        _settle_model(arguments)
    except ValueError as error:
        problems.append(str(error))
    if is_check:
        arguments.run = partial(run_check, problems=problems)
    elif problems:
        for problem in dict.fromkeys([*problems, *_wrong_numbers(arguments)]):
            refuse("tandem", problem)
        return ExitCode.CONFIG
    return int(arguments.run(arguments))


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all commands; each sets `run` to its function."""
    parser = CommandParser("tandem", usage="tandem COMMAND ...", description=TANDEM.description, epilog=TANDEM.epilog)
    parser.add_argument("--version", action="version", version=f"tandem {distribution_version()}")
    commands = parser.add_subparsers(title="commands", dest="command", required=True, metavar="COMMAND", prog="tandem")

    serve = _add_command(
        commands, "serve", run_serve, rare=_RARE_FLAGS | {"endpoint", "curve_keys", "curve_any_client", "insecure_tcp"}
    )
    _add_model_argument(serve)
    _add_config_argument(serve)
    # The frontend accepts several names, and the engine uses the first one; load limits are shared.
    add_engine_arguments(serve, without=["served_model_name", "max_concurrent", "max_queued_tokens"])
    add_flags(serve, (*LORA_FLAGS, *HUB_FLAGS))
    add_http_arguments(serve)
    add_watch_arguments(serve)
    add_flags(serve, OPS_FLAGS)
    add_transport_arguments(serve, endpoint_required=False)
    serve.add_aliases(ALIASES)
    _add_speculative_config(serve)

    engine = _add_command(commands, "engine", run_engine, rare=_RARE_FLAGS)
    _add_model_argument(engine)
    _add_config_argument(engine)
    add_engine_arguments(engine)
    add_flags(engine, (*LORA_FLAGS, *HUB_FLAGS))
    add_watch_arguments(engine)
    add_flags(engine, OPS_FLAGS)
    add_transport_arguments(engine, endpoint_required=True)
    engine.add_aliases(ALIASES)
    _add_speculative_config(engine)

    frontend = _add_command(commands, "frontend", run_frontend, rare=_RARE_FLAGS)
    _add_model_argument(frontend)
    _add_config_argument(frontend)
    frontend.add_argument(
        "--model",
        "--model-dir",
        dest="model_dir",
        metavar="MODEL",
        help="directory with the model's tokenizer.json, or name on the Hugging Face hub (default: the built-in model)",
    )
    add_flags(frontend, HUB_FLAGS)
    add_child_arguments(frontend)
    add_http_arguments(frontend)
    add_watch_arguments(frontend)
    add_flags(frontend, OPS_FLAGS)
    add_transport_arguments(frontend, endpoint_required=True)
    frontend.add_aliases(ALIASES)

    _add_client_commands(commands)

    doctor = _add_command(commands, "doctor", run_doctor, rare=_RARE_FLAGS - {"host", "port"})
    _add_model_argument(doctor)
    add_engine_arguments(doctor)
    add_flags(doctor, HUB_FLAGS)
    add_flags(doctor, [flag for flag in FRONTEND_FLAGS if flag.name in ("host", "port")])
    add_flags(doctor, OPS_FLAGS)
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.add_aliases(ALIASES)

    api_key = _add_command(commands, "api-key", run_api_key)
    api_key.add_argument("name", metavar="NAME", help="name in metrics and logs; two keys may share one while rotating")
    add_flags(api_key, API_KEY_FLAGS)

    keys = _add_command(commands, "keys", run_keys)
    keys.add_argument("directory", type=Path, metavar="DIR", help="folder of the engine's keys")
    keys.add_argument("--client", metavar="NAME", help="make keys of a frontend, which the engine then accepts")
    return parser


def _add_command(
    commands: "argparse._SubParsersAction[CommandParser]",
    name: str,
    run: Callable[[argparse.Namespace], int],
    rare: Collection[str] = (),
    foreign: Mapping[str, ForeignFlag] | None = None,
) -> CommandParser:
    """Add a command with its help.

    rare: names of flags shown only by `--help-all`. foreign: messages for another program's flags.
    """
    text = COMMANDS[name]
    command = commands.add_parser(
        name,
        rare=rare,
        foreign=foreign,
        check=_wrong_numbers,
        help=text.summary,
        usage=f"tandem {name} {text.usage}",
        description=text.description,
        epilog=text.epilog,
    )
    command.set_defaults(run=run)
    return command


def _wrong_numbers(arguments: argparse.Namespace) -> list[str]:
    """Return error messages for numbers out of bounds."""
    own = {flag.name for flag in _BOUNDED_FLAGS if flag.bounds is not None}
    names = set(EngineOptions.__struct_fields__) - own
    engine = {name: value for name, value in vars(arguments).items() if name in names}
    found = [*out_of_bounds(arguments, _BOUNDED_FLAGS), *wrong_numbers(EngineOptions(**engine)).values()]
    return list(dict.fromkeys(found))  # some numbers are in both tables


def _add_model_argument(command: argparse.ArgumentParser) -> None:
    command.add_argument("positional_model", nargs="?", metavar="MODEL", help="the same as --model MODEL")


def _add_speculative_config(command: CommandParser) -> None:
    command.add_argument(
        "--speculative-config", "-sc", action=SpeculativeConfig, default=argparse.SUPPRESS, help=argparse.SUPPRESS
    )


def _add_config_argument(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("configuration")
    group.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="TOML file of flags by their names, such as max-len = 4096; flags of the command line win over it",
    )
    group.add_argument(
        "--check",
        action="store_true",
        help="say whether the command would start, with every problem that shows before weights are read, and exit "
        "with 0 or 2; nothing is started",
    )


def _add_client_commands(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    """Add the commands that connect to a running server."""
    chat = _add_command(commands, "chat", run_chat)
    chat.add_argument("--system", metavar="TEXT", help="system prompt of the conversation")
    chat.add_argument("--no-history", action="store_true", help="do not keep the lines typed for later runs")

    complete = _add_command(commands, "complete", run_complete)
    complete.add_argument("prompt", nargs="?", metavar="PROMPT", help="prompt to complete (default: read from stdin)")

    batch = _add_command(commands, "run-batch", run_batch)
    batch.add_argument("input", type=Path, metavar="INPUT", help="requests in OpenAI's batch format, JSONL")
    batch.add_argument("output", type=Path, metavar="OUTPUT", help="results, JSONL; an interrupted run is resumed")
    add_flags(batch, BATCH_FLAGS)

    inspect = _add_command(commands, "inspect", run_inspect)
    add_flags(inspect, INSPECT_FLAGS)

    bench = _add_command(commands, "bench", run_bench, foreign=FOREIGN_BENCH_FLAGS)

    swap = _add_command(commands, "swap", run_swap)
    swap.add_argument(
        "path",
        metavar="PATH",
        help="folder of the checkpoint, below the server's --swap-root; a relative one starts in this directory",
    )
    add_flags(swap, SWAP_FLAGS)

    for command in (chat, complete, batch, inspect, swap):
        add_server_arguments(command)
    add_server_arguments(bench, aliases=["--base-url"])
    add_flags(bench, BENCH_FLAGS)
    add_bench_arguments(bench)
    bench.add_aliases(BENCH_ALIASES)
    for command in (chat, complete):
        add_sampling_arguments(command)


def _settle_model(arguments: argparse.Namespace) -> None:
    """Store the model given with or without --model in its argument.

    Raises ValueError for two different models.

    """
    positional = getattr(arguments, "positional_model", None)
    name = "model_dir" if arguments.command == "frontend" else "model"
    flag = getattr(arguments, name, None)
    if positional is not None:
        if flag is not None and str(flag) != positional:
            raise ValueError(f"the model is given twice, as {positional} and as --model {flag}; leave one out")
        setattr(arguments, name, positional)


def _refuse(reason: str, is_child: bool = False) -> int:
    refuse("tandem", reason, is_child)
    return ExitCode.CONFIG


@ignored_sighup()
def run_serve(arguments: argparse.Namespace) -> int:
    return _supervise(arguments, with_frontends=True)


@ignored_sighup()
def run_engine(arguments: argparse.Namespace) -> int:
    return _supervise(arguments, with_frontends=False)


def _supervise(arguments: argparse.Namespace, with_frontends: bool) -> int:
    from tandem.frontend.supervisor.adapters import check_modules, find_adapters
    from tandem.frontend.supervisor.launch import (
        check_engine_installed,
        check_swap_root,
        check_template,
        checked_engine_options,
        http_keys,
        supervise,
    )
    from tandem.frontend.supervisor.model import LaunchError, find_draft_model, find_model
    from tandem.frontend.supervisor.preflight import check_before_weights

    try:
        check_engine_installed()
        options = checked_engine_options(arguments)
        if with_frontends:
            # Refuse invalid settings before a model is downloaded.
            http_keys(arguments)
            check_template(arguments.chat_template)
            check_swap_root(arguments.swap_root, options.enable_weight_updates)
        # Downloaded here, where an interrupt takes effect at once; the event loop would wait for it.
        with raised_sigterm():
            chat = ChatOptions(template=arguments.chat_template) if with_frontends else None
            options = find_draft_model(options, hub_options(arguments))
            check = check_before_weights(options, chat)
            model = find_model(arguments.model, hub_options(arguments), before_weights=check)
            root = arguments.lora_root if with_frontends else None
            names = {options.served_model_name or model.served_name}
            names |= set(arguments.served_model_name) if with_frontends else set()
            check_modules(arguments.lora_modules, names, options.enable_lora, root)
            adapters = find_adapters(arguments.lora_modules, hub_options(arguments))
        return asyncio.run(supervise(arguments, options, model, with_frontends, adapters))
    except LaunchError as error:
        return _refuse(str(error))


@ignored_sighup()
def run_frontend(arguments: argparse.Namespace) -> int:
    """Run frontends under a supervisor.

    With sockets inherited from a supervisor, run one frontend in this process.
    """
    from tandem.frontend.supervisor.model import LaunchError, find_model

    try:
        config = frontend_config(arguments)
        if not config.listener_fds:
            from tandem.frontend.supervisor.launch import check_template, supervise_frontends

            check_template(arguments.chat_template)
        with raised_sigterm():
            model = find_model(arguments.model_dir, hub_options(arguments), with_weights=False)
        if not config.listener_fds:
            config.transport.warn(config.endpoint)
            return asyncio.run(supervise_frontends(arguments, model))
    except (ValueError, LaunchError) as error:
        return _refuse(str(error), arguments.supervisor_fd is not None)
    return _serve(structs.replace(config, model_dir=model.folder))


def _serve(config: FrontendConfig) -> int:
    from tandem.frontend.chat.chat_template import ChatTemplateError
    from tandem.frontend.generation.tokenizer import TokenizerError
    from tandem.frontend.server.server import serve
    from tandem.frontend.store.store import StoreError

    try:
        serve(config)
    except (TokenizerError, ChatTemplateError, StoreError) as error:
        return _refuse(str(error), config.supervisor_fd is not None)
    return ExitCode.OK


def run_check(arguments: argparse.Namespace, problems: Sequence[str]) -> int:
    from tandem.frontend.cli.preflight import run_check

    return run_check(arguments, problems)


def run_chat(arguments: argparse.Namespace) -> int:
    from tandem.frontend.cli.chat import run_chat

    return run_chat(arguments)


def run_complete(arguments: argparse.Namespace) -> int:
    from tandem.frontend.cli.complete import run_complete

    return run_complete(arguments)


def run_batch(arguments: argparse.Namespace) -> int:
    from tandem.frontend.cli.batch.run_batch import run_batch

    return run_batch(arguments)


def run_swap(arguments: argparse.Namespace) -> int:
    from tandem.frontend.cli.swap import run_swap

    return run_swap(arguments)


def run_inspect(arguments: argparse.Namespace) -> int:
    from tandem.frontend.cli.inspect import run_inspect

    return run_inspect(arguments)


def run_bench(arguments: argparse.Namespace) -> int:
    from tandem.frontend.cli.bench.command import run_bench

    return run_bench(arguments)


def run_doctor(arguments: argparse.Namespace) -> int:
    from tandem.frontend.cli.doctor import run_doctor

    return run_doctor(arguments)


def run_api_key(arguments: argparse.Namespace) -> int:
    from tandem.frontend.cli.api_key import run_api_key

    try:
        return run_api_key(arguments)
    except ValueError as error:
        return _refuse(str(error))


def run_keys(arguments: argparse.Namespace) -> int:
    directory, name = arguments.directory, arguments.client
    try:
        if name is None:
            _, secret = make_curve(directory)
            print(f"{secret} stays with the engine; `tandem keys {directory} --client NAME` makes keys of a frontend")
        else:
            accepted, folder = make_client(directory, name)
            print(f"move {folder} to the frontend's host, for its --curve-keys; delete {accepted} to end its access")
    except ValueError as error:
        return _refuse(str(error))
    except OSError as error:
        return _refuse(f"cannot write keys to {directory}: {error.strerror}")
    return ExitCode.OK
