"""Masks that workers compute before it is known which are needed."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import numpy as np
import pytest
from llguidance import LLMatcher
from numpy.typing import NDArray

from tandem.engine_core.constraints.grammar_advancer import BatchAdvancer
from tandem.engine_core.constraints.grammars import CompiledGrammar, GrammarConstraint, Grammars
from tandem.engine_core.constraints.mask_builder import MaskBuilder
from tandem.engine_core.constraints.workers.channel import MASK
from tandem.engine_core.constraints.workers.mask_memory import MaskMemory
from tandem.engine_core.constraints.workers.pool import WorkerPool
from tandem.engine_core.contracts import Constraint, InternedList
from tandem.engine_core.integers import ceil_div
from tandem.engine_core.stats import new_stats
from tests.engine_core.constraints.conftest import ENDS, VOCAB
from tests.fakes.clock import FakeClock
from tests.fakes.inline_link import InlineLink
from tests.support.effort import EFFORT
from tests.support.grammar_walks import allowed_tokens, mask_of

WORDS, ROWS = ceil_div(VOCAB, 32), 12
UNTOUCHED = 0x5A5A5A5A
REGEX = LLMatcher.grammar_from_regex("[a-d]{4,30}(xyz|end)[a-f]{1,30}")


@dataclass
class AdvanceBatch:
    """A constraint, and a matcher alone after the same tokens."""

    constraint: GrammarConstraint
    alone: LLMatcher


class Site:
    """A mask builder with two workers in this process, and two arrays."""

    def __init__(self, grammars: Grammars) -> None:
        self.grammars = grammars
        self.memory = MaskMemory()
        self.outs: list[NDArray[np.int32]] = [self.memory.allocate(ROWS, WORDS) for _ in range(2)]
        self.links = [InlineLink(grammars, self.memory) for _ in range(2)]
        starts = iter(self.links)
        self.pool = WorkerPool(2, lambda: next(starts))
        clock = FakeClock()
        self.builder = MaskBuilder(ENDS, new_stats(), clock, lambda: 0.0, workers=self.pool, memory=self.memory)
        self.advancer = BatchAdvancer(self.pool)
        self.compiled = grammars.compile(REGEX)
        self.here = grammars.compile(REGEX)
        """The same grammar, which no worker has."""
        self.last = InternedList[tuple[Constraint, int]]()
        """The last masks that were indexed; those that equal them are the same object."""
        self.posted: list[list[int]] = []
        """Indices of the masks in each posted batch."""
        for link in self.links:
            self._record(link)

    def spread(self) -> None:
        """Give the grammar to another worker."""
        self.compiled.add_remote(self.pool.compile(REGEX, self.compiled.links))

    def followed(self, compiled: CompiledGrammar) -> AdvanceBatch:
        return AdvanceBatch(compiled.constraint(ignore_ends=False), self.compiled.first.deep_copy())

    def indexed(self, held: dict[int, AdvanceBatch]) -> InternedList[tuple[Constraint, int]]:
        masks = InternedList[tuple[Constraint, int]]((each.constraint, index) for index, each in held.items())
        if masks != self.last:
            self.last = masks
        return self.last

    def prefetch(self, held: dict[int, AdvanceBatch], out: NDArray[np.int32]) -> None:
        out[:] = UNTOUCHED
        self.builder.prefetch(self.indexed(held), out)

    def check(self, held: dict[int, AdvanceBatch], out: NDArray[np.int32]) -> None:
        """Fill the masks at these indices and compare them with those of the matchers alone."""
        self.builder.fill(self.indexed(held), out)
        for index, each in held.items():
            assert out[index].tolist() == mask_of(each.alone, WORDS), index

    def _record(self, link: InlineLink) -> None:
        post = link.inline.post

        def record(operations: "memoryview[int]") -> None:
            numbers = list(operations)
            indices = [numbers[index + 2] for index in range(0, len(numbers), 3) if numbers[index] == MASK]
            self.posted.append(sorted(indices))
            post(operations)  # type: ignore[arg-type]

        link.inline.post = record  # type: ignore[method-assign,assignment]

    def masks_posted(self) -> list[int]:
        """Return the indices of the masks that were posted since the last call."""
        indices = sorted(index for batch in self.posted for index in batch)
        self.posted.clear()
        return indices


@pytest.fixture
def site(grammars: Grammars) -> Iterator[Site]:
    site = Site(grammars)
    yield site
    site.pool.close()


def mixed(site: Site, count: int = 6) -> dict[int, AdvanceBatch]:
    """Return constraints by index: in turn on the first worker, on the second, and here."""
    site.spread()
    site.spread()
    held = {
        ROWS - 1 - 2 * number: site.followed(site.here if number % 3 == 2 else site.compiled) for number in range(count)
    }
    workers = [None if each.constraint.remote is None else each.constraint.remote.link for each in held.values()]
    assert {site.links.index(link) for link in workers if link} == {0, 1} and None in workers
    return held


def remote_indices(site: Site, held: dict[int, AdvanceBatch], out: NDArray[np.int32]) -> list[int]:
    first = site.memory.first_index(out)
    return sorted(first + index for index, each in held.items() if each.constraint.remote is not None)


def test_masks_that_were_begun_are_not_asked_for_again(site: Site) -> None:
    held, out = mixed(site), site.outs[1]
    site.prefetch(held, out)
    assert site.masks_posted() == remote_indices(site, held, out)
    here = [index for index, each in held.items() if each.constraint.remote is None]
    assert all((out[index] == UNTOUCHED).all() for index in here)
    site.check(held, out)
    assert site.masks_posted() == []
    untouched = [index for index in range(ROWS) if index not in held]
    assert (out[untouched] == UNTOUCHED).all()


def test_masks_are_begun_again_for_each_fill(site: Site) -> None:
    """Those of the last step are not taken for the next one's."""
    held, out = mixed(site), site.outs[0]
    (letter,) = site.grammars.prepare().tokenize_str("b")
    site.prefetch(held, out)
    site.check(held, out)
    site.masks_posted()
    for each in held.values():
        assert each.constraint.accept(letter) and each.alone.consume_token(letter)
    site.masks_posted()
    site.check(held, out)
    assert site.masks_posted() == remote_indices(site, held, out)


