"""Tokens of a step, which matchers accept together."""

from collections.abc import Sequence, Set
from typing import cast

import numpy as np

from tandem.engine_core.constraints.grammars import GrammarConstraint
from tandem.engine_core.constraints.workers.channel import ACCEPT, ACCEPTED, FAILED, FORCES, STOPPED
from tandem.engine_core.constraints.workers.pool import Batch, WorkerPool
from tandem.engine_core.contracts import Masks


class TokenAcceptor:
    """Implement `contracts.Acceptor` for `GrammarConstraint`s only.

    Most tokens are accepted by a grammar that goes on and forces little: their constraints are not looked at again.
    Work for each row of a step is kept out of the loops here as far as can be: 256 rows take 0.1 ms for each call in
    them.
    """

    def __init__(self, workers: WorkerPool | None = None) -> None:
        self.workers = workers
        self._rows: list[int] = []
        self._constraints: list[GrammarConstraint] = []
        self._tokens: Sequence[int] = ()
        self._least = 1
        """Fewest forced tokens that matter."""
        self._here: list[int] = []
        """Indices of the constraints whose matcher is in this process."""
        self._remote: list[Batch] = []
        """Those of others."""

    def begin(self, masks: Masks, tokens: Sequence[int], least: int) -> bool:
        """Implement `Acceptor.begin`.

        What the workers are to do is sent with the masks that they are to begin with, or by `finish`.
        """
        self._rows = [row for row, _ in masks]
        self._constraints = constraints = [cast("GrammarConstraint", constraint) for _, constraint in masks]
        self._tokens, self._least, self._remote = tokens, least, []
        if self.workers is None:
            self._here = list(range(len(constraints)))
            return False
        for constraint, token in zip(constraints, tokens, strict=True):
            if constraint.remote is not None:
                constraint.remote.tokens.append(token)
        ids = np.array([constraint.remote_id for constraint in constraints], dtype=np.int32)
        self._here = np.flatnonzero(ids < 0).tolist()
        self._remote = self.workers.begin(ACCEPT, ids, np.array(tokens, dtype=np.int32))
        return bool(self._remote)

    def finish(self) -> Set[int]:
        """Implement `Acceptor.finish`."""
        if self._remote and self.workers is not None:
            self.workers.post_awaited()
        settled = set(self._rows)
        settled.difference_update(self._accept_here())
        if self._remote and self.workers is not None:
            self.workers.wait_accepted()
            settled.difference_update(self._read_workers())
        self._rows, self._constraints, self._here, self._remote = [], [], [], []
        return settled

    def _accept_here(self) -> list[int]:
        """Have the matchers of this process accept their tokens.

        Return the rows that are not settled.
        """
        others = []
        for index in self._here:
            constraint, token = self._constraints[index], self._tokens[index]
            matcher = constraint.local
            if constraint.overdrawn or matcher is None:
                others.append(self._rows[index])  # One without tokens may have been moved to a worker since `begin`.
                continue
            forced = matcher.follow(token)
            if forced is None or len(forced) >= self._least:
                constraint.advance(token, matcher.accepted, forced)
                others.append(self._rows[index])
        return others

    def _read_workers(self) -> list[int]:
        """Read what the workers have made of their tokens.

        Return the rows that are not settled.
        """
        others = []
        for batch in self._remote:
            channel = batch.link.channel
            flags = channel.all_flags[batch.slots]
            is_settled = flags == ACCEPTED
            if batch.link.is_lost:
                is_settled[:] = False
            elif is_settled.all():
                continue
            else:
                forces_little = channel.num_forced[batch.slots] < self._least
                is_settled |= (flags & (ACCEPTED | STOPPED | FAILED | FORCES) == ACCEPTED | FORCES) & forces_little
            for index in batch.indices[~is_settled].tolist():
                constraint = self._constraints[index]
                assert constraint.remote is not None, "a matcher was taken back before its token was accepted"
                constraint.advance(self._tokens[index], *constraint.remote.end_accept())
                others.append(self._rows[index])
        return others
