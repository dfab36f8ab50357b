"""vLLM's `--speculative-config`, a JSON object, as flags of ours."""

import argparse
import json
from collections.abc import Sequence
from typing import Any

from tandem.protocol.engine_options import DRAFT_MODEL

FLAGS = {
    "num_speculative_tokens": "speculate_tokens",
    "prompt_lookup_min": "speculate_min_match",
    "prompt_lookup_max": "speculate_max_match",
}
"""Argument name of our flag for each key of a number."""
METHODS = {
    "ngram": ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"),
    "draft_model": ("model", "num_speculative_tokens"),
}
"""Keys of each method."""
NGRAM_MODELS = ("ngram", "[ngram]")
"""Names of a model by which vLLM chooses n-gram drafts if no method is given; any other is a draft model."""
DRAFT_SIZE = "draft_tensor_parallel_size"
"""Key of the number of GPUs of a draft model, which both methods may have."""
BOUNDS = {"num_speculative_tokens": 7, "prompt_lookup_min": 16, "prompt_lookup_max": 16}
"""Largest value of each of them; the smallest is 1."""


class SpeculativeConfig(argparse.Action):
    """Set the arguments of our flags."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        try:
            found = speculative_arguments(str(values))
        except ValueError as error:
            parser.error(f"--speculative-config: {error}")
        for name, value in found.items():
            setattr(namespace, name, value)


def speculative_arguments(text: str) -> dict[str, Any]:
    """Return the values of our arguments.

    As in vLLM, a model without a method is a draft model, unless its name is "ngram", and of the two lengths of matches
    one that is missing is the other. Raises ValueError, with the name of the key, for what is not supported.
    """
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(given, dict):
        raise ValueError('must be an object like {"method": "ngram", "num_speculative_tokens": 3}')
    method = given.pop("method", None)
    if method is None and given.get("model") in NGRAM_MODELS:
        method = given.pop("model").strip("[]")
    elif method is None and "model" in given:
        method = "draft_model"
    known = METHODS.get(method) if isinstance(method, str) else None
    if known is None:
        raise ValueError(f"method {method!r} is not supported, only {' and '.join(map(repr, METHODS))} are")
    if (size := given.pop(DRAFT_SIZE, 1)) != 1 or isinstance(size, bool):
        raise ValueError(f"{DRAFT_SIZE} {size!r}: must be 1")
    if unknown := sorted(given.keys() - {*known}):
        raise ValueError(f"{', '.join(unknown)} not supported with {method}, only {', '.join(known)}")
    speculate = "ngram"
    if method == "draft_model":
        model = given.pop("model", None)
        if not isinstance(model, str) or not model:
            raise ValueError(f"model {model!r}: must be the folder of the draft model, or its name on the hub")
        speculate = DRAFT_MODEL + model
    for key, value in given.items():
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= BOUNDS[key]:
            raise ValueError(f"{key} {value!r}: must be from 1 to {BOUNDS[key]}")
    lengths = [given[key] for key in ("prompt_lookup_min", "prompt_lookup_max") if key in given]
    if lengths:
        given |= {"prompt_lookup_min": lengths[0], "prompt_lookup_max": lengths[-1]}
        if lengths[0] > lengths[-1]:
            raise ValueError(f"prompt_lookup_min {lengths[0]} is more than prompt_lookup_max {lengths[-1]}")
    return {"speculate": speculate, **{FLAGS[key]: value for key, value in given.items()}}
