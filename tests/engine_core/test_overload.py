"""A real model under far more work than it can hold: a full queue, few pages, random aborts.

A short form runs always, the same one on every machine; TANDEM_SOAK_STEPS=240000 makes it a long one.
"""

import gc
import os
import random
from collections import Counter

from msgspec import structs

from tandem.engine_core.models.decoder import Decoder
from tandem.engine_core.scheduler.planner import SchedulerLimits
from tandem.protocol.codec import pack_ids
from tandem.protocol.commands import Abort, EndSession, SetPolicy, Submit
from tandem.protocol.engine_options import POLICIES
from tandem.protocol.errors import ErrorCode, FinishReason
from tandem.protocol.events import Failure
from tandem.protocol.params import SamplingParams
from tests.support.own_memory import own_bytes
from tests.support.tiny_llama import CLIENT, VOCAB, Compared, Shape, TinyEngine, random_model

STEPS = int(os.environ.get("TANDEM_SOAK_STEPS", "1200"))
"""Steps that are committed while the queue is kept full."""
OPEN_AT_MOST = 40
MAX_WAITING = 8


class Overload:
    """One client that keeps the queue full, and drops output once it has checked it."""

    def __init__(self, model: Decoder, seed: int) -> None:
        self.rng = random.Random(seed)
        self.driven = TinyEngine(model, Shape(depth=2, pages=1 + 24, max_rows=6, step_tokens=24, chunk=9))
        scheduler = self.driven.scheduler
        scheduler.limits = structs.replace(scheduler.limits, max_waiting=MAX_WAITING)
        assert isinstance(scheduler.limits, SchedulerLimits)
        self.beginnings = [self._ids(self.rng.randint(8, 30)) for _ in range(3)]
        self.open: dict[int, tuple[tuple[int, ...], SamplingParams]] = {}
        self.answers: dict[tuple[int, ...], list[int]] = {}
        self.ends: Counter[str] = Counter()
        self.compared = Compared()
        self.asked = 0

    def _ids(self, count: int) -> tuple[int, ...]:
        return tuple(self.rng.randrange(3, VOCAB) for _ in range(count))

    def run(self, steps: int) -> None:
        """Submit, abort and tick for this many steps, then until everything has ended."""
        end = self.driven.engine.stats.steps_committed + steps
        while self.driven.engine.stats.steps_committed < end:
            self._act()
            self._tick()
        while self.open or self.driven.engine.pipeline.in_flight:
            self._tick()

    def _act(self) -> None:
        rng, inbox = self.rng, self.driven.mailbox.inbox
        while len(self.open) < OPEN_AT_MOST and rng.random() < 0.5:
            prompt = rng.choice(self.beginnings)
            if rng.random() < 0.7:
                prompt += (3 + rng.randrange(6),) * rng.randint(1, 3)
            params = SamplingParams(rng.choice([2, 12, 30]), temperature=0.0, ignore_eos=True)
            self.asked += 1
            self.open[self.asked] = (prompt, params)
            priority, session = rng.randint(-1, 1), rng.choice(["", "", "", "one", "two"])
            submit = Submit(self.asked, pack_ids(prompt), params, priority=priority, session=session)
            inbox.append((CLIENT, submit))
        if rng.random() < 0.05 and self.open:
            inbox.append((CLIENT, Abort([rng.choice(list(self.open))])))
        if rng.random() < 0.01:
            inbox.append((CLIENT, rng.choice([SetPolicy(1, rng.choice(POLICIES)), EndSession(2, "one")])))

    def _tick(self) -> None:
        self.driven.engine.tick()
        mailbox = self.driven.mailbox
        for key, outcomes in list(mailbox.outcomes.items()):
            (outcome,) = outcomes
            prompt, params = self.open.pop(key[1])
            tokens = mailbox.received.pop(key, [])
            self.ends[outcome.code if isinstance(outcome, Failure) else outcome.reason] += 1
            if not isinstance(outcome, Failure) and outcome.reason is FinishReason.LENGTH:
                assert len(tokens) == params.max_tokens
                self._check(prompt, tokens)
            mailbox.cached.pop(key, None)
            del mailbox.outcomes[key]
        mailbox.replies.clear()
        self.driven.runtime.record()

    def _check(self, prompt: tuple[int, ...], tokens: list[int]) -> None:
        """Compare the longest answer to each prompt with the dense model, and the others with it."""
        known = self.answers.get(prompt, [])
        if tokens == known[: len(tokens)]:
            return
        params = SamplingParams(len(tokens), temperature=0.0, ignore_eos=True)
        self.compared.check(self.driven.model, prompt, tokens, params, False)
        self.answers[prompt] = max(known, tokens, key=len)


def bytes_at_rest() -> int:
    gc.collect()
    return own_bytes()


def test_overload_leaves_nothing_behind() -> None:
    overload = Overload(random_model(), seed=3)
    overload.run(STEPS // 3)
    before, objects = bytes_at_rest(), len(gc.get_objects())
    overload.run(STEPS - STEPS // 3)
    grown, more = bytes_at_rest() - before, len(gc.get_objects()) - objects
    scheduler, stats = overload.driven.scheduler, overload.driven.engine.stats
    memory = scheduler.memory
    print(
        f"\n{stats.steps_committed} steps, {overload.asked} requests: {dict(overload.ends)}; "
        f"{stats.preemptions} preemptions, {memory.usage.num_evicted} pages evicted, {memory.num_hit_tokens} of "
        f"{memory.num_queried_tokens} prompt tokens cached, {memory.sessions.num_evicted} sessions evicted; "
        f"{overload.compared.close} of {overload.compared.tokens} tokens too close to call; {grown} bytes and {more} "
        "objects more than after the first third"
    )
    assert scheduler.audit() == []
    assert (scheduler.num_open, len(scheduler.waiting), list(scheduler.held)) == (0, 0, [])
    assert scheduler.rows.free == scheduler.rows.total
    assert stats.steps_launched == stats.steps_committed
    assert {FinishReason.LENGTH, FinishReason.ABORT, ErrorCode.OVERLOADED, ErrorCode.SESSION_BUSY} <= set(overload.ends)
    assert stats.preemptions > 0
    assert scheduler.memory.usage.num_evicted > 0
    assert overload.compared.close <= overload.compared.tokens / 20
    assert more < 2000
    assert grown < 16 * 2**20
