"""Checkpoints of recurrent states in the prefix cache.

A recurrent layer keeps a state that covers all tokens of a row, so pages alone do not let a sequence continue from the
prefix cache: it needs a copy of the state at the end of the match, a checkpoint. A node of the tree has one or none, at
the end of its page. A sequence begins at the deepest node with a checkpoint on the path of its pages, and computes the
tokens after it again; pages of these that the cache holds already replace its own.

On the device a row's state is split (`kernels/delta_rule/state.py`): at any time its base is the state at the last
multiple of the interval below the row's length. So a checkpoint is a copy of the base. Checkpoints are saved:

- at the end of a prompt;
- at the end of a turn, unless the base covers tokens that are not known yet;
- where the pages match further than the checkpoints: other prompts evidently have the same beginning;
- also before the end of a long prompt, if the state at the end covers some of the last TEMPLATE_TOKENS: the next turn
  may leave these out, and could not continue from it; likewise before the verified tokens of a long prompt;
- when a sequence is preempted, as a private checkpoint; until then the base of its row is one, renewed by each chunk.

Copies are part of steps. A save is executed by the step that is launched next, before its rows change any state: a node
has its checkpoint as soon as the step that computes it is launched, whatever becomes of the row. A load is executed by
the first step with the row. Until then its slot is locked. Slots are free at once when nothing needs them, like pages,
since steps run in order. The number of copies in a step has no other limit than those of rows and slots, as a copy
costs less than the tokens that it saves; steps with many copies compute fewer positions of prompts.
"""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Items

from msgspec import structs

from tandem.engine_core.kv_cache.radix import ROOT, RadixTree
from tandem.engine_core.kv_cache.state_slots import StateSlots
from tandem.engine_core.plan import ScheduledSequence, StateCopy, StepPlan
from tandem.engine_core.sequence import Sequence

TEMPLATE_TOKENS = 8
"""Last tokens of a prompt that the next turn of a chat may leave out, such as one that begins the reasoning."""
LONG_CHUNKS = 4
"""A prompt is cut before its end only if it has this many times the grid's positions to compute."""


