"""The prefix cache: examples, and a state machine against a dictionary of prefixes."""

from array import array

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tandem.engine_core.kv_cache.radix import ROOT, RadixTree
from tests.support.effort import machine

PAGES = 40


def ids(*tokens: int) -> "array[int]":
    return array("i", tokens)


class Filled:
    """A tree with a supply of page numbers."""

    def __init__(self, page_size: int) -> None:
        self.tree = RadixTree(PAGES, page_size)
        self.free = list(range(PAGES - 1, 0, -1))

    def put(self, namespace: bytes, tokens: "array[int]") -> list[int]:
        """Inserts every full page of these tokens, locked; the pages that hold them."""
        path: list[int] = []
        for index in range(len(tokens) // self.tree.page_size):
            parent = path[-1] if path else ROOT
            page = self.free.pop()
            held = self.tree.insert(self.tree.key(namespace, tokens, index, parent), page, parent)
            if held != page:
                self.free.append(page)
            self.tree.lock((held,))
            path.append(held)
        return path


def test_a_prefix_is_found_page_by_page() -> None:
    filled = Filled(2)
    path = filled.put(b"", ids(1, 2, 3, 4, 5, 6, 7))
    tree = filled.tree
    assert len(path) == 3, "the last token fills no page"
    assert tree.match(b"", ids(1, 2, 3, 4, 9, 9), 3) == path[:2]
    assert tree.match(b"", ids(1, 2, 3, 4, 5, 6), 2) == path[:2], "no further than the limit"
    assert tree.match(b"", ids(1, 2, 3, 4, 5, 6), 3, index=1, parent=path[0]) == path[1:], "on from a page"
    assert tree.match(b"", ids(3, 4), 1) == [], "the same tokens after others are another page"
    assert tree.match(b"", ids(2, 1), 1) == []


def test_namespaces_share_nothing() -> None:
    filled = Filled(2)
    plain, salted = filled.put(b"", ids(1, 2, 3, 4)), filled.put(b"salt", ids(1, 2, 3, 4))
    assert not set(plain) & set(salted)
    assert filled.tree.match(b"salt", ids(1, 2, 3, 4), 2) == salted
    assert filled.tree.match(b"other", ids(1, 2, 3, 4), 2) == []


def test_no_namespace_looks_like_another_with_other_tokens() -> None:
    """A namespace that ends in the bytes of a page, and a page number that looks like one."""
    filled = Filled(1)
    filled.put(ids(7).tobytes(), ids(8))
    filled.put(b"", ids(7, 8))
    assert filled.tree.size == 3
    assert filled.tree.match(b"", ids(8), 1) == []


def test_the_same_page_twice_is_kept_once() -> None:
    filled = Filled(2)
    first = filled.put(b"", ids(1, 2, 3, 4))
    assert filled.put(b"", ids(1, 2, 3, 4)) == first
    assert [filled.tree.readers(page) for page in first] == [2, 2]
    assert filled.tree.size == 2


def test_the_least_recently_used_leaf_goes_first() -> None:
    filled = Filled(1)
    tree = filled.tree
    left, right, longer = filled.put(b"", ids(1, 2)), filled.put(b"", ids(1, 3)), filled.put(b"", ids(1, 3, 4))
    for path in (longer, left, right):
        tree.unlock(path)
    assert tree.evictable == 4
    assert tree.evict(1) == [longer[-1]], "right was used after left, but it is not a leaf"
    tree.lock(left)
    tree.unlock(left)
    assert tree.evict(1) == [right[-1]]
    assert tree.evict(10) == [left[-1], left[0]], "a parent goes after its children"
    assert (tree.size, tree.evict(1)) == (0, [])
    assert tree.audit() == []


def test_who_is_read_or_kept_stays() -> None:
    filled = Filled(1)
    tree = filled.tree
    read, kept = filled.put(b"", ids(1, 2)), filled.put(b"", ids(1, 3))
    tree.pin(kept)
    tree.unlock(kept)
    assert (tree.locked, tree.pinned, tree.evictable) == (2, 1, 0), "the first page of both is read"
    assert tree.evict(5) == []
    tree.unlock(read)
    assert (tree.locked, tree.pinned, tree.evictable) == (0, 2, 1)
    assert tree.evict(5) == [read[1]]
    tree.unpin(kept)
    assert tree.evict(5) == [kept[1], kept[0]]


def test_misuse_is_found() -> None:
    filled = Filled(1)
    path = filled.put(b"", ids(1, 2))
    tree = filled.tree
    with pytest.raises(AssertionError, match=f"page {path[1]} unpinned without a pin"):
        tree.unpin((path[1],))
    with pytest.raises(AssertionError, match="is in the tree already"):
        tree.insert(tree.key(b"", ids(9), 0, ROOT), path[0], ROOT)
    with pytest.raises(AssertionError, match="which is not in the tree"):
        RadixTree(PAGES, 1).insert(tree.key(b"", ids(9), 0, 5), 6, 5)
    tree.unlock(path)
    with pytest.raises(AssertionError, match=f"page {path[0]} unlocked without a lock"):
        tree.unlock((path[0],))


def test_audits_see_what_is_broken() -> None:
    filled = Filled(1)
    path = filled.put(b"", ids(1, 2))
    tree = filled.tree
    tree._locks[path[0]] = 0
    assert f"page {path[1]} is held more often than page {path[0]} before it" in tree.audit()
    tree._locks[30] = 1
    assert "page 30 is held outside the tree" in tree.audit()


class Prefixes(RuleBasedStateMachine):
    """Sequences come, read, keep and go, and pages are evicted. The model knows each page by its whole prefix."""

    @initialize(page_size=st.sampled_from([1, 2, 4]))
    def start(self, page_size: int) -> None:
        self.filled = Filled(page_size)
        self.size = page_size
        self.known: dict[tuple[bytes, bytes], int] = {}
        """(namespace, all tokens up to the page's end) -> page."""
        self.reading: list[list[int]] = []
        self.kept: list[list[int]] = []

    NAMESPACES = st.sampled_from([b"", b"s"])
    TOKENS = st.lists(st.integers(0, 1), max_size=8)

    @rule(namespace=NAMESPACES, tokens=TOKENS)
    def insert(self, namespace: bytes, tokens: list[int]) -> None:
        full = len(tokens) // self.size
        if len(self.filled.free) < full:
            return
        path = self.filled.put(namespace, ids(*tokens))
        self.reading.append(path)
        for index, page in enumerate(path):
            key = (namespace, ids(*tokens[: (index + 1) * self.size]).tobytes())
            assert self.known.setdefault(key, page) == page

    @rule(namespace=NAMESPACES, tokens=TOKENS, keep=st.booleans())
    def match(self, namespace: bytes, tokens: list[int], keep: bool) -> None:
        limit = len(tokens) // self.size
        expected: list[int] = []
        for index in range(limit):
            page = self.known.get((namespace, ids(*tokens[: (index + 1) * self.size]).tobytes()))
            if page is None:
                break
            expected.append(page)
        found = self.filled.tree.match(namespace, ids(*tokens), limit)
        assert found == expected
        if keep:
            self.filled.tree.pin(found)
            self.kept.append(found)
        else:
            self.filled.tree.lock(found)
            self.reading.append(found)

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.filled.tree.unlock(self.reading.pop(data.draw(st.integers(0, len(self.reading) - 1))))

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        self.filled.tree.unpin(self.kept.pop(data.draw(st.integers(0, len(self.kept) - 1))))

    @rule(count=st.integers(1, 5))
    def evict(self, count: int) -> None:
        held = {page for path in (*self.reading, *self.kept) for page in path}
        gone = self.filled.tree.evict(count)
        assert len(gone) == min(count, len(self.known) - len(held)), "all that nobody holds can go"
        assert not set(gone) & held
        self.known = {key: page for key, page in self.known.items() if page not in gone}
        self.filled.free += gone

    @invariant()
    def agrees(self) -> None:
        tree = self.filled.tree
        assert tree.audit() == []
        assert {page for page in range(PAGES) if page in tree} == set(self.known.values())
        locked = {page for path in self.reading for page in path}
        pinned = {page for path in self.kept for page in path} - locked
        assert (tree.size, tree.locked, tree.pinned) == (len(self.known), len(locked), len(pinned))
        assert tree.size + len(self.filled.free) == PAGES - 1


Prefixes.TestCase.settings = machine(60, 50)
TestPrefixes = Prefixes.TestCase
