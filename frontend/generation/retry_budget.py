"""Limit how often a request is resubmitted after the loss of its engine."""

from collections.abc import Iterable

from msgspec import structs

from tandem.frontend.errors import ApiError, from_failure
from tandem.protocol.errors import ErrorCode
from tandem.protocol.events import Failure

ENGINE_LOSSES = frozenset((ErrorCode.ENGINE_UNAVAILABLE, ErrorCode.ENGINE_FAILED, ErrorCode.SHUTTING_DOWN))
"""Failure codes of the engine, not of the request."""
MAX_RESUBMISSIONS = 2
"""Maximum number of resubmissions of a request."""
MAX_RUNNING_LOSSES = 1
"""Maximum number of engines lost while computing a request that is resubmitted: a request that crashes engines gets no
third one."""


class RetryBudget:
    """Number of engines that a request has lost."""

    def __init__(self) -> None:
        self.num_losses = 0
        self.num_running_losses = 0
        """Losses of engines that had started to compute the request."""
        self._waiting: frozenset[int] = frozenset()
        """Ids of the sequences that the last lost engine had not started, as far as known."""
        self._failure: Failure | None = None
        """Failure of the last engine."""

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
        """Record sequences that a lost engine had started to compute.

        Return the failure of the request if it has lost too many such engines.
        """
        if self._waiting.isdisjoint(request_ids):
            return None
        self._waiting = frozenset()
        self.num_running_losses += 1
        return self._failure if self.num_running_losses > MAX_RUNNING_LOSSES else None

    def waits_for_room(self, failure: Failure, had_run: bool) -> bool:
        """Return True if a refused request waits until an engine has capacity.

        A new engine lacks capacity at first for all prompts that the last one had computed. A refusal with a
        Retry-After is final: the engine gives it after its own wait for a grammar.
        """
        is_full = failure.code is ErrorCode.OVERLOADED and not failure.retry_after
        return is_full and self.num_losses > 0 and not had_run

    def error(self, failure: Failure, retry_after: int) -> ApiError:
        """Return the error of a request that ends with this failure."""
        if failure.code in ENGINE_LOSSES and self.num_losses > 1:
            lost = f"{self.num_losses} engines were lost with this request, which is not sent to another"
            failure = structs.replace(failure, message=f"{failure.message}; {lost}")
        return from_failure(failure, retry_after)
