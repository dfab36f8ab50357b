"""The flags of an engine core: declared once, read by its own process and passed on by the supervisor.

`None` means "decided by the engine from the device and the model".
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Literal, get_args

from msgspec import Struct, structs

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "bfloat16", "float16", "float32"]
Switch = Literal["on", "off"]
LoadFormat = Literal["auto", "dummy"]
KVDtype = Literal["auto", "fp8"]
PageSize = int | Literal["max"]
PrefillChunk = int | Literal["off"]
Policy = Literal["fcfs", "prefill_first", "decode_first", "decode_round_robin", "priority"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
Batching = Literal["continuous", "static"]


class EngineOptions(Struct, frozen=True):
    """What a person may set of an engine core; `tandem.engine_core.config` resolves it into an `EngineConfig`."""

    model: str | None = None
    served_model_name: str | None = None
    device: Device = "auto"
    dtype: Dtype = "auto"
    pipeline: Switch | None = None
    max_rows: int | None = None
    max_len: int | None = None
    max_step_tokens: int | None = None
    prefill_chunk: PrefillChunk | None = None
    max_prefill_chunks_per_step: int | None = None
    policy: Policy = "fcfs"
    batching: Batching = "continuous"
    prefix_cache: Switch | None = None
    session_ttl: float | None = None
    max_sessions: int | None = None
    page_size: PageSize | None = None
    kv_tokens: int | None = None
    kv_memory: int | None = None
    gpu_memory: float | None = None
    kv_dtype: KVDtype = "auto"
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
    "max_step_tokens": "positions computed in one step; default: 2048 on cuda, 128 on cpu, or as --prefill-chunk needs",
    "prefill_chunk": "most prompt positions of one sequence in a step in which others decode; off: prompts are "
    "computed whole; default: 256 or --max-step-tokens, whichever is less, or off under --batching static",
    "max_prefill_chunks_per_step": "prompts that one step takes part of; with --prefill-chunk it bounds the whole "
    "step; default: as many as fit",
    "policy": "who is served first in a step; under priority also who is admitted first",
    "batching": "continuous admits whenever there is room; static runs each batch to its end first",
    "prefix_cache": "share the KV of equal prompt beginnings; default: on, unless --page-size is max or --batching is "
    "static",
    "session_ttl": "seconds for which an idle session keeps its KV; default: 600",
    "max_sessions": "sessions at a time; default: 256, or 0 without the prefix cache",
    "page_size": "positions of one KV page, a power of two; max: one contiguous region a sequence, of --max-len or the "
    "next power of two; default: 16",
    "kv_tokens": "positions in the KV pool; default: from the memory",
    "kv_memory": "memory of the KV pool instead, in bytes or like 4GiB or 512MiB",
    "gpu_memory": "cuda: share of the device's memory for this engine in all, weights included; the KV pool gets what "
    "a full step and the graphs leave of it; default: 0.9",
    "kv_dtype": "of keys and values; auto is the model's, fp8 (e4m3) halves a 16-bit pool at the cost of some accuracy",
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
    "kv_dtype": ("auto", "fp8"),
    "policy": POLICIES,
    "batching": ("continuous", "static"),
    "prefix_cache": ("on", "off"),
}
_TEXT = {"model", "served_model_name", "graph_rows", "graph_tokens"}
_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def _page_size(text: str) -> PageSize:
    return "max" if text == "max" else _integer(text, "a power of two, or max")


def _prefill_chunk(text: str) -> PrefillChunk:
    return "off" if text == "off" else _integer(text, "a number of positions, or off")


def _integer(text: str, allowed: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not {allowed}") from None


def _byte_count(text: str) -> int:
    unit = next((unit for unit in _UNITS if text.endswith(unit)), "")
    try:
        return round(float(text.removesuffix(unit)) * _UNITS[unit]) if unit else int(text)
    except (ValueError, OverflowError):
        message = f"{text!r} is no number of bytes; write one like 1000000, 512MiB or 4GiB"
        raise argparse.ArgumentTypeError(message) from None


_PARSERS: dict[str, Callable[[str], int | float | str]] = {
    "page_size": _page_size,
    "prefill_chunk": _prefill_chunk,
    "session_ttl": float,
    "kv_memory": _byte_count,
    "gpu_memory": float,
}


def flag_name(name: str) -> str:
    """Spell the flag of an attribute: two dashes, and dashes for underscores."""
    return "--" + name.replace("_", "-")


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares every engine flag on a parser."""
    group = parser.add_argument_group("engine core")
    for info in structs.fields(EngineOptions):
        choices = _CHOICES.get(info.name)
        group.add_argument(
            flag_name(info.name),
            default=info.default,
            choices=choices,
            type=str if choices or info.name in _TEXT else _PARSERS.get(info.name, int),
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
            argv.append(f"{flag_name(name)}={value}")
    return argv