class StateCache:
    """Checkpoints of sequences and nodes, and the copies that the next steps execute."""

    def __init__(self, slots: StateSlots, tree: RadixTree, interval: int, grid: int) -> None:
        """Start without checkpoints.

        interval: positions from one state that can be saved to the next, a multiple of the tree's page size; grid:
        chunks of prompts end at multiples of this; 0: prompts are computed whole.
        """
        assert interval % tree.page_size == 0, f"pages of {tree.page_size}, checkpoints every {interval}"
        self.slots = slots
        self.epoch = 0
        """Incremented when a node gets a checkpoint."""
        self._tree = tree
        self._interval = interval
        self._grid = grid
        self._saves: dict[int, StateCopy] = {}
        """Saves that no launched step has executed, by slot."""
        self._loads: dict[int, StateCopy] = {}
        """Loads that no launched step has executed, by id of the sequence."""
        self._producers: dict[int, Sequence] = {}
        """Running sequences that will save checkpoints of their prompts, by id."""
        tree.on_lost = self.forget
        slots.cost_of = self._cost

    @property
    def num_copies(self) -> int:
        """Number of copies that the next step executes at most."""
        return len(self._saves) + len(self._loads)

    @property
    def are_expected(self) -> bool:
        """True if running sequences will save checkpoints of their prompts."""
        return bool(self._producers)

    def covered(self, length: int) -> int:
        """Return the position of the state that can be saved from a row of this many tokens."""
        return (length - 1) // self._interval * self._interval if length else 0

    def reach(self, path: Items[int]) -> int:
        """Return the number of nodes on a path up to the last one with a checkpoint; 0 if none has one."""
        slots = self.slots
        for depth in range(len(path), 0, -1):
            if path[depth - 1] in slots:
                return depth
        return 0

    def start(self, seq: Sequence, path: Items[int]) -> int:
        """Return the number of nodes after which a waiting sequence can begin. path: of its cached pages."""
        depth, own = self.reach(path), seq.cache.restart // self._tree.page_size
        return own if depth < own <= len(path) and _private(seq) in self.slots else depth

    def on_admit(self, seq: Sequence, path: Items[int], depth: int) -> None:
        """Plan the load and the checkpoints of a sequence that begins after `depth` nodes of a path."""
        size, cache = self._tree.page_size, seq.cache
        own = cache.restart == depth * size and _private(seq) in self.slots
        if depth:
            self._load(seq, _private(seq) if own else path[depth - 1], depth * size)
        if not own:
            self.drop_restart(seq)
        cache.cuts = self._cuts(seq, depth * size, len(path) * size)
        cache.states_epoch, cache.awaited_state = self.epoch, (-1, 0)
        if self.slots.total and depth * size < seq.prompt_len:
            self._producers[seq.id] = seq

    def _cuts(self, seq: Sequence, start: int, matched: int) -> list[int]:
        """Return the ends of chunks at which a prompt saves checkpoints, other than its own end.

        start: position at which it begins; matched: position at which its cached pages end.
        """
        length, grid = min(len(seq.tokens), seq.cacheable_len), self._grid
        if not grid or not self.slots.total:
            return []
        last, cuts = self.covered(length), set()
        if start < matched < last:
            cuts.add((matched + self._interval) // grid * grid)
        is_lost = length == seq.prompt_len and length - last <= TEMPLATE_TOKENS
        if (is_lost or length < seq.prompt_len) and last - start >= LONG_CHUNKS * grid:
            cuts.add((length - 1) // grid * grid)
        return sorted(cut for cut in cuts if start < self.covered(cut))

    def on_rematch(self, seq: Sequence, node: int, position: int) -> None:
        """Plan the load of a running prompt that continues from the checkpoint of a node at a position."""
        self._load(seq, node, position)
        seq.cache.cuts = [cut for cut in seq.cache.cuts if self.covered(cut) > position]
        if position >= seq.prompt_len:
            self._producers.pop(seq.id, None)

    def _load(self, seq: Sequence, owner: int, position: int) -> None:
        self._unplan_load(seq)
        self._loads[seq.id] = StateCopy(seq.row, self.slots.lock(owner), position)

    def _unplan_load(self, seq: Sequence) -> bool:
        """Drop the planned load of a sequence; return False without one."""
        load = self._loads.pop(seq.id, None)
        if load is not None:
            self.slots.unlock(load.slot)
        return load is not None

    def with_copies(self, plan: StepPlan) -> StepPlan:
        """Return a plan with the copies that it executes."""
        if not self._saves and not self._loads:
            return plan
        loads = [self._loads[row.seq_id] for row in plan.other_rows if row.seq_id in self._loads]
        return structs.replace(plan, saves=tuple(self._saves.values()), loads=tuple(loads))

    def on_launch(self, plan: StepPlan) -> None:
        """Note that a step with copies has been launched."""
        for save in plan.saves:
            if self._saves.get(save.slot) is save:
                del self._saves[save.slot]
        if plan.loads:
            for seq_id in [row.seq_id for row in plan.other_rows if row.seq_id in self._loads]:
                self.slots.unlock(self._loads.pop(seq_id).slot)
                self._release(~seq_id)

    def on_computed(self, seq: Sequence, row: ScheduledSequence) -> None:
        """Save what a launched row with known tokens leaves, if it ends where a checkpoint is wanted.

        Its full pages are in the tree.
        """
        cuts, ends_prompt = seq.cache.cuts, row.start < seq.prompt_len <= row.end
        is_cut = row.end in cuts
        if cuts and cuts[0] <= row.end:
            seq.cache.cuts = [cut for cut in cuts if cut > row.end]
        if is_cut or ends_prompt:
            self._publish(seq, self.covered(row.end))
        if ends_prompt:
            self._producers.pop(seq.id, None)

    def expect_none(self, seq: Sequence) -> None:
        """Have a running sequence save no checkpoints of its prompt from now on."""
        self._producers.pop(seq.id, None)
        seq.cache.cuts = []

    def on_release(self, seq: Sequence) -> None:
        """Save what a sequence leaves in its row, for the next turn, or for itself if it was preempted.

        No step in flight holds it. If no other may use what it computed, the checkpoints of its path are dropped.
        """
        self.expect_none(seq)
        nodes = seq.cache.nodes
        is_loaded = not self._unplan_load(seq)
        if seq.is_unshared:
            # A sequence that is about to load one finds out by itself.
            for node in [node for node in nodes if not self.slots.is_locked(node)]:
                self.forget(node)
        if seq.outcome is not None:
            self.drop_restart(seq)
        if seq.is_unshared or not is_loaded or seq.cache.is_truncated:
            return  # Without its load, or truncated, the row has another state than the host counts.
        position = self.covered(seq.num_scheduled_tokens)
        depth = position // self._tree.page_size
        is_known = 0 < depth <= len(nodes) and nodes[depth - 1] in self.slots
        if seq.outcome is not None or is_known:
            self._publish(seq, position)
        elif position and (slot := self.slots.acquire(_private(seq), position)) is not None:
            seq.cache.restart = position
            self._saves[slot] = StateCopy(seq.row, slot, position)

    def drop_restart(self, seq: Sequence) -> None:
        """Free the checkpoint that a preempted sequence has for itself, if it has one."""
        self._release(_private(seq))
        seq.cache.restart = 0

    def _publish(self, seq: Sequence, position: int) -> None:
        """Save the state of a row at a position, that of its base, for the node there."""
        nodes = seq.cache.nodes
        depth = position // self._tree.page_size
        if not 0 < depth <= len(nodes):
            return  # There is none, or the base covers a token that is not known.
        node = nodes[depth - 1]
        if node in self.slots:
            self.slots.touch(node)
            return
        slot = self.slots.acquire(node, self._cost(node, 0))
        if slot is not None:
            self._saves[slot] = StateCopy(seq.row, slot, position)
            self.epoch += 1

    def _cost(self, owner: int, known: int) -> int:
        """Return the number of tokens from the last checkpoint before an owner's, which would be computed without it.

        known: its cost so far, which does not change for a private checkpoint.
        """
        if owner < 0:
            return known
        count, node = 1, self._tree.parent(owner)
        while node != ROOT and node not in self.slots:
            count, node = count + 1, self._tree.parent(node)
        return count * self._tree.page_size

    def forget(self, node: int) -> None:
        """Drop the checkpoint of a node, if it has one."""
        self._release(node)

    def _release(self, owner: int) -> None:
        slot = self.slots.release(owner)
        if slot is not None:
            self._saves.pop(slot, None)

    def blocks(self, seq: Sequence) -> bool:
        """Return whether a waiting sequence has to wait for the checkpoint that it has found last."""
        seq_id, position = seq.cache.awaited_state
        producer = self._producers.get(seq_id)
        return (
            producer is not None
            and producer.outcome is None
            and producer.priority >= seq.priority
            and position in self._expected(producer)
        )

    def find_awaited(self, seq: Sequence, start: int, limit: int) -> bool:
        """Look for the last checkpoint that a waiting sequence could begin with and a running one will save.

        Only running sequences of at least its priority count, and of these only the ones that have got as far as
        `start`: it would reach the checkpoints of the others earlier by itself. start: position at which the sequence
        can begin now; limit: largest position at which it can begin. Return whether there is one.
        """
        seq.cache.awaited_state, found = (-1, 0), start
        for producer in self._producers.values():
            if producer.priority < seq.priority or producer.cache.namespace != seq.cache.namespace or producer.outcome:
                continue
            if producer.num_scheduled_tokens < start:
                continue
            for position in self._expected(producer):
                if found < position <= limit and _share(seq, producer, position, self._interval):
                    seq.cache.awaited_state, found = (producer.id, position), position
        return found > start

    def _expected(self, producer: Sequence) -> list[int]:
        """Return the positions of the checkpoints that a running prompt will save."""
        end = min(producer.prompt_len, producer.cacheable_len)
        return [*map(self.covered, producer.cache.cuts), self.covered(end)]

    def audit(self, held: Items[Sequence], waiting: Iterable[Sequence]) -> list[str]:
        """Return the inconsistencies of slots, nodes and copies, one line each.

        held: every sequence that holds pages; waiting: those that may have been preempted.
        """
        problems = self.slots.audit(Counter([load.slot for load in self._loads.values()]))
        own = {_private(seq) for seq in waiting} | {_private(seq) for seq in held if seq.id in self._loads}
        for owner in self.slots.owners:
            if owner < 0 and owner not in own:
                problems.append(f"sequence {~owner} has a checkpoint of its own and does not wait")
            elif owner >= 0 and not (owner in self._tree and self._tree.classes[0].held[owner]):
                problems.append(f"node {owner} has a checkpoint without a page")
        used = {self.slots.slot(owner) for owner in self.slots.owners}
        if not self._saves.keys() <= used:
            problems.append(f"slots {self._saves.keys() - used} are saved to without an owner")
        ids = {seq.id for seq in held}
        if not self._loads.keys() | self._producers.keys() <= ids:
            problems.append(f"sequences {(self._loads.keys() | self._producers.keys()) - ids} have left")
        return problems


def _private(seq: Sequence) -> int:
    """Return the owner of the checkpoint that only this sequence uses; nodes are not negative."""
    return ~seq.id


def _share(seq: Sequence, other: Sequence, position: int, interval: int) -> bool:
    """Return whether two sequences have equal tokens before a position. The last ones are compared first."""
    first = max(0, position - interval)
    mine, others = seq.tokens, other.tokens
    return mine[first:position] == others[first:position] and mine[:first] == others[:first]
