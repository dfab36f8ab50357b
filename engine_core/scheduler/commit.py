"""Committed tokens, and the updates that frontends get of them.

Tokens are appended up to the one that ends a sequence; a grammar may force some.
"""

from collections.abc import Iterable, Mapping

from msgspec import Struct, field

from tandem.engine_core.contracts import NO_TOKEN, Constraint, InternedList, MaskedRows, StepResult, TokenDelta
from tandem.engine_core.plan import StepPlan
from tandem.engine_core.sequence import Sequence
from tandem.protocol.errors import ErrorCode, FinishReason
from tandem.protocol.events import Failure, Finished, Started


class SchedulerUpdates(Struct):
    """Starts, tokens and ends since the updates were taken last.

    Frontends have to learn all of them.
    """

    started: list[tuple[bytes, Started]] = field(default_factory=list)
    """Frontend and start of each request that was admitted, again where more of its prompt was found in the cache."""
    deltas: dict[bytes, TokenDelta] = field(default_factory=dict)
    """New tokens by frontend."""
    ended: list[Sequence] = field(default_factory=list)
    """Sequences that got their outcome, each exactly once (I8)."""
    num_zombies: int = 0
    """Committed rows of sequences that had already ended."""
    first_tokens: list[Sequence] = field(default_factory=list)
    """Sequences that got their first token."""
    verified: Mapping[tuple[int, int], int] = {}
    """Number of committed rows by their drafts and how many of these were accepted, without rows that can have none."""

    @property
    def num_tokens(self) -> int:
        """Number of new tokens over all frontends."""
        return sum([len(delta.tokens) for delta in self.deltas.values()])

    def delta(self, client: bytes) -> TokenDelta:
        """Return the delta that collects a frontend's tokens."""
        found = self.deltas.get(client)
        if found is None:
            found = self.deltas[client] = TokenDelta([], [])
        return found

    def report_start(self, seq: Sequence) -> None:
        """Add the start of a sequence, or of its continuation under other weights.

        Does nothing if it was reported before with the same number of cached tokens, or if the sequence has output.
        """
        cached, wire, version = seq.cache.num_cached_tokens, seq.wire, seq.weights.name
        is_changed = wire.reported_version != version or (wire.reported_cached != cached and not seq.generated)
        if wire.reported_cached < 0 or is_changed:
            generated = seq.generated if wire.reported_cached >= 0 else 0
            wire.reported_cached, wire.reported_version = cached, version
            self.started.append((seq.client, Started(seq.request_id, cached, version, generated)))


def append_tokens(
    seq: Sequence, tokens: Iterable[int], updates: SchedulerUpdates, is_advanced: bool = False
) -> Finished | Failure | None:
    """Append tokens to a sequence and to the updates, up to the one that ends it.

    The sequence's constraint advances with each token, unless it has (`is_advanced`). Return the outcome, or None if
    the sequence continues; tokens after the one that ended it are dropped.
    """
    constraint, known, delta = seq.constraint, seq.tokens, updates.delta(seq.client)
    for token in tokens:
        if token == NO_TOKEN:
            return _model_error(seq)
        if constraint is not None and not is_advanced and not constraint.accept(token):
            return _grammar_error(seq, constraint)
        known.append(token)
        delta.request_ids.append(seq.request_id)
        delta.tokens.append(token)
        is_complete = constraint is not None and not is_advanced and constraint.is_complete
        if is_complete or token in seq.end_ids or len(known) >= seq.total_len:
            outcome = check_stop(seq)
            if outcome is not None:
                return outcome
    return None


def check_stop(seq: Sequence) -> Finished | None:
    """Return the outcome that the newest token causes, or None.

    An end id is checked first, then the grammar, then the length. A complete grammar ends
    the sequence even with `ignore_eos` or before `min_tokens`.
    """
    token = seq.tokens[-1]
    generated = len(seq.tokens) - seq.prompt_len
    if token in seq.end_ids and generated > seq.min_tokens:
        return Finished(seq.request_id, FinishReason.STOP, token)
    if seq.constraint is not None and seq.constraint.is_complete:
        return Finished(seq.request_id, FinishReason.STOP, token if seq.constraint.is_end(token) else None)
    if len(seq.tokens) >= seq.total_len:
        return Finished(seq.request_id, FinishReason.LENGTH)
    return None


