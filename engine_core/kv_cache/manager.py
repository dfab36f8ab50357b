"""The KV pool as sequences see it: pages of their own, pages that they share, pages that come back.

The path of a sequence is its page table: first `shared` pages, which lie in the prefix cache and are locked, then pages
of its own. A page moves from the second kind to the first when the step that fills it has been launched: later steps
run after it on the device (I1), so they may read it at once, and nobody ever writes it again.
"""

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Items

from tandem.engine_core.integers import ceil_div
from tandem.engine_core.kv_cache.pages import PageAllocator
from tandem.engine_core.kv_cache.pending_pages import PendingPages
from tandem.engine_core.kv_cache.radix import ROOT, RadixTree
from tandem.engine_core.kv_cache.sessions import Sessions
from tandem.engine_core.sequence import Sequence

CACHE, SETTLING = -1, -2
"""Owners that are no sequences: the prefix cache, and steps in flight that still use a page which nobody needs."""
EVICT_AHEAD = 4096
"""Of so many evictable pages one more is evicted than has to be."""


class KVManager:
    """Composes the allocator, the prefix cache (None: off) and the sessions."""

    def __init__(
        self, pages: PageAllocator, page_size: int, tree: RadixTree | None = None, sessions: Sessions | None = None
    ) -> None:
        self.pages = pages
        self.page_size = page_size
        self.tree = tree
        self.sessions = Sessions(tree, 0, 0.0) if sessions is None else sessions
        self.queried = self.hit = 0
        """Prompt tokens looked for, prompt tokens found."""
        self._version = bytes(4)
        """Begins every namespace: KV of other weights is never found."""
        self._pending = PendingPages()
        self.moves = 0
        """Counts moments from which on somebody might be admitted who was refused: pages came back, or are shared."""
        self._settling: deque[tuple[int, list[int]]] = deque()
        """Pages by the step after which they are free."""

    @property
    def in_use(self) -> int:
        """Pages that are not free to be had: of sequences and of sessions."""
        return self.pages.used - self.evictable

    @property
    def evictable(self) -> int:
        return self.tree.evictable if self.tree is not None else 0

    @property
    def cached(self) -> int:
        """Pages in the prefix cache, whether in use or not."""
        return self.tree.size if self.tree is not None else 0

    @property
    def evicted(self) -> int:
        """Pages that the prefix cache ever gave up."""
        return self.tree.lost if self.tree is not None else 0

    @property
    def available(self) -> int:
        """Pages that `take` could give: free, evictable, or kept by sessions alone."""
        tree = self.tree
        return self.pages.free + (tree.evictable + tree.pinned if tree is not None else 0)

    @property
    def settling(self) -> int:
        """Pages that come back when steps in flight have committed."""
        return sum([len(pages) for _, pages in self._settling])

    def needed(self, positions: int) -> int:
        return ceil_div(positions, self.page_size)

    def take(self, owner: int, count: int, keep: int = 0) -> list[int] | None:
        """Pages for an owner, evicting what must go; None, and nothing evicted, unless `keep` more would remain."""
        return self.pages.allocate(owner, count) if self._free(count, keep) else None

    def _free(self, count: int, keep: int = 0) -> bool:
        """Sees to it that so many pages are free, if with `keep` more they are to be had.

        In a large cache some more than these are evicted, for they cost less together.
        """
        lacking = count - self.pages.free
        if lacking + keep <= 0:
            return True
        tree = self.tree
        if tree is None or lacking + keep > tree.evictable + tree.pinned:
            return False
        if lacking > 0:
            while tree.evictable < lacking:
                assert self.sessions.relieve(), f"{tree.pinned} pages are pinned by no session"
            gone = tree.evict(lacking + tree.evictable // EVICT_AHEAD)
            self.pages.release(CACHE, gone)
        return True

    def awaits(self, seq: Sequence) -> bool:
        """Whether the first page that a waiting sequence would have to compute is being computed by a running one of
        no lower priority."""
        if not self._pending or not self._matches(seq):
            return False
        assert self.tree is not None
        if seq.awaited_key not in self._pending or not self._stands(seq):
            path = self._match(seq)
            if len(path) >= self._limit(seq):
                return False
            seq.awaited_key = self.tree.key(seq.cache_namespace, seq.tokens, len(path), _last(path, len(path)))
        return self.follows(seq)

    def follows(self, seq: Sequence) -> bool:
        """Whether the page for which a waiting sequence was last seen to wait is still being computed. Quick."""
        return self._pending.holds_up(seq)

    def admit(self, seq: Sequence, chunk: int, keep: int) -> bool:
        """Gives a waiting sequence the cached pages of its prompt, and pages for the first `chunk` positions after
        them: all of it or nothing, and `keep` pages remain."""
        path = self._match(seq)
        start = len(path) * self.page_size
        end = start + min(chunk, len(seq.tokens) - start)
        if self.tree is not None:
            self.tree.lock(path)
        own = self.take(seq.id, self.needed(end) - len(path), keep)
        if own is None:
            if self.tree is not None:
                self.tree.unlock(path)
            return False
        seq.cache_namespace = self._root(seq)
        seq.pages, seq.num_shared_pages, seq.num_scheduled_tokens = path + own, len(path), start
        seq.cached_path, seq.cached_path_epoch = [], -1
        if not seq.preemptions and self._matches(seq):
            self.queried += len(seq.tokens)
            self._count_hit(seq, start)
        if seq.session:
            self.sessions.follow(seq.session, seq.id, path)
        self._claim(seq)
        return True

    def extend(self, seq: Sequence, newest_step: int) -> None:
        """Looks again for what a prompt still has to compute: another sequence may have computed it meanwhile."""
        if not self._matches(seq):
            return
        assert self.tree is not None
        shared = seq.num_shared_pages
        found = self.tree.match(seq.cache_namespace, seq.tokens, self._limit(seq), shared, _last(seq.pages, shared))
        end = (shared + len(found)) * self.page_size
        if end <= seq.num_scheduled_tokens:
            return
        self.tree.lock(found)
        unused = seq.pages[shared : shared + len(found)]
        seq.pages[shared : shared + len(found)] = found
        self._settle_later(seq, unused, newest_step)
        if not seq.preemptions:
            self._count_hit(seq, end - seq.num_scheduled_tokens)
        seq.remap(shared)
        seq.num_shared_pages, seq.num_scheduled_tokens = shared + len(found), end
        self._claim(seq)

    def grow(self, seq: Sequence, end: int) -> bool:
        """Pages for the positions below `end`; False, and none, if they are not to be had."""
        missing = self.needed(end) - len(seq.pages)
        if missing <= 0:
            return True
        own = self.take(seq.id, missing)
        if own is None:
            return False
        seq.pages += own
        return True

    def grow_each(self, sequences: Items[Sequence]) -> bool:
        """A page for each of these that has none for its next position; False if they are not all to be had."""
        size = self.page_size
        full = [seq for seq in sequences if len(seq.pages) * size <= seq.num_scheduled_tokens]
        pages = self.pages.allocate_each([seq.id for seq in full]) if self._free(len(full)) else None
        if pages is None:
            return False
        for seq, page in zip(full, pages, strict=True):
            seq.pages.append(page)
        return True

    def publish(self, seq: Sequence, step_id: int) -> None:
        """Called after a launch: puts the pages that it filled with known tokens into the cache."""
        if self.tree is not None:
            self._settle_later(seq, self._publish(seq), step_id)
            self._claim(seq)

    def settle(self, step_id: int) -> None:
        """Frees what waited for this step."""
        while self._settling and self._settling[0][0] <= step_id:
            self.moves += 1
            self.pages.release(SETTLING, self._settling.popleft()[1])

    def end_turn(self, seq: Sequence, newest_step: int, now: float) -> None:
        """Called when a turn of a session has its outcome: what has been computed of it is kept for the next one."""
        path = None
        if seq.pages:
            self._settle_later(seq, self._publish(seq), newest_step)
            path = seq.pages[: seq.num_shared_pages]
        self.sessions.leave(seq.session, seq.id, now, path)

    def release(self, seq: Sequence) -> None:
        """Takes everything back from a sequence that no step in flight holds. What it computed stays in the cache."""
        own: list[int] = []
        if self.tree is not None:
            own = self._publish(seq)
            self._pending.drop(seq)
            self.tree.unlock(seq.pages[: seq.num_shared_pages])
        own += seq.pages[seq.num_shared_pages :]
        self.pages.release(seq.id, own)
        self.moves += 1
        seq.pages = []
        seq.num_shared_pages = seq.num_mapped_pages = seq.num_scheduled_tokens = seq.uploaded_len = 0

    def readers(self, page: int) -> int:
        """Sequences that share a page."""
        return self.tree.readers(page) if self.tree is not None else 0

    def holds_alone(self, seq: Sequence) -> bool:
        """Whether any page would come back with this sequence."""
        return len(seq.pages) > seq.num_shared_pages or any(
            self.readers(page) == 1 for page in seq.pages[: seq.num_shared_pages]
        )

    def new_weights(self) -> None:
        """From now on nothing is found of what was computed before; sessions begin anew."""
        self._version = (int.from_bytes(self._version, "little") + 1).to_bytes(4, "little")
        self.sessions.clear()

    def abandon(self) -> None:
        """Frees what steps in flight use. Only for an engine that will not touch the device again."""
        for _, pages in self._settling:
            self.pages.release(SETTLING, pages)
        self._settling.clear()

    def _matches(self, seq: Sequence) -> bool:
        return self.tree is not None and not seq.scored

    def _limit(self, seq: Sequence) -> int:
        """Most pages that a sequence may find: the last token has to be computed, for what it yields."""
        return (len(seq.tokens) - 1) // self.page_size

    def _match(self, seq: Sequence) -> list[int]:
        """Goes on from where the last look ended, less what the cache has lost since."""
        tree, path = self.tree, seq.cached_path
        if tree is None or seq.scored:
            return []
        while not self._stands(seq):
            path.pop()
        seq.cache_namespace, seq.cached_path_epoch = self._root(seq), tree.lost
        path += tree.match(seq.cache_namespace, seq.tokens, self._limit(seq), len(path), _last(path, len(path)))
        return path

    def _stands(self, seq: Sequence) -> bool:
        """Whether the last page that was found is still what it was, and so are all before it: leaves go first."""
        assert self.tree is not None
        if not seq.cached_path:
            return True
        return seq.cache_namespace == self._root(seq) and seq.cached_path_epoch >= self.tree.lost_at(
            seq.cached_path[-1]
        )

    def _root(self, seq: Sequence) -> bytes:
        """The namespace in which its pages are to be looked for now."""
        return self._version + seq.namespace

    def _count_hit(self, seq: Sequence, tokens: int) -> None:
        """What a grammar forced behind the prompt may be found too, and is none of it."""
        found = min(tokens, seq.prompt_len - seq.num_cached_tokens)
        self.hit += found
        seq.num_cached_tokens += found

    def _publish(self, seq: Sequence) -> list[int]:
        """Returns pages of the sequence in whose place it has taken another's of the same content."""
        tree, size = self.tree, self.page_size
        assert tree is not None
        duplicates: list[int] = []
        for index in range(seq.num_shared_pages, min(seq.num_scheduled_tokens, len(seq.tokens)) // size):
            parent, page = _last(seq.pages, index), seq.pages[index]
            held = tree.insert(tree.key(seq.cache_namespace, seq.tokens, index, parent), page, parent)
            tree.lock((held,))
            if held == page:
                self.pages.transfer(seq.id, CACHE, page)
            else:
                duplicates.append(page)
                seq.pages[index] = held
                seq.remap(index)
            seq.num_shared_pages = index + 1
            self.moves += 1
        return duplicates

    def _settle_later(self, seq: Sequence, pages: list[int], step_id: int) -> None:
        if not pages:
            return
        if not seq.inflight:
            self.pages.release(seq.id, pages)
            self.moves += 1
            return
        for page in pages:
            self.pages.transfer(seq.id, SETTLING, page)
        self._settling.append((step_id, pages))

    def _claim(self, seq: Sequence) -> None:
        """Says which page the sequence computes next, if all its tokens are known."""
        self._pending.drop(seq)
        if self.tree is not None and (seq.num_shared_pages + 1) * self.page_size <= len(seq.tokens):
            key = self.tree.key(
                seq.cache_namespace, seq.tokens, seq.num_shared_pages, _last(seq.pages, seq.num_shared_pages)
            )
            self._pending.make(seq, key)

    def audit(self, held: Iterable[Sequence]) -> list[str]:
        """What is wrong, a line each, given every sequence that holds pages. Empty when all is well."""
        problems = self.pages.audit()
        owned = {owner: sorted(pages) for owner, pages in self.pages.owned().items()}
        expected = {SETTLING: sorted([page for _, pages in self._settling for page in pages])}
        readers: dict[int, int] = {}
        claims = 0
        for seq in held:
            expected[seq.id] = sorted(seq.pages[seq.num_shared_pages :])
            claims += bool(seq.pending_key)
            for page in seq.pages[: seq.num_shared_pages]:
                readers[page] = readers.get(page, 0) + 1
        if self.tree is not None:
            problems += self.tree.audit()
            expected[CACHE] = [page for page in range(self.pages.total + 1) if page in self.tree]
            wrong = [page for page in range(self.pages.total + 1) if self.tree.readers(page) != readers.get(page, 0)]
            problems += [f"page {page} has {self.tree.readers(page)} locks, not one a reader" for page in wrong]
        if {owner: pages for owner, pages in expected.items() if pages} != owned:
            problems.append(f"pages belong to {owned}, expected {expected}")
        if claims != len(self._pending):
            problems.append(f"{len(self._pending)} claims, {claims} of them of somebody")
        return problems


def _last(pages: list[int], count: int) -> int:
    """The last of the first `count` pages."""
    return pages[count - 1] if count else ROOT
