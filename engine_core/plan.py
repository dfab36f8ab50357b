"""Plan of one step, as plain immutable data.

The scheduler builds a plan, the runtime executes it. A decode row is a row of length 1, a prefill chunk a longer one:
the arithmetic is the same for both. Plans are frozen msgspec structs, because 256 rows are built every step and frozen
dataclasses cost ten times as much.
"""

import itertools

from msgspec import Struct

from tandem.protocol.params import SamplingParams

PADDING_ROW = 0
"""Row of the device's tables reserved for the padded rows of a step."""
PADDING_PAGE = 0
"""Page of the KV pool reserved for the padding row: padded rows read and write it, so no sequence ever owns it."""


class ScheduledSequence(Struct, frozen=True, gc=False):
    """One sequence's share of a step.

    It covers positions `start` to `start + length - 1` of its row. A row of one position takes it from the device's
    table of lengths; `start` is the host's count.

    The defaults describe a row in steady decode: one position, sampled, with nothing to upload.
    """

    seq_id: int
    row: int
    start: int
    length: int = 1
    samples: bool = True
    """True if the row reaches the end of the known tokens, so that its last position yields a token."""
    constrained: bool = False
    """True if sampling has to wait for a mask that depends on the tokens of the previous step."""
    tokens: bytes = b""
    """Packed int32 ids of positions that the device does not know yet (prompt tokens), from `start - skipped` on."""
    new_pages: tuple[int, ...] = ()
    """Pages to append to the device's page tables: those of the first KV group, then the same number for each other
    group. `PADDING_PAGE` replaces a page outside the group's window, which the sequence has given up."""
    first_page: int = 0
    """Index of the first new page of each group in the row's page table."""
    prompt_logprob_ids: bytes = b""
    """Packed int32 ids of the prompt tokens that follow the row's positions from `num_unscored` on, if their
    log-probabilities are wanted."""
    skipped: int = 0
    """Number of positions before `start` that no row of the sequence computes, because their KV was cached; `tokens`
    begins with their ids."""
    num_unscored: int = 0
    """Number of the row's positions before the first of `prompt_logprob_ids`."""
    logits: bool = False
    """True to return the logits of the scored positions, and of the last one if it is sampled."""

    @property
    def num_scored(self) -> int:
        """Number of `prompt_logprob_ids`."""
        return len(self.prompt_logprob_ids) // 4

    @property
    def num_logits(self) -> int:
        """Number of positions whose logits are returned."""
        return self.num_scored + self.samples if self.logits else 0

    @property
    def end(self) -> int:
        """One past the last position: the position of the first sampled token."""
        return self.start + self.length


class NewSequence(Struct, frozen=True):
    """Per-sequence data that the device needs before the first row."""

    seq_id: int
    row: int
    prompt_len: int
    params: SamplingParams
    end_ids: tuple[int, ...] = ()
    """Ids to suppress before `params.min_tokens` tokens were sampled."""
    logprobs: bool = True
    """True if the request asked for log-probabilities; ignored in steps with `StepPlan.logprobs == -1`."""
    max_drafts: int = 0
    """Maximum number of drafts that a step verifies for the sequence; 0: it is decoded one token a step."""
    prediction: bytes = b""
    """Token ids of the text that the request predicts, packed as int32."""
    adapter_slot: int = 0
    """Slot of the device's memory with the sequence's adapter; 0: it has none."""


class DraftSpan(Struct, frozen=True, gc=False):
    """Known tokens of a row of which the draft model computes keys and values, as a prompt."""

    seq_id: int
    row: int
    start: int
    length: int

    @property
    def end(self) -> int:
        """One past the last position."""
        return self.start + self.length


def catch_up_tokens(rows: int) -> int:
    """Return the number of tokens of each row that the draft model computes before the first draft of a step.

    These are the newest one, and the last draft of a step that accepted all, and with few rows, for which a pass takes
    hardly longer, the positions of some steps without drafts.
    """
    return 8 if rows <= 8 else 4 if rows <= 32 else 2


class StateCopy(Struct, frozen=True, gc=False):
    """A copy between the state of a row in all recurrent layers and a slot for checkpoints."""

    row: int
    slot: int
    position: int
    """Number of tokens that the copy covers."""


