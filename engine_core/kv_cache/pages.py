"""The pages of the KV pool and their owners."""

from collections.abc import Sequence

from tandem.engine_core.plan import PADDING_PAGE

CACHE = -1
"""Owner of the pages in the prefix cache; other owners are ids of sequences."""


class PageAllocator:
    """Allocator of pages, in O(1) each, that records the owner of every page.

    Because the owners are known, a double free or a leak is detected where it happens. Owners are integers: ids of
    sequences, and CACHE.
    """

    def __init__(self, pages: int) -> None:
        """Start with every page free.

        pages: number of pages, the reserved page 0 included.
        """
        assert pages >= 2, f"{pages} pages leave none besides the reserved one"
        self.total = pages - 1
        self.num_allocated = 0
        """Number of pages allocated since the start."""
        self._free = list(range(pages - 1, PADDING_PAGE, -1))
        self._owner: list[int | None] = [None] * pages

    @property
    def free(self) -> int:
        """Number of free pages."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Number of pages that have an owner."""
        return self.total - len(self._free)

    def allocate(self, owner: int, count: int) -> list[int] | None:
        """Return `count` pages for an owner, or None if fewer are free."""
        assert count > 0, f"{owner} asks for {count} pages, at least 1"
        if count > len(self._free):
            return None
        taken = self._free[-count:]
        del self._free[-count:]
        for page in taken:
            assert self._owner[page] is None, f"free page {page} is owned by {self._owner[page]}"
            self._owner[page] = owner
        self.num_allocated += len(taken)
        return taken

    def allocate_each(self, owners: Sequence[int]) -> list[int] | None:
        """Return one page for each of these owners, or None if fewer are free.

        The pages are in the order of the owners.
        """
        first = len(self._free) - len(owners)
        if first < 0:
            return None
        taken = self._free[first:]
        del self._free[first:]
        for page, owner in zip(taken, owners, strict=True):
            assert self._owner[page] is None, f"free page {page} is owned by {self._owner[page]}"
            self._owner[page] = owner
        self.num_allocated += len(taken)
        return taken

    def release(self, owner: int, pages: Sequence[int]) -> None:
        """Free pages of one owner.

        Asserts that each page is the owner's: a page freed twice would serve two sequences.
        """
        for page in pages:
            assert self._owner[page] == owner, f"{owner} frees page {page}, owned by {self._owner[page]}; {self}"
            self._owner[page] = None
        self._free.extend(pages)

    def transfer(self, owner: int, new_owner: int, pages: Sequence[int]) -> None:
        """Give pages to another owner."""
        owners = self._owner
        for page in pages:
            assert owners[page] == owner, f"{owner} hands over page {page}, owned by {owners[page]}; {self}"
            owners[page] = new_owner

    def owned(self) -> dict[int, list[int]]:
        """Return the pages of every owner, ascending."""
        pages: dict[int, list[int]] = {}
        for page, owner in enumerate(self._owner):
            if owner is not None:
                pages.setdefault(owner, []).append(page)
        return pages

    def audit(self) -> list[str]:
        """Return the inconsistencies of pages, one line each; empty if there are none.

        A page must not be both free and owned, neither of them, or free twice.
        """
        problems = []
        if len(set(self._free)) != len(self._free):
            problems.append("a page is on the free list twice")
        free = set(self._free)
        if PADDING_PAGE in free or self._owner[PADDING_PAGE] is not None:
            problems.append("the reserved page is in circulation")
        for page, owner in enumerate(self._owner):
            if page == PADDING_PAGE:
                continue
            if owner is not None and page in free:
                problems.append(f"page {page} is free and owned by {owner}")
            if owner is None and page not in free:
                problems.append(f"page {page} leaked: neither free nor owned")
        return problems

    def __repr__(self) -> str:
        return f"PageAllocator({self.free} of {self.total} pages free)"
