"""Prompts that wait for their first output."""

from collections import deque

from tandem.engine_core.sequence import Sequence


class QueuedPrompts:
    """Count of the prompt tokens of all open sequences without output.

    The choices of a request share their prompt, which counts with the first of them.

    A prompt leaves with the commit of the step that samples its first token, or with the end of its sequence. Every
    method takes constant time, counted over all calls.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._lengths: dict[int, int] = {}
        """Length of each prompt that counts, by sequence."""
        self._sampled: deque[tuple[int, int]] = deque()
        """Launched steps that sample a first token, and its sequence, in the order of launches."""

    def add(self, seq: Sequence) -> None:
        """Count the prompt of an accepted sequence."""
        self._lengths[seq.id] = counted = seq.prompt_len if seq.submit.sampling.choice == 0 else 0
        self.num_tokens += counted

    def on_sample(self, seq_id: int, step_id: int) -> None:
        """Note that a launched step samples a token of a sequence."""
        if seq_id in self._lengths:
            self._sampled.append((step_id, seq_id))

    def on_commit(self, step_id: int) -> list[int]:
        """Remove the prompts that got their first token in the committed step.

        Return their sequences, without those that have ended.
        """
        sampled, removed = self._sampled, []
        while sampled and sampled[0][0] <= step_id:
            seq_id = sampled.popleft()[1]
            if seq_id in self._lengths:
                self.remove(seq_id)
                removed.append(seq_id)
        return removed

    def remove(self, seq_id: int) -> None:
        """Remove the prompt of a sequence that has output or has ended. Idempotent."""
        self.num_tokens -= self._lengths.pop(seq_id, 0)