def test_fewer_masks_than_were_begun(site: Site) -> None:
    held, out = mixed(site), site.outs[0]
    site.prefetch(held, out)
    site.masks_posted()
    left = dict(list(held.items())[::2])
    site.check(left, out)
    assert site.masks_posted() == []


def test_masks_of_others_than_were_begun_are_computed_after_all(site: Site) -> None:
    """Another constraint has come to the index, or to one that nothing was begun for."""
    held, out = mixed(site), site.outs[0]
    (letter,) = site.grammars.prepare().tokenize_str("b")
    site.prefetch(held, out)
    site.masks_posted()
    taken, free = next(iter(held)), next(index for index in range(ROWS) if index not in held)
    held |= {taken: site.followed(site.compiled), free: site.followed(site.compiled)}
    assert held[taken].constraint.accept(letter) and held[taken].alone.consume_token(letter)
    site.masks_posted()
    site.check(held, out)
    assert site.masks_posted() == sorted([site.memory.first_index(out) + taken, site.memory.first_index(out) + free])


def test_masks_begun_in_another_array_do_not_count(site: Site) -> None:
    held = mixed(site)
    site.prefetch(held, site.outs[0])
    site.masks_posted()
    site.outs[1][:] = UNTOUCHED
    site.check(held, site.outs[1])
    assert site.masks_posted() == remote_indices(site, held, site.outs[1])


def test_masks_of_one_object_that_were_begun_in_another_array_do_not_count(site: Site) -> None:
    site.spread()
    site.spread()
    held = {index: site.followed(site.compiled) for index in range(6)}
    site.prefetch(held, site.outs[0])
    site.outs[1][:] = UNTOUCHED
    site.check(held, site.outs[1])


def step(site: Site, held: dict[int, AdvanceBatch], out: NDArray[np.int32], random: Random) -> None:
    """Begin with the masks of a step, check them, and accept a token in each row."""
    site.prefetch(held, out)
    assert site.masks_posted() == remote_indices(site, held, out)
    site.check(held, out)
    assert site.masks_posted() == []
    for each in held.values():
        token = random.choice([token for token in allowed_tokens(each.alone) if token not in ENDS])
        assert each.constraint.accept(token) and each.alone.consume_token(token)
    site.masks_posted()


def test_masks_of_one_object_step_after_step(site: Site) -> None:
    """They are sent as before, to the array of the step, and again once a worker has lost a matcher."""
    site.spread()
    site.spread()
    random = Random(1)
    held = {ROWS - 1 - 2 * number: site.followed(site.compiled) for number in range(5)}
    masks = site.indexed(held)
    for number in range(6):
        step(site, held, site.outs[number % 2], random)
    remote = held[ROWS - 1].constraint.remote
    assert remote is not None
    remote._take_over()
    for link in site.links:
        link.post_and_wait()
    for number in range(4):
        step(site, held, site.outs[number % 2], random)
    assert site.indexed(held) is masks and held[ROWS - 1].constraint.remote is None


def test_a_constraint_that_comes_to_a_worker_meanwhile(site: Site) -> None:
    held = {index: site.followed(site.compiled) for index in range(4)}
    site.prefetch(held, site.outs[0])
    assert site.masks_posted() == []
    site.spread()
    assert all(each.constraint.remote is not None for each in held.values())
    site.check(held, site.outs[0])
    assert site.masks_posted() == remote_indices(site, held, site.outs[0])


def test_a_constraint_that_is_taken_back_meanwhile(site: Site) -> None:
    """Its worker has rejected a token that was accepted in between."""
    held, out = mixed(site), site.outs[0]
    site.prefetch(held, out)
    index, each = next((index, each) for index, each in held.items() if each.constraint.remote is not None)
    remote = each.constraint.remote
    assert remote is not None
    remote._take_over()
    assert each.constraint.remote is None and each.constraint.local is not None
    out[index] = UNTOUCHED
    site.masks_posted()
    site.check(held, out)
    assert site.masks_posted() == []


