"""The prefix cache: a radix tree over token ids with KV pages as nodes.

Every edge holds the tokens of one whole page. The tree is stored flat: a node id indexes every list, and one dictionary
maps (parent node, tokens of the edge) to the node. So a tree of 100,000 nodes is a handful of lists, a page of a prompt
is found with one look-up, and the garbage collector has nothing to walk.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence

from tandem.engine_core.kv_cache.eviction import EvictionQueue
from tandem.engine_core.kv_cache.page_classes import ABSENT, ClassPages, PageClass, PageCounts

ROOT = 0
"""Id of the root, the parent of the nodes of first pages; it has no tokens and no pages."""
WHOLE_PATH = (PageClass((0,)),)
"""Classes of a model with one KV group that attends to all positions."""


class RadixTree:
    """Tree of nodes with KV pages, shared by the sequences of a namespace.

    Any sequence of the namespace may read the pages of a node, and none may write them. Namespaces are bytes: KV under
    another adapter or another salt is another namespace.

    A node holds the pages of each class (`page_classes`) or lacks them. The first class is needed on the whole path: a
    node that lacks its pages stays in the tree but is never matched; a sequence that computes its tokens again gives it
    pages again. Of the other classes a match needs the tail: their pages may be evicted from any node.

    Each node counts, by class, its readers (`lock`) and the sessions that keep it between turns (`pin`). A reader of a
    node reads every node before it as well in the first class, so a node in use never hangs below one that is not, and
    evicting leaves is enough to free all pages of that class.

    Match points are nodes where later matches are expected to end: the last nodes of prompts, turns and sessions, and
    nodes with two children. The pages of their tails are evicted after all others of their class.

    `counts` are of pages, over all classes.
    """

    def __init__(
        self, page_size: int, classes: tuple[PageClass, ...] = WHOLE_PATH, max_nodes: int | None = None
    ) -> None:
        """Start with the root only.

        page_size: tokens of an edge; classes: of the pages of a node; max_nodes: see `make_room`.
        """
        self.page_size = page_size
        self.counts = PageCounts()
        self.classes = tuple([ClassPages(kind, self.counts) for kind in classes])
        self.max_nodes = max_nodes
        self.num_evicted = 0
        """Number of pages given up since the start."""
        self.epoch = 0
        """Incremented whenever a node leaves the tree or loses a page that matches need on their whole path."""
        self.on_lost: Callable[[int], None] | None = None
        """Function that is called with each node that leaves the tree or loses such a page."""
        self._path, self._tails = self.classes[0], self.classes[1:]
        assert self._path.kind.tail is None and all(tail.kind.tail is not None for tail in self._tails)
        self._locks, self._pins = self._path.locks, self._path.pins
        self._tables = {
            group: table for pages in self.classes for group, table in zip(pages.kind.groups, pages.tables, strict=True)
        }
        self._index: dict[bytes, int] = {}
        self._key: list[bytes | None] = [None]
        """Key of each node; None for the root and for ids that are not in the tree."""
        self._parent = [ROOT]
        self._num_children = [0]
        self._removed_at = [0]
        """`epoch` when the node with this id left the tree last; 0 if none has."""
        self._dropped_at = 0
        """`epoch` when a node that stayed in the tree lost a page of the first class last."""
        self._last_use = [0]
        self._uses = 0
        self._free_ids: list[int] = []
        self._queue = EvictionQueue()
        """Unused leaves."""
        self.has_draft_kv = bytearray(1)
        """For each node, 1 if the draft model has computed the keys and values of its page too."""
        self._points: dict[int, int] = {}
        """Last use of each match point; empty without tails."""
        self._point_queue = EvictionQueue()

    @property
    def num_nodes(self) -> int:
        """Nodes in the tree, the root excluded."""
        return len(self._index)

    @property
    def match_points(self) -> list[int]:
        """The match points, the least recently used first."""
        return sorted(self._points, key=self._points.__getitem__)

    def __contains__(self, node: int) -> bool:
        return 0 <= node < len(self._key) and self._key[node] is not None

    def __iter__(self) -> Iterator[int]:
        """Yield the ids of the nodes in the tree."""
        return iter([node for node, key in enumerate(self._key) if key is not None])

    def pages(self, nodes: Sequence[int], group: int = 0) -> list[int]:
        """Return the page of each node in one group, `ABSENT` where it holds none."""
        held = self._tables[group]
        return [held[node] for node in nodes]

    def num_readers(self, node: int, kind: int = 0) -> int:
        """Return the number of locks on a node's pages of a class."""
        return self.classes[kind].locks[node]

    def parent(self, node: int) -> int:
        """Return the node right before a node, `ROOT` for that of a first page."""
        return self._parent[node]

    def num_children(self, node: int) -> int:
        """Return the number of nodes right behind a node."""
        return self._num_children[node]

    def key(self, namespace: bytes, tokens: array[int], index: int, parent: int) -> bytes:
        """Return the key of the node for page `index` of a sequence.

        parent: the node of page `index - 1`, `ROOT` for the first page.
        """
        start = index * self.page_size
        return _key(parent, namespace, tokens[start : start + self.page_size].tobytes())

    def match(self, namespace: bytes, tokens: array[int], limit: int) -> list[int]:
        """Return the longest path that holds these tokens and whose pages a sequence can read.

        limit: largest number of nodes.
        """
        path = self.walk(namespace, tokens, limit)
        return path[: self.reach(path)]

    def walk(self, namespace: bytes, tokens: array[int], limit: int, index: int = 0, parent: int = ROOT) -> list[int]:
        """Return the nodes that hold these tokens, whether or not a match can end at the last one.

        They are the nodes of the pages from `index` on and below `limit`, up to the first one without a page of the
        first class. parent: the node of page `index - 1`.
        """
        found: list[int] = []
        size, known, held = self.page_size, self._index, self._path.held
        for start in range(index * size, limit * size, size):
            node = known.get(_key(parent, namespace, tokens[start : start + size].tobytes()))
            if node is None or not held[node]:
                break
            found.append(node)
            parent = node
        return found

    def reach(self, path: Sequence[int], known: int = 0) -> int:
        """Return the number of nodes in the longest match on a path from the root, as `walk` returns it.

        A match ends at a node if the tails of all classes are complete there. known: number of nodes of the match that
        was found last; if it still is one, only those right behind it are looked at, which costs less than the whole
        path; 0: the whole path is.
        """
        if not self._tails:
            return len(path)
        if 0 < known <= len(path) and self._is_complete(path[:known]):
            held = [tail.held for tail in self._tails]
            while known < len(path) and all(column[path[known]] for column in held):
                known += 1
            return known
        depth, previous = len(path), -1
        columns = [(bytes(map(tail.held.__getitem__, path)), tail.kind.tail or 0) for tail in self._tails]
        while depth != previous:
            previous = depth
            for column, length in columns:
                first, lacking = column.rfind(bytes([True]) * length, 0, depth), column.find(False, 0, depth)
                if first >= 0:
                    depth = first + length
                elif lacking >= 0:  # A match shorter than the tail needs all its nodes.
                    depth = lacking
        return depth

    def _is_complete(self, path: Sequence[int]) -> bool:
        """Return whether a match can end at the end of a path from the root."""
        return all(tail.held[node] for tail in self._tails for node in path[self.tail_start(len(path), tail.kind) :])

    @staticmethod
    def tail_start(depth: int, kind: PageClass) -> int:
        """Return the index of the first node that a match of `depth` nodes needs of a class."""
        return 0 if kind.tail is None else max(0, depth - kind.tail)

    def is_current(self, path: Sequence[int], epoch: int) -> bool:
        """Return whether a path found by `walk` at this epoch is still in the tree.

        Its last node decides, because leaves are evicted first.
        """
        return epoch >= self._dropped_at and (not path or epoch >= self._removed_at[path[-1]])

    def prune(self, path: list[int], epoch: int) -> None:
        """Remove stale nodes from a path that was found by `walk` at this epoch.

        A node is stale if it has left the tree or lost a page of the first class since.
        """
        if epoch < self._dropped_at:
            path.clear()
        while path and epoch < self._removed_at[path[-1]]:
            path.pop()

    def insert(self, key: bytes, parent: int) -> int:
        """Return the node of this key, created behind its parent if there is none.

        A new node holds no pages, is unlocked, and cannot be evicted before it has been locked and unlocked once.
        """
        node = self._index.get(key)
        if node is not None:
            return node
        assert parent == ROOT or parent in self, f"a node behind node {parent}, which is not in the tree; {self}"
        node = self._index[key] = self._new_id()
        self._key[node] = key
        self._parent[node] = parent
        self._num_children[parent] += 1
        if self._num_children[parent] > 1:
            self.mark(parent)
        return node

    def attach(self, nodes: Sequence[int], pages: Sequence[Sequence[int]], kind: int = 0) -> list[int]:
        """Give consecutive nodes of a path their pages of a class, for each group one for each node.

        Nodes that hold some already keep those. Return the indexes of these nodes.
        """
        known = self.classes[kind].attach(nodes, pages)
        if kind:
            for node in nodes:
                if self._num_children[node] > 1 and node not in self._points:
                    self.mark(node)
        return known

    def drop(self, node: int, kind: int = 0) -> list[int]:
        """Take the pages of a class from a node that stays in the tree.

        Return the pages. They must have neither readers nor pins.
        """
        assert self.classes[kind].held[node], f"node {node} holds no page of class {kind}; {self}"
        if not kind:
            self.has_draft_kv[node] = 0
        pages = self.classes[kind].take((node,))
        self.num_evicted += len(pages)
        if not kind:
            self.epoch = self._dropped_at = self.epoch + 1
            if self.on_lost is not None:
                self.on_lost(node)
        return pages

    def num_with_draft_kv(self, nodes: Sequence[int]) -> int:
        """Return the number of leading nodes of a path whose pages the draft model has computed."""
        if not nodes or not self.has_draft_kv[nodes[0]]:
            return 0
        lacking = bytes(map(self.has_draft_kv.__getitem__, nodes)).find(0)
        return len(nodes) if lacking < 0 else lacking

    def lock(self, nodes: Sequence[int], firsts: Sequence[int] = (0,)) -> None:
        """Add a reader to consecutive nodes of a path, which hold their pages.

        firsts: by class, index of the first node that is read.
        """
        for pages, first in zip(self.classes, firsts, strict=True):
            pages.lock(nodes[first:] if first else nodes)

    def unlock(self, nodes: Sequence[int], firsts: Sequence[int] = (0,)) -> None:
        """Remove a reader from consecutive nodes of a path.

        firsts: by class, index of the first node that was read.
        """
        for pages, first in zip(self.classes, firsts, strict=True):
            pages.unlock(nodes[first:] if first else nodes)
        self._on_use(nodes)

    def pass_by(self, nodes: Sequence[int], kind: int) -> None:
        """Remove a reader of one class, other than the first, from consecutive nodes of a path."""
        assert kind, "a reader passes no page of the first class"
        self.classes[kind].unlock(nodes)

    def pin(self, nodes: Sequence[int]) -> list[int]:
        """Keep a path from the root in the tree, with or without readers, and the tails that its last node has.

        Return, by class, the index of the first node whose pages are kept.
        """
        firsts = []
        for pages in self.classes:
            first = self.tail_start(len(nodes), pages.kind)
            if pages.kind.tail is not None and not all(pages.held[node] for node in nodes[first:]):
                first = len(nodes)
            pages.pin(nodes[first:])
            firsts.append(first)
        return firsts

    def unpin(self, nodes: Sequence[int], firsts: Sequence[int] = (0,)) -> None:
        """Undo one `pin`, which returned `firsts`, of a path."""
        for pages, first in zip(self.classes, firsts, strict=True):
            pages.unpin(nodes[first:])
        self._on_use(nodes)

    def mark(self, node: int) -> None:
        """Make a node a match point, or note its use.

        Does nothing if no match can end there, because the node lacks a page of its tail.
        """
        if not self._tails or node == ROOT:
            return
        if node not in self._points:
            tails = [(pages, self._tail(node, pages.kind)) for pages in self._tails]
            if not all(pages.held[member] for pages, tail in tails for member in tail):
                return
            for pages, tail in tails:
                for member in tail:
                    pages.protect(member)
        self._uses += 1
        self._points[node] = self._uses
        self._point_queue.push(node, self._uses, self._is_point, len(self._points))

    def touch(self, node: int) -> None:
        """Note the use of a match point; does nothing for other nodes."""
        if node in self._points:
            self.mark(node)

    def evict(self, count: int) -> list[int]:
        """Evict pages until at least `count` are released; return them.

        Pages in use stay, so there may be fewer pages than `count`. Loose pages go first. Then the least recently used
        match point loses its tail, or the least recently used leaf leaves the tree, whichever was used earlier. The
        pages of a node go together, so there may also be a few more.
        """
        pages: list[int] = []
        while len(pages) < count:
            if self._tails and self._evict_tail(pages):
                continue
            leaf = self._queue.pop(self._is_evictable)
            if leaf is None:
                break
            nodes = [leaf] if self._tails else self._oldest_nodes(leaf, count - len(pages))
            self._offer((self._remove(nodes, pages),))
        self.num_evicted += len(pages)
        return pages

    def _oldest_nodes(self, leaf: int, count: int) -> list[int]:
        """Return the nodes to evict for `count` pages of a tree without tails, beginning with the oldest leaf.

        Nodes of one sequence were mostly used together: then the parent is next, and need not queue.
        """
        parents, children, last_use = self._parent, self._num_children, self._last_use
        locks, pins, held, size = self._locks, self._pins, self._path.held, len(self._path.tables)
        oldest, nodes, node = self._queue.oldest_use, [leaf], leaf
        while True:
            count -= size * held[node]
            node = parents[node]
            if count <= 0 or node == ROOT or children[node] > 1 or locks[node] or pins[node] or last_use[node] > oldest:
                return nodes
            nodes.append(node)

    def _evict_tail(self, pages: list[int]) -> bool:
        """Add the pages of one node's tail class to a list, or make the tail of a match point loose.

        Return False if no page is loose and a leaf was used before the match points.
        """
        for tail in self._tails:
            if tail.loose:
                node = next(iter(tail.loose))
                pages += tail.take((node,))
                self._remove_empty(node)
                return True
        point_use = self._point_queue.oldest_valid_use(self._is_point)
        if point_use >= self._queue.oldest_valid_use(self._is_evictable):
            return False
        point = self._point_queue.pop(self._is_point)
        if point is None:
            return False
        self._forget_point(point)
        self._remove_empty(point)
        return True

    def make_room(self, count: int) -> tuple[int, list[int]]:
        """Remove leaves, the least recently used first, until `count` nodes can be added.

        Return how many can be added, and the pages that were released. The pool bounds the number of nodes that hold
        pages on their whole path. If a model has no such pages, `max_nodes` does.
        """
        pages: list[int] = []
        if self.max_nodes is None:
            return count, pages
        while self.num_nodes + count > self.max_nodes:
            leaf = self._queue.pop(self._is_evictable)
            if leaf is None:
                break
            self._offer((self._remove((leaf,), pages),))
        self.num_evicted += len(pages)
        return min(count, max(0, self.max_nodes - self.num_nodes)), pages

    def discard(self, nodes: Sequence[int]) -> list[int]:
        """Take the unused pages from the nodes of a path; return the pages.

        Leaves go with their pages. Other nodes stay without them and are not matched until they are computed again.
        """
        pages: list[int] = []
        for node in reversed(nodes):
            unused = [kind for kind, held in enumerate(self.classes) if not held.in_use(node)]
            if not unused and not self._tails:
                break
            for kind in unused:
                if self.classes[kind].held[node]:
                    pages += self.drop(node, kind)
            if self._is_evictable(node, self._last_use[node]):
                self._remove((node,), [])
        return pages

    def _remove(self, nodes: Sequence[int], pages: list[int]) -> int:
        """Take a leaf out of the tree, and then the nodes before it; return the parent of the last.

        Their pages are added to the list `pages`; the caller counts them.
        """
        keys, index, removed_at = self._key, self._index, self._removed_at
        for held in self.classes:
            pages += held.take([node for node in nodes if held.held[node]])
        for node in nodes if self._points else ():
            if node in self._points:
                self._forget_point(node)
        for node in nodes:
            key = keys[node]
            assert key is not None, f"node {node} is not in the tree; {self}"
            del index[key]
            keys[node] = None
            self._num_children[self._parent[node]] -= 1
            self.epoch = removed_at[node] = self.epoch + 1
        if self.on_lost is not None:
            for node in nodes:
                self.on_lost(node)
        self._free_ids += nodes
        return self._parent[nodes[-1]]

    def _remove_empty(self, node: int) -> None:
        """Remove a node that holds no page, if nothing needs it, and then those before it."""
        removed = False
        while (
            node != ROOT
            and self._is_evictable(node, self._last_use[node])
            and node not in self._points
            and not any(held.held[node] and held.tables for held in self.classes)
        ):
            node, removed = self._remove((node,), []), True
        if removed:
            self._offer((node,))

    def _tail(self, node: int, kind: PageClass) -> list[int]:
        """Return the nodes whose pages of a class a match that ends at a node needs."""
        tail: list[int] = []
        while node != ROOT and len(tail) < (kind.tail or 0):
            tail.append(node)
            node = self._parent[node]
        return tail

    def _forget_point(self, node: int) -> None:
        """Make a match point a node like others."""
        del self._points[node]
        for pages in self._tails:
            for member in self._tail(node, pages.kind):
                pages.unprotect(member)

    def _is_point(self, node: int, last_use: int) -> bool:
        """Return whether a node is a match point that was last used at this time."""
        return self._points.get(node) == last_use

    def _new_id(self) -> int:
        """Return an id that no node in the tree has."""
        if self._free_ids:
            self.has_draft_kv[self._free_ids[-1]] = 0
            return self._free_ids.pop()
        self.has_draft_kv.append(0)
        self._key.append(None)
        for column in (self._parent, self._num_children, self._removed_at, self._last_use):
            column.append(0)
        for pages in self.classes:
            pages.add_node()
        return len(self._key) - 1

    def _on_use(self, nodes: Sequence[int]) -> None:
        """Note the use of consecutive nodes of a path, and queue the last one if it can be evicted."""
        self._uses += 1
        for node in nodes:
            self._last_use[node] = self._uses
        self._offer(nodes)

    def _offer(self, nodes: Sequence[int]) -> None:
        """Queue the last node of a path for eviction, if it is evictable.

        No other node of a path is a leaf. The queue is bounded by the nodes without reader and pin, at most
        `num_nodes`.
        """
        node = nodes[-1] if nodes else ROOT
        if node != ROOT and self._is_evictable(node, self._last_use[node]):
            self._queue.push(node, self._last_use[node], self._is_evictable, self.num_nodes)

    def _is_evictable(self, node: int, last_use: int) -> bool:
        """Return whether a node is an unused leaf that was last used at this time."""
        return (
            not (self._num_children[node] or self._locks[node] or self._pins[node])
            and self._last_use[node] == last_use
            and self._key[node] is not None
        )

    def audit(self) -> list[str]:
        """Return the inconsistencies of nodes and their pages, one line each.

        The list is empty if there are none.
        """
        members = list(self)
        problems = self._audit_shape(members)
        every = [page for pages in self.classes for table in pages.tables for page in table if page != ABSENT]
        if len(set(every)) != len(every):
            problems.append("a page is held by two nodes")
        found = [sum(column) for column in zip(*[pages.count() for pages in self.classes], strict=True)]
        counted = [self.counts.held, self.counts.locked, self.counts.pinned]
        if counted != found:
            problems.append(f"pages held, locked and pinned are {found}, counted {counted}")
        for number, pages in enumerate(self.classes):
            problems += [f"class {number}: {line}" for line in pages.audit()]
            needed = [0] * len(self._key)
            for point in self._points if pages.kind.tail is not None else ():
                for member in self._tail(point, pages.kind):
                    needed[member] += 1
            if needed != pages.num_points:
                problems.append(f"class {number}: match points protect {needed}, counted {pages.num_points}")
            for node in [node for node in range(len(self._key)) if node not in self]:
                if pages.held[node]:
                    problems.append(f"node {node} holds a page outside the tree")
                if pages.in_use(node):
                    problems.append(f"node {node} is in use outside the tree")
        problems += [f"match point {node} is not in the tree" for node in self._points if node not in self]
        return problems

    def _audit_shape(self, members: list[int]) -> list[str]:
        problems = []
        if sorted(self._index.values()) != members:
            problems.append(f"{len(members)} nodes are in the tree, {self.num_nodes} of them indexed")
        if sorted((*members, *self._free_ids)) != list(range(1, len(self._key))):
            problems.append("a node id is lost, or in the tree and free")
        children = [0] * len(self._key)
        locks, pins = self._locks, self._pins
        for node in members:
            parent = self._parent[node]
            children[parent] += 1
            if any(pages.locks[node] > locks[node] for pages in self._tails):
                problems.append(f"node {node} is read by more sequences than use its path")
            if parent == ROOT:
                continue
            if parent not in self:
                problems.append(f"node {node} hangs below node {parent}, which is not in the tree")
            if locks[node] > locks[parent] or pins[node] > pins[parent]:
                problems.append(f"node {node} is in use more often than node {parent} before it")
        if children != self._num_children:
            problems.append("children are miscounted")
        return problems

    def __repr__(self) -> str:
        return (
            f"RadixTree({self.num_nodes} nodes, {self.counts.held} pages, {self.counts.locked} locked, "
            f"{self.counts.pinned} pinned)"
        )


def _key(parent: int, namespace: bytes, tokens: bytes) -> bytes:
    """Return a key that no other (parent, namespace, tokens) has.

    A node id has four bytes and the tokens of a page have a fixed length. The key includes the namespace only if the
    parent is the root, whose id is known.
    """
    return parent.to_bytes(4, "little") + (tokens if parent else namespace + tokens)
