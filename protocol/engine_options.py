"""Flags of an engine core, declared as attributes of `EngineOptions`.

Each is declared once, by its annotation. The parser, its help, the defaults and the arguments that a supervisor passes
on follow from the declaration.
"""

import argparse
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from decimal import Decimal
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from msgspec import Struct, structs

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "bfloat16", "float16", "float32"]
Switch = Literal["on", "off"]
LoadFormat = Literal["auto", "dummy"]
KVDtype = Literal["auto", "fp8", "fp8_e4m3"]
Quantize = Literal["off", "fp8"]
PageSize = int | Literal["max"]
PrefillChunk = int | Literal["off"]
Policy = Literal["fcfs", "prefill_first", "decode_first", "decode_round_robin", "priority"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
Batching = Literal["continuous", "static"]
DRAFT_MODEL = "model:"
"""Prefix of the model in --speculate."""
SpeculateTokens = int | Literal["auto"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
Parse = Callable[[str], Any]

ANY_NAME = "*"
"""Model name that matches every name."""

MAX_INT32 = 2**31 - 1
_SUFFIXES = {
    "": 1,
    **{"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12},
    **{"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40},
}
"""Suffixes of numbers, as vLLM has them: small letters are decimal, capital ones binary."""
_SIZES = {**_SUFFIXES, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_NUMBER = re.compile(r"\s*(-?\d[\d_]{0,24}(?:\.\d{1,24})?)([A-Za-z]*)\s*")
_DTYPE_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}


def parse_count(text: str) -> int:
    """Parse a number of tokens or the like, such as 4096, 32k (32,000) or 32K (32,768)."""
    count = _scaled(text, _SUFFIXES)
    if count is None or count != int(count):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a whole number; write one like 4096, 32k (32,000) or 32K (32,768)"
        )
    return int(count)


def _scaled(text: str, units: Mapping[str, int]) -> Decimal | None:
    """Return a number times the unit that follows it; None for another text."""
    match = _NUMBER.fullmatch(text)
    if match is None or match[2] not in units:
        return None
    return Decimal(match[1].replace("_", "")) * units[match[2]]


def _page_size(text: str) -> PageSize:
    return "max" if text == "max" else _integer(text, "a power of two, or max")


def _prefill_chunk(text: str) -> PrefillChunk:
    if text == "off":
        return "off"
    try:
        return parse_count(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(str(error).replace("is not a", "is neither off nor a")) from None


def _speculate(text: str) -> str:
    if text in ("off", "ngram") or text.removeprefix(DRAFT_MODEL) not in (text, ""):
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is not off, ngram, or {DRAFT_MODEL} and a folder or name on the hub")


def _speculate_tokens(text: str) -> SpeculateTokens:
    return "auto" if text == "auto" else _integer(text, "a number of drafts, or auto")


def _integer(text: str, allowed: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not {allowed}") from None


def _byte_count(text: str) -> int:
    size = _scaled(text, _SIZES)
    if size is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of bytes; write one like 1000000, 512MiB, 4GiB or 4G"
        )
    return round(size)


def _dtype(text: str) -> str:
    return _DTYPE_ALIASES.get(text, text)


class EngineFlag(Struct, frozen=True):
    """Command-line flag of one attribute of `EngineOptions`.

    The attribute is annotated with it.
    """

    help: str
    """One line of help; it names the default in words if the attribute's default is None."""
    parse: Parse | None = None
    """Conversion of the flag's text; None for the default of the attribute's type: int, float or str, or its
    literals as choices."""
    bounds: tuple[float, float] | None = None
    """Smallest and largest number allowed whatever the model; None for flags that are not numbers."""
    metavar: str = "N"
    """Name of the value in the help. Ignored for flags with choices."""
    is_everyday: bool = False
    """True for a flag that `--help` shows; `--help-all` shows the others too."""


class EngineOptions(Struct, frozen=True):
    """Settings of an engine core that users may give.

    `tandem.engine_core.config` resolves them. None leaves a setting to the engine, which chooses it by the device and
    the model.
    """

    model: Annotated[
        str | None,
        EngineFlag(
            "Hugging Face directory with config.json, safetensors and tokenizer.json, or name on the Hugging Face hub "
            "(default: the model shipped with Tandem)",
            metavar="MODEL",
            is_everyday=True,
        ),
    ] = None
    served_model_name: Annotated[
        str | None,
        EngineFlag(
            "name by which clients select the model (default: the directory's name, or that on the hub)",
            metavar="NAME",
            is_everyday=True,
        ),
    ] = None
    device: Annotated[Device, EngineFlag("device that runs the model; auto is cuda if available", is_everyday=True)] = (
        "auto"
    )
    dtype: Annotated[
        Dtype,
        EngineFlag(
            "data type of weights and KV; auto is float32 on a CPU and the checkpoint's own on cuda; bf16, fp16 and "
            "half are short for two of them",
            _dtype,
            is_everyday=True,
        ),
    ] = "auto"
    pipeline: Annotated[
        Switch | None,
        EngineFlag(
            "keep two steps in flight (on) or one (off) (default: on for cuda, off for cpu, where forwards block)"
        ),
    ] = None
    max_rows: Annotated[
        int | None,
        EngineFlag(
            "maximum number of sequences decoded at once (default: 32 on cpu; on cuda the largest of 1024, 512 and 256 "
            "with 24 MiB a row left after the weights; fewer if the state of recurrent layers would take more than half"
            " of the memory that the weights leave)",
            bounds=(1, 16_384),
            is_everyday=True,
        ),
    ] = None
    max_len: Annotated[
        int | None,
        EngineFlag(
            "maximum number of positions of one sequence, prompt and output, such as 4096, 32k (32,000) or 32K "
            "(32,768) (default: what the model allows)",
            parse_count,
            bounds=(2, math.inf),
            is_everyday=True,
        ),
    ] = None
    max_step_tokens: Annotated[
        int | None,
        EngineFlag(
            "maximum number of positions computed in one step (default: 8192 on cuda, 128 on cpu, or what "
            "--prefill-chunk needs)",
            parse_count,
            bounds=(1, 2**20),
        ),
    ] = None
    prefill_chunk: Annotated[
        PrefillChunk | None,
        EngineFlag(
            "maximum number of prompt positions of one sequence in a step in which others decode; off computes "
            "prompts whole (default: no limit but --max-itl and --max-step-tokens; off under --batching static)",
            _prefill_chunk,
            bounds=(1, math.inf),
        ),
    ] = None
    max_prefill_chunks_per_step: Annotated[
        int | None,
        EngineFlag(
            "maximum number of prompts that one step computes a part of; with --prefill-chunk it bounds the whole"
            " step (default: as many as fit; with CUDA graphs at most 64)",
            bounds=(1, math.inf),
        ),
    ] = None
    max_itl: Annotated[
        float | None,
        EngineFlag(
            "milliseconds that prompts may make a step take in which others decode, as expected from measured steps "
            "(default: 5, or 2.5 times a decode step of all running sequences; up to 40 where larger steps compute "
            "prompts at much less cost per token)",
            bounds=(0.01, 1e6),
            metavar="MS",
            is_everyday=True,
        ),
    ] = None
    policy: Annotated[
        Policy,
        EngineFlag("order in which sequences are scheduled in a step; under priority also the order of admission"),
    ] = "fcfs"
    batching: Annotated[
        Batching,
        EngineFlag("continuous admits requests whenever there is room; static runs each batch to its end first"),
    ] = "continuous"
    prefix_cache: Annotated[
        Switch | None,
        EngineFlag(
            "share the KV of equal prompt prefixes (default: on; off with --page-size max or --batching static, and for"
            " models with recurrent layers with pages above 16 positions)",
            is_everyday=True,
        ),
    ] = None
    session_ttl: Annotated[
        float | None,
        EngineFlag(
            "seconds for which an idle session keeps its KV (default: 600)", bounds=(0, 1e10), metavar="SECONDS"
        ),
    ] = None
    max_sessions: Annotated[
        int | None,
        EngineFlag("maximum number of sessions (default: 256, or 0 without the prefix cache)", bounds=(0, math.inf)),
    ] = None
    page_size: Annotated[
        PageSize | None,
        EngineFlag(
            "positions of one KV page, a power of two; max gives each sequence one contiguous region of --max-len"
            " positions, rounded up to a power of two (default: 16)",
            _page_size,
            bounds=(1, math.inf),
        ),
    ] = None
    kv_tokens: Annotated[
        int | None,
        EngineFlag(
            "number of positions in the KV pool, for sequences of any length; with windows, long sequences have room"
            " for more (default: as many as the memory allows)",
            parse_count,
            bounds=(1, math.inf),
        ),
    ] = None
    kv_memory: Annotated[
        int | None,
        EngineFlag(
            "memory of the KV pool, in bytes or like 4GiB, 4G or 512MiB, instead of --kv-tokens",
            _byte_count,
            bounds=(1, math.inf),
            metavar="SIZE",
            is_everyday=True,
        ),
    ] = None
    gpu_memory: Annotated[
        float | None,
        EngineFlag(
            "cuda: share of the device's memory that this engine uses in total, including weights; the KV pool "
            "gets what a full step and the graphs leave of it (default: 0.9)",
            bounds=(0.001, 1),
            metavar="SHARE",
            is_everyday=True,
        ),
    ] = None
    kv_dtype: Annotated[
        KVDtype,
        EngineFlag(
            "data type of keys and values; auto is the model's, fp8 (or fp8_e4m3) halves a 16-bit pool at some loss of "
            "accuracy, with the checkpoint's scales or calibrated ones",
            is_everyday=True,
        ),
    ] = "auto"
    quantize: Annotated[
        Quantize,
        EngineFlag(
            "fp8 (e4m3) stores the weights of a 16-bit checkpoint's layers in one byte, with a scale for each output; "
            "off serves it as it is; quantized checkpoints need no flag",
            is_everyday=True,
        ),
    ] = "off"
    max_waiting: Annotated[
        int | None,
        EngineFlag(
            "maximum number of requests that wait in the engine; further requests get a 429 "
            "(default: --max-concurrent)",
            bounds=(1, math.inf),
        ),
    ] = None
    max_concurrent: Annotated[
        int,
        EngineFlag(
            "maximum number of sequences in progress, of all frontends together; further requests get a 429",
            bounds=(1, MAX_INT32),
        ),
    ] = 1024
    max_queued_tokens: Annotated[
        int,
        EngineFlag(
            "maximum number of prompt tokens that wait for their first output, of all frontends together; further "
            "requests get a 429",
            parse_count,
            bounds=(1, MAX_INT32),
        ),
    ] = 2**20
    threads: Annotated[
        int | None, EngineFlag("number of torch threads on a cpu (default: cores - 1)", bounds=(1, 4096))
    ] = None
    grammar_workers: Annotated[
        int | None,
        EngineFlag(
            "processes that follow grammars for the engine when 24 or more constrained requests are open; each keeps a "
            "core busy meanwhile; 0: the engine follows all by itself (default: on cuda a quarter of the cores, at "
            "most 4; on a CPU 0)",
            bounds=(0, 64),
        ),
    ] = None
    speculate: Annotated[
        str,
        EngineFlag(
            "ngram drafts the tokens that followed the last ones when they occurred before, and verifies several in "
            "one step: output that quotes or edits its prompt takes fewer steps; model:PATH drafts with a small model "
            "of the same tokenizer, a folder or name on the Hugging Face hub; off decodes one token a step",
            _speculate,
            metavar="METHOD",
            is_everyday=True,
        ),
    ] = "off"
    speculate_tokens: Annotated[
        SpeculateTokens,
        EngineFlag(
            "maximum number of drafts that a step verifies for each sequence; auto adapts it to the number of accepted "
            "drafts, down to 0",
            _speculate_tokens,
            bounds=(1, 7),
        ),
    ] = "auto"
    speculate_min_match: Annotated[
        int, EngineFlag("minimum number of last tokens that must have occurred before for a draft", bounds=(1, 16))
    ] = 2
    speculate_max_match: Annotated[
        int, EngineFlag("number of last tokens that are compared to find the best place to draft from", bounds=(1, 16))
    ] = 4
    enable_weight_updates: Annotated[
        bool,
        EngineFlag("let operators and trainers replace the weights of a running engine"),
    ] = False
    swap_copy: Annotated[
        bool,
        EngineFlag(
            "copy a staged checkpoint into memory: its files may change before its weights are loaded, which then are "
            "not read from the disk"
        ),
    ] = False
    weight_update_hosts: Annotated[
        str,
        EngineFlag(
            "addresses and networks of trainers whose process group the engine may join, separated by commas; own: all "
            "addresses of this host",
            metavar="LIST",
        ),
    ] = "127.0.0.0/8,::1,own"
    update_timeout: Annotated[
        float,
        EngineFlag(
            "seconds within which a trainer has to join, and to send the tensors of one call",
            bounds=(0.1, 86_400),
            metavar="SECONDS",
        ),
    ] = 60.0
    sleep_reserve: Annotated[
        bool,
        EngineFlag(
            "take the host memory to which a sleep of level 1 copies the weights at the start, not at the first sleep; "
            "it is pinned, or for weights on a CPU a temporary file"
        ),
    ] = False
    logprobs_mode: Annotated[
        LogprobsMode,
        EngineFlag(
            "log-probabilities of sampled tokens: the model's own, or processed: after bias, penalties, masks, "
            "temperature and truncation; those of prompts are always the model's own"
        ),
    ] = "raw_logprobs"
    developer: Annotated[
        Switch, EngineFlag("on allows the flags of benchmarks, which replace the model's output by another")
    ] = "off"
    synthetic_acceptance: Annotated[
        float | None,
        EngineFlag(
            "benchmarks, with --developer on: share of drafts that are accepted, whatever the model says",
            bounds=(0, 1),
        ),
    ] = None
    teacher_tokens: Annotated[
        str | None,
        EngineFlag(
            "benchmarks, with --developer on: JSON file with a list of token ids, which every request generates",
            metavar="FILE",
        ),
    ] = None
    enable_lora: Annotated[
        bool,
        EngineFlag(
            "serve LoRA adapters in PEFT's format as models of their own; the memory of their slots is taken at the "
            "start",
            is_everyday=True,
        ),
    ] = False
    max_loras: Annotated[
        int,
        EngineFlag("maximum number of adapters in the device's memory, among which one step may mix", bounds=(1, 255)),
    ] = 8
    max_lora_rank: Annotated[
        int,
        EngineFlag(
            "maximum rank of an adapter; each slot has room for one of this rank on all layers", bounds=(1, 512)
        ),
    ] = 64
    max_cpu_loras: Annotated[
        int | None,
        EngineFlag(
            "maximum number of adapters in host memory; others are read from disk when they are used "
            "(default: --max-loras)",
            bounds=(1, 4096),
        ),
    ] = None
    load_format: Annotated[
        LoadFormat,
        EngineFlag(
            "auto reads the directory's safetensors; dummy generates random weights of the shapes in its config.json"
        ),
    ] = "auto"
    graph_rows: Annotated[
        str | None,
        EngineFlag(
            "cuda: row counts of decode steps that are captured in CUDA graphs, a list like 1,2,4,8, or 'off' "
            "(default: up to --max-rows)",
            metavar="LIST",
        ),
    ] = None
    graph_tokens: Annotated[
        str | None,
        EngineFlag(
            "cuda: prompt positions of mixed steps that are captured in CUDA graphs, a list like 128,512,2048, or"
            " 'off' (default: up to 8192)",
            metavar="LIST",
        ),
    ] = None

    @property
    def draft_model(self) -> str | None:
        """Folder of the draft model, or its name on the hub; None without one."""
        name = self.speculate.removeprefix(DRAFT_MODEL)
        return None if name == self.speculate else name


def flag_name(name: str) -> str:
    """Spell the flag of an attribute: two dashes, and dashes for underscores."""
    return "--" + name.replace("_", "-")


def add_engine_arguments(parser: argparse.ArgumentParser, without: Collection[str] = ()) -> None:
    """Add the engine flags to a parser.

    It defines those named by `without` itself.
    """
    group = parser.add_argument_group("engine core")
    for name, default, annotated, flag in _declarations():
        if name in without:
            continue
        if annotated is bool:
            group.add_argument(flag_name(name), action="store_true", help=flag.help)
            continue
        choices, parse = _choices_and_parse(annotated)
        group.add_argument(
            flag_name(name),
            default=default,
            choices=choices,
            type=flag.parse or parse,
            metavar=None if choices else flag.metavar,
            help=flag.help + ("" if default is None else f" (default: {default})"),
        )


def rare_engine_flags() -> frozenset[str]:
    """Return the attributes with flags that only `--help-all` shows."""
    return frozenset(name for name, _, _, flag in _declarations() if not flag.is_everyday)


def _declarations() -> Iterator[tuple[str, Any, Any, EngineFlag]]:
    """Yield the name, the default, the type and the flag of each attribute."""
    hints = get_type_hints(EngineOptions, include_extras=True)
    for info in structs.fields(EngineOptions):
        annotated, flag = get_args(hints[info.name])
        yield info.name, info.default, annotated, flag


def check_numbers(options: EngineOptions) -> None:
    """Raise ValueError for numbers that no model and no machine can make valid."""
    if wrong := wrong_numbers(options):
        raise ValueError("; ".join(wrong.values()))


def wrong_numbers(options: EngineOptions) -> dict[str, str]:
    """Return a message for each number that nothing can make valid.

    No model and no machine could; the keys are the names of the attributes.
    """
    found: dict[str, str] = {}
    for name, _, _, flag in _declarations():
        value = getattr(options, name)
        if flag.bounds is None or not isinstance(value, int | float):
            continue
        low, high = flag.bounds
        if not low <= value <= high:  # also true for NaN
            allowed = f"at least {low:.10g}" if high == math.inf else f"from {low:.10g} to {high:.10g}"
            found[name] = f"{flag_name(name)} {value:.10g}: must be {allowed}"
    size = options.page_size
    if isinstance(size, int) and size > 0 and size & (size - 1):
        found["page_size"] = f"--page-size {size} is not a power of two; use one, or max for one page per sequence"
    return found


def _choices_and_parse(annotated: Any) -> tuple[tuple[str, ...] | None, Parse]:
    """Return the choices of an attribute's type and the conversion of its text.

    The choices are None unless the type is a literal.
    """
    kinds = get_args(annotated) if get_origin(annotated) in (Union, UnionType) else (annotated,)
    kind = next(kind for kind in kinds if kind is not NoneType)
    return (get_args(kind), str) if get_origin(kind) is Literal else (None, kind)


def engine_options(arguments: argparse.Namespace) -> EngineOptions:
    """Collect the engine's settings from parsed arguments.

    Of several names of the model, which only a frontend takes, the engine has the first.
    """
    values = {name: getattr(arguments, name) for name in EngineOptions.__struct_fields__}
    if isinstance(names := values["served_model_name"], list):
        values["served_model_name"] = next((name for name in names if name != ANY_NAME), None)
    return EngineOptions(**values)


def engine_argv(options: EngineOptions) -> Sequence[str]:
    """Build the flags from which another process parses equal options."""
    argv: list[str] = []
    for name in EngineOptions.__struct_fields__:
        value = getattr(options, name)
        if value is True:
            argv.append(flag_name(name))
        elif value is not None and value is not False:
            argv.append(f"{flag_name(name)}={value}")
    return argv
