"""The prefix cache: a radix tree over token ids with KV pages as nodes.

Every edge holds the tokens of one whole page. The tree is stored flat: a node id indexes every list, and one dictionary
maps (parent node, tokens of the edge) to the node. So a tree of 100,000 nodes is a handful of lists, a page of a prompt
is found with one look-up, and the garbage collector has nothing to walk.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from tandem.engine_core.kv_cache.eviction import EvictionQueue

ROOT = 0
"""Id of the root, the parent of the nodes of first pages; it has no tokens and no pages."""
ABSENT = -1
"""Placeholder in a node for the page of a KV group that it does not hold."""


class RadixTree:
    """Tree of nodes with KV pages, shared by the sequences of a namespace.

    Any sequence of the namespace may read the pages of a node, and none may write them.

    A node holds one page per KV group; pages may be absent. A node that lacks a page stays in the tree but is never
    matched; a sequence that computes its tokens again gives it a page again.

    Each node counts its readers (`lock`) and the sessions that keep it between turns (`pin`). A reader of a node reads
    every node before it as well, so a node in use never hangs below one that is not, and evicting leaves is enough.
    Namespaces are bytes: KV under another adapter or another salt is another namespace.

    The counts `num_pages`, `num_locked` and `num_pinned` are of pages, over all groups.
    """

    def __init__(self, page_size: int, num_groups: int = 1) -> None:
        """Start with the root only.

        page_size: tokens of an edge; num_groups: pages that a complete node holds.
        """
        self.page_size = page_size
        self.num_groups = num_groups
        self.num_pages = 0
        """Pages that nodes hold."""
        self.num_locked = 0
        """Pages of nodes that have a reader."""
        self.num_pinned = 0
        """Pages of nodes without a reader that a session keeps."""
        self.num_evicted = 0
        """Number of pages given up since the start."""
        self.epoch = 0
        """Incremented whenever a node leaves the tree or loses a page."""
        self._index: dict[bytes, int] = {}
        self._key: list[bytes | None] = [None]
        """Key of each node; None for the root and for ids that are not in the tree."""
        self._parent = [ROOT]
        self._num_children = [0]
        self._locks = [0]
        self._pins = [0]
        self._pages = [[ABSENT] for _ in range(num_groups)]
        """Page of each node, by group."""
        self._num_held = [0]
        """Pages that each node holds, 0 to `num_groups`."""
        self._removed_at = [0]
        """`epoch` when the node with this id left the tree last; 0 if none has."""
        self._dropped_at = 0
        """`epoch` when a node that stayed in the tree lost a page last."""
        self._last_use = [0]
        self._uses = 0
        self._free_ids: list[int] = []
        self._queue = EvictionQueue()

    @property
    def num_nodes(self) -> int:
        """Nodes in the tree, the root excluded."""
        return len(self._index)

    @property
    def num_evictable(self) -> int:
        """Pages that `evict` can give up."""
        return self.num_pages - self.num_locked - self.num_pinned

    def __contains__(self, node: int) -> bool:
        return 0 <= node < len(self._key) and self._key[node] is not None

    def __iter__(self) -> Iterator[int]:
        """Yield the ids of the nodes in the tree."""
        return iter([node for node, key in enumerate(self._key) if key is not None])

    def num_readers(self, node: int) -> int:
        """Return the number of locks on a node."""
        return self._locks[node]

    def pages(self, nodes: Sequence[int], group: int = 0) -> list[int]:
        """Return the page of each node in one group, `ABSENT` where it holds none."""
        held = self._pages[group]
        return [held[node] for node in nodes]

    def key(self, namespace: bytes, tokens: array[int], index: int, parent: int) -> bytes:
        """Return the key of the node for page `index` of a sequence.

        parent: the node of page `index - 1`, `ROOT` for the first page.
        """
        start = index * self.page_size
        return _key(parent, namespace, tokens[start : start + self.page_size].tobytes())

    def match(self, namespace: bytes, tokens: array[int], limit: int, index: int = 0, parent: int = ROOT) -> list[int]:
        """Return the path of complete nodes that hold these tokens.

        It covers the pages from `index` on and below `limit`, and ends before the first node that lacks a page of any
        group. parent: the node of page `index - 1`.
        """
        found: list[int] = []
        size, known, num_held, complete = self.page_size, self._index, self._num_held, self.num_groups
        for start in range(index * size, limit * size, size):
            node = known.get(_key(parent, namespace, tokens[start : start + size].tobytes()))
            if node is None or num_held[node] < complete:
                break
            found.append(node)
            parent = node
        return found

    def is_current(self, path: Sequence[int], epoch: int) -> bool:
        """Return whether a path matched at this epoch is still in the tree.

        Its last node decides, because leaves are evicted first.
        """
        return epoch >= self._dropped_at and (not path or epoch >= self._removed_at[path[-1]])

    def prune(self, path: list[int], epoch: int) -> None:
        """Remove stale nodes from a path that was matched at this epoch.

        A node is stale if it has left the tree or lost a page since.
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
        return node

    def attach(self, node: int, page: int, group: int = 0) -> int:
        """Give a node its page of a group, unless it holds one.

        Return the page that the node holds now.
        """
        held = self._pages[group][node]
        if held != ABSENT:
            return held
        assert not (self._locks[node] or self._pins[node]), f"node {node} is in use without its page; {self}"
        self._pages[group][node] = page
        self._num_held[node] += 1
        self.num_pages += 1
        return page

    def drop(self, node: int, group: int = 0) -> int:
        """Take the page of a group from a node that stays in the tree.

        Return the page. The node must have neither readers nor pins.
        """
        page = self._pages[group][node]
        assert page != ABSENT, f"node {node} holds no page of group {group}; {self}"
        assert not (self._locks[node] or self._pins[node]), f"node {node} loses a page while in use; {self}"
        self._pages[group][node] = ABSENT
        self._num_held[node] -= 1
        self.num_pages -= 1
        self.num_evicted += 1
        self.epoch = self._dropped_at = self.epoch + 1
        return page

    def lock(self, nodes: Sequence[int]) -> None:
        """Add a reader to consecutive nodes of a path, all of them complete."""
        locks, pins, groups = self._locks, self._pins, self.num_groups
        for node in nodes:
            if not locks[node]:
                assert self._num_held[node] == groups, f"node {node} is locked without all its pages; {self}"
                self.num_locked += groups
                if pins[node]:
                    self.num_pinned -= groups
            locks[node] += 1

    def unlock(self, nodes: Sequence[int]) -> None:
        """Remove a reader from consecutive nodes of a path."""
        locks, pins, groups = self._locks, self._pins, self.num_groups
        self._uses += 1
        for node in nodes:
            assert locks[node] > 0, f"node {node} unlocked without a lock; {self}"
            locks[node] -= 1
            self._last_use[node] = self._uses
            if not locks[node]:
                self.num_locked -= groups
                if pins[node]:
                    self.num_pinned += groups
        self._offer(nodes)

    def pin(self, nodes: Sequence[int]) -> None:
        """Keep consecutive nodes of a path in the tree, with or without readers.

        All of them must be complete.
        """
        for node in nodes:
            assert self._num_held[node] == self.num_groups, f"node {node} is pinned without all its pages; {self}"
            if not (self._locks[node] or self._pins[node]):
                self.num_pinned += self.num_groups
            self._pins[node] += 1

    def unpin(self, nodes: Sequence[int]) -> None:
        """Undo one `pin` of consecutive nodes of a path."""
        self._uses += 1
        for node in nodes:
            assert self._pins[node] > 0, f"node {node} unpinned without a pin; {self}"
            self._pins[node] -= 1
            self._last_use[node] = self._uses
            if not (self._locks[node] or self._pins[node]):
                self.num_pinned -= self.num_groups
        self._offer(nodes)

    def evict(self, count: int) -> list[int]:
        """Evict nodes until at least `count` pages are released; return the pages.

        Nodes in use stay, so there may be fewer pages than `count`. Leaves go first, the least recently used first. The
        pages of a node go together, so there may also be a few more.
        """
        pages: list[int] = []
        node = ROOT
        while len(pages) < count:
            if node == ROOT:
                oldest = self._queue.pop(self._is_evictable)
                if oldest is None:
                    break
                node = oldest
            parent = self._remove(node, pages)
            node = ROOT
            if parent != ROOT and self._is_evictable(parent, last_use := self._last_use[parent]):
                # Nodes of one sequence were mostly used together: then the parent is next, and need not queue.
                if len(pages) < count and last_use <= self._queue.oldest_use:
                    node = parent
                else:
                    self._offer((parent,))
        self.num_pages -= len(pages)
        self.num_evicted += len(pages)
        return pages

    def discard(self, nodes: Sequence[int]) -> list[int]:
        """Take the pages from the unused nodes of a path; return the pages.

        Leaves go with their pages. Other nodes stay without them and are not matched until they are computed again.
        """
        pages: list[int] = []
        for node in reversed(nodes):
            if self._locks[node] or self._pins[node]:
                break
            groups = range(self.num_groups)
            pages += [self.drop(node, group) for group in groups if self._pages[group][node] != ABSENT]
            if self._is_evictable(node, self._last_use[node]):
                self._remove(node, [])
        return pages

    def _remove(self, node: int, pages: list[int]) -> int:
        """Take a leaf out of the tree; return its parent.

        The pages of the leaf are added to the list `pages`; the caller counts them.
        """
        key, parent = self._key[node], self._parent[node]
        assert key is not None, f"node {node} is not in the tree; {self}"
        for held in self._pages:
            if (page := held[node]) != ABSENT:
                pages.append(page)
                held[node] = ABSENT
        self._num_held[node] = 0
        del self._index[key]
        self._key[node] = None
        self._num_children[parent] -= 1
        self.epoch = self._removed_at[node] = self.epoch + 1
        self._free_ids.append(node)
        return parent

    def _new_id(self) -> int:
        """Return an id that no node in the tree has."""
        if self._free_ids:
            return self._free_ids.pop()
        self._key.append(None)
        lists = (self._parent, self._num_children, self._locks, self._pins, self._num_held, self._removed_at)
        for column in (*lists, self._last_use):
            column.append(0)
        for held in self._pages:
            held.append(ABSENT)
        return len(self._key) - 1

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
        held = [sum([pages[node] != ABSENT for pages in self._pages]) for node in range(len(self._key))]
        if held != self._num_held or sum(held) != self.num_pages:
            problems.append(f"{self.num_pages} pages counted, nodes hold {sum(held)}")
        every = [page for pages in self._pages for page in pages if page != ABSENT]
        if len(set(every)) != len(every):
            problems.append("a page is held by two nodes")
        locked = [node for node in range(len(self._key)) if self._locks[node]]
        pinned = [node for node in range(len(self._key)) if self._pins[node] and not self._locks[node]]
        counts = sum([held[node] for node in locked]), sum([held[node] for node in pinned])
        if counts != (self.num_locked, self.num_pinned):
            problems.append(f"{self.num_locked} pages locked and {self.num_pinned} pinned, {counts} are")
        for node in (*locked, *pinned):
            if node not in self:
                problems.append(f"node {node} is in use outside the tree")
            elif held[node] < self.num_groups:
                problems.append(f"node {node} is in use with {held[node]} of {self.num_groups} pages")
        outside = [node for node, count in enumerate(held) if count and node not in self]
        problems += [f"node {node} holds a page outside the tree" for node in outside]
        return problems

    def _audit_shape(self, members: list[int]) -> list[str]:
        problems = []
        if sorted(self._index.values()) != members:
            problems.append(f"{len(members)} nodes are in the tree, {self.num_nodes} of them indexed")
        if sorted((*members, *self._free_ids)) != list(range(1, len(self._key))):
            problems.append("a node id is lost, or in the tree and free")
        children = [0] * len(self._key)
        for node in members:
            parent = self._parent[node]
            children[parent] += 1
            if parent == ROOT:
                continue
            if parent not in self:
                problems.append(f"node {node} hangs below node {parent}, which is not in the tree")
            if self._locks[node] > self._locks[parent] or self._pins[node] > self._pins[parent]:
                problems.append(f"node {node} is in use more often than node {parent} before it")
        if children != self._num_children:
            problems.append("children are miscounted")
        return problems

    def __repr__(self) -> str:
        return (
            f"RadixTree({self.num_nodes} nodes, {self.num_pages} pages, {self.num_locked} locked, "
            f"{self.num_pinned} pinned)"
        )


def _key(parent: int, namespace: bytes, tokens: bytes) -> bytes:
    """Return a key that no other (parent, namespace, tokens) has.

    A node id has four bytes and the tokens of a page have a fixed length. The key includes the namespace only if the
    parent is the root, whose id is known.
    """
    return parent.to_bytes(4, "little") + (tokens if parent else namespace + tokens)
