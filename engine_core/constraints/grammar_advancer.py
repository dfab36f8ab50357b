"""Advance the grammars of all rows of a step in one batch."""

from array import array
from collections.abc import Sequence, Set
from typing import cast

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from tandem.engine_core.constraints.grammars import GrammarConstraint
from tandem.engine_core.constraints.workers.channel import ACCEPT, ACCEPTED, EXPECT, FAILED, FORCES, STOPPED
from tandem.engine_core.constraints.workers.mask_memory import MaskMemory
from tandem.engine_core.constraints.workers.pool import Batch, WorkerPool, are_current
from tandem.engine_core.contracts import NO_TOKEN, ArrivingTokens, MaskedRows, cache_of


class AdvanceBatch(Struct, frozen=True):
    """Constraints that accept the tokens of a step."""

    rows: list[int]
    all_rows: frozenset[int]
    constraints: list[GrammarConstraint]
    given: "list[array[int] | None]"
    """Token lists of the matchers on workers; None for other matchers."""
    here: list[int]
    """Indices of the constraints whose matcher is in this process."""
    batches: list[Batch]
    """Operations of the workers for the other constraints."""
    indices: Sequence[int]
    """Indices at which the tokens arrive (`ArrivingTokens.indices`)."""


_EMPTY_BATCH = AdvanceBatch([], frozenset(), [], [], [], [], ())


class BatchAdvancer:
    """Implement `contracts.GrammarAdvancer` for `GrammarConstraint`s only.

    Most tokens are accepted by a grammar that continues and forces few tokens; their constraints need no further work.
    Work for each row of a step is cache out of the loops here as far as can be: 256 rows take 0.1 ms for each call in
    them.
    """

    def __init__(self, workers: WorkerPool | None = None, memory: MaskMemory | None = None) -> None:
        """Keep the workers, and the arrays that they can map."""
        self.workers = workers
        self.memory = memory or MaskMemory()
        self._batch = _EMPTY_BATCH
        self._tokens: Sequence[int] = ()
        self._least = 1
        """Minimum number of forced tokens worth appending."""
        self._arriving: MaskedRows | None = None
        """Rows whose tokens the workers accept as they arrive."""

    def accept_on_arrival(self, masks: MaskedRows, arriving: ArrivingTokens) -> bool:
        """Implement `GrammarAdvancer.accept_on_arrival`.

        The operations are sent together with the masks to prefetch, or by `finish_accept`.
        """
        first = self.memory.find(arriving.memory)
        if self.workers is None or first is None:
            return False
        cache = cache_of(masks)
        known: AdvanceBatch | None = cache.get(("arriving", first))
        if known is not None and known.indices == arriving.indices and are_current(known.batches):
            self._batch = known
            self.workers.repeat(known.batches)
        else:
            values = np.array(arriving.indices, dtype=np.int32) + first
            self._batch = found = self._begin_batch(EXPECT, masks, values, arriving.indices)
            if not found.here:  # local matchers may still move to a worker
                cache["arriving", first] = found
        self._arriving = masks if self._batch.batches else None
        return bool(self._batch.batches)

    def start_accept(self, masks: MaskedRows, tokens: Sequence[int], least: int) -> None:
        """Implement `GrammarAdvancer.start_accept`."""
        assert self._arriving is None or masks is self._arriving, "other tokens are arriving"
        assert len(masks) == len(tokens), f"{len(tokens)} tokens for {len(masks)} masks"
        self._tokens, self._least = tokens, least
        if self._arriving is None:
            self._batch = self._begin_batch(ACCEPT, masks, np.array(tokens, dtype=np.int32))
        self._arriving = None
        if self._batch.batches:
            for given, token in zip(self._batch.given, tokens, strict=True):
                if given is not None and token != NO_TOKEN:
                    given.append(token)

    def _begin_batch(
        self, operation: int, masks: MaskedRows, values: NDArray[np.int32], indices: Sequence[int] = ()
    ) -> AdvanceBatch:
        """Start an operation on the workers for the constraints that they follow.

        values: second number of each operation.
        """
        rows = [row for row, _ in masks]
        constraints = cast("list[GrammarConstraint]", [each for _, each in masks])
        ids = np.array([each.remote_id for each in constraints], dtype=np.int32)
        return AdvanceBatch(
            rows,
            frozenset(rows),
            constraints,
            [None if each.remote is None else each.remote.tokens for each in constraints],
            np.flatnonzero(ids < 0).tolist(),
            [] if self.workers is None else self.workers.enqueue(operation, ids, values),
            indices,
        )

    def finish_accept(self) -> Set[int]:
        """Implement `GrammarAdvancer.finish_accept`."""
        current = self._batch
        if current.batches and self.workers is not None:
            self.workers.post_awaited()
        others: list[int] = []
        if NO_TOKEN in self._tokens:
            others += [row for row, token in zip(current.rows, self._tokens, strict=True) if token == NO_TOKEN]
        if current.here:
            others += self._accept_here()
        if current.batches and self.workers is not None:
            self.workers.wait_accepted()
            others += self._read_workers()
        self._batch = _EMPTY_BATCH
        return current.all_rows.difference(others) if others else current.all_rows

    def _accept_here(self) -> list[int]:
        """Accept tokens using the matchers of this process.

        Return the rows whose constraint needs a call of `accept`.
        """
        others, current = [], self._batch
        for index in current.here:
            constraint, token = current.constraints[index], self._tokens[index]
            matcher = constraint.local
            if token == NO_TOKEN:
                continue
            if constraint.overdrawn or matcher is None:
                # One without tokens may have been moved to a worker since `start_accept`.
                others.append(current.rows[index])
                continue
            forced = matcher.follow(token)
            if forced is None or len(forced) >= self._least:
                constraint.advance(token, matcher.accepted, forced)
                others.append(current.rows[index])
        return others

    def _read_workers(self) -> list[int]:
        """Read the results of the workers.

        Return the rows whose constraint needs a call of `accept`.
        """
        others, current = [], self._batch
        for batch in current.batches:
            channel, has_more = batch.link.channel, batch.link.take_flagged()
            if not (has_more or batch.link.is_lost):
                continue
            flags = channel.all_flags[batch.slots]
            is_advanced = flags == ACCEPTED
            if batch.link.is_lost:
                is_advanced[:] = False
            else:
                forces_little = channel.num_forced[batch.slots] < self._least
                is_advanced |= (flags & (ACCEPTED | STOPPED | FAILED | FORCES) == ACCEPTED | FORCES) & forces_little
            for index in batch.indices[~is_advanced].tolist():
                if self._tokens[index] == NO_TOKEN:
                    continue
                constraint = current.constraints[index]
                assert constraint.remote is not None, "a matcher was taken back before its token was accepted"
                constraint.advance(self._tokens[index], *constraint.remote.end_accept())
                others.append(current.rows[index])
        return others
