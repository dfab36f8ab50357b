"""The KV pool as sequences see it: own pages, shared pages, and their release.

The page tables of a sequence, one for each KV group, begin with the pages of nodes of the prefix cache, which it locks,
followed by pages of its own. A page moves from the second kind to the first when the step that fills it has been
launched: later steps run after it on the device (I1), so they may read it at once, and it is never written again. For
the same reason a page that a sequence no longer needs is free at once, even if a step in flight reads or writes it: its
next owner writes it in a later step. Only work outside the compute stream, such as a copy to host memory, would have to
hold it.

Groups of layers with a window give up the pages that no later step reads. They keep those that a match at the last full
page of the known tokens needs, so that the sequence itself can be continued from the cache.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items

from msgspec import Struct

from tandem.engine_core.errors import RequestError
from tandem.engine_core.integers import ceil_div
from tandem.engine_core.kv_cache.audit import audit_owners, audit_readers
from tandem.engine_core.kv_cache.page_classes import PageClass, page_classes
from tandem.engine_core.kv_cache.pages import CACHE, PageAllocator
from tandem.engine_core.kv_cache.pending_pages import PendingPages
from tandem.engine_core.kv_cache.radix import ROOT, RadixTree
from tandem.engine_core.kv_cache.sessions import Session, Sessions
from tandem.engine_core.kv_cache.states import StateCache
from tandem.engine_core.page_counts import held_pages
from tandem.engine_core.plan import PADDING_PAGE, ScheduledSequence
from tandem.engine_core.sequence import Sequence
from tandem.engine_core.weight_version import INITIAL, WeightVersion
from tandem.protocol.errors import ErrorCode

Leaving = Counter[tuple[int, int]]
"""Number of leaving readers by class and node."""
MAX_NODES_PER_PAGE, MAX_LONGEST_PATHS = 8, 16
"""Limits of the prefix cache's nodes in models with windows in all layers: nodes per page of the pool, and sequences of
the maximum length. The larger one applies."""
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
        max_lead: int = 0,
        states: StateCache | None = None,
    ) -> None:
        """Start with an unused pool.

        windows: window of each KV group; None: its layers attend to all positions; max_lead: positions beyond the
        host's count that a row of steady decode may compute (I9); states: checkpoints of recurrent layers, None if the
        model has none, or the prefix cache is off.
        """
        self.pages = pages
        self.tree = tree
        self.states = states
        self.sessions = Sessions(tree, 0, 0.0) if sessions is None else sessions
        self.pending = PendingPages()
        """Pages that running sequences compute next."""
        self.num_queried_tokens = 0
        """Prompt tokens looked up in the prefix cache since the start."""
        self.num_hit_tokens = 0
        """Prompt tokens found in the prefix cache since the start."""
        self.epoch = 0
        """Incremented whenever an admission that was declined might succeed: pages came back, or became shared."""
        self.weights = INITIAL
        """Weights that compute the KV of sequences from now on."""
        self._page_size = page_size
        self._max_lead = max_lead
        self.num_groups = len(windows)
        self._windows = windows
        self._classes = page_classes(windows, page_size)
        self._tails: list[tuple[int, PageClass, int]] = [
            (number, kind, kind.tail) for number, kind in enumerate(self._classes) if kind.tail is not None
        ]
        """Number, class and length of the tail of each class with a window."""
        if tree is not None:
            assert tuple([pages.kind for pages in tree.classes]) == self._classes, f"other classes than {windows}"
        assert states is None or not self._tails, "checkpoints with windows are not supported"

    @property
    def has_windows(self) -> bool:
        """True if a KV group has a window."""
        return bool(self._tails)

    @property
    def usage(self) -> KVUsage:
        """The pool's pages, counted by kind."""
        pages, tree = self.pages, self.tree
        if tree is None:
            return KVUsage(pages.total, pages.free, pages.used, 0, 0, pages.free, 0)
        counts, free = tree.counts, pages.free
        evictable = counts.evictable
        return KVUsage(
            pages.total,
            free,
            pages.used - evictable,
            counts.held,
            evictable,
            free + evictable + counts.pinned,
            tree.num_evicted,
        )

    def check_fits(self, seq: Sequence, whole: bool = False) -> None:
        """Raise RequestError if a sequence at full length is larger than the pool.

        The message contains the numbers and the setting to change. whole: True if prompts are computed in one step, for
        which groups with a window need pages of all positions.
        """
        windows = (None,) * self.num_groups if whole else self._windows
        # The pages that a match at the end of the cacheable tokens needs are held while verified ones are computed.
        lead = self._max_lead + seq.submit.num_verified
        needed = held_pages(windows, seq.kv_len, self._page_size, lead)
        if needed > self.pages.total:
            max_tokens = seq.total_len - seq.prompt_len
            raise RequestError(
                ErrorCode.KV_CAPACITY,
                f"{seq.prompt_len} prompt tokens and max_tokens {max_tokens} need {needed} KV pages of "
                f"{self._page_size} tokens, the pool has {self.pages.total}; lower max_tokens or raise --kv-tokens",
            )

    def row_end(self, seq: Sequence, length: int) -> int:
        """Return one past the last position for which a row of a sequence needs a page.

        A row of steady decode may begin beyond the host's count, and verify drafts. length: positions of the row.
        """
        end = seq.num_scheduled_tokens + length
        return min(end + self._max_lead, seq.total_len - 1) if self._max_lead and seq.in_steady_decode else end

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
        least its priority is computing that page. With recurrent layers it should wait for a checkpoint instead.
        """
        tree, cache = self.tree, seq.cache
        if self.states is not None:
            return self._waits_for_state(seq, self.states)
        if tree is None or not self.pending or seq.ignores_cache:
            return False
        if cache.awaited_key not in self.pending or not tree.is_current(cache.matched, cache.matched_epoch):
            path = self._walk(seq)
            cache.depth = depth = tree.reach(path, cache.depth)
            if depth >= self._max_cached_pages(seq):
                return False
            cache.awaited_key = tree.key(cache.namespace, seq.tokens, depth, path[depth - 1] if depth else ROOT)
        return self.pending.blocks(seq)

    def _waits_for_state(self, seq: Sequence, states: StateCache) -> bool:
        """Return whether a waiting sequence could begin later in its prompt with a checkpoint that is expected."""
        cache = seq.cache
        if not states.are_expected or seq.ignores_cache:
            return False
        if cache.states_epoch == states.epoch and states.blocks(seq):
            return True
        cache.states_epoch = states.epoch
        start = states.start(seq, self._walk(seq)) * self._page_size
        return states.find_awaited(seq, start, self._max_cached_pages(seq) * self._page_size)

    def follows(self, seq: Sequence) -> bool:
        """Return whether a waiting sequence waits for what a running one computes, as found last."""
        return self.pending.blocks(seq) if self.states is None else self.states.blocks(seq)

    def admit(self, seq: Sequence, chunk: int, keep: int, *, whole: bool = False, alone: bool = False) -> bool:
        """Give a waiting sequence its first pages.

        These are the cached pages of its prompt, and pages for the `chunk` positions after them. Return False, with
        nothing given, if there are too few. chunk: positions, cut at the end of the known tokens, 0: all of them; keep:
        pages that must remain available; whole: True if there must be pages for all known tokens, which groups with a
        window do not need at once; alone: True if no other sequence has pages: then fewer pages than the chunk needs
        are enough.
        """
        tree, size, known = self.tree, self._page_size, len(seq.tokens)
        path = self._walk(seq)
        depth = self._start(seq, path)
        nodes, firsts = path[:depth], self._tail_starts(depth)
        start = depth * size
        end = min(start + chunk, known) if chunk and not (whole and not self._tails) else known
        if whole:
            keep += len(self._classes[0].groups) * (ceil_div(known, size) - ceil_div(end, size))
        if tree is not None:
            tree.lock(nodes, firsts)
        own = self._allocate(seq.id, ceil_div(end, size) - depth, keep)
        if own is None and alone and self._tails and (rest := self.usage.available // self.num_groups):
            own = self._allocate(seq.id, min(rest, ceil_div(end, size) - depth))
        if own is None:
            if tree is not None:
                tree.unlock(nodes, firsts)
            return False
        if tree is not None:
            for kind, first in zip(self._classes, firsts, strict=True):
                for group in kind.groups:
                    own[group][:0] = [PADDING_PAGE] * first + tree.pages(nodes[first:], group)
        seq.pages, seq.first_pages, seq.num_scheduled_tokens = tuple(own), firsts, start
        if self.states is not None:
            self.states.on_admit(seq, path, depth)
        cache = seq.cache
        cache.nodes, cache.start, cache.depth = nodes, _last(nodes), 0
        self._find_draft_kv(seq)
        if not self._tails:
            cache.matched, cache.matched_epoch = [], -1
        if tree is not None:
            tree.touch(cache.start)
            if not (seq.preemptions or seq.ignores_cache):
                self.num_queried_tokens += known
                self._count_hit(seq, start)
        if seq.submit.session:
            self.sessions.resume(seq.submit.session, seq.id, nodes)
        self._register_pending(seq)
        return True

    def _start(self, seq: Sequence, path: list[int]) -> int:
        """Return the number of nodes after which a sequence can begin, on the path of its cached pages."""
        if self.states is not None:
            return self.states.start(seq, path)
        return len(path) if self.tree is None else self.tree.reach(path)

    def rematch(self, seq: Sequence) -> None:
        """Look again for cached pages of a running prompt, from its first own page on.

        Another sequence may have computed them since the prompt was admitted. With recurrent layers it must have saved
        a checkpoint as well.
        """
        tree, cache, states = self.tree, seq.cache, self.states
        if tree is None or cache.is_stale or seq.ignores_cache:
            return
        if states is not None and cache.states_epoch == states.epoch:
            return
        shared = len(cache.nodes)
        if states is not None:
            cache.states_epoch = states.epoch
            limit = self._max_cached_pages(seq)
            found = tree.walk(cache.namespace, seq.tokens, limit, shared, _last(cache.nodes))
            found = found[: states.reach(found)]
        elif self._tails:
            path = self._walk(seq)
            found = path[shared : tree.reach(path, shared)]
        else:
            limit = self._max_cached_pages(seq)
            found = tree.walk(cache.namespace, seq.tokens, limit, shared, _last(cache.nodes))
        depth = shared + len(found)
        if depth * self._page_size <= seq.num_scheduled_tokens:
            return
        self._read(seq, found)
        if not seq.preemptions:
            self._count_hit(seq, depth * self._page_size - seq.num_scheduled_tokens)
        seq.remap(shared)
        seq.num_scheduled_tokens = depth * self._page_size
        if states is not None:
            states.on_rematch(seq, found[-1], seq.num_scheduled_tokens)
        self._register_pending(seq)

    def _read(self, seq: Sequence, found: list[int]) -> None:
        """Have a sequence read these nodes, behind those that it reads, instead of its own pages."""
        tree, nodes = self.tree, seq.cache.nodes
        assert tree is not None, f"{seq} reads nodes without a prefix cache"
        shared, depth = len(nodes), len(nodes) + len(found)
        starts = self._tail_starts(depth)
        for number, _, _ in self._tails:
            self._give_up(seq, number, min(shared, starts[number]))
        held = seq.first_pages
        seq.first_pages = firsts = [max(first, start) for first, start in zip(held, starts, strict=True)]
        tree.lock(found, [max(0, first - shared) for first in firsts])
        unused: list[int] = []
        for kind, first, before in zip(self._classes, firsts, held, strict=True):
            skipped = max(0, first - shared)
            for group in kind.groups:
                table = seq.pages[group]
                unused += table[max(shared, before) : depth]
                table[shared:depth] = [PADDING_PAGE] * skipped + tree.pages(found[skipped:], group)
        nodes += found
        self._find_draft_kv(seq)
        self._release_own(seq, unused)

    def grow(self, seq: Sequence, end: int) -> int:
        """Allocate pages for the positions of a sequence below `end`.

        Return the position below which it now has pages: `end`, or less where the pool has too few.
        """
        self._give_up_passed(seq)
        missing = ceil_div(end, self._page_size) - len(seq.pages[0])
        if missing > 0:
            own = self._allocate(seq.id, missing)
            if own is None and (rest := self.usage.available // self.num_groups):
                own = self._allocate(seq.id, rest)
            for table, pages in zip(seq.pages, own or (), strict=False):
                table += pages
        return min(end, len(seq.pages[0]) * self._page_size)

    def grow_each(self, sequences: Items[Sequence]) -> bool:
        """Allocate a page of each group for each sequence that has none for its next position.

        All of them get theirs, or none does: return False if the pool has too few.
        """
        size, full = self._page_size, list[Sequence]()
        if self._max_lead:
            for seq in sequences:
                full += [seq] * (ceil_div(self.row_end(seq, 1), size) - len(seq.pages[0]))
        else:
            full = [seq for seq in sequences if len(seq.pages[0]) * size <= seq.num_scheduled_tokens]
        if self._tails:
            for seq in full:
                self._give_up_passed(seq)
        owners = [seq.id for seq in full] * self.num_groups
        pages = self.pages.allocate_each(owners) if self._make_free(len(owners)) else None
        if pages is None:
            return False
        for group in range(self.num_groups):
            for seq, page in zip(full, pages[group * len(full) :], strict=False):
                seq.pages[group].append(page)
        return True

    def unmapped_pages(self, seq: Sequence, end: int) -> tuple[int, ...]:
        """Return the pages of positions below `end` that the device's tables lack, group by group."""
        first, last = seq.device.num_mapped_pages, ceil_div(end, self._page_size)
        if self.num_groups == 1:
            return tuple(seq.pages[0][first:last])
        return tuple([page for table in seq.pages for page in table[first:last]])

    def on_launch(self, seq: Sequence, row: ScheduledSequence) -> None:
        """Record the pages that a launched row uploaded.

        Also publish the pages that it filled with known tokens. Pages outside a window are given up then, or before the
        sequence gets its next page.
        """
        num_mapped = row.first_page + len(row.new_pages) // self.num_groups
        seq.device.num_mapped_pages = num_mapped
        mapped, kv_len = num_mapped * self._page_size, seq.total_len - 1
        seq.next_page_boundary = mapped - self._max_lead if mapped < kv_len else kv_len
        if row.tokens:
            self._on_computed(seq, row)

    def _on_computed(self, seq: Sequence, row: ScheduledSequence) -> None:
        """Publish the pages that a launched row filled with known tokens, and give up those that it read last."""
        if self.tree is not None and not seq.cache.is_stale:
            self._release_own(seq, self._publish(seq))
            self._register_pending(seq)
            if row.start < min(seq.prompt_len, seq.cacheable_len) <= row.end:
                self._mark_prompt(seq)
            if self.states is not None:
                self.states.on_computed(seq, row)
        self._give_up_passed(seq)

    def on_draft_kv(self, seq: Sequence, end: int) -> None:
        """Record that the draft model has computed the positions of a sequence below `end`.

        It may have written to pages of the prefix cache, which hold the same tokens for all.
        """
        size, nodes = self._page_size, seq.cache.nodes
        if self.tree is not None:
            for node in nodes[seq.drafts.model_len // size : end // size]:
                self.tree.has_draft_kv[node] = 1
        seq.drafts.model_len = max(seq.drafts.model_len, end)

    def _find_draft_kv(self, seq: Sequence) -> None:
        """Set the positions that the draft model has computed, after a sequence begins to read other pages."""
        if self.tree is not None:
            count, nodes = self.tree.num_with_draft_kv(seq.cache.nodes), seq.cache.nodes
            end = count * self._page_size
            seq.drafts.model_len = end if count < len(nodes) else max(seq.drafts.model_len, end)

    def end_turn(self, seq: Sequence, now: float) -> None:
        """End the session turn of a sequence that has its outcome.

        The KV that the sequence has computed is kept for the next turn, unless no other may use it.
        """
        path: list[int] | None = [] if seq.is_unshared else None
        if seq.pages and not seq.is_unshared:
            self._release_own(seq, self._publish(seq))
            path = seq.cache.nodes
            self._mark(path)
        self.sessions.end_turn(seq.submit.session, seq.id, now, path)

    def truncate(self, seq: Sequence, length: int) -> None:
        """Drop the KV of a sequence from position `length` on, the draft model's as well.

        Its own pages behind that position become free. Nodes of the prefix cache behind it lose a reader; they keep
        their pages, for others and for later matches. The sequence keeps less than `length` positions where that
        position is inside a node's page, which is never written again, and none where a window has passed the pages
        that the position attends to. With recurrent layers the sequence must have its outcome, as its row has the later
        state.
        """
        assert length >= 0 and (self.states is None or seq.outcome is not None), f"{seq} truncated to {length}"
        if not seq.pages or length >= seq.num_scheduled_tokens:
            return
        size, nodes = self._page_size, seq.cache.nodes
        if length < len(nodes) * size:
            length = length // size * size
        firsts, needed = seq.first_pages, self._tail_starts(length // size)
        if any(first > start for first, start in zip(firsts, needed, strict=True)):
            length, needed = 0, [0] * len(needed)
        depth, num_pages = min(len(nodes), length // size), ceil_div(length, size)
        own: list[int] = []
        for first, table in self._own_tables(seq):
            own += table[max(first, num_pages) :]
            del table[num_pages:]
        if self.tree is not None and depth < len(nodes):
            self.tree.unlock(nodes[depth:], [max(0, first - depth) for first in firsts])
            self.epoch += 1
            del nodes[depth:]
            seq.cache.start = _last(nodes)
        seq.first_pages = [min(first, start) for first, start in zip(firsts, needed, strict=True)]
        self._release_own(seq, own)
        seq.num_scheduled_tokens, seq.cache.is_truncated = length, True
        seq.drafts.model_len = min(seq.drafts.model_len, length)
        seq.remap(num_pages)
        if not (seq.outcome or seq.cache.is_stale):
            self._register_pending(seq)

    def release(self, seq: Sequence) -> None:
        """Take all pages back from a sequence that no step in flight holds.

        Its full pages stay in the prefix cache until they are evicted; those that no other may use leave it.
        """
        own: list[int] = []
        if self.tree is not None:
            own = self._publish(seq) if not seq.is_unshared else []
            if self.states is not None:
                self.states.on_release(seq)
            self.pending.remove(seq)
            if not seq.is_unshared:
                self._mark(seq.cache.nodes)
            self.tree.unlock(seq.cache.nodes, seq.first_pages)
            if self.tree.num_children(seq.cache.start) > 1:  # Others may start there too, so it is kept longer.
                self.tree.touch(seq.cache.start)
            if seq.is_unshared:
                self.pages.release(CACHE, self.tree.discard(seq.cache.nodes))
        for first, table in self._own_tables(seq):
            own += table[first:]
        self._release_own(seq, own)
        self.epoch += 1
        seq.pages, seq.first_pages, seq.cache.nodes = (), [], []
        seq.device.num_mapped_pages = seq.num_scheduled_tokens = seq.device.uploaded_len = 0
        seq.drafts.model_len = seq.drafts.model_lag = 0

    def change_weights(self, weights: WeightVersion, holders: Iterable[Sequence]) -> None:
        """Use other weights from now on: nothing that was computed before is shared any more.

        Unused pages leave the prefix cache, and sessions keep none. holders: the sequences with pages, which continue
        with them and share none from now on.
        """
        self.weights = weights
        for seq in holders:
            seq.cache.is_stale = True
            self.pending.remove(seq)
            if self.states is not None:
                self.states.expect_none(seq)
        self.reset_prefix_cache()

    def reset_prefix_cache(self) -> bool:
        """Drop the pages that no sequence reads from the prefix cache; sessions keep none.

        Return False if sequences still read some.
        """
        self.sessions.release_all()
        if self.tree is not None:
            self.pages.release(CACHE, self.tree.evict(self.tree.counts.evictable))
        self.epoch += 1
        return not self.pages.owned().get(CACHE)

    def forget(self, seq: Sequence) -> None:
        """Free what a sequence without pages has kept to be continued."""
        if self.states is not None:
            self.states.drop_restart(seq)

    def num_released(self, seq: Sequence, leaving: Mapping[tuple[int, int], int]) -> int:
        """Return the number of pages that become unused when a sequence leaves.

        These are its own pages, and shared pages without another reader. leaving: the number of other readers that
        leave as well.
        """
        count = sum([len(table) - first for first, table in self._own_tables(seq)])
        if self.tree is not None and seq.pages:
            readers = self.tree.num_readers
            for number, (kind, first) in enumerate(zip(self._classes, seq.first_pages, strict=True)):
                last = [readers(node, number) == leaving.get((number, node), 0) + 1 for node in seq.cache.nodes[first:]]
                count += len(kind.groups) * sum(last)
        return count

    def add_leaving(self, seq: Sequence, leaving: Leaving) -> int:
        """Add a sequence to the readers that leave; return the number of pages that become unused with it."""
        count = self.num_released(seq, leaving)
        for number, first in enumerate(seq.first_pages):
            leaving.update([(number, node) for node in seq.cache.nodes[first:]])
        return count

    def num_shared_pages(self, seq: Sequence) -> int:
        """Return the number of pages of the prefix cache that a sequence reads."""
        return seq.num_pages - sum([len(table) - first for first, table in self._own_tables(seq)])

    def num_kept_pages(self, session: Session) -> int:
        """Return the number of pages of the prefix cache that a session keeps."""
        kept = zip(self._classes, session.firsts, strict=False)
        return sum([len(kind.groups) * (len(session.nodes) - first) for kind, first in kept])

    def _own_tables(self, seq: Sequence) -> list[tuple[int, list[int]]]:
        """Return each page table of a sequence, with the index of its first own page."""
        if not seq.pages:
            return []
        shared = len(seq.cache.nodes)
        return [
            (max(shared, first), seq.pages[group])
            for kind, first in zip(self._classes, seq.first_pages, strict=True)
            for group in kind.groups
        ]

    def _tail_starts(self, depth: int) -> list[int]:
        """Return, by class, the index of the first page that a sequence needs after `depth` whole pages."""
        return [0 if kind.tail is None else max(0, depth - kind.tail) for kind in self._classes]

    def _give_up_passed(self, seq: Sequence) -> None:
        """Give up the pages that neither later steps nor a match at the last full page of the sequence need.

        The position of the sequence is a lower bound (I9): samples in flight do not count.
        """
        full = min(seq.num_scheduled_tokens, len(seq.tokens), seq.cacheable_len) // self._page_size
        for number, _, tail in self._tails:
            self._give_up(seq, number, full - tail)

    def _give_up(self, seq: Sequence, number: int, end: int) -> None:
        """Give up the pages of a class below index `end`: own ones become free, shared ones lose a reader."""
        first, nodes = seq.first_pages[number], seq.cache.nodes
        if end <= first:
            return
        shared = min(max(first, len(nodes)), end)
        if shared > first and self.tree is not None:
            self.tree.pass_by(nodes[first:shared], number)
            self.epoch += 1
        own: list[int] = []
        for group in self._classes[number].groups:
            table = seq.pages[group]
            own += table[shared:end]
            table[first:end] = [PADDING_PAGE] * (end - first)
        seq.first_pages[number] = end
        self._release_own(seq, own)

    def _mark_prompt(self, seq: Sequence) -> None:
        """Make the end of a prompt a match point.

        So is the last page that the same prompt can match, and the one before it: the next turn of a chat may leave out
        the last tokens of the template.
        """
        nodes, size, end = seq.cache.nodes, self._page_size, min(seq.prompt_len, seq.cacheable_len)
        for depth in range(max(1, (end - 1) // size - 1), end // size + 1):
            self._mark(nodes[:depth])

    def _mark(self, path: list[int]) -> None:
        """Make the last node of a path a match point."""
        if self.tree is not None and self._tails:
            self.tree.mark(_last(path))

    def _allocate(self, owner: int, count: int, keep: int = 0) -> list[list[int]] | None:
        """Allocate `count` pages of each group for an owner, evicting cached pages if needed.

        Return them by group; None, with nothing evicted, unless `keep` more pages remain available.
        """
        groups = self.num_groups
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
        if tree is None:
            return False
        evictable = tree.counts.evictable
        if missing + keep > evictable + tree.counts.pinned:
            return False
        if missing > 0:
            while evictable < missing:
                assert self.sessions.release_one(), f"{tree.counts.pinned} pages are pinned by no session"
                evictable = tree.counts.evictable
            self.pages.release(CACHE, tree.evict(missing + evictable // EVICT_AHEAD))
        return True

    def _max_cached_pages(self, seq: Sequence) -> int:
        """Return the largest number of cached pages that a sequence may use.

        Its last known token is never taken from the cache, nor is the one before its verified tokens: computing it
        yields the distribution of the next token.
        """
        return (min(len(seq.tokens), seq.cacheable_len) - 1) // self._page_size

    def _walk(self, seq: Sequence) -> list[int]:
        """Resume the search for the cached tokens of a sequence; return the path of nodes that hold them.

        Nodes evicted since the path was found are dropped from it first.
        """
        tree, cache = self.tree, seq.cache
        if tree is None or seq.ignores_cache:
            return []
        path = cache.matched
        tree.prune(path, cache.matched_epoch)
        cache.matched_epoch = tree.epoch
        path += cache.nodes[len(path) :]
        path += tree.walk(cache.namespace, seq.tokens, self._max_cached_pages(seq), len(path), _last(path))
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
        known = min(seq.num_scheduled_tokens, len(seq.tokens), seq.cacheable_len)
        full = first + self._room_for_nodes(known // self._page_size - first)
        for index in range(first, full):
            parent = tree.insert(tree.key(seq.cache.namespace, seq.tokens, index, parent), parent)
            nodes.append(parent)
        if full <= first:
            return duplicates
        for number, held in enumerate(seq.first_pages):
            duplicates += self._attach(seq, max(first, held), full, number)
        tree.lock(nodes[first:], [max(0, held - first) for held in seq.first_pages])
        if duplicates:
            self._find_draft_kv(seq)
        self.epoch += full - first
        return duplicates

    def _attach(self, seq: Sequence, start: int, end: int, number: int) -> list[int]:
        """Give the nodes of a sequence from index `start` to `end` its pages of a class.

        Where a node holds some already, the sequence reads those instead: return its own.
        """
        tree, tables = self.tree, [seq.pages[group] for group in self._classes[number].groups]
        assert tree is not None, f"{seq} publishes pages without a prefix cache"
        nodes, own = seq.cache.nodes[start:end], [table[start:end] for table in tables]
        known = tree.attach(nodes, own, number)
        duplicates = [pages[index] for pages in own for index in known]
        kept = set(known)
        if not number and seq.drafts.model_len:
            computed = seq.drafts.model_len // self._page_size - start
            for index in [index for index in range(min(computed, len(nodes))) if index not in kept]:
                tree.has_draft_kv[nodes[index]] = 1
        for group, table, pages in zip(self._classes[number].groups, tables, own, strict=True):
            if kept:
                pages = [page for index, page in enumerate(pages) if index not in kept]
                for index in known:
                    table[start + index] = tree.pages(nodes[index : index + 1], group)[0]
            self.pages.transfer(seq.id, CACHE, pages)
        if duplicates:
            seq.remap(start + known[0])
        return duplicates

    def _room_for_nodes(self, count: int) -> int:
        """Return how many of `count` nodes the prefix cache may still add, after it has removed unused ones."""
        if self.tree is None or count <= 0 or self._classes[0].groups:
            return max(0, count)
        room, evicted = self.tree.make_room(count)
        self.pages.release(CACHE, evicted)
        while room < count and self.sessions.release_one():
            room, evicted = self.tree.make_room(count)
            self.pages.release(CACHE, evicted)
        return room

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
        known = min(len(seq.tokens), seq.cacheable_len)
        if self.tree is not None and self.states is None and (index + 1) * self._page_size <= known:
            key = self.tree.key(seq.cache.namespace, seq.tokens, index, _last(seq.cache.nodes))
            self.pending.register(seq, key)

    def audit(self, held: Iterable[Sequence], waiting: Iterable[Sequence] = ()) -> list[str]:
        """Return the inconsistencies of nodes, pages and checkpoints, one line each.

        The list is empty if there are none. held: every sequence that holds pages; waiting: every one in the queue.
        """
        sequences = list(held)
        problems = [*audit_owners(self.pages, self.tree, sequences), *audit_readers(self.tree, sequences)]
        num_registered = sum([bool(seq.cache.pending_key) for seq in sequences])
        if num_registered != len(self.pending):
            problems.append(f"{len(self.pending)} pages are pending, sequences have registered {num_registered}")
        if self.states is not None:
            problems += self.states.audit(sequences, waiting)
        return problems


def _last(path: Items[int]) -> int:
    """Return the last node of a path, the root if it is empty."""
    return path[-1] if path else ROOT
