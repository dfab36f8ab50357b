"""Recording of every step that an engine launches, and its replay on the same runtime."""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from random import Random
from typing import Any
from unittest.mock import patch

import torch
from msgspec import structs
from torch import Tensor

from tandem.engine_core.contracts import MaskedRows, StepResult
from tandem.engine_core.engine import Engine
from tandem.engine_core.plan import StepPlan
from tandem.engine_core.runtime.runtime import TorchRuntime
from tandem.protocol.commands import Abort
from tandem.protocol.params import SamplingParams
from tests.fakes.constraint import FakeAdvancer, FakeCompiler, FakeFiller
from tests.fakes.fixed_masks import ReplayingFiller, as_filled
from tests.support.engine_driver import CLIENT, DrivenEngine

Request = tuple[list[int], SamplingParams]


@dataclass
class Recording:
    """Inputs and results of steps, in the order of their launches."""

    plans: list[StepPlan] = field(default_factory=list)
    masks: list[MaskedRows | None] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    """[S, V] each, of the rows that sample."""
    graphed: list[bool] = field(default_factory=list)
    results: list[StepResult] = field(default_factory=list)


def runtime_of(driven: DrivenEngine) -> TorchRuntime:
    runtime = driven.engine.runtime
    assert isinstance(runtime, TorchRuntime)
    return runtime


@contextmanager
def recorded(runtime: TorchRuntime) -> Iterator[Recording]:
    """Record every step that the runtime executes meanwhile."""
    recording = Recording()
    launch, sample, collect = runtime.launch, runtime.sample, runtime.collect

    def on_launch(slot: int, plan: StepPlan) -> None:
        launch(slot, plan)
        s = runtime.slots[slot]
        assert s.logits is not None and s.packed is not None
        recording.plans.append(plan)
        recording.logits.append(s.logits[: len(s.packed.sample_rows)].clone())
        recording.graphed.append(runtime.graphs is not None and runtime.graphs.bucket(plan) is not None)

    def on_sample(slot: int, masks: MaskedRows | None) -> None:
        sample(slot, masks)
        recording.masks.append(as_filled(runtime.slots[slot], masks))

    def on_collect(slot: int) -> StepResult:
        result = collect(slot)
        recording.results.append(structs.replace(result, milliseconds=0.0))  # It takes another time in each replay.
        return result

    wrapped: dict[str, Any] = {"launch": on_launch, "sample": on_sample, "collect": on_collect}
    with patch.multiple(runtime, **wrapped):
        yield recording


def play(runtime: TorchRuntime, recording: Recording, slots: Sequence[int]) -> Recording:
    """Run the recorded plans in the pipeline's order, in these slots in turn, as many in flight as there are slots."""
    in_flight: deque[int] = deque()
    with recorded(runtime) as played:
        for number, (plan, masks) in enumerate(zip(recording.plans, recording.masks, strict=True)):
            if len(in_flight) == len(slots):
                runtime.collect(in_flight.popleft())
            slot = slots[number % len(slots)]
            runtime.launch(slot, plan)
            runtime.sample(slot, masks)
            in_flight.append(slot)
        while in_flight:
            runtime.collect(in_flight.popleft())
    runtime.synchronize()
    return played


def table_tensors(runtime: TorchRuntime) -> dict[str, Tensor]:
    """Return every table by name, with rows first but for `bias`, where they come second."""
    tables = runtime.tables
    parts = {part.name: getattr(tables.sampling, part.name) for part in fields(tables.sampling)}
    return parts | {"pages": tables.pages}


def reset(runtime: TorchRuntime) -> None:
    """Zero tables and pool and clear the biases, as if nothing had run yet."""
    runtime.synchronize()
    with torch.inference_mode():
        for table in table_tensors(runtime).values():
            table.zero_()
        runtime.tables.sampling.bias[0].fill_(-1)
        runtime.kv.pool.zero_()
    runtime.tables.needs[:] = 0
    runtime.tables.biased[:] = False
    runtime.synchronize()


def state(runtime: TorchRuntime) -> dict[str, Tensor]:
    """Copy everything that outlives a step, without the reserved row and page."""
    runtime.synchronize()
    kv, tables = runtime.kv, table_tensors(runtime)
    rows = {name: (table[:, 1:] if name == "bias" else table[1:]).clone() for name, table in tables.items()}
    for name, pools in (("keys", kv.keys), ("values", kv.values)):
        for layer, pool in enumerate(pools):
            rows[f"{name} {layer}"] = runtime.page_tables[0].view_pages(pool)[1:].flatten(0, 1).clone()
    runtime.synchronize()
    return rows


def different(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Return the names of tensors that are not equal bit for bit."""
    return [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]


def constraining(engine: Engine) -> None:
    """Give the engine constraints that need no grammar and can be replayed. Call it before the first tick."""
    assert isinstance(engine.runtime, TorchRuntime)
    engine.compiler = engine.control.compiler = FakeCompiler()
    engine.advancer = FakeAdvancer(is_remote=True)
    engine.runtime.filler = ReplayingFiller(FakeFiller())


def drive(
    driven: DrivenEngine, requests: Sequence[Request], rng: Random, aborts: float = 0.0, constrained: int = 0
) -> list[int]:
    """Submit requests a few at a time and abort some; return their ids when nothing is in flight.

    aborts: probability of an abort in a tick. constrained: every n-th request has a constraint, 0 for none.
    """
    waiting, ids = deque(requests), list[int]()
    outcomes, inbox = driven.mailbox.outcomes, driven.mailbox.inbox
    while waiting or any((CLIENT, number) not in outcomes for number in ids) or driven.engine.pipeline.in_flight:
        if waiting and rng.random() < 0.3:
            for _ in range(min(len(waiting), rng.randint(1, 4))):
                grammar = "parity" if constrained and (len(ids) + 1) % constrained == 0 else None
                ids.append(driven.submit(*waiting.popleft(), constraint=grammar))
        if ids and rng.random() < aborts:
            inbox.append((CLIENT, Abort([rng.choice(ids)])))
        driven.engine.tick()
    return ids