class StepPlan(Struct, frozen=True):
    """One step, with at most one row for each sequence.

    Build it with `of`, `decode_only` or `followed_by`.
    """

    step_id: int
    rows: tuple[ScheduledSequence, ...]
    admitted: tuple[NewSequence, ...]
    total_tokens: int
    num_steady: int
    """Number of steady rows at the beginning: each is one sampled position, without tokens to upload or prompt
    log-probabilities. New pages and constraints are allowed."""
    needs_mask: bool
    """True if a constrained row samples."""
    is_unconstrained: bool
    """True if no row has a grammar."""
    logprobs: int = -1
    """Largest number of alternatives that a row wants with its log-probabilities; -1 without log-probabilities."""
    updated_rows: tuple[ScheduledSequence, ...] = ()
    """Rows with tokens or pages to upload."""
    num_drafts: int = 0
    """Drafts verified per row, only in steps of steady decode. The step computes 1 + num_drafts positions per row, and
    a row yields 1 to 1 + num_drafts tokens."""
    max_lead: int = 0
    """Maximum number of tokens that a row may have on the device beyond the host's count (I9)."""
    saves: tuple[StateCopy, ...] = ()
    """State copies from rows to checkpoint slots, executed before the loads and the forward pass."""
    loads: tuple[StateCopy, ...] = ()
    """State copies from checkpoint slots to rows, executed after the saves and before the forward pass."""
    has_adapters: bool = False
    """True if a running sequence has an adapter."""
    draft_spans: tuple[DraftSpan, ...] = ()
    """Positions that the draft model computes before the forward pass."""

    @property
    def is_decode_only(self) -> bool:
        """True if every row is steady: all are decoding; constraints are allowed."""
        return self.num_steady == len(self.rows)

    @property
    def is_unconstrained_decode(self) -> bool:
        """True for a step of steady decode: `is_decode_only` without constraints."""
        return self.is_decode_only and self.is_unconstrained

    @property
    def steady_rows(self) -> tuple[ScheduledSequence, ...]:
        """The first `num_steady` rows."""
        return self.rows[: self.num_steady]

    @property
    def other_rows(self) -> tuple[ScheduledSequence, ...]:
        """Rows behind the `steady_rows`, of any kind."""
        return self.rows[self.num_steady :]

    @property
    def sampled_rows(self) -> tuple[ScheduledSequence, ...]:
        """Rows that are sampled from."""
        if self.is_decode_only:
            return self.rows
        return (*self.steady_rows, *[row for row in self.other_rows if row.samples])

    @property
    def chunk_rows(self) -> tuple[ScheduledSequence, ...]:
        """Rows that are not sampled from: prefill chunks other than the last."""
        return tuple([row for row in self.other_rows if not row.samples])

    @classmethod
    def of(
        cls,
        step_id: int,
        rows: tuple[ScheduledSequence, ...],
        admitted: tuple[NewSequence, ...] = (),
        logprobs: int = -1,
    ) -> "StepPlan":
        """Build the plan of any step; all other fields are derived from the rows."""
        steady = itertools.takewhile(_is_steady, rows)
        return cls(
            step_id,
            rows,
            admitted,
            total_tokens=sum([row.length for row in rows]),
            num_steady=sum([1 for _ in steady]),
            needs_mask=any(row.constrained and row.samples for row in rows),
            is_unconstrained=not any(row.constrained for row in rows),
            logprobs=logprobs,
            updated_rows=tuple([row for row in rows if row.tokens or row.new_pages]),
        )

    @classmethod
    def decode_only(
        cls,
        step_id: int,
        rows: tuple[ScheduledSequence, ...],
        *,
        needs_mask: bool,
        logprobs: int,
        updated_rows: tuple[ScheduledSequence, ...],
        num_drafts: int = 0,
        max_lead: int = 0,
    ) -> "StepPlan":
        """Build the plan of a step of steady decode.

        Without drafts the result equals `of(step_id, rows, (), logprobs)` without inspecting the rows: the caller knows
        which rows are constrained and which have new pages.
        """
        return cls(
            step_id,
            rows,
            admitted=(),
            total_tokens=len(rows) * (1 + num_drafts),
            num_steady=len(rows),
            needs_mask=needs_mask,
            is_unconstrained=not needs_mask,
            logprobs=logprobs,
            updated_rows=updated_rows,
            num_drafts=num_drafts,
            max_lead=max_lead,
        )

    def followed_by(self, others: "StepPlan") -> "StepPlan":
        """Return a plan with all rows of two plans, this one's first.

        The result has this plan's step id and `logprobs`, and equals `of` for the rows of both.
        """
        return StepPlan(
            self.step_id,
            (*self.rows, *others.rows),
            (*self.admitted, *others.admitted),
            total_tokens=self.total_tokens + others.total_tokens,
            num_steady=self.num_steady + (others.num_steady if self.is_decode_only else 0),
            needs_mask=self.needs_mask or others.needs_mask,
            is_unconstrained=self.is_unconstrained and others.is_unconstrained,
            logprobs=self.logprobs,
            updated_rows=(*self.updated_rows, *others.updated_rows),
            max_lead=self.max_lead,
        )


def _is_steady(row: ScheduledSequence) -> bool:
    """Return True for one sampled position without tokens to upload or prompt log-probabilities."""
    return row.length == 1 and row.samples and not (row.tokens or row.prompt_logprob_ids)
