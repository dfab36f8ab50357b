"""The flags of an engine core, declared once for its own process and for the supervisor that passes them on."""

import argparse
from collections.abc import Callable, Sequence
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

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
    """The settings of an engine core that users may give; `tandem.engine_core.config` resolves them.

    None leaves a setting to the engine, which chooses it by the device and the model.
    """

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
    "model": "Hugging Face directory with config.json, safetensors and tokenizer.json (default: the model shipped "
    "with Tandem)",
    "served_model_name": "name by which clients select the model (default: the directory's name)",
    "device": "device that runs the model; auto is cuda if available",
    "dtype": "data type of weights and KV; auto is float32 on a CPU and the checkpoint's own on cuda",
    "pipeline": "keep two steps in flight (on) or one (off) (default: on for cuda, off for cpu, where forwards block)",
    "max_rows": "maximum number of sequences decoded at once (default: 256 on cuda, 32 on cpu)",
    "max_len": "maximum number of positions of one sequence, prompt and output (default: what the model allows)",
    "max_step_tokens": "maximum number of positions computed in one step (default: 2048 on cuda, 128 on cpu, or what "
    "--prefill-chunk needs)",
    "prefill_chunk": "maximum number of prompt positions of one sequence in a step in which others decode; off "
    "computes prompts whole (default: 256 or --max-step-tokens, whichever is less; off under --batching static)",
    "max_prefill_chunks_per_step": "maximum number of prompts that one step computes a part of; with --prefill-chunk "
    "it bounds the whole step (default: as many as fit)",
    "policy": "order in which sequences are scheduled in a step; under priority also the order of admission",
    "batching": "continuous admits requests whenever there is room; static runs each batch to its end first",
    "prefix_cache": "share the KV of equal prompt prefixes (default: on, unless --page-size is max or --batching is "
    "static)",
    "session_ttl": "seconds for which an idle session keeps its KV (default: 600)",
    "max_sessions": "maximum number of sessions (default: 256, or 0 without the prefix cache)",
    "page_size": "positions of one KV page, a power of two; max gives each sequence one contiguous region of --max-len "
    "positions, rounded up to a power of two (default: 16)",
    "kv_tokens": "number of positions in the KV pool (default: as many as the memory allows)",
    "kv_memory": "memory of the KV pool, in bytes or like 4GiB or 512MiB, instead of --kv-tokens",
    "gpu_memory": "cuda: share of the device's memory that this engine uses in total, including weights; the KV pool "
    "gets what a full step and the graphs leave of it (default: 0.9)",
    "kv_dtype": "data type of keys and values; auto is the model's, fp8 (e4m3) halves a 16-bit pool at some loss of "
    "accuracy",
    "max_waiting": "maximum number of requests that wait in the engine; further requests get a 503",
    "threads": "number of torch threads on a cpu (default: cores - 1)",
    "load_format": "auto reads the directory's safetensors; dummy generates random weights of the shapes in its "
    "config.json",
    "graph_rows": "cuda: row counts of decode steps that are captured in CUDA graphs, a list like 1,2,4,8, or 'off' "
    "(default: up to 256)",
    "graph_tokens": "cuda: prompt positions of mixed steps that are captured in CUDA graphs, a list like 128,512,2048, "
    "or 'off' (default: up to 8192)",
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
        message = f"{text!r} is not a number of bytes; write one like 1000000, 512MiB or 4GiB"
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


def _choices(hint: Any) -> tuple[str, ...] | None:
    """Return the values of a field that is a Literal, or a Literal or None; None for any other type."""
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    literals = [part for part in parts if part is not type(None)]
    return get_args(literals[0]) if len(literals) == 1 and get_origin(literals[0]) is Literal else None


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all engine flags to a parser."""
    group = parser.add_argument_group("engine core")
    hints = get_type_hints(EngineOptions)
    for info in structs.fields(EngineOptions):
        choices = _choices(hints[info.name])
        group.add_argument(
            flag_name(info.name),
            default=info.default,
            choices=choices,
            type=str if choices or info.name in _TEXT else _PARSERS.get(info.name, int),
            help=_HELP[info.name] + ("" if info.default is None else f" (default: {info.default})"),
        )


def engine_options(arguments: argparse.Namespace) -> EngineOptions:
    """Collect the engine's settings from parsed arguments."""
    return EngineOptions(**{name: getattr(arguments, name) for name in EngineOptions.__struct_fields__})


def engine_argv(options: EngineOptions) -> Sequence[str]:
    """Build the flags from which another process parses equal options."""
    argv: list[str] = []
    for name in EngineOptions.__struct_fields__:
        value = getattr(options, name)
        if value is not None:
            argv.append(f"{flag_name(name)}={value}")
    return argv
