"""What the device remembers between steps: every row's tokens, pages and sampling parameters.

All token values live here: prompts and samples are written, every forward gathers. So "the newest token exists only
on the device" needs no special case. ScheduledSequence 0 and page 0 are padding.
"""

from enum import Enum

import numpy as np
import torch
from torch import Tensor

from tandem.engine_core.plan import NewSequence
from tandem.engine_core.runtime.staging import ADMISSION_FLOATS, ADMISSION_INTS, MAX_SUPPRESSED, Packed
from tandem.engine_core.sampling.sampler import Bias, Draw, Penalties, SamplingRows, Truncation
from tandem.protocol.params import MAX_LOGIT_BIAS


class Mode(Enum):
    """The three ways of sampling a step: all rows greedy; some draw from the whole softmax; anything else."""

    GREEDY = "greedy"
    PLAIN = "plain"
    FULL = "full"


RANDOM, TRUNCATES, PENALIZES, BIASED = 1, 2, 4, 8
"""Bits of what a row asks of sampling, kept on the host so that no step has to ask the device."""


class DeviceTables:
    """Tables by row. Written in stream order by the launches that bring news, read by every forward and sampling."""

    def __init__(
        self,
        tokens: Tensor,
        pages: Tensor,
        ints: Tensor,
        floats: Tensor,
        bias: Tensor,
        suppressed: Tensor,
        places: Tensor,
    ) -> None:
        self.tokens = tokens
        """[rows, max_len] int32."""
        self.pages = pages
        """[rows, pages_per_row] int32."""
        self.ints = ints
        """[rows, 6] int64: row, prompt_len, top_k, choice, seed, unused."""
        self.floats = floats
        """[rows, 6] float32: temperature, top_p, min_p, repetition, presence and frequency penalty."""
        self.bias = bias
        """[2, rows * MAX_LOGIT_BIAS] int32: ids (-1 for none), and the bits of their float32 values."""
        self.suppressed = suppressed
        """[rows, MAX_SUPPRESSED] int32, -1 for none."""
        self.places = places
        """[4 * rows] int64, scratch: new pages of a decode step are written without an allocation (I7)."""
        self.modes = np.zeros(len(tokens), dtype=np.uint8)

    @classmethod
    def allocate(cls, max_rows: int, max_len: int, pages_per_row: int, device: torch.device) -> "DeviceTables":
        rows = max_rows + 1

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            zeros(rows, max_len),
            zeros(rows, pages_per_row),
            zeros(rows, ADMISSION_INTS, dtype=torch.int64),
            zeros(rows, ADMISSION_FLOATS, dtype=torch.float32),
            zeros(2, rows * MAX_LOGIT_BIAS),
            zeros(rows, MAX_SUPPRESSED),
            zeros(4 * rows, dtype=torch.int64),
        )

    def note(self, admitted: tuple[NewSequence, ...]) -> None:
        """Keeps on the host what the admitted rows ask of sampling."""
        for a in admitted:
            p = a.params
            self.modes[a.row] = (
                RANDOM * (not p.greedy)
                | TRUNCATES * p.truncates
                | PENALIZES * p.penalizes
                | BIASED * bool(p.logit_bias_ids)
            )

    def mode(self, packed: Packed) -> Mode:
        """The cheapest way of sampling that serves every row of a step."""
        modes = int(np.bitwise_or.reduce(self.modes[packed.sample_rows]))
        if modes & ~RANDOM:
            return Mode.FULL
        return Mode.PLAIN if modes else Mode.GREEDY

    def apply(self, inputs: Tensor, packed: Packed) -> None:
        """Writes a step's news, out of its packed inputs on the device, into the tables."""
        if "upload_index" in packed.fields:
            _scatter(self.tokens, field(inputs, packed, "upload_index"), field(inputs, packed, "upload_tokens"))
        if "page_index" in packed.fields:
            self._map(field(inputs, packed, "page_index"), field(inputs, packed, "pages"))
        if "ints" in packed.fields:
            self._admit(inputs, packed)

    def _map(self, index: Tensor, pages: Tensor) -> None:
        room = self.places[: len(index)]
        places = torch.add(index, 0, out=room) if len(room) == len(index) else index.long()
        self.pages.view(-1).index_copy_(0, places, pages)

    def _admit(self, inputs: Tensor, packed: Packed) -> None:
        words = field(inputs, packed, "ints").view(-1, ADMISSION_INTS).long()
        rows = words[:, 0]
        words[:, 4] = (words[:, 4] & 0xFFFF_FFFF) | (words[:, 5] << 32)
        self.ints[rows] = words
        self.floats[rows] = field(inputs, packed, "floats").view(torch.float32).view(-1, ADMISSION_FLOATS)
        ids, values = self.bias[0], self.bias[1]
        ids.view(-1, MAX_LOGIT_BIAS).index_fill_(0, rows, -1)
        _scatter(ids, field(inputs, packed, "bias_index"), field(inputs, packed, "bias_ids"))
        _scatter(values, field(inputs, packed, "bias_index"), field(inputs, packed, "biases"))
        self.suppressed.index_fill_(0, rows, -1)
        _scatter(self.suppressed, field(inputs, packed, "suppress_index"), field(inputs, packed, "suppressed"))

    def append(self, inputs: Tensor, packed: Packed, tokens: Tensor) -> None:
        """Writes the tokens just sampled, [S] int32, where the next forward will look for them."""
        index = field(inputs, packed, "sample_rows") * self.tokens.shape[1] + field(inputs, packed, "sample_positions")
        _scatter(self.tokens, index, tokens)

    def sampling_rows(self, inputs: Tensor, packed: Packed) -> SamplingRows:
        """What sampling needs for the S rows of a step that sample; a group that no row uses is left out."""
        rows = field(inputs, packed, "sample_rows").long()
        positions = field(inputs, packed, "sample_positions").long()
        modes = int(np.bitwise_or.reduce(self.modes[packed.sample_rows]))
        ints, floats = self.ints[rows].unbind(1), self.floats[rows].unbind(1)
        draw = truncation = penalties = bias = suppressed = None
        if modes & RANDOM:
            draw = Draw(temperature=floats[0], seed=ints[4], choice=ints[3], position=positions)
        if modes & TRUNCATES:
            truncation = Truncation(top_k=ints[2], top_p=floats[1], min_p=floats[2])
        if modes & PENALIZES:
            history = self.tokens[rows, : packed.longest].long()
            penalties = Penalties(floats[3], floats[4], floats[5], history, ints[1], positions)
        if modes & BIASED:
            entries = self.bias.view(2, -1, MAX_LOGIT_BIAS)[:, rows]
            bias = Bias(entries[0].long(), entries[1].view(torch.float32))
        if "suppress" in packed.fields:
            active = field(inputs, packed, "suppress").bool().unsqueeze(1)
            suppressed = torch.where(active, self.suppressed[rows], -1).long()
        return SamplingRows(draw, truncation, penalties, bias, suppressed)


def field(inputs: Tensor, packed: Packed, name: str) -> Tensor:
    """One field of a packed step: a view, int32."""
    offset, length = packed.fields[name]
    return inputs[offset : offset + length]


def _scatter(table: Tensor, index: Tensor, values: Tensor) -> None:
    table.view(-1).index_copy_(0, index.long(), values)
