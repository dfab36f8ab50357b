"""Sampling of a decode step on the device alone, so that a CUDA graph can hold it: greedy, plain or full.

Everything about a row is read from device tables by row index; grids depend on the shapes only, and no call allocates,
synchronises or reads the host. The three methods give one row the same token wherever more than one of them applies:
`greedy` for steps whose rows all take their best token, `plain` where some draw from the whole softmax, `full` for the
rest. Semantics, in order: `sampling.sampler.sample`.
"""

import torch
import triton
from torch import Tensor

from tandem.engine_core.kernels.sampling.bracket import PIVOTS, STATS
from tandem.engine_core.kernels.sampling.cutoff import find_cutoff
from tandem.engine_core.kernels.sampling.draw import AGAIN, FIRST, LAST, PLAIN, draw, row_best
from tandem.engine_core.kernels.sampling.greedy import NOTHING, check_logits, sample_greedy
from tandem.engine_core.kernels.sampling.narrow import narrow
from tandem.engine_core.kernels.sampling.penalties import adjust, mark
from tandem.engine_core.kernels.sampling.top_p_rejection import weigh

TILE = 4096
"""Tokens a program holds. It must not depend on the batch: a row's sums would change with it."""
GROUP = 64
"""Tokens of which only the largest counts when top-k looks for its bound."""
CAPACITY = 2048
"""Tokens of a row among which its cutoff is searched quickly."""
TRIES = 2
"""Draws of a row with top-p before its cutoff is searched: at 0.9 one row in about two hundred is left for that."""


