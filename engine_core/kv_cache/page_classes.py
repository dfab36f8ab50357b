"""Pages that nodes of the prefix cache hold together, and how many of them a match needs.

The KV groups of a model form classes by window: groups with equal windows hold, and give up, the pages of the same
positions. Layers that attend to all positions need the pages of every node on the path of a match. Layers with a window
need those of its tail only, the last nodes of the path that lie within the window of the next position.
"""

from collections import OrderedDict
from collections.abc import Sequence

from msgspec import Struct

from tandem.engine_core.integers import ceil_div

ABSENT = -1
"""Placeholder in a node for a page that it does not hold."""


class PageClass(Struct, frozen=True):
    """KV groups that hold the pages of the same positions."""

    groups: tuple[int, ...]
    """Indexes of the groups."""
    tail: int | None = None
    """Number of nodes, the last of a match included, whose pages the match needs; None: those of the whole path."""


def page_classes(windows: Sequence[int | None], page_size: int) -> tuple[PageClass, ...]:
    """Return the classes of the groups with these windows.

    The class of the whole path comes first, also if no group belongs to it. Those of larger windows come before those
    of smaller ones: who reads a page of a class reads the pages of all classes before it.
    """
    path = PageClass(tuple([group for group, window in enumerate(windows) if window is None]))
    sizes = sorted({window for window in windows if window is not None}, reverse=True)
    return (path, *[_window_class(windows, size, page_size) for size in sizes])


def _window_class(windows: Sequence[int | None], size: int, page_size: int) -> PageClass:
    groups = tuple([group for group, window in enumerate(windows) if window == size])
    return PageClass(groups, ceil_div(size - 1, page_size))


class PageCounts:
    """Numbers of pages in the nodes of a tree, over all classes."""

    __slots__ = ("held", "locked", "pinned")

    held: int
    """Pages that nodes hold."""
    locked: int
    """Pages that have a reader."""
    pinned: int
    """Pages without a reader that a session keeps."""

    def __init__(self) -> None:
        self.held = self.locked = self.pinned = 0

    @property
    def evictable(self) -> int:
        """Pages that are not in use."""
        return self.held - self.locked - self.pinned


