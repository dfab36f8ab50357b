"""Sampling in plain torch, on any device."""

from dataclasses import replace

import torch

from tandem.engine_core.kernels.reference.sampling import Bias, Draw, Penalties, SamplingRows, Truncation, sample
from tandem.engine_core.kernels.sampling.inputs import FLOAT_COLUMNS, INT_COLUMNS, SamplingBatch, SamplingTables
from tandem.engine_core.sampling.sampler import BIASED, PENALIZES, RANDOM, SUPPRESSES, TRUNCATES, Mode


class TorchSampler:
    """Implement `Sampler` with the oracle, using parameters gathered from the tables."""

    def __init__(self, tables: SamplingTables) -> None:
        self.tables = tables

    def sample(self, batch: SamplingBatch) -> None:
        batch.sampled[:] = sample(batch.logits, gather(self.tables, batch), batch.allowed)
        if not batch.publish:
            return
        rows, positions = batch.rows.long(), batch.positions.long() + 1
        self.tables.tokens.index_put_((rows, positions), batch.sampled.clamp(min=0))
        self.tables.lengths.index_put_((rows,), torch.where(rows > 0, positions + 1, 1).int())

    def launch(self, mode: Mode, batch: SamplingBatch) -> None:
        everything = RANDOM | TRUNCATES | PENALIZES | BIASED | SUPPRESSES
        needs = {Mode.GREEDY: 0, Mode.UNTRUNCATED: RANDOM}.get(mode, everything)
        self.sample(replace(batch, needs=needs, longest=self.tables.tokens.shape[1]))


def gather(tables: SamplingTables, batch: SamplingBatch) -> SamplingRows:
    """Gather the parameters of a batch; a group that no row needs is None."""
    rows, needs = batch.rows.long(), batch.needs
    positions = batch.positions.long() + 1
    p = dict(zip(INT_COLUMNS, tables.ints[rows].unbind(1), strict=True))
    p |= zip(FLOAT_COLUMNS, tables.floats[rows].unbind(1), strict=True)
    draw = truncation = penalties = bias = suppressed = None
    if needs & RANDOM:
        draw = Draw(temperature=p["temperature"], seed=p["seed"], choice=p["choice"], position=positions)
    if needs & TRUNCATES:
        truncation = Truncation(top_k=p["top_k"], top_p=p["top_p"], min_p=p["min_p"])
    if needs & PENALIZES:
        penalties = Penalties(
            repetition=p["repetition_penalty"],
            presence=p["presence_penalty"],
            frequency=p["frequency_penalty"],
            history=tables.tokens[rows, : batch.longest].long(),
            prompt_len=p["prompt_len"],
            total_len=positions,
        )
    if needs & BIASED:
        bias = Bias(tables.bias[0, rows].long(), tables.bias[1, rows].view(torch.float32))
    if needs & SUPPRESSES:
        suppresses = positions - p["prompt_len"] < p["min_tokens"]
        suppressed = torch.where(suppresses.unsqueeze(1), tables.suppressed[rows], -1).long()
    return SamplingRows(draw, truncation, penalties, bias, suppressed)
