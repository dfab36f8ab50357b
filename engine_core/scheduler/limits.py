"""What bounds a step and the queue."""

from msgspec import Struct


class SchedulerLimits(Struct, frozen=True):
    max_step_tokens: int
    prefill_chunk: int
    """Positions of one prompt in a step that decodes, too; 0: prompts are computed whole."""
    max_waiting: int
    prompts_a_step: int = 0
    """0: any number."""
    max_uploads: int = 65_536
    """Cached prompt tokens that one step may bring to the device; at least as many as the longest sequence has."""
    static: bool = False
    """Static batching: a batch runs to its end before the next is admitted."""
