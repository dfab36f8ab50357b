"""The prefix cache: which pages hold the KV of which tokens.

A radix tree over token ids whose edges are whole pages, stored flat: a node is a page, its number indexes every list,
and one dictionary maps (parent page, tokens of the page) to the page. So a tree of 100,000 pages is a handful of lists,
a page of a prompt is found with one look-up, and the garbage collector has nothing to walk.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from tandem.engine_core.kv_cache.eviction import EvictionQueue

ROOT = 0
"""Parent of first pages: the number of the reserved page, which is never in the tree."""


class RadixTree:
    """Pages that any sequence of the same namespace may read, and nobody may write.

    Each page counts its readers (`lock`) and the sessions that keep it between turns (`pin`). Whoever locks a page
    locks every page before it too, so a page in use never hangs below one that is not, and evicting leaves is enough.
    Namespaces are bytes: KV under another adapter, other weights or another salt is another namespace.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        """pages: of the pool, the reserved page 0 among them."""
        self.page_size = page_size
        self.size = 0
        self.locked = 0
        """Pages with a reader."""
        self.pinned = 0
        """Pages without one that a session keeps."""
        self._index: dict[bytes, int] = {}
        self._key: list[bytes | None] = [None] * pages
        """None for a page that is not in the tree."""
        self._parent = [ROOT] * pages
        self._children = [0] * pages
        self._locks = [0] * pages
        self._pins = [0] * pages
        self.lost = 0
        """Pages that ever left."""
        self._lost_at = [0] * pages
        """Of each page, how many had left when it last did."""
        self._last_use = [0] * pages
        self._uses = 0
        self._queue = EvictionQueue()

    @property
    def evictable(self) -> int:
        return self.size - self.locked - self.pinned

    def __contains__(self, page: int) -> bool:
        return self._key[page] is not None

    def readers(self, page: int) -> int:
        return self._locks[page]

    def lost_at(self, page: int) -> int:
        """What `lost` was when this page last left, 0 if it never has."""
        return self._lost_at[page]

    def key(self, namespace: bytes, tokens: array[int], index: int, parent: int) -> bytes:
        """What the page at `index` of a sequence is known by, given the page before it."""
        at = index * self.page_size
        return _key(parent, namespace, tokens[at : at + self.page_size].tobytes())

    def match(self, namespace: bytes, tokens: array[int], limit: int, index: int = 0, parent: int = ROOT) -> list[int]:
        """The pages from `index` on, below `limit`, that hold these tokens; `parent` is the page before them."""
        found: list[int] = []
        size, known = self.page_size, self._index
        for at in range(index * size, limit * size, size):
            page = known.get(_key(parent, namespace, tokens[at : at + size].tobytes()))
            if page is None:
                break
            found.append(page)
            parent = page
        return found

    def insert(self, key: bytes, page: int, parent: int) -> int:
        """Puts a page behind its parent; if the tree has one of the same key, that one is returned and nothing done.
        The page returned is unlocked and not in the eviction's reach before somebody locks and unlocks it."""
        held = self._index.setdefault(key, page)
        if held != page:
            return held
        assert self._key[page] is None, f"page {page} is in the tree already; {self}"
        assert parent == ROOT or parent in self, f"page {page} behind page {parent}, which is not in the tree; {self}"
        self._key[page] = key
        self._parent[page] = parent
        self._children[parent] += 1
        self.size += 1
        return page

    def lock(self, pages: Sequence[int]) -> None:
        """One reader more for pages that follow each other."""
        locks, pins = self._locks, self._pins
        for page in pages:
            if not locks[page]:
                self.locked += 1
                self.pinned -= pins[page] > 0
            locks[page] += 1

    def unlock(self, pages: Sequence[int]) -> None:
        """One reader less."""
        locks, pins = self._locks, self._pins
        self._uses += 1
        for page in pages:
            assert locks[page] > 0, f"page {page} unlocked without a lock; {self}"
            locks[page] -= 1
            self._last_use[page] = self._uses
            if not locks[page]:
                self.locked -= 1
                self.pinned += pins[page] > 0
        self._offer(pages)

    def pin(self, pages: Sequence[int]) -> None:
        """Keeps pages that follow each other, read or not."""
        for page in pages:
            self.pinned += not (self._locks[page] or self._pins[page])
            self._pins[page] += 1

    def unpin(self, pages: Sequence[int]) -> None:
        self._uses += 1
        for page in pages:
            assert self._pins[page] > 0, f"page {page} unpinned without a pin; {self}"
            self._pins[page] -= 1
            self._last_use[page] = self._uses
            self.pinned -= not (self._locks[page] or self._pins[page])
        self._offer(pages)

    def evict(self, count: int) -> list[int]:
        """Takes out up to `count` pages that nobody reads or keeps, leaves first, least recently used first."""
        gone: list[int] = []
        page = ROOT
        while len(gone) < count:
            if page == ROOT:
                oldest = self._queue.pop(self._evictable)
                if oldest is None:
                    break
                page = oldest
            gone.append(page)
            parent = self._remove(page)
            page = ROOT
            if parent != ROOT and self._evictable(parent, last_use := self._last_use[parent]):
                # Pages of one sequence were mostly used together: then the parent is next, and need not queue.
                if len(gone) < count and last_use <= self._queue.oldest_use:
                    page = parent
                else:
                    self._offer((parent,))
        return gone

    def _remove(self, page: int) -> int:
        """Takes a leaf out of the tree; returns its parent."""
        key, parent = self._key[page], self._parent[page]
        assert key is not None
        del self._index[key]
        self._key[page] = None
        self._children[parent] -= 1
        self.size -= 1
        self.lost += 1
        self._lost_at[page] = self.lost
        return parent

    def _offer(self, pages: Sequence[int]) -> None:
        """Queues those of these pages that may go. Of pages that follow each other only the last can be a leaf."""
        page = pages[-1] if pages else ROOT
        if page != ROOT and self._evictable(page, self._last_use[page]):
            self._queue.push(page, self._last_use[page], self._evictable, self.evictable)

    def _evictable(self, page: int, last_use: int) -> bool:
        return (
            not (self._children[page] or self._locks[page] or self._pins[page])
            and self._last_use[page] == last_use
            and self._key[page] is not None
        )

    def audit(self) -> list[str]:
        """What is wrong, a line each. Empty when all is well."""
        problems = []
        members = [page for page, key in enumerate(self._key) if key is not None]
        if sorted(self._index.values()) != members or len(members) != self.size:
            problems.append(f"{self.size} pages counted, {len(members)} in the tree, {len(self._index)} in the index")
        children = [0] * len(self._key)
        for page in members:
            parent = self._parent[page]
            children[parent] += 1
            if parent == ROOT:
                continue
            if parent not in self:
                problems.append(f"page {page} hangs below page {parent}, which is not in the tree")
            if self._locks[page] > self._locks[parent] or self._pins[page] > self._pins[parent]:
                problems.append(f"page {page} is held more often than page {parent} before it")
        if children != self._children:
            problems.append("children are miscounted")
        locked = [page for page in range(len(self._key)) if self._locks[page]]
        pinned = [page for page in range(len(self._key)) if self._pins[page] and not self._locks[page]]
        if (len(locked), len(pinned)) != (self.locked, self.pinned):
            problems.append(f"{self.locked} pages locked and {self.pinned} pinned, {len(locked)} and {len(pinned)} are")
        problems += [f"page {page} is held outside the tree" for page in (*locked, *pinned) if page not in self]
        return problems

    def __repr__(self) -> str:
        return f"RadixTree({self.size} pages, {self.locked} locked, {self.pinned} pinned)"


def _key(parent: int, namespace: bytes, tokens: bytes) -> bytes:
    """Unambiguous: a page number has four bytes, the tokens of a page have a fixed length, and only a first page,
    whose parent is no page, has a namespace between them."""
    return parent.to_bytes(4, "little") + (tokens if parent else namespace + tokens)
