"""Sampling for benchmarks: a given text, or drafts that are accepted with a given probability.

With random weights no draft is ever accepted, but a step takes as long as with others. So a benchmark chooses the
tokens: those of a text (teacher forcing), or as many accepted drafts as some drafter has.
"""

import torch
from torch import Tensor

from tandem.engine_core.kernels.sampling.inputs import INT_COLUMNS, SamplingBatch, SamplingTables
from tandem.engine_core.runtime.speculation import Drafter
from tandem.engine_core.sampling.sampler import Mode, Sampler

PROMPT_LEN, TOTAL_LEN = INT_COLUMNS.index("prompt_len"), INT_COLUMNS.index("total_len")
MAX_DRAFTS, SEED = INT_COLUMNS.index("max_drafts"), INT_COLUMNS.index("seed")


class ForcedSampler:
    """Implement `Sampler` with another sampler, whose tokens it replaces.

    Both tensors may be changed while the engine runs; CUDA graphs read them.
    """

    def __init__(self, sampler: Sampler, tables: SamplingTables, text: Tensor, acceptance: Tensor) -> None:
        """Keep a sampler and what replaces its tokens.

        text: [N] int32, the tokens that every row generates, -1 for those that are sampled; acceptance: [] float32,
        probability that a draft is accepted; 0: it is accepted if it equals the token.
        """
        self.sampler = sampler
        self.tables = tables
        self.text = text
        self.acceptance = acceptance

    def sample(self, batch: SamplingBatch) -> None:
        self.sampler.sample(batch)
        self._force(batch)

    def launch(self, mode: Mode, batch: SamplingBatch) -> None:
        self.sampler.launch(mode, batch)
        self._force(batch)

    def _force(self, batch: SamplingBatch) -> None:
        tables, rows, positions = self.tables, batch.rows.long(), batch.positions.long() + 1
        index = positions - tables.ints[rows, PROMPT_LEN]
        inside = (index >= 0) & (index < len(self.text))
        text = torch.where(inside, self.text[index.clamp(0, len(self.text) - 1)], -1)
        sampled = torch.where(text >= 0, text, batch.sampled)
        if batch.publish:
            tables.tokens.index_put_((rows, positions), sampled.clamp(min=0))
        else:
            drafts = tables.tokens[rows, positions.clamp(max=tables.tokens.shape[1] - 1)]
            is_right = (drafts >= 0) & (_coins(tables.ints[rows, SEED], positions) < self.acceptance)
            # A draft model samples with the same noise: with random weights most of its drafts would be accepted.
            is_wrong = (drafts >= 0) & ~is_right & (sampled == drafts) & (self.acceptance > 0)
            another = torch.where(drafts > 0, drafts - 1, drafts + 1)
            sampled = torch.where(is_right, drafts, torch.where(is_wrong, another, sampled))
        batch.sampled.copy_(sampled)


class EagerDrafter:
    """Implement `Drafter` with another drafter, and some token wherever that has no draft.

    It adds none while the acceptance of the sampler is 0.
    """

    def __init__(self, drafter: Drafter, forced: ForcedSampler) -> None:
        self.drafter = drafter
        self.forced = forced

    def propose(self, rows: Tensor, num_drafts: int, sources: Tensor, needs: int = 0) -> None:
        self.drafter.propose(rows, num_drafts, sources, needs)
        tables, acceptance = self.forced.tables, self.forced.acceptance
        row, count = rows.long().unsqueeze(1), torch.arange(num_drafts, device=rows.device)
        length, ints = tables.lengths[row].long(), tables.ints
        position = length + count
        is_wanted = (row > 0) & (count < ints[row, MAX_DRAFTS]) & (position < ints[row, TOTAL_LEN] - 1)
        at = row, position.clamp(max=tables.tokens.shape[1] - 1)
        known, newest = tables.tokens[at], tables.tokens[row, length - 1]
        is_missing = is_wanted & (known < 0) & (acceptance > 0)
        tables.tokens.index_put_(at, torch.where(is_missing, newest, known))

    def note_accepted(self, rows: Tensor, counts: Tensor) -> None:
        self.drafter.note_accepted(rows, counts)


def _coins(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return a pseudorandom number in [0, 1) for each seed of a request and position, float32.

    So numbers of drafts can be compared: equal requests accept equal positions, whatever their rows.
    """
    bits = (seeds * 0x9E3779B1 + positions * 0x85EBCA77) & 0xFFFFFFFF
    bits = (bits ^ (bits >> 15)) * 0x2C1B3C6D & 0xFFFFFFFF
    bits = (bits ^ (bits >> 12)) * 0x297A2D39 & 0xFFFFFFFF
    return ((bits ^ (bits >> 15)) & 0xFFFFFF).float() / 2**24
