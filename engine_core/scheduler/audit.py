"""Compare the host's bounds with the lengths on the device (I9)."""

from collections.abc import Collection, Iterable
from collections.abc import Sequence as Items

from tandem.engine_core.sequence import Sequence


def audit_lengths(sequences: Iterable[Sequence], lengths: Items[int], unsampled: Collection[int] = ()) -> list[str]:
    """Return one line for each sequence with bounds that do not contain the device's length.

    sequences: all that have a row; lengths: the device's, by row, after everything enqueued; unsampled: ids of the
    sequences that a launched step is yet to sample.
    """
    problems = []
    for seq in sequences:
        if seq.outcome is not None or seq.num_scheduled_tokens < seq.device.upload_end:
            continue  # Further samples are dropped, or the device does not know all tokens yet.
        length, least = lengths[seq.row], seq.min_device_len - (seq.id in unsampled)
        if not least <= length <= seq.max_device_len or not (seq.inflight or least == length == seq.max_device_len):
            problems.append(f"{seq} has {length} tokens on the device, not {least} to {seq.max_device_len}")
    return problems
