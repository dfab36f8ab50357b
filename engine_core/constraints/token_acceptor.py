"""Tokens of a step, which matchers accept together."""

from collections.abc import Sequence
from typing import cast

from tandem.engine_core.constraints.grammars import GrammarConstraint
from tandem.engine_core.constraints.workers.pool import WorkerPool
from tandem.engine_core.contracts import Constraint


class TokenAcceptor:
    """Implement `contracts.Acceptor` for `GrammarConstraint`s only."""

    def __init__(self, workers: WorkerPool) -> None:
        self.workers = workers

    def accept_ahead(self, tokens: Sequence[tuple[Constraint, int]]) -> None:
        """Implement `Acceptor.accept_ahead`.

        The workers accept their tokens while this thread accepts the others, and then go on with what they can compute
        of the next masks.
        """
        here, remote = [], []
        for constraint, token in cast("Sequence[tuple[GrammarConstraint, int]]", tokens):
            followed = constraint.remote
            if followed is None:
                here.append((constraint, token))
            else:
                followed.begin_accept(token)
                remote.append((constraint, token, followed))
        self.workers.post()
        for constraint, token in here:
            if not constraint.overdrawn:
                matcher = constraint.matcher
                accepted = matcher.consume_token(token)
                goes_on = accepted and not matcher.is_stopped()
                constraint.advance(token, accepted, matcher.compute_ff_tokens() if goes_on else None)
        self.workers.wait()
        for constraint, token, followed in remote:
            constraint.advance(token, *followed.end_accept())
