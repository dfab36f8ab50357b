"""Number of times that a request may be submitted again."""

from collections.abc import Iterable

from msgspec import structs

from tandem.frontend.errors import ApiError, from_failure
from tandem.protocol.errors import ErrorCode
from tandem.protocol.events import Failure

ENGINE_LOSSES = frozenset((ErrorCode.ENGINE_UNAVAILABLE, ErrorCode.ENGINE_FAILED, ErrorCode.SHUTTING_DOWN))
"""Codes of failures that are the engine's, not the request's own."""
MAX_RESUBMISSIONS = 2
"""Most times that a request is submitted again after the loss of its engine."""
MAX_RUNNING_LOSSES = 1
"""Most engines that may be lost while they compute a request that is submitted again: a request that makes engines fail
gets no third one."""


class RetryBudget:
    """Count of the engines that one request has lost."""

    def __init__(self) -> None:
        self.num_losses = 0
        self.num_running_losses = 0
        """Losses of engines that had begun to compute the request."""
        self._waiting: frozenset[int] = frozenset()
        """Ids of the sequences that the last lost engine had not begun to compute, as far as is known."""
        self._failure: Failure | None = None
        """Failure by which the last engine was lost."""

    def lose(self, failure: Failure, had_run: bool, request_ids: Iterable[int]) -> bool:
        """Count the loss of an engine with these sequences.

        Return True if the request may be submitted again.
        """
        self.num_losses += 1
        self.num_running_losses += had_run
        self._failure = failure
        self._waiting = frozenset() if had_run else frozenset(request_ids)
        return self.num_losses <= MAX_RESUBMISSIONS and self.num_running_losses <= MAX_RUNNING_LOSSES

    def note_launched(self, request_ids: frozenset[int]) -> Failure | None:
        """Learn of sequences that a lost engine had begun to compute.

        Return the failure by which the request ends if it was lost with too many such engines.
        """
        if self._waiting.isdisjoint(request_ids):
            return None
        self._waiting = frozenset()
        self.num_running_losses += 1
        return self._failure if self.num_running_losses > MAX_RUNNING_LOSSES else None

    def waits_for_room(self, failure: Failure, had_run: bool) -> bool:
        """Return True if a request that was refused waits until an engine has room.

        A new engine has none at once for all prompts that the last one had computed. A refusal that says when to try
        again is the answer of the request: the engine gives it after a wait of its own, for a grammar.
        """
        is_full = failure.code is ErrorCode.OVERLOADED and not failure.retry_after
        return is_full and self.num_losses > 0 and not had_run

    def error(self, failure: Failure, retry_after: int) -> ApiError:
        """Return the error of a request that ends with this failure."""
        if failure.code in ENGINE_LOSSES and self.num_losses > 1:
            lost = f"{self.num_losses} engines were lost with this request, which is not sent to another"
            failure = structs.replace(failure, message=f"{failure.message}; {lost}")
        return from_failure(failure, retry_after)
