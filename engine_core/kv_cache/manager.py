"""The KV pool as sequences see it: own pages, shared pages, and their release.

The page table of a sequence begins with the pages of nodes of the prefix cache, which it locks, followed by pages of
its own. A page moves from the second kind to the first when the step that fills it has been launched: later steps run
after it on the device (I1), so they may read it at once, and it is never written again. For the same reason a page that
a sequence no longer needs is free at once, even if a step in flight reads or writes it: its next owner writes it in a
later step. Only work outside the compute stream, such as a copy to host memory, would have to hold it.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items

from msgspec import Struct

from tandem.engine_core.errors import RequestError
from tandem.engine_core.integers import ceil_div
from tandem.engine_core.kv_cache.audit import audit_owners, audit_readers
from tandem.engine_core.kv_cache.pages import CACHE, PageAllocator
from tandem.engine_core.kv_cache.pending_pages import PendingPages
from tandem.engine_core.kv_cache.radix import ROOT, RadixTree
from tandem.engine_core.kv_cache.sessions import Sessions
from tandem.engine_core.plan import ScheduledSequence
from tandem.engine_core.sequence import Sequence
from tandem.protocol.errors import ErrorCode

EVICT_AHEAD = 4096
"""Evict one page more than needed per this number of evictable pages: together they cost less."""


class KVUsage(Struct, frozen=True):
    """Usage of the pool at one moment, in pages; page 0 is not counted."""

    total: int
    free: int
    in_use: int
    """Pages of sequences, and of the prefix cache where a sequence or a session holds them."""
    cached: int
    """Pages in the prefix cache, in use or not."""
    evictable: int
    """Pages in the prefix cache that neither a sequence nor a session holds."""
    available: int
    """Pages that an allocation could get: free ones, evictable ones, and those that only sessions hold."""
    num_evicted: int
    """Pages that the prefix cache has given up since the start."""


class KVManager:
    """Composition of page allocator, prefix cache (None: off) and sessions."""

    def __init__(
        self,
        pages: PageAllocator,
        page_size: int,
        tree: RadixTree | None = None,
        sessions: Sessions | None = None,
        windows: tuple[int | None, ...] = (None,),
    ) -> None:
        """Start with an unused pool.

        windows: window of each KV group; None: its layers attend to all positions.
        """
        self.pages = pages
        self.tree = tree
        self.sessions = Sessions(tree, 0, 0.0) if sessions is None else sessions
        self.pending = PendingPages()
        """Pages that running sequences compute next."""
        self.num_queried_tokens = 0
        """Prompt tokens looked up in the prefix cache since the start."""
        self.num_hit_tokens = 0
        """Prompt tokens found in the prefix cache since the start."""
        self.epoch = 0
        """Incremented whenever an admission that was declined might succeed: pages came back, or became shared."""
        self._page_size = page_size
        self._num_groups = len(windows)

    @property
    def usage(self) -> KVUsage:
        """The pool's pages, counted by kind."""
        pages, tree = self.pages, self.tree
        if tree is None:
            return KVUsage(pages.total, pages.free, pages.used, 0, 0, pages.free, 0)
        evictable = tree.num_evictable
        return KVUsage(
            pages.total,
            pages.free,
            pages.used - evictable,
            tree.num_pages,
            evictable,
            pages.free + evictable + tree.num_pinned,
            tree.num_evicted,
        )

    def check_fits(self, seq: Sequence) -> None:
        """Raise RequestError if a sequence at full length is larger than the pool.

        The message contains the numbers and the setting to change.
        """
        needed = self._num_groups * ceil_div(seq.kv_len, self._page_size)
        if needed > self.pages.total:
            max_tokens = seq.total_len - seq.prompt_len
            raise RequestError(
                ErrorCode.KV_CAPACITY,
                f"{seq.prompt_len} prompt tokens and max_tokens {max_tokens} need {needed} KV pages of "
                f"{self._page_size} tokens, the pool has {self.pages.total}; lower max_tokens or raise --kv-tokens",
            )

    def lacks_pages(self, seq: Sequence, end: int) -> bool:
        """Return whether a position of a sequence below `end` has no page."""
        return end > len(seq.pages[0]) * self._page_size

    def num_lacking_pages(self, sequences: Iterable[Sequence]) -> int:
        """Return how many of these sequences lack a page for some of their positions.

        It is `lacks_pages` up to `kv_len`, written out since it runs for all running sequences when some arrive.
        """
        size = self._page_size
        return sum([seq.total_len - 1 > len(seq.pages[0]) * size for seq in sequences])

    def waits_for_prefix(self, seq: Sequence) -> bool:
        """Look for the cached prefix of a waiting sequence.

        Return whether the sequence should wait for the next page of its prefix: it should if a running sequence of at
        least its priority is computing that page.
        """
        tree, cache = self.tree, seq.cache
        if tree is None or not self.pending or seq.needs_prompt_logprobs:
            return False
        if cache.awaited_key not in self.pending or not tree.is_current(cache.matched, cache.matched_epoch):
            path = self._match(seq)
            if len(path) >= self._max_cached_pages(seq):
                return False
            cache.awaited_key = tree.key(cache.namespace, seq.tokens, len(path), _last(path))
        return self.pending.blocks(seq)

    def admit(self, seq: Sequence, chunk: int, keep: int) -> bool:
        """Give a waiting sequence its first pages.

        These are the cached pages of its prompt, and pages for the `chunk` positions after them. Return False, with
        nothing given, if there are too few. chunk: positions, cut at the end of the known tokens; keep: pages that must
        remain available.
        """
        tree, path = self.tree, self._match(seq)
        start = len(path) * self._page_size
        end = start + min(chunk, len(seq.tokens) - start)
        if tree is not None:
            tree.lock(path)
        own = self._allocate(seq.id, ceil_div(end, self._page_size) - len(path), keep)
        if own is None:
            if tree is not None:
                tree.unlock(path)
            return False
        if tree is not None:
            own = [tree.pages(path, group) + pages for group, pages in enumerate(own)]
        seq.pages, seq.num_scheduled_tokens = tuple(own), start
        seq.cache.nodes, seq.cache.matched, seq.cache.matched_epoch = path, [], -1
        if tree is not None and not (seq.preemptions or seq.needs_prompt_logprobs):
            self.num_queried_tokens += len(seq.tokens)
            self._count_hit(seq, start)
        if seq.submit.session:
            self.sessions.resume(seq.submit.session, seq.id, path)
        self._register_pending(seq)
        return True

    def rematch(self, seq: Sequence) -> None:
        """Look again for cached pages of a running prompt, from its first own page on.

        Another sequence may have computed them since the prompt was admitted.
        """
        tree, cache = self.tree, seq.cache
        if tree is None or seq.needs_prompt_logprobs:
            return
        shared = len(cache.nodes)
        found = tree.match(cache.namespace, seq.tokens, self._max_cached_pages(seq), shared, _last(cache.nodes))
        end = (shared + len(found)) * self._page_size
        if end <= seq.num_scheduled_tokens:
            return
        tree.lock(found)
        unused: list[int] = []
        for group, table in enumerate(seq.pages):
            unused += table[shared : shared + len(found)]
            table[shared : shared + len(found)] = tree.pages(found, group)
        cache.nodes += found
        self._release_own(seq, unused)
        if not seq.preemptions:
            self._count_hit(seq, end - seq.num_scheduled_tokens)
        seq.remap(shared)
        seq.num_scheduled_tokens = end
        self._register_pending(seq)

    def grow(self, seq: Sequence, end: int) -> int:
        """Allocate pages for the positions of a sequence below `end`.

        Return the position below which it now has pages: `end`, or less where the pool has too few.
        """
        missing = ceil_div(end, self._page_size) - len(seq.pages[0])
        if missing > 0:
            own = self._allocate(seq.id, missing)
            if own is None and (rest := self.usage.available // self._num_groups):
                own = self._allocate(seq.id, rest)
            for table, pages in zip(seq.pages, own or (), strict=False):
                table += pages
        return min(end, len(seq.pages[0]) * self._page_size)

    def grow_each(self, sequences: Items[Sequence]) -> bool:
        """Allocate a page of each group for each sequence that has none for its next position.

        All of them get theirs, or none does: return False if the pool has too few.
        """
        size = self._page_size
        full = [seq for seq in sequences if len(seq.pages[0]) * size <= seq.num_scheduled_tokens]
        tables = [(seq.id, table) for seq in full for table in seq.pages]
        pages = self.pages.allocate_each([owner for owner, _ in tables]) if self._make_free(len(tables)) else None
        if pages is None:
            return False
        for (_, table), page in zip(tables, pages, strict=True):
            table.append(page)
        return True

    def unmapped_pages(self, seq: Sequence, end: int | None = None) -> tuple[int, ...]:
        """Return the pages of positions below `end` that the device's tables lack, group by group.

        end None: pages of all positions.
        """
        first, last = seq.device.num_mapped_pages, None if end is None else ceil_div(end, self._page_size)
        if self._num_groups == 1:
            return tuple(seq.pages[0][first:last])
        return tuple([page for table in seq.pages for page in table[first:last]])

    def on_launch(self, seq: Sequence, row: ScheduledSequence) -> None:
        """Record the pages that a launched row brought to the device.

        Also publish the pages that it filled with known tokens.
        """
        num_mapped = row.first_page + len(row.new_pages) // self._num_groups
        seq.device.num_mapped_pages = num_mapped
        seq.next_page_boundary = min(num_mapped * self._page_size, seq.total_len - 1)
        if row.tokens and self.tree is not None:
            self._release_own(seq, self._publish(seq))
            self._register_pending(seq)

    def end_turn(self, seq: Sequence, now: float) -> None:
        """End the session turn of a sequence that has its outcome.

        The KV that the sequence has computed is kept for the next turn, unless the model failed.
        """
        path: list[int] | None = [] if seq.is_broken else None
        if seq.pages and not seq.is_broken:
            self._release_own(seq, self._publish(seq))
            path = seq.cache.nodes
        self.sessions.end_turn(seq.submit.session, seq.id, now, path)

    def release(self, seq: Sequence) -> None:
        """Take all pages back from a sequence that no step in flight holds.

        Its full pages stay in the prefix cache until they are evicted; if the model failed, they leave it with the NaN.
        """
        own: list[int] = []
        if self.tree is not None:
            own = self._publish(seq) if not seq.is_broken else []
            self.pending.remove(seq)
            self.tree.unlock(seq.cache.nodes)
            if seq.is_broken:
                self.pages.release(CACHE, self.tree.discard(seq.cache.nodes))
        for table in seq.pages:
            own += table[len(seq.cache.nodes) :]
        self._release_own(seq, own)
        self.epoch += 1
        seq.pages, seq.cache.nodes = (), []
        seq.device.num_mapped_pages = seq.num_scheduled_tokens = seq.device.uploaded_len = 0

    def num_released(self, seq: Sequence, leaving: Mapping[int, int]) -> int:
        """Return the number of pages that become unused when a sequence leaves.

        These are its own pages, and shared pages without another reader. leaving: by node, the number of its other
        readers that leave as well.
        """
        nodes = seq.cache.nodes
        count = seq.num_pages - len(nodes) * len(seq.pages)
        if self.tree is not None:
            readers = self.tree.num_readers
            count += self._num_groups * sum([readers(node) == leaving.get(node, 0) + 1 for node in nodes])
        return count

    def _allocate(self, owner: int, count: int, keep: int = 0) -> list[list[int]] | None:
        """Allocate `count` pages of each group for an owner, evicting cached pages if needed.

        Return them by group; None, with nothing evicted, unless `keep` more pages remain available.
        """
        groups = self._num_groups
        if not self._make_free(count * groups, keep):
            return None
        pages = self.pages.allocate(owner, count * groups)
        if pages is None:
            return None
        if groups == 1:
            return [pages]
        return [pages[first : first + count] for first in range(0, len(pages), count)]

    def _make_free(self, count: int, keep: int = 0) -> bool:
        """Free `count` pages, evicting cached pages if needed.

        Return False, with nothing evicted, unless `keep` more pages are available. In a large cache a few more than
        needed are evicted, because they cost less together.
        """
        missing = count - self.pages.free
        if missing + keep <= 0:
            return True
        tree = self.tree
        if tree is None or missing + keep > tree.num_evictable + tree.num_pinned:
            return False
        if missing > 0:
            while tree.num_evictable < missing:
                assert self.sessions.release_one(), f"{tree.num_pinned} pages are pinned by no session"
            evicted = tree.evict(missing + tree.num_evictable // EVICT_AHEAD)
            self.pages.release(CACHE, evicted)
        return True

    def _max_cached_pages(self, seq: Sequence) -> int:
        """Return the largest number of cached pages that a sequence may use.

        Its last known token is never taken from the cache: computing it yields the next token.
        """
        return (len(seq.tokens) - 1) // self._page_size

    def _match(self, seq: Sequence) -> list[int]:
        """Resume matching from the cached path of a waiting sequence; return the path.

        Nodes evicted since the path was found are dropped from it first.
        """
        tree, cache = self.tree, seq.cache
        if tree is None or seq.needs_prompt_logprobs:
            return []
        path = cache.matched
        tree.prune(path, cache.matched_epoch)
        cache.matched_epoch = tree.epoch
        path += tree.match(cache.namespace, seq.tokens, self._max_cached_pages(seq), len(path), _last(path))
        return path

    def _count_hit(self, seq: Sequence, tokens: int) -> None:
        """Count cached tokens of a prompt.

        Tokens that a grammar forced after the prompt may be found in the cache as well; they are not counted.
        """
        found = min(tokens, seq.prompt_len - seq.cache.num_cached_tokens)
        self.num_hit_tokens += found
        seq.cache.num_cached_tokens += found

    def _publish(self, seq: Sequence) -> list[int]:
        """Put the full pages of a sequence into the prefix cache.

        Return the pages of the sequence that the cache held already: it now reads the cached ones instead.
        """
        tree, nodes = self.tree, seq.cache.nodes
        if tree is None:
            return []
        duplicates: list[int] = []
        first, parent = len(nodes), _last(nodes)
        for index in range(first, min(seq.num_scheduled_tokens, len(seq.tokens)) // self._page_size):
            node = tree.insert(tree.key(seq.cache.namespace, seq.tokens, index, parent), parent)
            nodes.append(node)
            parent = node
            for group, table in enumerate(seq.pages):
                page = table[index]
                held = tree.attach(node, page, group)
                if held == page:
                    self.pages.transfer(seq.id, CACHE, page)
                else:
                    duplicates.append(page)
                    table[index] = held
                    seq.remap(index)
        tree.lock(nodes[first:])
        self.epoch += len(nodes) - first
        return duplicates

    def _release_own(self, seq: Sequence, pages: list[int]) -> None:
        """Free pages of a sequence at once.

        A step in flight may still use them; see the module's docstring.
        """
        if pages:
            self.pages.release(seq.id, pages)
            self.epoch += 1

    def _register_pending(self, seq: Sequence) -> None:
        """Register the page that a sequence computes next, if all its tokens are known."""
        self.pending.remove(seq)
        index = len(seq.cache.nodes)
        if self.tree is not None and (index + 1) * self._page_size <= len(seq.tokens):
            key = self.tree.key(seq.cache.namespace, seq.tokens, index, _last(seq.cache.nodes))
            self.pending.register(seq, key)

    def audit(self, held: Iterable[Sequence]) -> list[str]:
        """Return the inconsistencies of nodes and pages, one line each.

        The list is empty if there are none. held: every sequence that holds pages.
        """
        sequences = list(held)
        problems = [*audit_owners(self.pages, self.tree, sequences), *audit_readers(self.tree, sequences)]
        num_registered = sum([bool(seq.cache.pending_key) for seq in sequences])
        if num_registered != len(self.pending):
            problems.append(f"{len(self.pending)} pages are pending, sequences have registered {num_registered}")
        return problems


def _last(path: Items[int]) -> int:
    """Return the last node of a path, the root if it is empty."""
    return path[-1] if path else ROOT
