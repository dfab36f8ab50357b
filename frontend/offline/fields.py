"""Keyword arguments of offline calls: fields of an HTTP request, and short forms."""

import argparse
import difflib
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from tandem.frontend.api.chat_completions.request import BODY as CHAT
from tandem.frontend.api.completions.request import BODY as COMPLETION
from tandem.frontend.flags.speculative_config import speculative_arguments
from tandem.frontend.hub.options import HubOptions
from tandem.frontend.request.prompts import Prompt
from tandem.frontend.supervisor.adapters import check_modules, find_adapters
from tandem.protocol.engine_options import DRAFT_MODEL, EngineOptions, add_engine_arguments, check_numbers, engine_argv
from tandem.protocol.engine_options import engine_options as parsed_options
from tandem.protocol.events import NO_LIMIT
from tandem.protocol.params import MAX_TOP_LOGPROBS

Conversation = Sequence[Mapping[str, Any]]

_ELSEWHERE = {
    "prompt": "it is the first argument",
    "messages": "it is the first argument",
    "model": "it is given to the constructor; lora chooses an adapter",
    "stream": "call stream() or stream_chat()",
    "stream_options": "the result has the usage",
    "stream_format": "call stream() or stream_chat()",
    "return_token_ids": "the result has the ids",
    "echo": "give prompt_logprobs=N; the result has the prompt",
    "use_tqdm": "give progress=False to hide the bar",
    "sampling_params": "give its fields as keywords, such as temperature=0, max_tokens=64",
}
"""Unsupported names, and what to use instead."""

_OTHER_OPTIONS = {
    "max_model_len": "max_len",
    "context_length": "max_len",
    "max_num_seqs": "max_rows",
    "max_running_requests": "max_rows",
    "max_num_batched_tokens": "max_step_tokens",
    "gpu_memory_utilization": "gpu_memory",
    "mem_fraction_static": "gpu_memory",
    "enable_prefix_caching": "prefix_cache",
    "kv_cache_dtype": "kv_dtype",
    "model_path": "model",
    "block_size": "page_size",
    "verbose": "log_level",
    "quantization": "quantize",
}
"""Options of other engines, and the closest option here."""

_ONE_GPU = "one GPU per engine; tensor and pipeline parallelism are not supported"
_MISSING_OPTIONS = {
    "tensor_parallel_size": _ONE_GPU,
    "pipeline_parallel_size": _ONE_GPU,
    "data_parallel_size": "one GPU per engine; start an LLM in a process for each GPU",
    "seed": "seeds are an argument of each call; an LLM has none",
    "enable_sleep_mode": "an LLM does not sleep; a server with --enable-weight-updates does",
    "trust_remote_code": "code from checkpoints is never run; supported architectures are built in",
    "enforce_eager": "graph_rows='off' runs without CUDA graphs",
    "tokenizer": "the tokenizer is the model folder's tokenizer.json",
    "cpu_offload_gb": "the whole model runs on one device",
    "swap_space": "KV is never swapped to CPU memory; preempted sequences are recomputed",
}
"""Options of other engines that have no equivalent, and the reason."""


class Fields(Struct, frozen=True):
    """Validated keyword arguments of a call."""

    body: dict[str, Any]
    """Fields of the HTTP request."""
    prompt_logprobs: int | None = None
    """Number of alternatives for each prompt token; None for no prompt log-probabilities."""
    with_logprobs: bool = False
    """True if outputs have log-probabilities."""


class VerifyFields(Struct, frozen=True):
    """Validated arguments of `verify`."""

    request: Fields
    """Fields of a completion that scores its prompt."""
    logits: bool
    """True if results have logits."""


def engine_options(model: str | None, options: Mapping[str, Any]) -> EngineOptions:
    """Build the engine's settings from the keyword arguments of a constructor.

    Raises TypeError for an unknown option, with the closest name or the reason why there is none, and ValueError for an
    invalid value.
    """
    known = EngineOptions.__struct_fields__
    options = _with_drafts(options)
    for name in options:
        if name in _MISSING_OPTIONS:
            raise TypeError(f"{name!r} is not an option of LLM: {_MISSING_OPTIONS[name]}")
        if name not in known:
            near = _OTHER_OPTIONS.get(name) or next(iter(difflib.get_close_matches(name, known, 1)), None)
            hint = f"; did you mean {near!r}?" if near else f"; the options are {', '.join(known)}"
            raise TypeError(f"{name!r} is not an option of LLM{hint}")
    unlimited = {"max_concurrent": NO_LIMIT, "max_queued_tokens": NO_LIMIT}
    settings = EngineOptions(model=model, **{**unlimited, **options})
    parser = argparse.ArgumentParser(exit_on_error=False, add_help=False, allow_abbrev=False)
    add_engine_arguments(parser)
    try:
        found = parsed_options(parser.parse_args(engine_argv(settings)))
    except argparse.ArgumentError as error:
        name = str(error.argument_name).lstrip("-").replace("-", "_")
        raise ValueError(f"{name}={getattr(settings, name)!r}: {error.message}") from None
    check_numbers(found)
    return found


