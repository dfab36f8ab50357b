"""Random traffic with aborts, for TANDEM_SOAK_SECONDS (20 by default): all resources are returned."""

import gc
import os
import time
from collections import Counter
from itertools import product
from random import Random
from unittest.mock import patch

import pytest
import torch

from tandem.engine_core.plan import PADDING_ROW, NewSequence, ScheduledSequence, StepPlan
from tandem.engine_core.runtime.runtime import TorchRuntime
from tandem.protocol.codec import pack_ids
from tandem.protocol.commands import Abort
from tandem.protocol.engine_options import Device, EngineOptions
from tandem.protocol.errors import FinishReason
from tandem.protocol.events import Finished
from tandem.protocol.params import SamplingParams
from tests.support.engine_driver import CLIENT, DrivenEngine
from tests.support.gpu_traffic import KINDS, requests
from tests.support.length_check import check_lengths
from tests.support.plan_recording import runtime_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

SECONDS = float(os.environ.get("TANDEM_SOAK_SECONDS", "20"))
VOCAB, MAX_OPEN = 4096, 60
DEVICE: Device = "cuda"


def build(device: Device = DEVICE) -> DrivenEngine:
    """Less capacity than the traffic needs: rows and pages run out, and requests wait."""
    options = EngineOptions(
        device=device,
        dtype="bfloat16",
        pipeline="on",
        max_rows=24,
        max_step_tokens=256,
        prefill_chunk=100,
        max_len=512,
        kv_tokens=6144,
        max_waiting=40,
        graph_rows="1,2,4,8,16",
    )
    return DrivenEngine.build(options)


def settle(runtime: TorchRuntime) -> None:
    """The same last steps in every slot, one from a graph and one without, because a slot keeps what its last step
    needed, and so does the attention of its steps that no graph holds."""
    row = ScheduledSequence(-1, PADDING_ROW, 0, 4, True, tokens=pack_ids([0] * 4))
    for slot, graphs in product(range(len(runtime.slots)), (runtime.graphs, None)):
        with patch.object(runtime, "graphs", graphs):
            runtime.launch(slot, StepPlan.of(1, (row,), (NewSequence(-1, PADDING_ROW, 4, SamplingParams(2)),)))
            runtime.sample(slot, None)
            runtime.collect(slot)
    runtime.synchronize()
    gc.collect()


class Soak:
    """Keeps up to MAX_OPEN requests open, and aborts some of them at any time."""

    def __init__(self, driven: DrivenEngine, seed: int) -> None:
        self.driven = driven
        self.rng = Random(seed)
        self.asked: dict[int, tuple[list[int], SamplingParams]] = {}
        self.open: set[int] = set()
        self.aborted: set[int] = set()

    def run(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.act()
            self.driven.engine.tick()
            self.forget_ended()
            if self.rng.random() < 0.02:
                check_lengths(self.driven.engine, wait=True)
        while self.open or self.driven.engine.pipeline.in_flight:
            self.driven.engine.tick()
            self.forget_ended()

    def act(self) -> None:
        rng = self.rng
        if len(self.open) < MAX_OPEN and rng.random() < 0.3:
            for prompt, params in requests(rng.randint(1, 6), KINDS, rng, longest=300, most=120, vocab=VOCAB):
                number = self.driven.submit(prompt, params)
                self.asked[number] = (prompt, params)
                self.open.add(number)
        if self.open and rng.random() < 0.05:
            victims = rng.sample(sorted(self.open), min(len(self.open), rng.randint(1, 3)))
            self.aborted |= set(victims)
            self.driven.mailbox.inbox.append((CLIENT, Abort(victims)))

    def forget_ended(self) -> None:
        self.open = {number for number in self.open if (CLIENT, number) not in self.driven.mailbox.outcomes}

    def check(self) -> Counter[str]:
        """Every request ended once with a valid reason; returns the count of each reason."""
        ways: Counter[str] = Counter()
        for number, (_, params) in self.asked.items():
            outcome, tokens = self.driven.outcome(number), self.driven.tokens(number)
            assert all(0 <= token < VOCAB for token in tokens)
            assert len(tokens) <= params.max_tokens
            if not isinstance(outcome, Finished):
                ways[outcome.code] += 1
                assert not tokens
                continue
            ways[outcome.reason] += 1
            if outcome.reason is FinishReason.LENGTH:
                assert len(tokens) == params.max_tokens
            elif outcome.reason is FinishReason.STOP:
                assert tokens[-1] == outcome.stop_token_id and len(tokens) > params.min_tokens
            else:
                assert number in self.aborted
        assert set(ways) <= {*FinishReason, "overloaded"}, ways
        return ways


def test_random_traffic_leaks_nothing() -> None:
    driven = build()
    runtime, engine = runtime_of(driven), driven.engine
    Soak(driven, seed=0).run(min(2.0, SECONDS / 4))
    settle(runtime)
    allocated, stats = torch.cuda.memory_allocated(), torch.cuda.memory_stats()
    steps = engine.stats.steps_committed
    soak = Soak(driven, seed=1)
    soak.run(SECONDS)
    settle(runtime)
    ways = soak.check()
    scheduler = engine.scheduler
    print(
        f"\n{SECONDS:.0f} s, {engine.stats.steps_committed - steps} steps, {len(soak.asked)} requests: {dict(ways)}; "
        f"{allocated} bytes allocated before, {torch.cuda.memory_allocated()} after; num_device_alloc "
        f"{stats['num_device_alloc']} before, {torch.cuda.memory_stats()['num_device_alloc']} after"
    )
    assert {FinishReason.LENGTH, FinishReason.STOP, FinishReason.ABORT} <= set(ways)
    assert engine.stats.steps_launched == engine.stats.steps_committed
    assert (scheduler.num_open, len(scheduler.waiting), len(scheduler.running), list(scheduler.held)) == (0, 0, 0, [])
    assert (scheduler.rows.free, scheduler.memory.usage.in_use) == (scheduler.rows.total, 0)
    assert scheduler.audit() == []
    assert torch.cuda.memory_allocated() == allocated
