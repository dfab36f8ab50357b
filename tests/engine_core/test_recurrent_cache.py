"""A hybrid model's prefix cache: continued prompts give the tokens of prompts that are computed whole."""

import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tandem.engine_core.kv_cache.states import StateCache
from tandem.engine_core.startup import kv_sizing
from tandem.protocol.codec import pack_ids
from tandem.protocol.commands import Abort
from tandem.protocol.engine_options import EngineOptions
from tandem.protocol.params import SamplingParams
from tests.engine_core.models.test_qwen3_5 import save_random
from tests.support.engine_driver import CLIENT, DrivenEngine
from tests.support.free_pages import poison_free_pages
from tests.support.kv_pool import end_sessions, evict_unused
from tests.support.parity import VOCAB, random_tokens

TOKENS = 6


@dataclass
class Asked:
    tokens: list[int]
    cached: int


class Pair:
    """An engine with a prefix cache, and one without as the reference. Free pages are full of NaN."""

    def __init__(self, folder: Path, other: "Pair | None" = None, **fields: Any) -> None:
        """Build the engines. other: pair of the same model, whose reference is used."""
        usual: dict[str, Any] = {"max_len": 512, "max_rows": 3, "kv_tokens": 2048, "pipeline": "on"} | fields
        options = EngineOptions(model=str(folder), device="cpu", dtype="float32", **usual)
        self.cached = DrivenEngine.build(options)
        poison_free_pages(self.cached)
        if other is not None:
            self.plain, self._known = other.plain, other._known
            return
        plain = {"max_len": 512, "max_rows": 1, "prefix_cache": "off", "kv_tokens": 1024}
        self.plain = DrivenEngine.build(EngineOptions(model=str(folder), device="cpu", dtype="float32", **plain))
        self._known: dict[tuple[int, ...], list[int]] = {}

    @property
    def states(self) -> StateCache:
        found = self.cached.engine.scheduler.memory.states
        assert found is not None
        return found

    def ask(self, *prompts: Sequence[int], tokens: int = TOKENS, session: str = "", preempt: int = 0) -> list[Asked]:
        """Run requests at once and compare their tokens with the reference's.

        preempt: ticks between two preemptions; 0: none.
        """
        params = SamplingParams(tokens, temperature=0.0, ignore_eos=True)
        ids = [self.cached.submit(prompt, params, session=session) for prompt in prompts]
        scheduler = self.cached.engine.scheduler
        for tick in range(1, 5000):
            self.cached.engine.tick()
            running = [seq for seq in scheduler.running.values() if not seq.finishing]
            if preempt and tick % preempt == 0 and running:
                scheduler.preempt(running[tick // preempt % len(running)])
            assert scheduler.audit() == []
            if not scheduler.num_open and not list(scheduler.held):
                break
        mailbox = self.cached.mailbox
        found = [Asked(self.cached.tokens(number), mailbox.cached.get((CLIENT, number), 0)) for number in ids]
        assert [one.tokens for one in found] == [self.expected(prompt, tokens) for prompt in prompts]
        return found

    def expected(self, prompt: Sequence[int], tokens: int) -> list[int]:
        """Return the tokens without the cache: the beginning of a longer answer if one is known."""
        known = self._known.get(tuple(prompt), [])
        if len(known) < tokens:
            params = SamplingParams(tokens, temperature=0.0, ignore_eos=True)
            (known,) = self.plain.generate([prompt], [params])
            self._known[tuple(prompt)] = known
        return known[:tokens]

    def clear(self) -> None:
        """Empty the prefix cache."""
        memory = self.cached.engine.scheduler.memory
        end_sessions(memory)
        evict_unused(memory)
        assert not self.states.slots.used


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hybrid")
    layers = ["linear_attention"] * 2 + ["full_attention"]
    save_random(path, {"num_hidden_layers": 3, "layer_types": layers, "max_position_embeddings": 1024})
    return path


@pytest.fixture(scope="module")
def shared(folder: Path) -> Pair:
    return Pair(folder)


@pytest.fixture
def pair(shared: Pair) -> Iterator[Pair]:
    shared.clear()
    yield shared
    assert shared.cached.engine.scheduler.audit() == []


def prompt(length: int, seed: int = 0) -> list[int]:
    (tokens,) = random_tokens((length,), VOCAB, seed=seed)
    return [int(token) for token in tokens]


def test_the_same_prompt_twice_computes_its_last_page_only(pair: Pair) -> None:
    for length in (17, 64, 65, 100):
        tokens = prompt(length, seed=length)
        (first,), (second,) = pair.ask(tokens), pair.ask(tokens)
        assert (first.cached, second.cached) == (0, (length - 1) // 16 * 16)


def test_a_longer_prompt_continues_the_cached_one(pair: Pair) -> None:
    tokens = prompt(81)
    pair.ask(tokens[:80], tokens=1)
    (found,) = pair.ask(tokens)
    assert found.cached == 64, "the state of 80 tokens was never a base"
    (found,) = pair.ask([*tokens, 5])
    assert found.cached == 80


@pytest.mark.parametrize("common", [70, 80, 128, 135])
def test_prompts_that_diverge_share_a_checkpoint_from_the_third_on(pair: Pair, common: int) -> None:
    """They diverge inside a page, at one, at a multiple of 64, and behind it."""
    tokens = prompt(common)
    cached = [pair.ask([*tokens, *prompt(40, seed)])[0].cached for seed in (1, 2, 3)]
    assert cached[:2] == [0, 0]
    assert common - 80 <= cached[2] <= common
    assert cached[2] == (common // 16 * 16 + 16) // 64 * 64 - 16


def test_matches_end_at_every_offset(pair: Pair) -> None:
    """Offsets of all kinds modulo 64; what follows the match is computed as a chunk and as single tokens."""
    tokens = prompt(160)
    for length in range(65, 129, 3):
        pair.clear()
        pair.ask(tokens[:length], tokens=1)
        (found,) = pair.ask(tokens[: length + 20], tokens=2)
        assert found.cached == (length - 1) // 16 * 16


def test_a_row_that_is_used_again_begins_without_a_state(folder: Path, shared: Pair) -> None:
    pair = Pair(folder, shared, max_rows=1)
    params = SamplingParams(50, temperature=0.0, ignore_eos=True)
    number = pair.cached.submit(prompt(40), params)
    for _ in range(8):
        pair.cached.engine.tick()
    pair.cached.mailbox.inbox.append((CLIENT, Abort([number])))
    pair.ask(prompt(3, seed=1))
    pair.ask(prompt(90, seed=2))


def test_prompts_shorter_than_the_convolution_take_no_checkpoint(pair: Pair) -> None:
    for length in (1, 2, 3):
        pair.ask(prompt(length, seed=length), tokens=2)
    assert not pair.states.slots.used
    (found,) = pair.ask(prompt(3, seed=3), tokens=40)
    assert found.cached == 0


def test_a_hit_whose_state_was_evicted_is_computed_from_the_last_one_left(pair: Pair) -> None:
    tokens = prompt(150)
    pair.ask(tokens[:60])
    pair.ask(tokens)
    memory = pair.cached.engine.scheduler.memory
    assert memory.tree is not None
    path = memory.tree.walk(b"", array("i", tokens), 9)
    assert len(path) == 9
    pair.states.forget(path[8])
    (found,) = pair.ask(tokens)
    assert found.cached == 48
    for node in path:
        pair.states.forget(node)
    (found,) = pair.ask(tokens)
    assert found.cached == 0, "pages alone cannot be continued"
    (found,) = pair.ask(tokens)
    assert found.cached == 144, "and the state is saved again"


def test_a_state_leaves_the_cache_with_its_page(pair: Pair) -> None:
    tokens = prompt(100)
    pair.ask(tokens)
    assert pair.states.slots.used
    stats = pair.cached.engine.stats
    assert (stats.state_slots, stats.state_slots_used > 0) == (pair.states.slots.total, True)
    evict_unused(pair.cached.engine.scheduler.memory)
    assert not pair.states.slots.used
    assert pair.ask(tokens)[0].cached == 0


def test_states_do_not_depend_on_the_rows_beside_them(pair: Pair) -> None:
    """A decode row of length 1 in a mixed step, hits and prompts together."""
    long, short = prompt(120), prompt(50, seed=5)
    pair.ask(long)
    pair.ask(short)
    found = pair.ask(long, [*short, 3, 4], prompt(70, seed=6), [*long, *prompt(30, seed=7)], tokens=30)
    assert [one.cached for one in found] == [112, 48, 0, 112]


def test_a_turn_continues_from_the_end_of_the_one_before(pair: Pair) -> None:
    tokens, before = prompt(50), 0
    for turn in range(6):
        (found,) = pair.ask(tokens, session="talk", tokens=25)
        assert found.cached == before
        before = (len(tokens) + 25 - 2) // 16 * 16
        tokens = [*tokens, *found.tokens, *prompt(21, seed=turn)]


@pytest.mark.parametrize("generated", range(12, 32))
def test_turns_end_at_every_offset_of_a_page(pair: Pair, generated: int) -> None:
    """With two steps in flight, the last one computes a token after the end, which may fold the ring."""
    tokens = prompt(20)
    pair.expected(tokens, 31)
    (found,) = pair.ask(tokens, tokens=generated)
    (again,) = pair.ask([*tokens, *found.tokens, 7, 8])
    assert again.cached == (20 + generated - 2) // 16 * 16


def test_turns_that_end_with_a_stop_token_have_a_zombie_step(folder: Path, shared: Pair) -> None:
    """The step in flight at the end computes the stop token: it may fold the ring, and its row is used again."""
    pair = Pair(folder, shared, max_rows=1)
    tokens = prompt(20)
    answer = pair.expected(tokens, 40)
    stops = [stop for stop, token in enumerate(answer) if answer.index(token) == stop]
    near = [stop for stop in stops if (20 + stop) % 16 in (15, 0, 1)]
    assert any((20 + stop) % 16 == 0 for stop in near)
    for stop in near:
        pair.clear()
        params = SamplingParams(40, temperature=0.0, stop_token_ids=pack_ids([answer[stop]]), ignore_eos=True)
        number = pair.cached.submit(tokens, params)
        other = pair.cached.submit(prompt(40, seed=9), SamplingParams(3, temperature=0.0, ignore_eos=True))
        pair.cached.run()
        assert pair.cached.tokens(number) == answer[: stop + 1]
        assert pair.cached.tokens(other) == pair.expected(prompt(40, seed=9), 3)
        (again,) = pair.ask([*tokens, *answer[: stop + 1], 7, 8])
        assert again.cached == (20 + stop) // 16 * 16
    assert pair.cached.engine.stats.zombie_rows > 0


def test_two_equal_prompts_at_once_compute_one(pair: Pair) -> None:
    """The second waits for the checkpoint of the first."""
    tokens = prompt(200)
    found = pair.ask(tokens, tokens, [*tokens, *prompt(30, seed=1)])
    assert [one.cached for one in found] == [0, 192, 192]


def test_a_running_prompt_takes_the_checkpoint_that_another_saves(folder: Path, shared: Pair) -> None:
    """The one of higher priority does not wait; the other finds its checkpoint while it runs."""
    pair = Pair(folder, shared, max_step_tokens=64, policy="priority")
    tokens = prompt(300)
    params = SamplingParams(TOKENS, temperature=0.0, ignore_eos=True)
    first = pair.cached.submit(tokens, params)
    pair.cached.engine.tick()
    second = pair.cached.submit(tokens, params, priority=3)
    pair.cached.run()
    assert pair.cached.tokens(first) == pair.cached.tokens(second) == pair.expected(tokens, TOKENS)
    cached = [pair.cached.mailbox.cached.get((CLIENT, number), 0) for number in (first, second)]
    assert cached[0] > 0, "it goes on where the second has saved"
    assert cached[1] == 0


@pytest.mark.parametrize("every", [3, 5, 7])
def test_preempted_sequences_continue_from_their_own_checkpoints(folder: Path, shared: Pair, every: int) -> None:
    pair = Pair(folder, shared, max_step_tokens=32)
    pair.ask(prompt(100, seed=1), prompt(90, seed=2), tokens=40, preempt=every)
    assert pair.cached.engine.stats.preemptions > 4
    computed = pair.cached.engine.stats.iteration_tokens.total
    assert computed < 190 + 80 + pair.cached.engine.stats.preemptions * 50


SCHEDULES: dict[str, dict[str, Any]] = {
    "blocking": {"pipeline": "off"},
    "small steps": {"max_step_tokens": 7},
    "one position a prompt": {"max_step_tokens": 4, "prefill_chunk": 1},
    "chunks of 16": {"max_step_tokens": 19, "prefill_chunk": 16},
    "chunks of 63": {"max_step_tokens": 66, "prefill_chunk": 63},
    "chunks of 64": {"max_step_tokens": 67, "prefill_chunk": 64},
    "chunks of 65": {"max_step_tokens": 68, "prefill_chunk": 65},
    "whole prompts": {"prefill_chunk": "off"},
    "small pages": {"page_size": 4},
    "few pages": {"kv_tokens": 600},
    "prompts first": {"policy": "prefill_first", "max_step_tokens": 40},
    "turns": {"policy": "decode_round_robin", "max_step_tokens": 40},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_tokens_are_equal_with_and_without_the_cache(name: str, folder: Path, shared: Pair) -> None:
    pair = Pair(folder, shared, **SCHEDULES[name])
    system, other = prompt(90), prompt(45, seed=1)
    users = [prompt(length, seed=length) for length in (3, 33, 70)]
    for _ in range(2):
        pair.ask(*[[*system, *user] for user in users], other, tokens=14)
        pair.ask([*system, *users[0], *pair.expected([*system, *users[0]], 14), *users[1]], other, tokens=3)
    memory = pair.cached.engine.scheduler.memory
    assert memory.num_hit_tokens > 0


def test_the_time_of_a_copy_is_measured_at_the_start(pair: Pair) -> None:
    assert pair.cached.engine.scheduler.planner.costs.state_copy_ms > 0.0
    assert pair.plain.engine.scheduler.planner.costs.state_copy_ms == 0.0, "it has no checkpoints"


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_few_slots_change_no_token_and_none_is_lost(slots: int, folder: Path, shared: Pair) -> None:
    """Equal, branching and continued prompts arrive while others run; some are cancelled at any moment."""
    with patch.object(kv_sizing, "MAX_STATE_SLOTS", slots):
        pair = Pair(folder, shared, max_step_tokens=48)
    assert pair.states.slots.total == slots
    rng, scheduler, mailbox = random.Random(slots), pair.cached.engine.scheduler, pair.cached.mailbox
    params = SamplingParams(TOKENS, temperature=0.0, ignore_eos=True)
    stems = [prompt(length, seed=length) for length in (70, 130)]
    asked: dict[int, list[int]] = {}
    cancelled: set[int] = set()
    for tick in range(3000):
        if tick % 4 == 0 and len(asked) < 28:
            tokens = [*rng.choice(stems), *prompt(rng.choice([0, 5, 40, 70]), seed=rng.randrange(2))]
            asked[pair.cached.submit(tokens, params)] = tokens
        if tick % 9 == 5 and (running := [seq.request_id for seq in scheduler.held]):
            cancelled.add(number := rng.choice(running))
            mailbox.inbox.append((CLIENT, Abort([number])))
        pair.cached.engine.tick()
        assert scheduler.audit() == []
        if len(asked) == 28 and not scheduler.num_open and not list(scheduler.held):
            break
    assert len(cancelled) > 3
    for number, tokens in asked.items():
        found, expected = pair.cached.tokens(number), pair.expected(tokens, TOKENS)
        assert found == (expected[: len(found)] if number in cancelled else expected)
    assert pair.states.slots.num_evicted > 0
    assert scheduler.memory.num_hit_tokens > 0
    pair.clear()
    assert [pair.states.slots.acquire(-owner, 1) is not None for owner in range(1, slots + 1)] == [True] * slots


def test_without_slots_tokens_are_equal_and_no_prompt_waits(folder: Path, shared: Pair) -> None:
    with patch.object(kv_sizing, "MAX_STATE_SLOTS", 0):
        pair = Pair(folder, shared)
    tokens = prompt(150)
    numbers = [pair.cached.submit(tokens, SamplingParams(TOKENS, temperature=0.0, ignore_eos=True)) for _ in range(2)]
    pair.cached.engine.tick()
    assert len(pair.cached.engine.scheduler.running) == 2
    pair.cached.run()
    assert [pair.cached.tokens(number) for number in numbers] == [pair.expected(tokens, TOKENS)] * 2
    assert pair.cached.engine.scheduler.audit() == []
