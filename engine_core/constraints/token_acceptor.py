"""Tokens of a step, which the matchers of many rows accept on several threads."""

from collections.abc import Callable, Mapping, Sequence
from typing import cast

from llguidance import LLExecutor

from tandem.engine_core.constraints.faster_way import FasterWay
from tandem.engine_core.constraints.grammars import GrammarConstraint
from tandem.engine_core.constraints.threads import by_base, fitting
from tandem.engine_core.contracts import Constraint


class TokenAcceptor:
    """Implement `contracts.Acceptor` for `GrammarConstraint`s only."""

    def __init__(self, executors: Mapping[int, LLExecutor], clock: Callable[[], float]) -> None:
        """Keep the threads.

        executors: threads besides the loop's, by their number, the fewest first; clock: seconds.
        """
        self.executors = executors
        self.clock = clock
        self._threads_help = FasterWay()

    def accept_ahead(self, tokens: Sequence[tuple[Constraint, int]]) -> None:
        pairs = [pair for pair in cast("Sequence[tuple[GrammarConstraint, int]]", tokens) if not pair[0].overdrawn]
        groups = by_base(pairs)
        executor = fitting(self.executors, groups)
        if executor is None:
            return
        start, parallel = self.clock(), self._threads_help.choose()
        if parallel:
            pairs = [pair for group in groups for pair in group]
            accepted = executor.consume_token_par([(constraint.matcher, token) for constraint, token in pairs])
        else:
            accepted = [constraint.matcher.consume_token(token) for constraint, token in pairs]
        for (constraint, token), was_accepted in zip(pairs, accepted, strict=True):
            constraint.ahead = (token, was_accepted)
        self._threads_help.record(parallel, self.clock() - start, len(pairs))
