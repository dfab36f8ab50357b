"""Preflight check of a model by the engine's code, before its weights are downloaded.

The engine's code runs in a child process, since frontends do not import torch.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec
from msgspec import structs

from tandem.frontend.config import ChatOptions
from tandem.frontend.hub.options import BeforeWeights
from tandem.frontend.process import child_environment
from tandem.frontend.supervisor.model import LaunchError
from tandem.frontend.supervisor.tokenizer import ConversionError, cache_folder, with_tokenizer
from tandem.protocol.engine_options import EngineOptions, engine_argv
from tandem.protocol.preflight import PreflightReport

CHILD_SECONDS = 300.0
"""Maximum seconds for the child process; importing torch from a slow disk takes a while."""

RunPreflight = Callable[[EngineOptions, int | None], PreflightReport]
"""Function from settings, and the size of weights that are not downloaded yet, to the report."""


def run_preflight(options: EngineOptions, weight_bytes: int | None) -> PreflightReport:
    """Run the engine's preflight check in a child process.

    Raises ValueError if the child fails.
    """
    command = [sys.executable, "-P", "-m", "tandem.engine_core.startup.preflight", *engine_argv(options)]
    if weight_bytes is not None:
        command.append(f"--weight-bytes={weight_bytes}")
    try:
        environment = child_environment(os.environ)
        child = subprocess.run(command, capture_output=True, text=True, timeout=CHILD_SECONDS, env=environment)
        return msgspec.json.decode(child.stdout, type=PreflightReport)
    except subprocess.TimeoutExpired:
        raise ValueError(f"the engine's libraries did not load within {CHILD_SECONDS:g} s") from None
    except msgspec.MsgspecError:
        reason = (child.stderr.strip().splitlines() or ["no output"])[-1]
        raise ValueError(f"the engine's libraries cannot be used (exit code {child.returncode}): {reason}") from None


def check_before_weights(
    options: EngineOptions, chat: ChatOptions | None, ask: RunPreflight = run_preflight
) -> BeforeWeights:
    """Return a check of a model's small files, to be called before its weights are downloaded.

    It raises LaunchError for an unsupported architecture, quantization or dtype, for weights that do not fit into
    memory, and for a tokenizer or chat template that cannot be loaded.

    chat: None for an engine without frontends, which needs no chat template.

    """

    def check(folder: Path, weight_bytes: int) -> None:
        try:
            problems = ask(structs.replace(options, model=str(folder)), weight_bytes).problems
        except ValueError as error:
            problems = [str(error)]
        if not problems and (problem := text_problem(folder, chat)):
            problems = [problem]
        if problems:
            raise LaunchError("\n".join([*problems, f"the weights of {options.model} were not downloaded"]))

    return check


def text_problem(folder: Path, chat: ChatOptions | None) -> str:
    """Return why the tokenizer of a folder, or with `chat` its chat template, cannot be loaded; "" if they can.

    A tokenizer in another format is converted, as at a start.
    """
    from tandem.frontend.chat.chat_template import ChatTemplateError, load_chat_template  # slow to import
    from tandem.frontend.generation.tokenizer import TokenizerError, load_tokenizer

    try:
        converted = with_tokenizer(folder, cache_folder())
        with closing(load_tokenizer(converted, threads=1)) as tokenizer:
            if chat is not None:
                load_chat_template(converted, chat.template, tokenizer)
    except (ConversionError, TokenizerError, ChatTemplateError) as error:
        return str(error)
    return ""
