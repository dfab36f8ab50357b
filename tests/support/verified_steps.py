"""Logits of every sampled position of an engine's requests, and the tokens that its sampler draws from them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tandem.engine_core.contracts import MaskedRows, StepResult
from tandem.engine_core.kernels.sampling.inputs import SamplingBatch
from tandem.engine_core.runtime.runtime import TorchRuntime

EVERYTHING = 0b11111
"""Needs of every kind but masks."""


@dataclass
class Positions:
    """What was computed at the positions of requests that gave a token."""

    logits: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """[V] by sequence and position."""
    verified: int = 0
    """Number of tokens of steps that verified drafts."""


@contextmanager
def kept_positions(runtime: TorchRuntime) -> Iterator[Positions]:
    """Keep the logits of all tokens, and check those of steps with drafts against a second call of the sampler.

    Where drafts were accepted, the token table has what the draws of later positions depend on.
    """
    kept, sample, collect = Positions(), runtime.sample, runtime.collect
    pending: dict[int, tuple[Any, Tensor, Tensor, Tensor]] = {}

    def on_sample(slot: int, masks: MaskedRows | None) -> None:
        s = runtime.slots[slot]
        plan = s.plan
        assert plan is not None and s.logits is not None and s.packed is not None
        count = len(s.packed.sample_rows) * (1 + plan.num_drafts)
        logits, longest = s.logits[:count].clone(), s.packed.longest
        sample(slot, masks)
        positions, again = torch.tensor(s.packed.sample_positions), s.sampled[:0]
        if plan.num_drafts:
            rows, positions = s.sample_rows[:count].clone(), s.sample_positions[:count].clone()
            again = torch.zeros_like(rows)
            batch = SamplingBatch(logits, rows, positions, again, None, EVERYTHING, longest, publish=False)
            with torch.inference_mode():
                runtime.sampler.sample(batch)
        pending[slot] = plan, logits, positions, again

    def on_collect(slot: int) -> StepResult:
        plan, logits, positions, again = pending.pop(slot)
        result, queries = collect(slot), 1 + plan.num_drafts
        for index, (row, run) in enumerate(zip(plan.sampled_rows, [run for run in result.runs() if run], strict=True)):
            first = index * queries
            if plan.num_drafts:
                assert again[first : first + len(run)].tolist() == list(run), f"{row} of step {plan.step_id}"
                kept.verified += len(run)
            for offset in range(first, first + len(run)):
                kept.logits[row.seq_id, int(positions[offset])] = logits[offset].float().cpu()
        return result

    with patch.multiple(runtime, sample=on_sample, collect=on_collect):
        yield kept


def largest_difference(one: Positions, other: Positions) -> float:
    """Return the largest difference of logits at the positions that both computed."""
    common = one.logits.keys() & other.logits.keys()
    assert len(common) > 0.9 * len(one.logits)
    return max(float((one.logits[key] - other.logits[key]).abs().max()) for key in common)