def test_a_mask_that_is_refused_after_it_was_begun(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    held, out = mixed(site), site.outs[1]
    monkeypatch.setattr("tandem.engine_core.constraints.workers.worker.SLOW_SECONDS", -1.0)
    site.prefetch(held, out)
    monkeypatch.undo()
    site.check(held, out)
    assert all(each.constraint.remote is None and each.constraint.remote_id == -1 for each in held.values())
    for each in held.values():
        token = allowed_tokens(each.alone)[0]
        assert each.constraint.accept(token) and each.alone.consume_token(token)
    site.masks_posted()
    site.prefetch(held, out)
    site.check(held, out)
    assert site.masks_posted() == [] and all(link.num_open == 0 for link in site.links)


@pytest.mark.parametrize("is_noticed", [False, True])
def test_a_worker_that_is_lost_after_its_masks_were_begun(site: Site, is_noticed: bool) -> None:
    """What the other one has begun with counts all the same."""
    held, out = mixed(site), site.outs[0]
    gone, other = site.links
    gone.inline.do_next = lambda: None  # It dies over this batch.
    site.prefetch(held, out)
    if is_noticed:
        gone.lose("is gone")
    else:
        gone.end()
    site.masks_posted()
    site.check(held, out)
    assert gone.is_lost and site.masks_posted() == []
    followers = [each.constraint.remote for each in held.values() if each.constraint.remote is not None]
    assert followers and all(remote.link is other for remote in followers)


def test_nothing_to_begin_with(site: Site) -> None:
    site.builder.prefetch([], site.outs[0])
    assert site.posted == []
    site.builder.fill([], site.outs[0])
    assert site.posted == []


def test_masks_are_those_of_matchers_alone_whatever_was_begun(grammars: Grammars) -> None:
    """Two arrays in turn, as a step's masks are begun while those of another are in use; constraints come and go."""
    num_begun = num_late = 0
    for seed in range(6 * EFFORT):
        site, random = Site(grammars), Random(seed)
        held: dict[int, AdvanceBatch] = {}
        for step in range(40):
            out = site.outs[step % 2]
            if step in (5, 12):
                site.spread()
            for index in random.sample(range(ROWS), 3):
                if index not in held or random.random() < 0.2:
                    held[index] = site.followed(random.choice([site.compiled, site.compiled, site.here]))
            if random.random() < 0.8:
                site.prefetch(held, out)
            site.masks_posted()
            if random.random() < 0.3:
                index = random.choice(list(held))
                held[index] = site.followed(site.compiled)
            if step == 25:
                random.choice(site.links).end()
            share = random.choice([0.8, 1.0])
            wanted = {index: each for index, each in held.items() if random.random() < share}
            num_remote = len(remote_indices(site, wanted, out))
            site.check(wanted, out)
            late = len(site.masks_posted())
            num_late, num_begun = num_late + late, num_begun + num_remote - late
            tokens = {index: random.choice(allowed_tokens(each.alone)) for index, each in wanted.items()}
            masks = [(index, each.constraint) for index, each in wanted.items()]
            site.advancer.start_accept(masks, [tokens[index] for index, _ in masks], 1)
            advanced = site.advancer.finish_accept()
            for index, each in wanted.items():
                assert each.alone.consume_token(tokens[index])
                assert index in advanced or each.constraint.accept(tokens[index])
                if each.alone.is_stopped():
                    del held[index]
        assert any(link.is_lost for link in site.links)
        site.pool.close()
    assert num_begun > 100 and num_late > 50


def test_ends_are_looked_for_only_where_a_worker_has_found_some(
    site: Site, grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = LLMatcher.grammar_from_regex("[a-d]{2,9}")
    compiled, looked = grammars.compile(text), list[list[int]]()
    compiled.add_remote(site.pool.compile(text, []))
    each, alone = compiled.constraint(ignore_ends=True), compiled.first.deep_copy()
    drop = site.builder._drop_ends
    monkeypatch.setattr(site.builder, "_drop_ends", lambda rows, out: (looked.append(rows), drop(rows, out))[1])
    out, (a,) = site.outs[0], grammars.prepare().tokenize_str("a")
    for number in range(6):
        site.builder.prefetch([(each, 3)], out)
        site.builder.fill([(each, 3)], out)
        assert each.remote is not None
        allowed = np.flatnonzero(np.unpackbits(out[3].view(np.uint8), bitorder="little")).tolist()
        ending = set(allowed_tokens(alone)) & set(ENDS)
        assert allowed and allowed == [token for token in allowed_tokens(alone) if token not in ENDS]
        assert bool(ending) == (number >= 2) and looked == [[3]] * max(0, number - 1)
        assert each.accept(a) and alone.consume_token(a)
