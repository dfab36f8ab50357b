"""Number of times that a request may be submitted again."""

MAX_RESUBMISSIONS = 2
"""Most times that a request is submitted again after the loss of its engine."""
MAX_RUNNING_LOSSES = 1
"""Most engines that may be lost while they compute a request that is submitted again: a request that makes engines fail
gets no third one."""


class Attempts:
    """Count of the engines that one request has lost."""

    def __init__(self) -> None:
        self.num_losses = 0
        self.num_running_losses = 0
        """Losses of engines that had begun to compute the request."""

    def lose(self, had_run: bool) -> bool:
        """Count the loss of an engine; return True if the request may be submitted again."""
        self.num_losses += 1
        self.num_running_losses += had_run
        return self.num_losses <= MAX_RESUBMISSIONS and self.num_running_losses <= MAX_RUNNING_LOSSES
