"""Whether a committed token ends its sequence."""

from tandem.engine_core.sequence import Sequence
from tandem.protocol.errors import FinishReason
from tandem.protocol.events import Finished


def end_of(seq: Sequence) -> Finished | None:
    """The end that the newest token brings, if it does: an end id first, then the grammar, then the length.

    Where the grammar allows nothing more, `ignore_eos` and `min_tokens` cannot be followed any further either.
    """
    token = seq.tokens[-1]
    generated = len(seq.tokens) - seq.prompt_len
    if token in seq.end_ids and generated > seq.min_tokens:
        return Finished(seq.request_id, FinishReason.STOP, token)
    if seq.constraint is not None and seq.constraint.complete:
        return Finished(seq.request_id, FinishReason.STOP, token if seq.constraint.is_end(token) else None)
    if len(seq.tokens) >= seq.total_len:
        return Finished(seq.request_id, FinishReason.LENGTH)
    return None
