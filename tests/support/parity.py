"""Random checkpoints of transformers, and how far this engine's logits are from those of transformers.

A test of a family builds one of transformers' configurations, and `check_parity` does the rest.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.porting.tiny import COMMON, randomize_vectors
from tests.support.paged_model import PagedRun, chunked, load

TOLERANCE = 1e-4
"""Largest error of a logit in float32 on a CPU; logits reach about 8."""
VOCAB = 157
SMALL: dict[str, Any] = COMMON | {"vocab_size": VOCAB, "num_hidden_layers": 3}
"""Fields of a configuration that is large enough to tell mistakes and small enough to be fast."""
LENGTHS = (1, 9, 40, 23, 64)
"""Positions of the sequences that run together."""
PREFILL = (1, 5, 39, 1, 30)
"""Positions of them that are prompts; the rest is decoded one by one."""
SCHEDULES = ((1, 16), (7, 4), (1000, 16))
"""Pairs of a prompt chunk and a page size: one position a step, chunks beside decoding rows, and whole prompts."""


def save_random(
    directory: Path,
    config: Any,
    *,
    seed: int = 0,
    norms: tuple[float, float] = (0.5, 1.5),
    model_class: Any = None,
    **saving: Any,
) -> Any:
    """Save a random checkpoint with random norms and biases, and return transformers' model in float32.

    config: one of transformers' configurations; norms: range of the norms' weights; model_class: None for that of
    AutoModelForCausalLM; saving: arguments of `save_pretrained`.
    """
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        config._attn_implementation = config._experts_implementation = "eager"
        model = AutoModelForCausalLM.from_config(config) if model_class is None else model_class(config)
        model = model.float().eval()
        randomize_vectors(model, norms)
        model.save_pretrained(directory, **saving)
    return model


def random_tokens(lengths: Sequence[int], vocab: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (length,), generator=generator) for length in lengths]


def reference_logits(model: Any, tokens: Sequence[Tensor]) -> list[Tensor]:
    """Logits after every position of each sequence by itself, [L, V] each."""
    with torch.no_grad():
        return [model(input_ids=sequence[None]).logits[0].float() for sequence in tokens]


def greedy_tokens(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """Tokens that transformers' `generate` appends to a prompt, none of which ends the sequence."""
    with torch.no_grad():
        ids = torch.tensor([list(prompt)])
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=count, max_new_tokens=count
        )
    return made[0, len(prompt) :].tolist()


def worst(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    return max((one.float() - other).abs().max().item() for one, other in zip(found, expected, strict=True))


def check_parity(
    directory: Path,
    reference: Any,
    *,
    tolerance: float = TOLERANCE,
    dtype: torch.dtype = torch.float32,
    lengths: Sequence[int] = LENGTHS,
    prefill: Sequence[int] = PREFILL,
    schedules: Sequence[tuple[int, int]] = SCHEDULES,
    max_positions: int | None = None,
) -> None:
    """Assert that a checkpoint's logits are within the tolerance of the reference's, in every schedule.

    dtype: that in which this engine computes; the reference stays in float32. lengths, prefill, schedules: as the
    constants of this module; max_positions: as in `build_model`.
    """
    tokens = random_tokens(lengths, VOCAB, seed=1)
    expected = reference_logits(reference, tokens)
    model = load(directory, dtype, max_positions)
    errors = {}
    for chunk, page_size in schedules:
        run = PagedRun(model, tokens, page_size, seed=chunk, dtype=dtype)
        errors[chunk] = worst(run.run(chunked(lengths, prefill, chunk)), expected)
    largest = max(logits.abs().max().item() for logits in expected)
    print(f"max abs error by chunk: {errors}, largest logit: {largest}")
    assert max(errors.values()) < tolerance, errors