class DeviceSampler:
    """The tables that sampling reads, and its scratch: about 8 bytes for each token of the vocabulary and row.

    One instance serves all steps that are enqueued one after the other on one stream, graphs included.
    """

    def __init__(
        self,
        tokens: Tensor,
        ints: Tensor,
        floats: Tensor,
        bias: Tensor,
        suppressed: Tensor,
        vocab_size: int,
        max_batch: int,
        *,
        tile: int = TILE,
        group: int = GROUP,
        capacity: int = CAPACITY,
        tries: int = TRIES,
    ) -> None:
        """tokens: [R, max_len] int32; ints: [R, 6] int64 (row, prompt_len, top_k, choice, seed, unused); floats:
        [R, 6] float32 (temperature, top_p, min_p, repetition, presence, frequency); bias: [2, R * K] int32, ids (-1
        for none) and the bits of float32 values, K a power of two; suppressed: [R, E] int32, -1 for none. Row 0 is
        padding. `tile`, `group` and `capacity` are powers of two. tries: 0 searches every cutoff, for tests.
        """
        self.tokens = tokens
        self.ints = ints
        self.floats = floats
        self.bias = bias.view(2, len(tokens), -1)
        self.suppressed = suppressed
        self.vocab_size = vocab_size
        self.max_batch = max_batch
        self.tile = tile
        self.group = group
        self.tries = tries
        self.pdl = tokens.is_cuda
        device = tokens.device
        tiles = triton.cdiv(vocab_size, tile)
        width = triton.cdiv(vocab_size, 64) * 64

        def scratch(*shape: int, dtype: torch.dtype = torch.float32, fill: int = 0) -> Tensor:
            return torch.full((max_batch, *shape), fill, dtype=dtype, device=device)

        self._winner = scratch(dtype=torch.int64, fill=NOTHING.value)
        self._arrivals = scratch(dtype=torch.int32)
        self._best = scratch(tiles, dtype=torch.int64)
        self._marks = scratch(width, dtype=torch.int32)
        self._adjusted = scratch(width)
        self._touched = scratch(dtype=torch.int32)
        self._stats = scratch(tiles, STATS.value)
        self._peaks = scratch(tiles, tile // group)
        self._bound = scratch()
        self._pivots = scratch(2, PIVOTS.value)
        self._above = scratch(2, tiles, PIVOTS.value)
        self._sums = scratch(tiles, 2)
        self._found = scratch(dtype=torch.int32)
        self._found_ids = scratch(capacity, dtype=torch.int32)
        self._found_logits = scratch(capacity)
        self._cutoff = scratch(dtype=torch.int64)
        self._state = scratch(dtype=torch.int32)

    @property
    def scratch_bytes(self) -> int:
        """Device memory of the scratch buffers."""
        return sum(value.nbytes for name, value in vars(self).items() if name.startswith("_"))

    def greedy(
        self,
        logits: Tensor,
        rows: Tensor,
        positions: Tensor,
        suppress: Tensor,
        sampled: Tensor,
        allowed: Tensor | None = None,
    ) -> None:
        """Each row's largest logit, whatever its parameters. `suppress` is not looked at; ValueError for a mask."""
        if allowed is not None:
            raise ValueError("a mask needs the full mode")
        self._check(logits, rows)
        if len(rows):
            common = (self.tokens, self._winner, self._arrivals, sampled, self.tile, self.pdl)
            sample_greedy(logits, rows, positions, *common)

    def plain(
        self,
        logits: Tensor,
        rows: Tensor,
        positions: Tensor,
        suppress: Tensor,
        sampled: Tensor,
        allowed: Tensor | None = None,
    ) -> None:
        """Draws at each row's temperature and uses no other parameter. As `greedy` about `suppress` and masks."""
        if allowed is not None:
            raise ValueError("a mask needs the full mode")
        self._check(logits, rows)
        if len(rows):
            row_best(logits, rows, self._best, self.tile, self.pdl)
            self._draw(logits, rows, positions, PLAIN.value, sampled)

    def full(
        self,
        logits: Tensor,
        rows: Tensor,
        positions: Tensor,
        suppress: Tensor,
        sampled: Tensor,
        allowed: Tensor | None = None,
    ) -> None:
        """Samples with everything a row's parameters ask for.

        logits: [B, V] float32, bfloat16 or float16, rows contiguous, not modified; rows: [B] int32; positions: [B]
        int32, the position whose logits these are; suppress: [B] int32, whether the row's suppressed ids may not be
        sampled now; sampled: [B] int32, written, as is tokens[rows[b], positions[b] + 1]; allowed: None, or [B,
        ceil(V / 32)] int32 as in `apply_bitmask`. ValueError for logits of another kind, vocabulary or batch.
        """
        self._check(logits, rows)
        if not len(rows):
            return
        ints, floats, pdl = self.ints, self.floats, self.pdl
        marks = (self._marks, self._adjusted, self._touched)
        tables = (self.tokens, ints, floats, self.bias, self.suppressed)
        mark(rows, positions, suppress, *tables, *marks, self.vocab_size, allowed is not None, pdl)
        adjust(logits, rows, ints, floats, allowed, *marks, self._best, self._peaks, self.tile, self.group, pdl)
        self._try(logits, rows, positions, sampled)
        row = (logits, rows, ints, floats, self._adjusted, self._touched, self._state)
        seen = (self._best, self._stats, self._peaks, self._bound, self._pivots, self._above)
        found = (self._sums, self._found, self._found_ids, self._found_logits)
        narrow(*row, *seen, *found, self.tile, self.group, pdl)
        find_cutoff(*row, self._best, *found, self._cutoff, self.tile, pdl)
        self._draw(logits, rows, positions, LAST.value, sampled)

    def _try(self, logits: Tensor, rows: Tensor, positions: Tensor, sampled: Tensor) -> None:
        """Draws rows without top-k, and leaves in the state of each whether its cutoff must be known after all."""
        row = (logits, rows, self.ints, self.floats, self._adjusted, self._touched, self._best, sampled)
        written = (self._stats, self._state, self._cutoff, self._arrivals)
        attempts = max(1, self.tries)
        for attempt in range(attempts):
            first, last = attempt == 0, attempt == attempts - 1
            self._draw(logits, rows, positions, FIRST.value if first else AGAIN.value, sampled)
            weigh(*row, *written, self.tile, first=first, last=last, accept=self.tries > 0, pdl=self.pdl)

    def _draw(self, logits: Tensor, rows: Tensor, positions: Tensor, turn: int, sampled: Tensor) -> None:
        draw(
            *(logits, rows, positions, self.ints, self.floats, self._best),
            None if turn == PLAIN.value else (self._adjusted, self._touched, self._state, self._cutoff),
            turn,
            *(self.tokens, self._winner, self._arrivals, sampled),
            block=self.tile,
            pdl=self.pdl,
        )

    def _check(self, logits: Tensor, rows: Tensor) -> None:
        check_logits(logits)
        if logits.shape[1] != self.vocab_size or not len(rows) == len(logits) <= self.max_batch:
            raise ValueError(
                f"logits of shape {tuple(logits.shape)} for {len(rows)} rows do not fit a vocabulary of "
                f"{self.vocab_size} and steps of up to {self.max_batch} rows"
            )
