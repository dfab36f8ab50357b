"""Tokens of a step, which matchers accept together."""

from collections.abc import Sequence, Set
from typing import cast

import numpy as np
from numpy.typing import NDArray

from tandem.engine_core.constraints.grammars import GrammarConstraint
from tandem.engine_core.constraints.workers.channel import ACCEPT, ACCEPTED, EXPECT, FAILED, FORCES, STOPPED
from tandem.engine_core.constraints.workers.mask_memory import MaskMemory
from tandem.engine_core.constraints.workers.pool import Batch, WorkerPool
from tandem.engine_core.constraints.workers.remote_matcher import RemoteMatcher
from tandem.engine_core.contracts import NO_TOKEN, ArrivingTokens, Masks


class TokenAcceptor:
    """Implement `contracts.Acceptor` for `GrammarConstraint`s only.

    Most tokens are accepted by a grammar that goes on and forces little: their constraints are not looked at again.
    Work for each row of a step is kept out of the loops here as far as can be: 256 rows take 0.1 ms for each call in
    them.
    """

    def __init__(self, workers: WorkerPool | None = None, memory: MaskMemory | None = None) -> None:
        """Keep the workers, and the arrays that they can map."""
        self.workers = workers
        self.memory = memory or MaskMemory()
        self._masks: Masks = ()
        self._constraints: list[GrammarConstraint] = []
        self._matchers: list[RemoteMatcher | None] = []
        """Those of the constraints that workers were told to go on with."""
        self._tokens: Sequence[int] = ()
        self._least = 1
        """Fewest forced tokens that matter."""
        self._here: list[int] = []
        """Indices of the constraints whose matcher is in this process."""
        self._remote: list[Batch] = []
        """Those of others."""
        self._expected: Masks | None = None
        """Masks whose tokens the workers take as they arrive."""

    def expect(self, masks: Masks, arriving: ArrivingTokens) -> bool:
        """Implement `Acceptor.expect`.

        What the workers are to do is sent with the masks that they are to begin with, or by `finish`.
        """
        first = None if self.workers is None else self.memory.find(np.asarray(arriving.memory))
        if first is None:
            return False
        self._send(EXPECT, masks, np.array(arriving.indices, dtype=np.int32) + first)
        self._expected = masks if self._remote else None
        return bool(self._remote)

    def begin(self, masks: Masks, tokens: Sequence[int], least: int) -> None:
        """Implement `Acceptor.begin`."""
        assert self._expected is None or masks is self._expected, "other tokens were expected"
        assert len(masks) == len(tokens), f"{len(tokens)} tokens for {len(masks)} masks"
        self._tokens, self._least = tokens, least
        if self._expected is None:
            self._send(ACCEPT, masks, np.array(tokens, dtype=np.int32))
        self._expected = None
        if self._remote:
            for matcher, token in zip(self._matchers, tokens, strict=True):
                if matcher is not None and token != NO_TOKEN:
                    matcher.tokens.append(token)

    def _send(self, operation: int, masks: Masks, values: NDArray[np.int32]) -> None:
        """Give the workers an operation on the constraints that they follow.

        values: second number of each operation.
        """
        self._masks, self._constraints = masks, cast("list[GrammarConstraint]", [each for _, each in masks])
        self._matchers = [each.remote for each in self._constraints]
        ids = np.array([each.remote_id for each in self._constraints], dtype=np.int32)
        self._here = np.flatnonzero(ids < 0).tolist()
        self._remote = [] if self.workers is None else self.workers.begin(operation, ids, values)

    def finish(self) -> Set[int]:
        """Implement `Acceptor.finish`."""
        if self._remote and self.workers is not None:
            self.workers.post_awaited()
        settled = {row for row, _ in self._masks}
        if NO_TOKEN in self._tokens:
            settled -= {mask[0] for mask, token in zip(self._masks, self._tokens, strict=True) if token == NO_TOKEN}
        if self._here:
            settled.difference_update(self._accept_here())
        if self._remote and self.workers is not None:
            self.workers.wait_accepted()
            settled.difference_update(self._read_workers())
        self._masks, self._constraints, self._matchers, self._here, self._remote = (), [], [], [], []
        return settled

    def _accept_here(self) -> list[int]:
        """Have the matchers of this process accept their tokens.

        Return the rows that are not settled.
        """
        others = []
        for index in self._here:
            constraint, token = self._constraints[index], self._tokens[index]
            matcher = constraint.local
            if token == NO_TOKEN:
                continue
            if constraint.overdrawn or matcher is None:
                # One without tokens may have been moved to a worker since `begin`.
                others.append(self._masks[index][0])
                continue
            forced = matcher.follow(token)
            if forced is None or len(forced) >= self._least:
                constraint.advance(token, matcher.accepted, forced)
                others.append(self._masks[index][0])
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
                if self._tokens[index] == NO_TOKEN:
                    continue
                constraint = self._constraints[index]
                assert constraint.remote is not None, "a matcher was taken back before its token was accepted"
                constraint.advance(self._tokens[index], *constraint.remote.end_accept())
                others.append(self._masks[index][0])
        return others
