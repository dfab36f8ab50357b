"""The prefix cache: examples, and a state machine against a dictionary of prefixes."""

from array import array

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tandem.engine_core.kv_cache.radix import ABSENT, ROOT, RadixTree
from tests.support.effort import machine

PAGES = 40


def ids(*tokens: int) -> "array[int]":
    return array("i", tokens)


class Filled:
    """A tree with a supply of pages."""

    def __init__(self, page_size: int, num_groups: int = 1) -> None:
        self.tree = RadixTree(page_size, num_groups)
        self.free = list(range(PAGES - 1, 0, -1))

    def put(self, namespace: bytes, tokens: "array[int]") -> list[int]:
        """Insert every full page of these tokens, complete and locked; return the nodes."""
        nodes: list[int] = []
        for index in range(len(tokens) // self.tree.page_size):
            parent = nodes[-1] if nodes else ROOT
            node = self.tree.insert(self.tree.key(namespace, tokens, index, parent), parent)
            for group in range(self.tree.num_groups):
                page = self.free.pop()
                if self.tree.attach(node, page, group) != page:
                    self.free.append(page)
            self.tree.lock((node,))
            nodes.append(node)
        return nodes


def test_prefix_is_found_page_by_page() -> None:
    filled = Filled(2)
    path = filled.put(b"", ids(1, 2, 3, 4, 5, 6, 7))
    tree = filled.tree
    assert len(path) == 3, "the last token fills no page"
    assert tree.pages(path) == [1, 2, 3]
    assert tree.match(b"", ids(1, 2, 3, 4, 9, 9), 3) == path[:2]
    assert tree.match(b"", ids(1, 2, 3, 4, 5, 6), 2) == path[:2], "no further than the limit"
    assert tree.match(b"", ids(1, 2, 3, 4, 5, 6), 3, index=1, parent=path[0]) == path[1:], "resumed after a node"
    assert tree.match(b"", ids(3, 4), 1) == [], "the same tokens after others are another node"
    assert tree.match(b"", ids(2, 1), 1) == []


def test_namespaces_share_no_nodes() -> None:
    filled = Filled(2)
    plain, salted = filled.put(b"", ids(1, 2, 3, 4)), filled.put(b"salt", ids(1, 2, 3, 4))
    assert not set(plain) & set(salted)
    assert filled.tree.match(b"salt", ids(1, 2, 3, 4), 2) == salted
    assert filled.tree.match(b"other", ids(1, 2, 3, 4), 2) == []


def test_namespace_is_never_mistaken_for_tokens() -> None:
    """A namespace that ends in the bytes of a page, and a node id that looks like one."""
    filled = Filled(1)
    filled.put(ids(7).tobytes(), ids(8))
    filled.put(b"", ids(7, 8))
    assert filled.tree.num_nodes == 3
    assert filled.tree.match(b"", ids(8), 1) == []


def test_same_tokens_inserted_twice_are_kept_once() -> None:
    filled = Filled(2)
    first = filled.put(b"", ids(1, 2, 3, 4))
    assert filled.put(b"", ids(1, 2, 3, 4)) == first
    assert [filled.tree.num_readers(node) for node in first] == [2, 2]
    assert (filled.tree.num_nodes, filled.tree.num_pages) == (2, 2)


def test_eviction_takes_the_least_recently_used_leaf() -> None:
    filled = Filled(1)
    tree = filled.tree
    left, right, longer = filled.put(b"", ids(1, 2)), filled.put(b"", ids(1, 3)), filled.put(b"", ids(1, 3, 4))
    pages = dict(zip((*left, *longer), tree.pages((*left, *longer)), strict=True))
    for path in (longer, left, right):
        tree.unlock(path)
    assert tree.num_evictable == 4
    assert tree.evict(1) == [pages[longer[-1]]], "right was used after left, but it is not a leaf"
    tree.lock(left)
    tree.unlock(left)
    assert tree.evict(1) == [pages[right[-1]]]
    assert tree.evict(10) == [pages[left[-1]], pages[left[0]]], "a parent goes after its children"
    assert (tree.num_nodes, tree.num_pages, tree.evict(1)) == (0, 0, [])
    assert tree.audit() == []


def test_eviction_spares_nodes_that_are_read_or_kept() -> None:
    filled = Filled(1)
    tree = filled.tree
    read, kept = filled.put(b"", ids(1, 2)), filled.put(b"", ids(1, 3))
    pages = dict(zip((*read, *kept), tree.pages((*read, *kept)), strict=True))
    tree.pin(kept)
    tree.unlock(kept)
    assert (tree.num_locked, tree.num_pinned, tree.num_evictable) == (2, 1, 0), "the first page of both is read"
    assert tree.evict(5) == []
    tree.unlock(read)
    assert (tree.num_locked, tree.num_pinned, tree.num_evictable) == (0, 2, 1)
    assert tree.evict(5) == [pages[read[1]]]
    tree.unpin(kept)
    assert tree.evict(5) == [pages[kept[1]], pages[kept[0]]]


def test_ids_of_evicted_nodes_are_used_again() -> None:
    filled = Filled(1)
    tree = filled.tree
    old = filled.put(b"", ids(1, 2))
    found_at = tree.epoch
    tree.unlock(old)
    filled.free += tree.evict(2)
    new = filled.put(b"", ids(8, 9))
    assert set(new) == set(old)
    assert not tree.is_current(old, found_at)
    path = list(old)
    tree.prune(path, found_at)
    assert path == [], "other nodes have these ids now"
    assert tree.is_current(new, tree.epoch)
    assert tree.audit() == []


def test_match_ends_before_a_node_that_lacks_a_page_of_any_group() -> None:
    filled = Filled(1, num_groups=2)
    tree = filled.tree
    path = filled.put(b"", ids(1, 2, 3))
    found_at = tree.epoch
    tree.unlock(path)
    page = tree.drop(path[1], group=1)
    assert (tree.num_nodes, tree.num_pages, tree.num_evictable) == (3, 5, 5)
    assert tree.pages(path, 1) == [2, ABSENT, 6]
    assert tree.match(b"", ids(1, 2, 3), 3) == path[:1]
    assert not tree.is_current(path, found_at), "the last node is as it was, one before it is not"
    stale = list(path)
    tree.prune(stale, found_at)
    assert stale == []
    assert tree.audit() == []
    assert tree.attach(path[1], page, group=1) == page
    assert tree.match(b"", ids(1, 2, 3), 3) == path
    assert sorted(tree.evict(3)) == [3, 4, 5, 6], "both pages of a node go together"
    assert tree.audit() == []


def test_eviction_passes_leaves_without_a_page() -> None:
    filled = Filled(1)
    tree = filled.tree
    path = filled.put(b"", ids(1, 2))
    tree.unlock(path)
    assert tree.drop(path[1]) == 2
    assert tree.evict(1) == [1]
    assert (tree.num_nodes, tree.evict(1)) == (0, [])
    assert tree.audit() == []


def test_misuse_is_found() -> None:
    filled = Filled(1)
    path = filled.put(b"", ids(1, 2))
    tree = filled.tree
    with pytest.raises(AssertionError, match=f"node {path[1]} unpinned without a pin"):
        tree.unpin((path[1],))
    with pytest.raises(AssertionError, match="loses a page while in use"):
        tree.drop(path[1])
    with pytest.raises(AssertionError, match="which is not in the tree"):
        RadixTree(1).insert(tree.key(b"", ids(9), 0, 5), 5)
    tree.unlock(path)
    with pytest.raises(AssertionError, match=f"node {path[0]} unlocked without a lock"):
        tree.unlock((path[0],))
    tree.drop(path[1])
    with pytest.raises(AssertionError, match=f"node {path[1]} holds no page"):
        tree.drop(path[1])
    with pytest.raises(AssertionError, match=f"node {path[1]} is locked without all its pages"):
        tree.lock(path)
    with pytest.raises(AssertionError, match=f"node {path[1]} is pinned without all its pages"):
        tree.pin(path[1:])


def test_audits_see_what_is_broken() -> None:
    filled = Filled(1)
    path = filled.put(b"", ids(1, 2))
    tree = filled.tree
    tree._locks[path[0]] = 0
    assert f"node {path[1]} is in use more often than node {path[0]} before it" in tree.audit()
    tree._locks[path[0]] = 1
    assert tree.audit() == []
    tree._pages[0][path[1]] = tree._pages[0][path[0]]
    assert tree.audit() == ["a page is held by two nodes"]
    tree._pages[0][path[1]] = ABSENT
    assert f"node {path[1]} is in use with 0 of 1 pages" in tree.audit()
    assert "2 pages counted, nodes hold 1" in tree.audit()
    tree.unlock(path)
    tree.evict(2)
    tree._locks[path[0]] = 1
    assert f"node {path[0]} is in use outside the tree" in tree.audit()
    tree._free_ids.pop()
    assert "a node id is lost, or in the tree and free" in tree.audit()


class Prefixes(RuleBasedStateMachine):
    """Sequences come, read, keep and go; pages are evicted, and taken from nodes that stay.

    The model knows each node by its whole prefix, and the pages that it holds.
    """

    @initialize(page_size=st.sampled_from([1, 2, 4]), num_groups=st.sampled_from([1, 1, 2]))
    def start(self, page_size: int, num_groups: int) -> None:
        self.filled = Filled(page_size, num_groups)
        self.size = page_size
        self.known: dict[tuple[bytes, bytes], int] = {}
        """(namespace, all tokens up to the page's end) -> node."""
        self.absent: set[tuple[int, int]] = set()
        """(node, group) without a page."""
        self.reading: list[list[int]] = []
        self.kept: list[list[int]] = []
        self.found: list[tuple[bytes, list[int], list[int], int]] = []
        """Paths that were matched and not locked: (namespace, tokens, nodes, epoch)."""

    NAMESPACES = st.sampled_from([b"", b"s"])
    TOKENS = st.lists(st.integers(0, 1), max_size=8)

    @rule(namespace=NAMESPACES, tokens=TOKENS)
    def insert(self, namespace: bytes, tokens: list[int]) -> None:
        full = len(tokens) // self.size
        if len(self.filled.free) < full * self.filled.tree.num_groups:
            return
        path = self.filled.put(namespace, ids(*tokens))
        self.reading.append(path)
        for index, node in enumerate(path):
            key = (namespace, ids(*tokens[: (index + 1) * self.size]).tobytes())
            assert self.known.setdefault(key, node) == node
        self.absent = {(node, group) for node, group in self.absent if node not in path}

    @rule(namespace=NAMESPACES, tokens=TOKENS, use=st.sampled_from(["read", "keep", "remember"]))
    def match(self, namespace: bytes, tokens: list[int], use: str) -> None:
        found = self.filled.tree.match(namespace, ids(*tokens), len(tokens) // self.size)
        assert found == self._expected(namespace, tokens)
        if use == "keep":
            self.filled.tree.pin(found)
            self.kept.append(found)
        elif use == "read":
            self.filled.tree.lock(found)
            self.reading.append(found)
        else:
            self.found.append((namespace, tokens, found, self.filled.tree.epoch))

    def _expected(self, namespace: bytes, tokens: list[int]) -> list[int]:
        expected: list[int] = []
        for index in range(len(tokens) // self.size):
            node = self.known.get((namespace, ids(*tokens[: (index + 1) * self.size]).tobytes()))
            if node is None or any(node == other for other, _ in self.absent):
                break
            expected.append(node)
        return expected

    @precondition(lambda self: self.found)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        """A path found earlier, pruned and matched on, is what a new match finds."""
        namespace, tokens, path, epoch = self.found.pop(data.draw(st.integers(0, len(self.found) - 1)))
        tree, before = self.filled.tree, list(path)
        tree.prune(path, epoch)
        assert path == before[: len(path)]
        assert (path == before) == tree.is_current(before, epoch) or not before
        parent = path[-1] if path else ROOT
        path += tree.match(namespace, ids(*tokens), len(tokens) // self.size, len(path), parent)
        assert path == self._expected(namespace, tokens)

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.filled.tree.unlock(self.reading.pop(data.draw(st.integers(0, len(self.reading) - 1))))

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        self.filled.tree.unpin(self.kept.pop(data.draw(st.integers(0, len(self.kept) - 1))))

    def _unused(self) -> list[int]:
        held = {node for path in (*self.reading, *self.kept) for node in path}
        return [node for node in self.known.values() if node not in held]

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        groups = range(self.filled.tree.num_groups)
        whole = [(node, group) for node in self._unused() for group in groups if (node, group) not in self.absent]
        if whole:
            node, group = data.draw(st.sampled_from(whole))
            (page,) = self.filled.tree.pages([node], group)
            assert self.filled.tree.drop(node, group) == page
            self.absent.add((node, group))
            self.filled.free.append(page)

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        """A reader leaves, and the pages of its path without another user are released."""
        tree, path = self.filled.tree, self.reading.pop(data.draw(st.integers(0, len(self.reading) - 1)))
        tree.unlock(path)
        pages = {node: {p for group in range(tree.num_groups) for p in tree.pages([node], group)} for node in path}
        gone = tree.discard(path)
        unused = set(self._unused()) & set(path)
        assert sorted(gone) == sorted(page for node in unused for page in pages[node] - {ABSENT})
        self.known = {key: node for key, node in self.known.items() if node in tree}
        parents = {(key[0], key[1][: -4 * self.size]) for key in self.known}
        for key, node in self.known.items():
            assert node not in unused or key in parents, "an unused leaf stayed"
        self.absent |= {(node, group) for node in unused for group in range(tree.num_groups)}
        self.absent = {(node, group) for node, group in self.absent if node in tree}
        self.filled.free += gone

    @rule(count=st.integers(1, 5))
    def evict(self, count: int) -> None:
        tree, unused = self.filled.tree, self._unused()
        pages = {node: {p for group in range(tree.num_groups) for p in tree.pages([node], group)} for node in tree}
        most = sum([len(pages[node] - {ABSENT}) for node in unused])
        gone = tree.evict(count)
        assert min(count, most) <= len(gone) <= min(count + tree.num_groups - 1, most), "all that is unused can go"
        left = {node for node in pages if node not in tree}
        assert left <= set(unused)
        assert set(gone) == {page for node in left for page in pages[node] - {ABSENT}}
        self.known = {key: node for key, node in self.known.items() if node not in left}
        self.absent = {(node, group) for node, group in self.absent if node not in left}
        self.filled.free += gone

    @invariant()
    def agrees(self) -> None:
        tree = self.filled.tree
        assert tree.audit() == []
        assert set(tree) == set(self.known.values())
        locked = {node for path in self.reading for node in path}
        pinned = {node for path in self.kept for node in path} - locked
        groups = tree.num_groups
        assert tree.num_nodes == len(self.known)
        assert tree.num_pages == len(self.known) * groups - len(self.absent)
        assert (tree.num_locked, tree.num_pinned) == (len(locked) * groups, len(pinned) * groups)
        assert tree.num_pages + len(self.filled.free) == PAGES - 1


Prefixes.TestCase.settings = machine(60, 50)
TestPrefixes = Prefixes.TestCase