def _with_drafts(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with those of drafts under the names of our flags.

    Raises TypeError if one is given twice, and ValueError for an invalid `speculative_config`, vLLM's.
    """
    found = dict(options)
    config = found.pop("speculative_config", None)
    given: dict[str, Any] = {}
    if config is not None:
        try:
            given |= speculative_arguments(json.dumps(config))
        except (TypeError, ValueError) as error:
            raise ValueError(f"speculative_config={config!r}: {error}") from None
    for name, other, prefix in (("draft_model", "speculate", DRAFT_MODEL), ("spec_length", "speculate_tokens", "")):
        value = found.pop(name, None)
        if value is None:
            continue
        if other in found or other in given:
            raise TypeError(f"{name!r} is short for {other!r}; give one of them")
        given[other] = f"{prefix}{value}" if prefix else value
    if twice := sorted(given.keys() & found.keys()):
        raise TypeError(f"{twice[0]!r} and 'speculative_config' set the same; give one of them")
    return found | given


def hub_options(revision: str | None, hf_token: str | None, download_dir: str | Path | None) -> HubOptions:
    """Build the hub options from the keyword arguments of a constructor."""
    return HubOptions(revision, hf_token, None if download_dir is None else Path(download_dir))


def find_lora_modules(
    modules: Mapping[str, str | Path] | None, options: EngineOptions, base: str, hub: HubOptions
) -> dict[str, str]:
    """Return the folders of adapters by name, after downloading those of the hub.

    base: name of the model. Raises LaunchError for one that cannot be served.
    """
    given = [(name, str(path)) for name, path in (modules or {}).items()]
    check_modules(given, (options.served_model_name or base,), options.enable_lora)
    return find_adapters(given, hub)


def refuse_parameters(given: object, call: str) -> None:
    """Raise TypeError for a sampling parameters object, as used with vLLM.

    The message has the equivalent call; `call` is the method and its first argument.
    """
    if given is None:
        return
    fields = given if isinstance(given, Mapping) else {"temperature": 0, "max_tokens": 64}
    keywords = ", ".join([f"{name}={value!r}" for name, value in fields.items()])
    such_as = "" if isinstance(given, Mapping) else " for example"
    raise TypeError(
        f"sampling parameters are keywords here, not a {type(given).__name__}; call{such_as} {call}, {keywords})"
    )


def completion_fields(given: Mapping[str, Any], stream: bool = False) -> Fields:
    """Validate the keyword arguments of a completion.

    A server ignores unknown fields for the sake of its clients; here such a name is a typo. Raises TypeError for it and
    for names covered by other arguments, ValueError for `prompt_logprobs` out of range. Other values are validated like
    a request's.
    """
    other = CHAT.names, "stream_chat()" if stream else "chat()"
    body = _checked(given, COMPLETION.names, ("prompt_logprobs", "lora"), other)
    with_logprobs = body.get("logprobs") is not None
    scored = body.pop("prompt_logprobs", None)
    if scored is not None:
        if stream:
            raise TypeError("'prompt_logprobs' cannot be streamed; call generate()")
        if type(scored) is not int or not 0 <= scored <= MAX_TOP_LOGPROBS:
            raise ValueError(f"'prompt_logprobs' must be between 0 and {MAX_TOP_LOGPROBS}, not {scored!r}")
        body |= {"echo": True, "logprobs": body["logprobs"] if with_logprobs else 0}
    return Fields({**body, "stream": stream}, scored, with_logprobs)


def verify_fields(logprobs: int, logits: bool, given: Mapping[str, Any]) -> VerifyFields:
    """Validate the arguments of `verify`.

    Raises TypeError and ValueError like `completion_fields`.
    """
    known = ("cache_salt", "priority", "session_id")
    body = _checked(given, known, ("lora",))
    if type(logprobs) is not int or not 0 <= logprobs <= MAX_TOP_LOGPROBS:
        raise ValueError(f"'logprobs' must be between 0 and {MAX_TOP_LOGPROBS}, not {logprobs!r}")
    body |= {"echo": True, "logprobs": logprobs, "max_tokens": 0, "stream": False}
    return VerifyFields(Fields(body, logprobs, True), bool(logits))


def continued_prompts(
    prompts: Prompt | Sequence[Prompt], continuations: Prompt | Sequence[Prompt]
) -> list[tuple[Prompt, Prompt]]:
    """Return each prompt with its continuation.

    Raises TypeError like `prompt_batch`, ValueError unless their numbers are equal.
    """
    first, rest = prompt_batch(prompts), prompt_batch(continuations, "continuation")
    if len(first) != len(rest):
        raise ValueError(f"{len(first)} prompts with {len(rest)} continuations; each prompt needs one of its own")
    return list(zip(first, rest, strict=True))


def chat_fields(given: Mapping[str, Any], stream: bool = False) -> Fields:
    """Validate the keyword arguments of a chat.

    Raises TypeError like `completion_fields`.

    """
    other = COMPLETION.names, "stream()" if stream else "generate()"
    body = _checked(given, CHAT.names, ("lora",), other)
    return Fields({**body, "stream": stream}, None, bool(body.get("logprobs")))


def _checked(
    given: Mapping[str, Any],
    known: Collection[str],
    own: Collection[str],
    other: tuple[Collection[str], str] = ((), ""),
) -> dict[str, Any]:
    """Return the fields of the body. other: fields of another call, and its name."""
    body = dict(given)
    for name in given:
        if name in _ELSEWHERE:
            raise TypeError(f"{name!r} is not a keyword here; {_ELSEWHERE[name]}")
        if name not in known and name not in own:
            if name in other[0]:
                raise TypeError(f"{name!r} is not a field of this request, but one of {other[1]}")
            near = difflib.get_close_matches(name, (*known, *own, "json_schema", "progress", "raise_on_error"), 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"{name!r} is not a field of this request{hint}")
    if (lora := body.pop("lora", None)) is not None:
        if not isinstance(lora, str) or not lora:
            raise TypeError(f"'lora' must be the name of an adapter, not {lora!r}")
        body["model"] = lora
    if (schema := body.pop("json_schema", None)) is not None:
        if hasattr(schema, "model_json_schema"):
            raise TypeError(f"'json_schema' must be a dict; give {schema.__name__}.model_json_schema()")
        if body.get("response_format") is not None:
            raise TypeError("'json_schema' is short for 'response_format'; give one of them")
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    return body


def prompt_batch(prompts: Prompt | Sequence[Prompt], noun: str = "prompt") -> list[Prompt]:
    """Return one prompt or several as a list.

    Raises TypeError for an element that is neither text nor a list of token ids. noun: its name in errors.
    """
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        prompts = _listed(prompts)
    if prompts and isinstance(prompts[0], int):
        return [check_prompt(prompts, f"the {noun}")]
    return [check_prompt(prompt, f"{noun} {index}") for index, prompt in enumerate(prompts)]


def check_prompt(prompt: Any, name: str = "the prompt") -> Prompt:
    """Return a prompt: text or a list of token ids.

    Raises TypeError for anything else; `name` is used in the message.
    """
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Mapping) or not isinstance(prompt, Sequence):
        prompt = _listed(prompt, name)
    invalid = next((part for part in prompt if type(part) is not int), None)
    if invalid is not None:
        raise TypeError(
            f"{name} is a list with a {type(invalid).__name__}; a prompt is a text or a list of token ids, and several "
            "prompts are one list of those"
        )
    return list(prompt)


def _listed(value: Any, name: str = "prompts") -> list[Any]:
    """Return the items of an array, such as NumPy's.

    Raises TypeError for a value without `tolist`, and for a scalar of an array.
    """
    items = value.tolist() if hasattr(value, "tolist") else None
    if not isinstance(items, list):
        kind = type(value).__name__
        raise TypeError(f"{name} must be a text, a list of token ids, or a list of those, not a value of type {kind}")
    return items


def conversation_batch(conversations: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """Return one conversation or several as a list.

    Raises TypeError for a value that is not a list of messages.
    """
    if isinstance(conversations, str | Mapping):
        raise TypeError("a conversation is a list of messages such as {'role': 'user', 'content': 'Hi'}")
    if conversations and isinstance(conversations[0], Mapping):
        return [conversations]  # type: ignore[list-item]
    for index, conversation in enumerate(conversations):
        if isinstance(conversation, str | Mapping) or not isinstance(conversation, Sequence):
            raise TypeError(
                f"conversation {index} must be a list of messages, not a value of type {type(conversation).__name__}"
            )
    return list(conversations)  # type: ignore[arg-type]
