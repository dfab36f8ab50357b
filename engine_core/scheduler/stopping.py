"""Whether a committed token ends its sequence."""

from engine_core.scheduler.sequence import Sequence
from protocol.errors import FinishReason
from protocol.events import Finished


def end_of(seq: Sequence) -> Finished | None:
    """The end that the newest token brings, if it does: an end id first, then the length."""
    token = seq.tokens[-1]
    generated = len(seq.tokens) - seq.prompt_len
    if token in seq.end_ids and generated > seq.min_tokens:
        return Finished(seq.request_id, FinishReason.STOP, token)
    if len(seq.tokens) >= seq.total_len:
        return Finished(seq.request_id, FinishReason.LENGTH)
    return None
