"""Batches of a link: which operations are waited for, and which go with a later batch."""

from collections.abc import Sequence

import numpy as np
import pytest

from tandem.engine_core.constraints.grammars import Grammars
from tandem.engine_core.constraints.workers.channel import (
    ACCEPT,
    CLOSE,
    DROP,
    MASK,
    MAX_OPERATIONS,
    MAX_SLOTS,
    OPEN,
    SLOT_BITS,
    TAKE,
)
from tandem.engine_core.constraints.workers.link import WorkerLink
from tandem.engine_core.constraints.workers.mask_memory import MaskMemory
from tandem.engine_core.constraints.workers.pool import WorkerPool
from tests.fakes.inline_link import InlineLink
from tests.support.grammar_walks import WALKED

TEXT = WALKED["letters"]


def ints(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


def operations(kind: int, *pairs: tuple[int, int]) -> bytes:
    """Return an operation on slots, each with its second number."""
    return np.array([(kind, *pair) for pair in pairs], dtype=np.int32).tobytes()


def record(link: InlineLink) -> list[list[tuple[int, ...]]]:
    """Return a list to which each batch that the link sends is added, instead of being done."""
    batches: list[list[tuple[int, ...]]] = []

    def do(operations: Sequence[int]) -> int:
        batches.append([tuple(operations[index : index + 3]) for index in range(0, len(operations), 3)])
        return 0

    link.worker.do = do  # type: ignore[method-assign]
    return batches


@pytest.fixture
def link(grammars: Grammars, memory: MaskMemory) -> InlineLink:
    return InlineLink(grammars, memory)


def test_only_what_is_begun_is_awaited(link: InlineLink) -> None:
    batches = record(link)
    slot = link.open(5)
    link.pending.extend((ACCEPT, slot, 7))
    assert not link.is_awaited
    link.enqueue(operations(MASK, (slot, 3), (slot + 1, 4)))
    assert link.is_awaited and batches == []
    link.post()
    assert batches == [[(OPEN, slot, 5), (ACCEPT, slot, 7), (MASK, slot, 3), (MASK, slot + 1, 4)]]
    assert not link.is_awaited and not link.pending


def test_batches_are_counted(link: InlineLink) -> None:
    record(link)
    counts = [link.num_posts]
    link.post()
    counts.append(link.num_posts)
    link.enqueue(operations(ACCEPT, (1, 2)))
    counts.append(link.num_posts)
    link.post()
    counts.append(link.num_posts)
    link.enqueue(operations(ACCEPT, *[(1, 2)] * (2 * MAX_OPERATIONS + 1)))
    link.post_and_wait()
    counts.append(link.num_posts)
    assert counts == [0, 0, 0, 1, 4], "nothing is sent where nothing is pending, and of much each part"


def test_a_lost_worker_gets_no_batch(link: InlineLink) -> None:
    batches = record(link)
    link.lose("is gone")
    link.enqueue(operations(ACCEPT, (1, 2)))
    link.post()
    assert (batches, link.num_posts, len(link.pending), link.is_awaited) == ([], 0, 0, False)


def started(grammars: Grammars, memory: MaskMemory, count: int) -> tuple[WorkerPool, list[InlineLink]]:
    """Return a pool whose workers have been started."""
    links = [InlineLink(grammars, memory) for _ in range(count)]
    starts = iter(links)

    def start() -> WorkerLink:
        return next(starts)

    pool = WorkerPool(count, start)
    pool.compile(TEXT, [])
    for each in links:
        each.post_and_wait()
    return pool, links


def test_what_is_not_awaited_goes_with_the_next_batch(grammars: Grammars, memory: MaskMemory) -> None:
    """Slots and grammars that are given back, and matchers that are opened, can wait."""
    pool, links = started(grammars, memory, 2)
    batches = [record(each) for each in links]
    slots = [each.open(1) for each in links]
    links[0].close_slot(slots[0])
    links[0].drop(1)
    pool.post_awaited()
    assert batches == [[], []]
    pool.enqueue(ACCEPT, ints(1 << SLOT_BITS | slots[1]), ints(7))
    pool.post_awaited()
    assert batches == [[], [[(OPEN, slots[1], 1), (ACCEPT, slots[1], 7)]]]
    pool.enqueue(ACCEPT, ints(9), ints(8))
    pool.post_awaited()
    assert batches[0] == [[(OPEN, slots[0], 1), (ACCEPT, 9, 8), (DROP, 1, 0), (CLOSE, slots[0], 0)]]
    pool.post_awaited()
    assert [len(each) for each in batches] == [1, 1], "they are not sent again"


def sent(link: InlineLink) -> list[tuple[int, ...]]:
    """Return the operations of the link's next batch in the order of their slots."""
    numbers = list(link.pending)
    return sorted(tuple(numbers[index : index + 3]) for index in range(0, len(numbers), 3))


def test_matchers_of_several_workers_and_of_none(grammars: Grammars, memory: MaskMemory) -> None:
    pool, links = started(grammars, memory, 3)
    last = (1 << SLOT_BITS) - 1
    ids = [2 << SLOT_BITS | 5, -1, 0, 2 << SLOT_BITS | last, last, -1, 2 << SLOT_BITS]
    batches = pool.enqueue(MASK, ints(*ids), ints(*range(100, 107)))
    assert [batch.link for batch in batches] == [links[0], links[2]]
    slots = [dict(zip(batch.indices.tolist(), batch.slots.tolist(), strict=True)) for batch in batches]
    assert slots == [{2: 0, 4: last}, {0: 5, 3: last, 6: 0}]
    assert sent(links[0]) == [(MASK, 0, 102), (MASK, last, 104)]
    assert sent(links[2]) == [(MASK, 0, 106), (MASK, 5, 100), (MASK, last, 103)]
    assert not links[1].pending and [each.is_awaited for each in links] == [True, False, True]


@pytest.mark.parametrize("ids", [[], [-1], [-1, -1, -1]])
def test_matchers_of_this_process_alone(grammars: Grammars, memory: MaskMemory, ids: list[int]) -> None:
    pool, links = started(grammars, memory, 2)
    assert pool.enqueue(ACCEPT, ints(*ids), ints(*range(len(ids)))) == []
    assert not any(each.pending or each.is_awaited for each in links)


def test_a_pool_without_workers_begins_nothing(grammars: Grammars, memory: MaskMemory) -> None:
    pool = WorkerPool(2, lambda: InlineLink(grammars, memory))
    assert pool.enqueue(ACCEPT, ints(-1, -1), ints(1, 2)) == []


def test_what_is_begun_goes_in_one_batch(grammars: Grammars, memory: MaskMemory) -> None:
    """What is pending before it is sent first if both are too much for one."""
    pool, (link,) = started(grammars, memory, 1)
    sizes: list[int] = []
    link.channel.post = lambda operations: sizes.append(len(operations) // 3)  # type: ignore[method-assign]
    pending = 0
    for pending in (MAX_OPERATIONS - 2 * MAX_SLOTS, MAX_OPERATIONS - 2 * MAX_SLOTS + 1):
        link.pending.extend((TAKE, 0, 7) * pending)
        for operation in (ACCEPT, MASK):
            pool.enqueue(operation, ints(*range(MAX_SLOTS)), ints(*range(MAX_SLOTS)))
        pool.post_awaited()
    assert sizes == [MAX_OPERATIONS, pending, 2 * MAX_SLOTS]
