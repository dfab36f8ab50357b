"""The page allocator against a set, step by step."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from tandem.engine_core.kv_cache.pages import PageAllocator
from tandem.engine_core.plan import PADDING_PAGE
from tests.support.effort import machine
from tests.support.refusals import numbers_in

PAGES = 17


class Allocations(RuleBasedStateMachine):
    """Random allocations and releases; the model is what each owner was given."""

    given_out = Bundle("given_out")

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(PAGES)
        self.held: dict[int, list[int]] = {}
        self.owners = 0

    @rule(target=given_out, count=st.integers(1, 9))
    def allocate(self, count: int) -> int:
        self.owners += 1
        taken = self.allocator.allocate(self.owners, count)
        free = PAGES - 1 - sum(map(len, self.held.values()))
        if count > free:
            assert taken is None
            self.held[self.owners] = []
        else:
            assert taken is not None
            assert len(set(taken)) == count
            self.held[self.owners] = taken
        return self.owners

    @rule(owners=st.lists(given_out, max_size=9))
    def allocate_each(self, owners: list[int]) -> None:
        free = self.allocator.free
        taken = self.allocator.allocate_each(owners)
        assert (taken is None) == (len(owners) > free)
        for owner, page in zip(owners, taken or (), strict=taken is not None):
            self.held[owner].append(page)

    @rule(owner=consumes(given_out))
    def release(self, owner: int) -> None:
        pages = self.held.pop(owner)
        self.allocator.release(owner, pages)
        for page in pages[:1]:
            with pytest.raises(AssertionError, match=f"frees page {page}"):
                self.allocator.release(owner, [page])

    @rule(owner=given_out, heir=given_out)
    def hand_over(self, owner: int, heir: int) -> None:
        for page in self.held[owner][:1]:
            self.allocator.transfer(owner, heir, [page])
            self.held[owner].remove(page)
            self.held[heir].append(page)
            with pytest.raises(AssertionError, match=rf"\bpage {page}, owned by {heir}\b"):
                self.allocator.transfer(owner + 1000, heir, [page])

    @rule(owner=given_out)
    def steal(self, owner: int) -> None:
        for page in self.held[owner][:1]:
            with pytest.raises(AssertionError, match=f"owned by {owner}"):
                self.allocator.release(owner + 1000, [page])

    @invariant()
    def agrees(self) -> None:
        assert self.allocator.audit() == []
        assert self.allocator.owned() == {owner: sorted(pages) for owner, pages in self.held.items() if pages}
        assert self.allocator.used == sum(map(len, self.held.values()))
        assert self.allocator.free + self.allocator.used == PAGES - 1


Allocations.TestCase.settings = machine(50, 50)
TestAllocations = Allocations.TestCase


def test_padding_page_is_never_allocated() -> None:
    allocator = PageAllocator(PAGES)
    assert allocator.total == PAGES - 1
    everything = allocator.allocate(1, PAGES - 1)
    assert everything is not None
    assert PADDING_PAGE not in everything
    assert allocator.allocate(2, 1) is None


def test_audit_names_a_leak_and_a_page_freed_twice() -> None:
    allocator = PageAllocator(PAGES)
    taken = allocator.allocate(1, 2)
    assert taken is not None
    allocator._owner[taken[0]] = None
    (problem,) = allocator.audit()
    assert problem.startswith(f"page {taken[0]} leaked")
    allocator._free += [taken[0], taken[0]]
    assert any(problem.endswith(" twice") for problem in allocator.audit())
    allocator._free.append(taken[1])
    assert any(numbers_in(problem) == [taken[1], 1] for problem in allocator.audit())
    allocator._free.append(PADDING_PAGE)
    assert any("reserved page" in problem for problem in allocator.audit())


def test_allocation_of_no_pages_is_an_error() -> None:
    with pytest.raises(AssertionError, match=r"\b0 pages"):
        PageAllocator(PAGES).allocate(1, 0)
    with pytest.raises(AssertionError, match="leave none"):
        PageAllocator(1)