class ClassPages:
    """Pages of one class by node, with their users.

    A page is in use while a sequence reads it (a lock) or a session keeps it (a pin). Pages of a tail are also
    protected by the match points that need them. Those that are neither in use nor protected are loose: they are
    evicted first.
    """

    def __init__(self, kind: PageClass, counts: PageCounts) -> None:
        """Start with the root, which holds no pages.

        counts: of all classes of the tree, which this class keeps up to date.
        """
        self.kind = kind
        self.counts = counts
        self.held = [False]
        """By node: True if it holds the pages of this class."""
        self.locks = [0]
        self.pins = [0]
        self.num_points = [0]
        """By node: number of match points that have it in their tail."""
        self.loose: OrderedDict[int, None] = OrderedDict()
        """Nodes with loose pages, the longest unused first; empty for the class of the whole path."""
        self.tables: list[list[int]] = [[ABSENT] for _ in kind.groups]
        """Pages by node, for each group."""

    def add_node(self) -> None:
        """Make room for one more node."""
        self.held.append(False)
        for column in (self.locks, self.pins, self.num_points):
            column.append(0)
        for table in self.tables:
            table.append(ABSENT)

    def in_use(self, node: int) -> bool:
        """Return whether a node has a lock or a pin."""
        return bool(self.locks[node] or self.pins[node])

    def pages(self, node: int) -> list[int]:
        """Return the pages that a node holds, one for each group."""
        return [table[node] for table in self.tables]

    def attach(self, nodes: Sequence[int], pages: Sequence[Sequence[int]]) -> list[int]:
        """Give nodes their pages, for each group one for each node.

        Nodes that hold some already keep those. Return the indexes of these nodes.
        """
        held = self.held
        known = [index for index, node in enumerate(nodes) if held[node]]
        new = list(nodes)
        if known:
            new = [node for node in nodes if not held[node]]
            pages = [[page for page, node in zip(column, nodes, strict=True) if not held[node]] for column in pages]
        for table, column in zip(self.tables, pages, strict=True):
            for node, page in zip(new, column, strict=True):
                table[node] = page
        for node in new:
            held[node] = True
        self.counts.held += len(new) * len(self.tables)
        if self.kind.tail is not None:
            for node in new:
                self._settle(node)
        return known

    def take(self, nodes: Sequence[int]) -> list[int]:
        """Take the pages from nodes that are not in use; return them, group by group."""
        held, locks, pins = self.held, self.locks, self.pins
        pages: list[int] = []
        for node in nodes:
            assert held[node] and not (locks[node] or pins[node]), f"node {node} loses its pages while in use"
            held[node] = False
        for table in self.tables:
            pages += [table[node] for node in nodes]
            for node in nodes:
                table[node] = ABSENT
        self.counts.held -= len(pages)
        if self.kind.tail is not None:
            for node in nodes:
                self.loose.pop(node, None)
        return pages

    def lock(self, nodes: Sequence[int]) -> None:
        """Add a reader to nodes that hold their pages."""
        locks, pins, held = self.locks, self.pins, self.held
        counts, size = self.counts, len(self.tables)
        for node in nodes:
            if not locks[node]:
                assert held[node], f"node {node} is locked without all its pages"
                counts.locked += size
                if pins[node]:
                    counts.pinned -= size
            locks[node] += 1
        if self.kind.tail is not None:
            for node in nodes:
                self.loose.pop(node, None)

    def unlock(self, nodes: Sequence[int]) -> None:
        """Remove a reader from nodes."""
        locks, pins = self.locks, self.pins
        counts, size = self.counts, len(self.tables)
        for node in nodes:
            assert locks[node] > 0, f"node {node} unlocked without a lock"
            locks[node] -= 1
            if not locks[node]:
                counts.locked -= size
                if pins[node]:
                    counts.pinned += size
        if self.kind.tail is not None:
            for node in nodes:
                self._settle(node)

    def pin(self, nodes: Sequence[int]) -> None:
        """Keep the pages of nodes, with or without readers."""
        for node in nodes:
            assert self.held[node], f"node {node} is pinned without all its pages"
            if not self.in_use(node):
                self.counts.pinned += len(self.tables)
            self.pins[node] += 1
            self.loose.pop(node, None)

    def unpin(self, nodes: Sequence[int]) -> None:
        """Undo one `pin` of nodes."""
        for node in nodes:
            assert self.pins[node] > 0, f"node {node} unpinned without a pin"
            self.pins[node] -= 1
            if not self.in_use(node):
                self.counts.pinned -= len(self.tables)
            self._settle(node)

    def protect(self, node: int) -> None:
        """Add a match point that needs the pages of a node."""
        self.num_points[node] += 1
        self.loose.pop(node, None)

    def unprotect(self, node: int) -> None:
        """Remove a match point that needed the pages of a node."""
        self.num_points[node] -= 1
        self._settle(node)

    def _settle(self, node: int) -> None:
        """Add a node to the loose ones if its pages have become loose."""
        if self.is_loose(node) and node not in self.loose:
            self.loose[node] = None

    def is_loose(self, node: int) -> bool:
        """Return whether a node holds pages that are neither in use nor protected."""
        return (
            self.kind.tail is not None
            and self.held[node]
            and not (self.locks[node] or self.pins[node] or self.num_points[node])
        )

    def count(self) -> tuple[int, int, int]:
        """Return the numbers of `PageCounts` that this class accounts for, counted node by node."""
        nodes, size = range(len(self.held)), len(self.tables)
        locked = sum([bool(self.locks[node]) for node in nodes])
        pinned = sum([bool(self.pins[node]) and not self.locks[node] for node in nodes])
        return sum(self.held) * size, locked * size, pinned * size

    def audit(self) -> list[str]:
        """Return the inconsistencies of nodes, one line each."""
        nodes, problems = range(len(self.held)), []
        for node in nodes:
            present = [table[node] != ABSENT for table in self.tables]
            if any(page != self.held[node] for page in present):
                problems.append(f"node {node} holds {sum(present)} of {len(present)} pages")
            if self.in_use(node) and not self.held[node]:
                problems.append(f"node {node} is in use without its pages")
        if set(self.loose) != {node for node in nodes if self.is_loose(node)}:
            problems.append(f"nodes {list(self.loose)} are kept as loose")
        return problems
