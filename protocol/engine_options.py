"""The flags of an engine core: declared once, read by its own process and passed on by the supervisor.

`None` means "decided by the engine from the device and the model".
"""

import argparse
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct, structs

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "bfloat16", "float16", "float32"]
Switch = Literal["on", "off"]
LoadFormat = Literal["auto", "dummy"]


class EngineOptions(Struct, frozen=True):
    """What a person may set of an engine core; `engine_core.config` resolves it into an `EngineConfig`."""

    model: str | None = None
    served_model_name: str | None = None
    device: Device = "auto"
    dtype: Dtype = "auto"
    pipeline: Switch | None = None
    max_rows: int | None = None
    max_len: int | None = None
    max_step_tokens: int | None = None
    prefill_chunk: int | None = None
    page_size: int = 16
    kv_tokens: int | None = None
    max_waiting: int = 1024
    threads: int | None = None
    load_format: LoadFormat = "auto"
    graph_rows: str | None = None
    graph_tokens: str | None = None


_HELP: dict[str, str] = {
    "model": "Hugging Face folder (config.json, safetensors, tokenizer.json); default: the model shipped inside",
    "served_model_name": "name that clients use; default: the folder's name",
    "device": "where the model runs; auto takes cuda if there is one",
    "dtype": "of weights and KV; auto is float32 on a CPU and the checkpoint's own on cuda",
    "pipeline": "two steps in flight (on) or one (off); default: on for cuda, off for cpu, where a forward blocks",
    "max_rows": "sequences decoded at once; default: 256 on cuda, 32 on cpu",
    "max_len": "positions of one sequence, prompt and output; default: what the model allows",
    "max_step_tokens": "positions computed in one step; default: 2048 on cuda, 128 on cpu",
    "prefill_chunk": "most prompt positions of one sequence in one step; default: --max-step-tokens",
    "page_size": "positions of one KV page, a power of two",
    "kv_tokens": "positions in the KV pool; default: from the free memory",
    "max_waiting": "requests that may queue in the engine before it refuses with 503",
    "threads": "torch threads on a cpu; default: cores - 1",
    "load_format": "auto reads the folder's safetensors; dummy takes random weights of the shape of its config.json",
    "graph_rows": "cuda: decode steps of up to so many rows are replayed from CUDA graphs, a list like 1,2,4,8; "
    "'off' for none; default: up to 256",
    "graph_tokens": "cuda: so do steps with up to so many positions of prompts, a list like 128,512,2048; 'off' for "
    "none; default: up to 8192",
}
_CHOICES: dict[str, tuple[str, ...]] = {
    "device": ("auto", "cpu", "cuda"),
    "dtype": ("auto", "bfloat16", "float16", "float32"),
    "pipeline": ("on", "off"),
    "load_format": ("auto", "dummy"),
}
_TEXT = {"model", "served_model_name", "graph_rows", "graph_tokens"}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares every engine flag on a parser."""
    group = parser.add_argument_group("engine core")
    for info in structs.fields(EngineOptions):
        choices = _CHOICES.get(info.name)
        group.add_argument(
            _flag(info.name),
            default=info.default,
            choices=choices,
            type=str if choices or info.name in _TEXT else int,
            help=_HELP[info.name] + ("" if info.default is None else f" (default {info.default})"),
        )


def engine_options(arguments: argparse.Namespace) -> EngineOptions:
    """The engine's part of parsed arguments."""
    return EngineOptions(**{name: getattr(arguments, name) for name in EngineOptions.__struct_fields__})


def engine_argv(options: EngineOptions) -> Sequence[str]:
    """The flags that make another process parse equal options."""
    argv: list[str] = []
    for name in EngineOptions.__struct_fields__:
        value = getattr(options, name)
        if value is not None:
            argv.append(f"{_flag(name)}={value}")
    return argv
