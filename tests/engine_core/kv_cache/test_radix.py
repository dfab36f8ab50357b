"""The prefix cache: examples, and a state machine against a dictionary of prefixes."""

import itertools
import re
from array import array
from typing import NamedTuple

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tandem.engine_core.kv_cache.page_classes import ABSENT, PageClass
from tandem.engine_core.kv_cache.radix import ROOT, WHOLE_PATH, RadixTree
from tests.support.effort import machine

PAGES = 60


def ids(*tokens: int) -> "array[int]":
    return array("i", tokens)


class Filled:
    """A tree with a supply of pages."""

    def __init__(self, page_size: int, classes: tuple[PageClass, ...] = WHOLE_PATH) -> None:
        self.tree = RadixTree(page_size, classes)
        self.free = list(range(PAGES - 1, 0, -1))

    def put(self, namespace: bytes, tokens: "array[int]", passed: int = 0) -> list[int]:
        """Insert every full page of these tokens and lock it, as a sequence does; return the nodes.

        passed: number of nodes whose pages of tails the sequence has given up before.
        """
        tree, nodes = self.tree, list[int]()
        for index in range(len(tokens) // tree.page_size):
            parent = nodes[-1] if nodes else ROOT
            node = tree.insert(tree.key(namespace, tokens, index, parent), parent)
            nodes.append(node)
        for kind, held in enumerate(tree.classes):
            mine = nodes[passed:] if kind else nodes
            pages = [[self.free.pop() for _ in mine] for _ in held.tables]
            known = tree.attach(mine, pages, kind)
            self.free += [column[index] for column in pages for index in known]
        tree.lock(nodes, self.firsts(min(passed, len(nodes))))
        return nodes

    def firsts(self, passed: int = 0) -> list[int]:
        """Return, by class, the first node that a sequence reads which has passed some."""
        return [passed if kind else 0 for kind in range(len(self.tree.classes))]


def test_prefix_is_found_page_by_page() -> None:
    filled = Filled(2)
    path = filled.put(b"", ids(1, 2, 3, 4, 5, 6, 7))
    tree = filled.tree
    assert len(path) == 3, "the last token fills no page"
    assert tree.pages(path) == [1, 2, 3]
    assert tree.match(b"", ids(1, 2, 3, 4, 9, 9), 3) == path[:2]
    assert tree.match(b"", ids(1, 2, 3, 4, 5, 6), 2) == path[:2], "no further than the limit"
    assert tree.walk(b"", ids(1, 2, 3, 4, 5, 6), 3, index=1, parent=path[0]) == path[1:], "resumed after a node"
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
    assert (filled.tree.num_nodes, filled.tree.counts.held) == (2, 2)


def test_eviction_takes_the_least_recently_used_leaf() -> None:
    filled = Filled(1)
    tree = filled.tree
    left, right, longer = filled.put(b"", ids(1, 2)), filled.put(b"", ids(1, 3)), filled.put(b"", ids(1, 3, 4))
    pages = dict(zip((*left, *longer), tree.pages((*left, *longer)), strict=True))
    for path in (longer, left, right):
        tree.unlock(path)
    assert tree.counts.evictable == 4
    assert tree.evict(1) == [pages[longer[-1]]], "right was used after left, but it is not a leaf"
    tree.lock(left)
    tree.unlock(left)
    assert tree.evict(1) == [pages[right[-1]]]
    assert tree.evict(10) == [pages[left[-1]], pages[left[0]]], "a parent goes after its children"
    assert (tree.num_nodes, tree.counts.held, tree.evict(1)) == (0, 0, [])
    assert tree.audit() == []


def test_eviction_spares_nodes_that_are_read_or_kept() -> None:
    filled = Filled(1)
    tree = filled.tree
    read, kept = filled.put(b"", ids(1, 2)), filled.put(b"", ids(1, 3))
    pages = dict(zip((*read, *kept), tree.pages((*read, *kept)), strict=True))
    tree.pin(kept)
    tree.unlock(kept)
    counts = tree.counts
    assert (counts.locked, counts.pinned, counts.evictable) == (2, 1, 0), "the first page of both is read"
    assert tree.evict(5) == []
    tree.unlock(read)
    assert (tree.counts.locked, tree.counts.pinned, tree.counts.evictable) == (0, 2, 1)
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


def test_match_ends_before_a_node_that_lacks_a_page_of_the_whole_path() -> None:
    filled = Filled(1, (PageClass((0, 1)),))
    tree = filled.tree
    path = filled.put(b"", ids(1, 2, 3))
    found_at = tree.epoch
    tree.unlock(path)
    pages = tree.drop(path[1])
    assert (tree.num_nodes, tree.counts.held, tree.counts.evictable, pages) == (3, 4, 4, [2, 5])
    assert tree.pages(path, 1) == [4, ABSENT, 6]
    assert tree.match(b"", ids(1, 2, 3), 3) == path[:1]
    assert not tree.is_current(path, found_at), "the last node is as it was, one before it is not"
    stale = list(path)
    tree.prune(stale, found_at)
    assert stale == []
    assert tree.audit() == []
    assert tree.attach(path, [[7, pages[0], 8], [9, pages[1], 10]]) == [0, 2], "the others keep theirs"
    assert tree.match(b"", ids(1, 2, 3), 3) == path
    assert sorted(tree.evict(3)) == [2, 3, 5, 6], "both pages of a node go together"
    assert tree.audit() == []


def test_eviction_passes_leaves_without_a_page() -> None:
    filled = Filled(1)
    tree = filled.tree
    path = filled.put(b"", ids(1, 2))
    tree.unlock(path)
    assert tree.drop(path[1]) == [2]
    assert tree.evict(1) == [1]
    assert (tree.num_nodes, tree.evict(1)) == (0, [])
    assert tree.audit() == []


def test_misuse_is_found() -> None:
    filled = Filled(1)
    path = filled.put(b"", ids(1, 2))
    tree = filled.tree
    with pytest.raises(AssertionError, match=f"node {path[1]} unpinned"):
        tree.unpin((path[1],))
    with pytest.raises(AssertionError, match=f"node {path[1]} loses"):
        tree.drop(path[1])
    with pytest.raises(AssertionError, match=r"\b5\b"):
        RadixTree(1).insert(tree.key(b"", ids(9), 0, 5), 5)
    tree.unlock(path)
    with pytest.raises(AssertionError, match=f"node {path[0]} unlocked"):
        tree.unlock((path[0],))
    tree.drop(path[1])
    with pytest.raises(AssertionError, match=f"node {path[1]} holds no"):
        tree.drop(path[1])
    with pytest.raises(AssertionError, match=f"node {path[1]} is locked"):
        tree.lock(path)
    with pytest.raises(AssertionError, match=f"node {path[1]} is pinned"):
        tree.pin(path[1:])


def test_audits_see_what_is_broken() -> None:
    filled = Filled(1)
    path = filled.put(b"", ids(1, 2))
    tree = filled.tree
    whole = tree.classes[0]
    whole.locks[path[0]] = 0
    assert any(re.fullmatch(rf"node {path[1]}\b.* node {path[0]}\b.*", problem) for problem in tree.audit())
    whole.locks[path[0]] = 1
    assert tree.audit() == []
    (table,) = whole.tables
    table[path[1]] = table[path[0]]
    (problem,) = tree.audit()
    assert "two nodes" in problem
    table[path[1]] = ABSENT
    (problem,) = tree.audit()
    assert problem.startswith(f"class 0: node {path[1]} holds 0 of 1 ")
    whole.held[path[1]] = False
    counts, used = tree.audit()
    assert used.startswith(f"class 0: node {path[1]} is in use")
    assert "[1, 2, 0]" in counts and "[2, 2, 0]" in counts
    table[path[1]], whole.held[path[1]] = 2, True
    tree.unlock(path)
    tree.evict(2)
    whole.locks[path[0]] = 1
    assert any(problem.startswith(f"node {path[0]} is in use") for problem in tree.audit())
    tree._free_ids.pop()
    assert any("node id" in problem for problem in tree.audit())


WINDOW = (PageClass((0,)), PageClass((1, 2), 2))
"""A group that attends to all positions, and two with a window of up to two pages."""


def test_match_needs_the_tail_of_windows_only() -> None:
    filled = Filled(1, WINDOW)
    tree = filled.tree
    path = filled.put(b"", ids(1, 2, 3, 4), passed=2)
    assert tree.match(b"", ids(1, 2, 3, 4), 4) == path
    assert tree.match(b"", ids(1, 2, 3, 9), 4) == [], "no match can end where a page of the window was given up"
    again = filled.put(b"", ids(1, 2))
    assert again == path[:2]
    assert tree.match(b"", ids(1, 2, 3, 9), 4) == path[:3]
    tree.unlock(path, filled.firsts(2))
    tree.unlock(again, filled.firsts())
    filled.free += tree.drop(path[2], 1)
    assert tree.match(b"", ids(1, 2, 3, 4), 4) == path[:2], "matches within the tail of the lost page end before it"
    assert tree.audit() == []


def test_pages_outside_tails_are_evicted_first_then_tails_by_last_use() -> None:
    filled = Filled(1, WINDOW)
    tree = filled.tree
    paths = [filled.put(b"", ids(number, 2, 3, 4)) for number in (5, 6)]
    for path in paths:
        tree.mark(path[-1])
        tree.unlock(path, filled.firsts())
    tree.lock(paths[0], filled.firsts())
    tree.touch(paths[0][-1])
    tree.unlock(paths[0], filled.firsts())
    assert [tree.classes[1].held[node] for path in paths for node in path] == [True] * 8
    filled.free += tree.evict(8)
    assert [tree.classes[1].held[node] for path in paths for node in path] == [False, False, True, True] * 2
    assert [len(tree.match(b"", ids(number, 2, 3, 4), 4)) for number in (5, 6)] == [4, 4]
    filled.free += tree.evict(1)
    assert [len(tree.match(b"", ids(number, 2, 3, 4), 4)) for number in (5, 6)] == [4, 0]
    assert tree.match_points == [paths[0][-1]]
    assert tree.audit() == []


def test_node_with_two_children_keeps_its_tail() -> None:
    """Four chats behind one system prompt: their tails need the same memory, but a new chat finds the prompt."""
    filled = Filled(1, WINDOW)
    tree, system = filled.tree, (1, 2, 3)
    chats = [filled.put(b"", ids(*system, number, 7)) for number in (4, 5)]
    fork = chats[0][2]
    assert tree.match_points == [fork]
    for path in chats:
        tree.mark(path[-1])
        tree.unlock(path, filled.firsts())
    tree.touch(fork)
    filled.free += tree.evict(2)
    assert tree.match(b"", ids(*system, 9), 4) == chats[0][:3]
    filled.free += tree.evict(2 + 4 * 2)
    assert tree.match(b"", ids(*system, 9), 4) == chats[0][:3], "the chats lose their tails before"
    assert [tree.match(b"", ids(*system, number, 7), 5) for number in (4, 5)] == [chats[0][:3]] * 2
    assert tree.audit() == []


def test_fork_whose_tail_was_evicted_is_a_match_point_again_once_it_is_computed() -> None:
    filled = Filled(1, WINDOW)
    tree = filled.tree
    chats = [filled.put(b"", ids(1, 2, number), passed=2) for number in (4, 5)]
    fork = chats[0][1]
    assert tree.match_points == [], "neither chat had the window's pages at the fork any more"
    third = filled.put(b"", ids(1, 2, 6))
    assert tree.match_points == [fork]
    for path, passed in zip((*chats, third), (2, 2, 0), strict=True):
        tree.unlock(path, filled.firsts(passed))
    assert tree.audit() == []


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_fork_that_lost_a_part_of_its_tail_becomes_a_match_point_again(lost: int) -> None:
    filled = Filled(1, WINDOW)
    tree = filled.tree
    first = filled.put(b"", ids(1, 2, 3, 4))
    fork = first[2]
    tree.unlock(first, filled.firsts())
    for node in first[1 : 1 + lost]:
        filled.free += tree.drop(node, 1)
    filled.put(b"", ids(1, 2, 3, 5))
    assert tree.match_points == [fork]
    assert tree.audit() == []


def test_chain_without_pages_goes_with_its_last_tail() -> None:
    filled = Filled(1, (PageClass(()), PageClass((0,), 2)))
    tree = filled.tree
    long, short = filled.put(b"", ids(1, 2, 3, 4, 5), passed=3), filled.put(b"", ids(1, 2, 9))
    tree.mark(long[-1])
    tree.mark(short[-1])
    tree.unlock(long, filled.firsts(3))
    tree.unlock(short, filled.firsts())
    assert (tree.num_nodes, tree.counts.held) == (6, 2 + 3)
    filled.free += tree.evict(1)
    assert tree.match(b"", ids(1, 2, 3, 4, 5), 5) == long, "the pages before the tails go first"
    filled.free += tree.evict(2)
    assert (tree.num_nodes, tree.counts.held) == (3, 2), "nodes 3, 4 and 5 went with their pages"
    filled.free += tree.evict(2)
    assert (tree.num_nodes, tree.counts.held) == (0, 0)
    assert tree.audit() == []


def test_number_of_nodes_is_bounded() -> None:
    filled = Filled(1, (PageClass(()), PageClass((0,), 1)))
    tree = filled.tree
    tree.max_nodes = 8
    first, second = filled.put(b"", ids(1, 2, 3), passed=2), filled.put(b"", ids(4, 5, 6), passed=2)
    tree.unlock(first, filled.firsts(2))
    assert tree.make_room(2) == (2, [])
    assert tree.make_room(4) == (4, [1]), "two leaves went, of which one held a page"
    assert tree.num_nodes == 4
    assert tree.make_room(9) == (5, []), "the nodes in use stay"
    assert set(tree) == set(second)
    assert tree.audit() == []


def test_session_keeps_the_tail_of_its_last_node() -> None:
    filled = Filled(1, WINDOW)
    tree = filled.tree
    path = filled.put(b"", ids(1, 2, 3, 4))
    tree.mark(path[-1])
    firsts = tree.pin(path)
    tree.unlock(path, filled.firsts())
    assert (firsts, tree.counts.pinned, tree.counts.evictable) == ([0, 2], 4 + 2 * 2, 2 * 2)
    filled.free += tree.evict(9)
    assert tree.match(b"", ids(1, 2, 3, 4), 4) == path
    shorter = tree.pin(path[:3])
    assert shorter == [0, 3], "of a shorter path, the tail is gone"
    tree.unpin(path, firsts)
    tree.unpin(path[:3], shorter)
    assert tree.counts.pinned == 0
    assert tree.audit() == []


class Reader(NamedTuple):
    path: list[int]
    firsts: list[int]


class Prefixes(RuleBasedStateMachine):
    """Sequences come, read, pass, keep and go; pages are evicted, and taken from nodes that stay.

    The model knows each node by its whole prefix, and the classes of which it lacks the pages.
    """

    @initialize(
        page_size=st.sampled_from([1, 2, 4]),
        classes=st.sampled_from(
            [
                WHOLE_PATH,
                (PageClass((0, 1)),),
                WINDOW,
                (PageClass(()), PageClass((0,), 2)),
                (PageClass((2,)), PageClass((0,), 3), PageClass((1,), 1)),
            ]
        ),
    )
    def start(self, page_size: int, classes: tuple[PageClass, ...]) -> None:
        self.filled = Filled(page_size, classes)
        self.size = page_size
        self.known: dict[tuple[bytes, bytes], int] = {}
        """(namespace, all tokens up to the page's end) -> node."""
        self.absent: set[tuple[int, int]] = set()
        """(node, class) without pages."""
        self.reading: list[Reader] = []
        self.kept: list[Reader] = []
        self.found: list[tuple[bytes, list[int], list[int], int]] = []
        """Paths that were found and not locked: (namespace, tokens, nodes, epoch)."""

    NAMESPACES = st.sampled_from([b"", b"s"])
    TOKENS = st.lists(st.integers(0, 1), max_size=8)

    @property
    def kinds(self) -> range:
        return range(len(self.filled.tree.classes))

    def _holds(self, node: int, kind: int) -> bool:
        return (node, kind) not in self.absent

    def _prefix(self, node: int) -> tuple[bytes, bytes]:
        return next(key for key, known in self.known.items() if known == node)

    def _path(self, node: int) -> list[int]:
        """Return the nodes from the root to this one."""
        namespace, tokens = self._prefix(node)
        width = 4 * self.size
        return [self.known[namespace, tokens[:end]] for end in range(width, len(tokens) + 1, width)]

    def _matches(self, path: list[int]) -> bool:
        """Return whether a match can end at the end of a path."""
        tails = [pages.kind.tail for pages in self.filled.tree.classes]
        return all(
            self._holds(node, kind)
            for kind, tail in enumerate(tails)
            for node in (path if tail is None else path[max(0, len(path) - tail) :])
        )

    def _num_children(self, node: int) -> int:
        namespace, tokens = self._prefix(node)
        width = 4 * self.size
        return sum([key[0] == namespace and key[1][:-width] == tokens for key in self.known])

    @rule(namespace=NAMESPACES, tokens=TOKENS, passed=st.sampled_from([0, 0, 1, 2, 9]))
    def insert(self, namespace: bytes, tokens: list[int], passed: int) -> None:
        full, tree = len(tokens) // self.size, self.filled.tree
        if len(self.filled.free) < full * sum(len(pages.tables) for pages in tree.classes):
            return
        nodes = set(self.known.values())
        path = self.filled.put(namespace, ids(*tokens), passed)
        passed = min(passed, len(path))
        self.reading.append(Reader(path, self.filled.firsts(passed)))
        for index, node in enumerate(path):
            key = (namespace, ids(*tokens[: (index + 1) * self.size]).tobytes())
            assert self.known.setdefault(key, node) == node
            for kind in self.kinds:
                if kind and index < passed:
                    self.absent |= {(node, kind)} if node not in nodes else set()
                else:
                    self.absent.discard((node, kind))
        for node, child in itertools.pairwise(path):
            if len(tree.classes) > 1 and child not in nodes and self._num_children(node) == 2:
                assert (node in tree.match_points) == self._matches(self._path(node))

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def pass_by(self, data: st.DataObject) -> None:
        """A reader passes pages of tails: later readers of smaller windows have passed as much or more."""
        index = data.draw(st.integers(0, len(self.reading) - 1))
        path, firsts = self.reading[index]
        for kind in self.kinds[1:]:
            end = data.draw(st.integers(firsts[kind], len(path)))
            self.filled.tree.pass_by(path[firsts[kind] : end], kind)
            firsts[kind] = end

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def mark(self, data: st.DataObject) -> None:
        node = data.draw(st.sampled_from(sorted(self.known.values())))
        tree = self.filled.tree
        known = node in tree.match_points
        tree.mark(node)
        if known or (len(tree.classes) > 1 and self._matches(self._path(node))):
            assert tree.match_points[-1] == node
        else:
            assert node not in tree.match_points

    @rule(namespace=NAMESPACES, tokens=TOKENS, use=st.sampled_from(["read", "keep", "remember"]))
    def match(self, namespace: bytes, tokens: list[int], use: str) -> None:
        tree = self.filled.tree
        found = tree.match(namespace, ids(*tokens), len(tokens) // self.size)
        walked = self._expected(namespace, tokens)
        assert found == max([walked[:end] for end in range(len(walked) + 1) if self._matches(walked[:end])], key=len)
        for known in range(1, len(walked) + 1):
            depth = tree.reach(walked, known)
            assert self._matches(walked[:depth])
            assert depth >= known if self._matches(walked[:known]) else depth == len(found)
        if use == "keep":
            self.kept.append(Reader(found, tree.pin(found)))
        elif use == "read":
            firsts = [tree.tail_start(len(found), pages.kind) for pages in tree.classes]
            tree.lock(found, firsts)
            self.reading.append(Reader(found, firsts))
        else:
            self.found.append((namespace, tokens, walked, tree.epoch))

    def _expected(self, namespace: bytes, tokens: list[int]) -> list[int]:
        """Return the path that `walk` should find."""
        expected: list[int] = []
        for index in range(len(tokens) // self.size):
            node = self.known.get((namespace, ids(*tokens[: (index + 1) * self.size]).tobytes()))
            if node is None or not self._holds(node, 0):
                break
            expected.append(node)
        return expected

    @precondition(lambda self: self.found)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        """A path found earlier, pruned and continued, is what a new search finds."""
        namespace, tokens, path, epoch = self.found.pop(data.draw(st.integers(0, len(self.found) - 1)))
        tree, before = self.filled.tree, list(path)
        tree.prune(path, epoch)
        assert path == before[: len(path)]
        assert (path == before) == tree.is_current(before, epoch) or not before
        parent = path[-1] if path else ROOT
        path += tree.walk(namespace, ids(*tokens), len(tokens) // self.size, len(path), parent)
        assert path == self._expected(namespace, tokens)

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.filled.tree.unlock(*self.reading.pop(data.draw(st.integers(0, len(self.reading) - 1))))

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        self.filled.tree.unpin(*self.kept.pop(data.draw(st.integers(0, len(self.kept) - 1))))

    def _used(self, users: list[Reader], kind: int) -> set[int]:
        return {node for path, firsts in users for node in path[firsts[kind] :]}

    def _unused(self, kind: int = 0) -> set[int]:
        """Return the nodes whose pages of a class have no user, whether they hold them or not."""
        return set(self.known.values()) - self._used([*self.reading, *self.kept], kind)

    def _loose(self) -> set[tuple[int, int]]:
        """Return (node, class) of the pages that are evicted first."""
        loose = {(node, kind) for kind in self.kinds[1:] for node in self._unused(kind) if self._holds(node, kind)}
        for point in self.filled.tree.match_points:
            path = self._path(point)
            for kind in self.kinds[1:]:
                first = self.filled.tree.tail_start(len(path), self.filled.tree.classes[kind].kind)
                loose -= {(node, kind) for node in path[first:]}
        return loose

    def _pages(self) -> dict[tuple[int, int], list[int]]:
        """Return the pages by (node, class)."""
        tree = self.filled.tree
        held = [(node, kind) for node in tree for kind in self.kinds if self._holds(node, kind)]
        return {(node, kind): tree.classes[kind].pages(node) for node, kind in held}

    def _forget(self, pages: dict[tuple[int, int], list[int]], gone: list[int]) -> set[tuple[int, int]]:
        """Take pages that were released out of the model; return where they were."""
        tree = self.filled.tree
        lost = {place for place, held in pages.items() if set(held) & set(gone)}
        assert sorted(gone) == sorted(page for place in lost for page in pages[place])
        self.known = {key: node for key, node in self.known.items() if node in tree}
        self.absent = {(node, kind) for node, kind in self.absent | lost if node in tree}
        self.filled.free += gone
        return lost

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        whole = [(node, kind) for kind in self.kinds for node in sorted(self._unused(kind)) if self._holds(node, kind)]
        if whole:
            pages, (node, kind) = self._pages(), data.draw(st.sampled_from(whole))
            gone = self.filled.tree.drop(node, kind)
            assert gone == pages[node, kind]
            self.absent.add((node, kind))
            self.filled.free += gone

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        """A reader leaves, and the pages of its path without another user are released."""
        tree, reader = self.filled.tree, self.reading.pop(data.draw(st.integers(0, len(self.reading) - 1)))
        pages = self._pages()
        tree.unlock(*reader)
        lost = self._forget(pages, tree.discard(reader.path))
        expected = {(node, kind) for kind in self.kinds for node in self._unused(kind) & set(reader.path)}
        assert {place for place in pages if place in expected or place[0] not in tree} >= lost
        for kind in self.kinds:
            assert all(not self._holds(node, kind) for node in self._unused(kind) & set(reader.path))
        parents = {(key[0], key[1][: -4 * self.size]) for key in self.known}
        for key, node in self.known.items():
            assert node not in self._unused() & set(reader.path) or key in parents, "an unused leaf stayed"

    @rule(count=st.integers(1, 5))
    def evict(self, count: int) -> None:
        tree, pages, loose = self.filled.tree, self._pages(), self._loose()
        unused = {place for place in pages if place[0] in self._unused(place[1])}
        most, points = sum([len(pages[place]) for place in unused]), tree.match_points
        gone = tree.evict(count)
        together = sum([len(held.tables) for held in tree.classes])
        assert min(count, most) <= len(gone) <= min(count + together - 1, most), "all that is unused can go"
        lost = self._forget(pages, gone)
        assert lost <= unused
        assert lost <= loose or loose <= lost, "loose pages go before all others"
        remaining = tree.match_points
        unmarked = [node for node in points if node in tree and node not in remaining]
        assert unmarked == [node for node in points if node in tree][: len(unmarked)], "the least recently used first"

    @invariant()
    def agrees(self) -> None:
        tree = self.filled.tree
        assert tree.audit() == []
        assert set(tree) == set(self.known.values())
        assert tree.num_nodes == len(self.known)
        counts = [0, 0, 0]
        for kind, pages in enumerate(tree.classes):
            locked = self._used(self.reading, kind)
            pinned = self._used(self.kept, kind) - locked
            held = len(self.known) - sum([other == kind for _, other in self.absent])
            for index, number in enumerate((held, len(locked), len(pinned))):
                counts[index] += number * len(pages.tables)
        assert [tree.counts.held, tree.counts.locked, tree.counts.pinned] == counts
        assert tree.counts.held + len(self.filled.free) == PAGES - 1


Prefixes.TestCase.settings = machine(60, 50)
TestPrefixes = Prefixes.TestCase
