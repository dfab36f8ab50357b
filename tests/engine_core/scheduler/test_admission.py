"""Admission gates: all or nothing, and every resource returned."""

from collections.abc import Callable, Iterable
from random import Random

import pytest

from tandem.engine_core.plan import PADDING_ROW
from tandem.engine_core.scheduler.admission import (
    MAX_BYPASSED,
    MAX_RESERVE_FRACTION,
    Admission,
    PageGate,
    RowGate,
    admit,
)
from tandem.engine_core.scheduler.queue import WaitingQueue
from tandem.engine_core.sequence import Sequence
from tandem.protocol.params import SamplingParams
from tests.support.kv_pool import kv_memory
from tests.support.scheduling import submitted


def new(seq_id: int, prompt: int = 5, max_tokens: int = 4) -> Sequence:
    return submitted(seq_id, range(prompt), SamplingParams(max_tokens))


class Closed:
    def acquire(self, seq: Sequence) -> Callable[[], None] | None:
        return None


def test_admission_looks_past_a_bounded_number_of_waiting_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look costs a walk through the prefix tree, in every tick for as long as they wait."""
    memory, queue, looked = kv_memory(40), WaitingQueue(), list[int]()
    for number in range(3 * MAX_BYPASSED):
        queue.push(new(number))

    def waits(seq: Sequence) -> bool:
        looked.append(seq.id)
        return seq.id != MAX_BYPASSED

    monkeypatch.setattr(memory, "waits_for_prefix", waits)
    admission = Admission(RowGate(2), memory, 0)
    assert [seq.id for seq in admission.admit(queue)] == [MAX_BYPASSED]
    assert looked == list(range(MAX_BYPASSED + 2))


def test_declining_gate_returns_what_earlier_gates_gave() -> None:
    rows, memory = RowGate(2), kv_memory(10)
    seq = new(1)
    assert not admit(seq, (rows, PageGate(memory, 8), Closed()))
    assert (rows.free, memory.usage.available, seq.row, seq.pages) == (2, 9, -1, ())
    assert memory.audit([]) == []


def test_closing_leases_returns_everything_once() -> None:
    rows, memory = RowGate(2), kv_memory(10)
    gates = rows, PageGate(memory, 8)
    seq = new(1)
    assert admit(seq, gates)
    assert seq.row != PADDING_ROW
    assert (rows.free, memory.usage.available, seq.num_pages) == (1, 7, 2)
    seq.leases.close()
    assert (rows.free, memory.usage.available, seq.row, seq.pages) == (2, 9, -1, ())
    seq.leases.close()
    assert (rows.free, memory.usage.available) == (2, 9)


def test_row_gate_declines_when_no_row_is_free() -> None:
    rows = RowGate(2)
    first, second, third = new(1), new(2), new(3)
    assert admit(first, (rows,))
    assert admit(second, (rows,))
    assert not admit(third, (rows,))
    assert {first.row, second.row} == {1, 2}
    first.leases.close()
    assert admit(third, (rows,))


def test_freeing_a_row_twice_is_an_assertion() -> None:
    rows = RowGate(1)
    seq = new(1)
    release = rows.acquire(seq)
    assert release is not None
    release()
    seq.row = 1
    with pytest.raises(AssertionError, match=r"\brow 1\b"):
        release()


@pytest.mark.parametrize(
    ("prompt", "chunk", "pages"), [(1, 8, 1), (4, 8, 1), (5, 8, 2), (30, 8, 2), (30, 9, 3), (30, 0, 8), (30, 1, 1)]
)
def test_admission_takes_pages_for_the_first_chunk(prompt: int, chunk: int, pages: int) -> None:
    gate = PageGate(kv_memory(20), chunk)
    seq = new(1, prompt, 40)
    assert gate.acquire(seq) is not None
    assert seq.num_pages == pages


def test_admission_leaves_a_page_for_each_sequence_that_may_grow() -> None:
    memory = kv_memory(1 + 64)
    gate = PageGate(memory, 0)
    grown, growing, more = new(1, 110, 2), new(2, 110, 30), new(3, 9, 30)
    assert gate.acquire(grown) is not None
    assert gate.acquire(growing) is not None
    assert (memory.usage.available, growing.num_pages) == (8, 28)
    assert not memory.lacks_pages(growing, 4 * 28)
    assert memory.lacks_pages(growing, 4 * 28 + 1)
    assert gate.acquire(new(4, 29, 1)) is None, "8 are free and wanted, one of them may be needed by the second"
    assert gate.acquire(new(5, 28, 1)) is not None, "the first will not grow"
    memory = kv_memory(1 + 16)
    gate = PageGate(memory, 0)
    for number in range(6):
        assert gate.acquire(new(number, 1, 30)) is not None
    assert gate.acquire(more) is not None, "of a small pool, one page is reserve enough"


def test_preempted_sequence_asks_for_all_its_pages_and_a_larger_reserve() -> None:
    memory = kv_memory(1 + 160)
    gate = PageGate(memory, 4)
    for number in range(1, 11):
        assert gate.acquire(new(number, 4, 99)) is not None
    again = new(50, 4 * 130, 99)
    for preemptions, admitted in ((3, False), (2, False), (1, True)):
        again.preemptions = preemptions
        release = gate.acquire(again)
        assert (release is not None) is admitted, "150 are free, 130 wanted, a reserve of 10 and 10 a preemption"


def counted(gate: PageGate) -> int:
    """Return the reserve as counted from nothing."""
    growing = [seq for seq in gate._holders.values() if gate.memory.lacks_pages(seq, seq.kv_len)]
    return min(len(growing), -(-gate.memory.pages.total // MAX_RESERVE_FRACTION))


def test_reserve_is_right_after_every_admission_growth_and_release() -> None:
    gate = PageGate(kv_memory(400), 4)
    leases: dict[int, Callable[[], None]] = {}
    sequences: dict[int, Sequence] = {}
    random = Random(3)
    for number in range(300):
        move = random.random()
        if move < 0.5:
            seq = new(number, random.randint(1, 12), random.randint(1, 12))
            release = gate.acquire(seq)
            if release is not None:
                leases[number], sequences[number] = release, seq
        elif sequences and move < 0.8:
            seq = random.choice(list(sequences.values()))
            gate.memory.grow(seq, random.randint(1, seq.kv_len))
        elif sequences:
            number = random.choice(list(sequences))
            sequences.pop(number).num_scheduled_tokens = 0
            leases.pop(number)()
        assert gate._reserve() == counted(gate)
    assert len(sequences) > 5


def test_burst_of_admissions_counts_the_growing_sequences_once() -> None:
    memory = kv_memory(400)
    gate = PageGate(memory, 4)
    for number in range(20):
        gate.acquire(new(number, 5, 40))
    counts, num_lacking_pages = [], memory.num_lacking_pages

    def counting(sequences: Iterable[Sequence]) -> int:
        counts.append(num_lacking_pages(sequences))
        return counts[-1]

    memory.num_lacking_pages = counting  # type: ignore[method-assign]
    grown = next(iter(gate._holders.values()))
    memory.grow(grown, grown.kv_len)
    for number in range(20, 40):
        assert gate.acquire(new(number, 5, 40)) is not None
    assert counts == [19]
