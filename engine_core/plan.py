"""What one step computes: plain immutable data that the scheduler makes and the runtime executes.

A decode row is a row of length 1, a prefill chunk a longer one: one arithmetic, one shape.
Frozen msgspec structs, because 256 of them are built every step (a tenth of the cost of frozen dataclasses).
"""

from msgspec import Struct

from tandem.protocol.params import SamplingParams


class ScheduledSequence(Struct, frozen=True, gc=False):
    """One sequence's share of a step: positions `start` to `start + length - 1` of its row."""

    seq_id: int
    row: int
    start: int
    length: int
    samples: bool
    """Whether the row reaches the end of what is known, so that its last position yields a token."""
    suppress_ends: bool = False
    """Whether that token may not end the sequence (`min_tokens`)."""
    constrained: bool = False
    """Whether sampling has to wait for a mask that depends on the tokens of the step before."""
    tokens: bytes = b""
    """Packed int32 ids of positions that the device does not know yet (prompt tokens), from `start - skipped` on."""
    new_pages: tuple[int, ...] = ()
    first_page: int = 0
    """Index of `new_pages[0]` in the row's page table."""
    targets: bytes = b""
    """Packed int32 ids of the tokens that follow the leading positions, where their log-probabilities are wanted: these
    positions are scored."""
    skipped: int = 0
    """How many positions before `start` are not computed by any row of the sequence, for their KV was cached: `tokens`
    begins with theirs."""

    @property
    def end(self) -> int:
        """One past the last position computed, and the position that a sampled token takes."""
        return self.start + self.length


class NewSequence(Struct, frozen=True):
    """What the device has to know of a sequence before its first row."""

    seq_id: int
    row: int
    prompt_len: int
    params: SamplingParams
    end_ids: tuple[int, ...] = ()
    """Ids to suppress while the row's `suppress_ends` is set."""


class StepPlan(Struct, frozen=True):
    """One step: at most one row a sequence. Make it with `of`, which derives the rest from the rows."""

    step_id: int
    rows: tuple[ScheduledSequence, ...]
    admitted: tuple[NewSequence, ...]
    total_tokens: int
    needs_mask: bool
    is_unconstrained_decode: bool
    """Whether every row is one sampled position and nothing else (tokens to upload, constraint, suppressed end), maybe
    with new pages: steady decode."""
    is_decode_only: bool
    """The same, constrained or not, and with a suppressed end or not: its logits can come from a graph."""
    logprobs: int = -1
    """Most alternatives that a row wants with its log-probabilities; -1: no row wants any."""
    updated_rows: tuple[ScheduledSequence, ...] = ()
    """The rows that bring tokens or pages."""

    @classmethod
    def of(
        cls,
        step_id: int,
        rows: tuple[ScheduledSequence, ...],
        admitted: tuple[NewSequence, ...] = (),
        logprobs: int = -1,
    ) -> "StepPlan":
        single = all(row.length == 1 and row.samples and not (row.tokens or row.targets) for row in rows)
        return cls(
            step_id,
            rows,
            admitted,
            total_tokens=sum([row.length for row in rows]),
            needs_mask=any(row.constrained and row.samples for row in rows),
            is_unconstrained_decode=single and not any(row.constrained or row.suppress_ends for row in rows),
            is_decode_only=single,
            logprobs=logprobs,
            updated_rows=tuple([row for row in rows if row.tokens or row.new_pages]),
        )
