"""What a grammar means for the sequences that have to follow one, between two steps. Pure, like the scheduler."""

from collections.abc import Mapping

from tandem.engine_core.contracts import Constraint, ConstraintAdvancer, Masks, TokenDelta
from tandem.engine_core.plan import StepPlan
from tandem.engine_core.sequence import Sequence
from tandem.protocol.errors import ErrorCode, FinishReason
from tandem.protocol.events import Failure, Finished


def check_stop(seq: Sequence) -> Finished | None:
    """The end that the newest token brings, if it does: an end id first, then the grammar, then the length.

    Where the grammar allows nothing more, `ignore_eos` and `min_tokens` cannot be followed any further either.
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


def get_masks(plan: StepPlan, held: Mapping[int, Sequence]) -> Masks:
    """The constraints that the sampling of a step waits for. Rows that have ended meanwhile need none."""
    return [(plan.rows[index].row, constraint) for index, constraint in _constrained(plan, held)]


def advance_constraints(
    advancer: ConstraintAdvancer, plan: StepPlan, tokens: list[int], held: Mapping[int, Sequence]
) -> set[int]:
    """Advances the constraints of a step by what was sampled; the sequences whose grammar does not take their token.

    The mask leaves such a token no chance, so this is a grammar too complex to go on with, or one that allows nothing
    beside what `min_tokens` forbids.
    """
    rows = _constrained(plan, held)
    accepted = advancer.accept([(constraint, tokens[index]) for index, constraint in rows])
    return {plan.rows[index].seq_id for (index, _), taken in zip(rows, accepted, strict=True) if not taken}


def _constrained(plan: StepPlan, held: Mapping[int, Sequence]) -> list[tuple[int, Constraint]]:
    """The rows, by index, that sample under a constraint and whose sequence lives."""
    found = []
    for index, row in enumerate(plan.rows):
        if row.constrained and row.samples:
            seq = held[row.seq_id]
            if seq.outcome is None and seq.constraint is not None:
                found.append((index, seq.constraint))
    return found


def grammar_error(seq: Sequence) -> Failure:
    """The end of a sequence whose grammar refused its newest token."""
    problem = seq.constraint.problem if seq.constraint is not None else ""
    message = f"the grammar cannot be followed any further after {seq.generated} tokens: {problem}"
    return Failure(seq.request_id, ErrorCode.GRAMMAR_FAILED, message)


def append(seq: Sequence, token: int, delta: TokenDelta) -> Finished | Failure | None:
    """Gives a sequence its next token, which goes to the client; its end, if that was it."""
    seq.tokens.append(token)
    delta.request_ids.append(seq.request_id)
    delta.tokens.append(token)
    return check_stop(seq)


def jump_forward(advancer: ConstraintAdvancer, seq: Sequence, delta: TokenDelta) -> Finished | Failure | None:
    """Appends the tokens that the grammar forces, without computing the steps that would sample them.

    Only for a sequence with no sample in flight. They are generated tokens like others: they go to the client, count,
    and may end the sequence. The device does not have them, so the next row uploads them. Log-probabilities are those
    of sampling, so a sequence that wants them never jumps.
    """
    constraint = seq.constraint
    assert constraint is not None and seq.num_inflight_samples == 0, f"no jump for {seq}"
    if seq.logprobs is not None or seq.scored:
        return None
    before = len(seq.tokens)
    outcome: Finished | Failure | None = None
    for token in constraint.fast_forward_tokens():
        if token in seq.end_ids and seq.generated < seq.min_tokens:
            break
        if not advancer.accept([(constraint, token)])[0]:
            outcome = grammar_error(seq)
            break
        outcome = append(seq, token, delta)
        if outcome is not None:
            break
    if len(seq.tokens) > before:
        seq.jumped()
    return outcome