class StepMasks:
    """Constraints that sampling the newest step needs.

    Rows whose sequence has ended, or whose token is known already because its grammar forced it, need none. Rows are
    looked at once for each step: afterwards those that need none any more are dropped.
    """

    def __init__(self, held: Mapping[int, Sequence]) -> None:
        """Keep the sequences of all steps in flight, by id."""
        self._held = held
        self._plan: StepPlan | None = None
        self._needed: dict[int, tuple[int, Constraint]] = {}
        """Row and constraint by the sequence's id, in the plan's order."""
        self._masks: MaskedRows | None = None
        """The same as `of` returned it, until some are dropped."""
        self._before: MaskedRows = ()
        """Its last result, unless a sequence has ended or jumped since: an ended one is kept by nothing."""

    def of(self, plan: StepPlan) -> MaskedRows:
        """Return the constraints of a step that is not sampled yet.

        They are the same object as long as they are equal, over many steps too.
        """
        if plan is not self._plan:
            self._plan = plan
            # Where each row is the next token of a sequence that needed its mask in the step before, nothing is new.
            if plan.is_decode_only and [row.seq_id for row in plan.rows] == list(self._needed):
                return self._newest()
            held, self._masks = self._held, None
            self._needed = {
                row.seq_id: (row.row, seq.constraint)
                for row in plan.rows
                if row.constrained
                and row.samples
                and (seq := held[row.seq_id]).outcome is None
                and seq.constraint is not None
                and row.start + row.length >= len(seq.tokens)
            }
        return self._newest()

    def _newest(self) -> MaskedRows:
        if self._masks is None:
            found = InternedList(self._needed.values())
            self._masks = self._before = self._before if found == self._before else found
        return self._masks

    def drop(self, seq_id: int) -> None:
        """Note that a sequence needs no mask in the newest step any more."""
        self._before = ()
        if self._needed.pop(seq_id, None) is not None:
            self._masks = None


def masked_tokens(plan: StepPlan, result: StepResult, masks: MaskedRows) -> list[int]:
    """Return the token that a step sampled under each mask.

    Return none at all if a row has not got exactly one.
    """
    sampled = plan.sampled_rows
    if plan.num_drafts:
        runs = zip(plan.rows, result.runs(), strict=True)
        found = {row.row: run[0] for row, run in runs if row.constrained and len(run) == 1}
        return [found[row] for row, _ in masks] if all(row in found for row, _ in masks) else []
    if not result.has_one_each(len(sampled)):
        return []
    if len(masks) == len(sampled):
        return result.tokens
    tokens = dict(zip([row.row for row in sampled], result.tokens, strict=True))
    return [tokens[row] for row, _ in masks]


def jump_forward(seq: Sequence, updates: SchedulerUpdates, least: int) -> Finished | Failure | None:
    """Append the tokens that the grammar forces.

    The steps that would sample them are skipped; where they are fewer than `least`, nothing is appended. Forced tokens
    are generated tokens like any other: they go to the client, count against the limits and may end the sequence, whose
    outcome is returned. The device does not have them, so the next row uploads them. A sample in flight would be the
    first of them: its row is not sampled yet, since it waits for its mask, and its sample is dropped. Log-probabilities
    come from sampling, so a sequence that wants them never jumps.
    """
    constraint = seq.constraint
    assert constraint is not None and seq.num_inflight_samples <= 1, f"no jump for {seq}"
    if seq.submit.logprobs is not None or seq.needs_prompt_logprobs:
        return None
    tokens = constraint.fast_forward_tokens()
    if len(tokens) - seq.num_inflight_samples < least:
        return None  # The step in flight samples the first one.
    before = len(seq.tokens)
    if seq.end_ids.isdisjoint(tokens):
        outcome = _append_forced(seq, constraint, tokens[: seq.total_len - before], updates)
    else:
        for index, token in enumerate(tokens):
            if token in seq.end_ids and seq.generated + index < seq.min_tokens:
                del tokens[index:]
                break
        outcome = append_tokens(seq, tokens, updates)
    if len(seq.tokens) > before:
        seq.jumped()
    return outcome


def _append_forced(
    seq: Sequence, constraint: Constraint, tokens: list[int], updates: SchedulerUpdates
) -> Finished | Failure | None:
    """Append forced tokens without end ids, up to the sequence's maximum length.

    The effect equals `append_tokens`, which checks each token.
    """
    if not constraint.accept_forced(tokens):
        return _grammar_error(seq, constraint)
    delta = updates.delta(seq.client)
    seq.tokens.extend(tokens)
    delta.request_ids.extend([seq.request_id] * len(tokens))
    delta.tokens.extend(tokens)
    return check_stop(seq) if constraint.is_complete or len(seq.tokens) >= seq.total_len else None


def _grammar_error(seq: Sequence, constraint: Constraint) -> Failure:
    """Return the outcome of a sequence after its grammar rejected the newest token.

    The mask excludes such a token, so the grammar is too complex to be followed further, or it only allows tokens that
    `min_tokens` forbids.
    """
    message = f"the grammar cannot be followed any further after {seq.generated} tokens: {constraint.problem}"
    return Failure(seq.request_id, ErrorCode.GRAMMAR_FAILED, message)


def _model_error(seq: Sequence) -> Failure:
    """Return the outcome of a sequence for which the model computed no distribution."""
    message = (
        f"the model gave no usable logits (NaN or infinite) after {seq.generated} generated tokens; a --dtype with a "
        "larger range (bfloat16 or float32) helps if its numbers overflow, otherwise check the checkpoint's weights"
    )
    return Failure(seq.request_id, ErrorCode.MODEL_FAILED, message)
