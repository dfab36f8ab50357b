"""One recorded list of step plans gives the same bits however it is run: pipelined or blocking, slow copies or not."""

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tandem.engine_core.kernels.sampling.inputs import SamplingBatch
from tandem.engine_core.plan import StepPlan
from tandem.engine_core.runtime.cuda_forward import CudaForward
from tandem.engine_core.runtime.device import read_gpu_traits
from tandem.engine_core.runtime.runtime import TorchRuntime
from tandem.engine_core.sampling.sampler import Mode
from tandem.engine_core.sampling.triton_sampler import TritonSampler
from tandem.protocol.engine_options import EngineOptions
from tests.support.eager_places import places_like, repeat_mixed
from tests.support.engine_driver import DrivenEngine
from tests.support.gpu_traffic import KINDS, requests
from tests.support.late_copies import LateCopies
from tests.support.plan_recording import (
    Recording,
    constraining,
    different,
    drive,
    play,
    recorded,
    reset,
    runtime_of,
    state,
)

pytestmark = pytest.mark.gpu

VOCAB = 4096


@pytest.fixture(scope="module")
def driven() -> DrivenEngine:
    """Steps of up to 8 rows fit a graph, steps of 9 to 12 do not."""
    options = EngineOptions(
        device="cuda",
        dtype="bfloat16",
        pipeline="on",
        max_rows=12,
        max_step_tokens=128,
        prefill_chunk=48,
        max_len=512,
        kv_tokens=4096,
        graph_rows="1,2,4,8",
    )
    driven = DrivenEngine.build(options)
    constraining(driven.engine)
    return driven


@pytest.fixture(scope="module")
def runtime(driven: DrivenEngine) -> TorchRuntime:
    return runtime_of(driven)


@pytest.fixture(scope="module")
def recordings(driven: DrivenEngine, runtime: TorchRuntime) -> dict[str, Recording]:
    """Two steps in flight; mixed steps, chunks, decode and aborts, each kind of sampling on a runtime as if new."""
    made = {}
    for number, kind in enumerate(KINDS):
        rng = Random(number)
        kinds = KINDS if kind == "full" else (kind,)
        asked = requests(22, kinds, rng, longest=90, most=40, vocab=VOCAB)
        reset(runtime)
        with recorded(runtime) as recording:
            drive(driven, asked, rng, aborts=0.03, constrained=10 if kind == "full" else 0)
        made[kind] = recording
    return made


def sorts(recording: Recording) -> dict[str, int]:
    """Number of steps of each kind."""
    lengths = [[row.length for row in plan.rows] for plan in recording.plans]
    return {
        "steps": len(recording.plans),
        "from graphs": sum(recording.graphed),
        "decode rows beside prompts": sum(1 in each and max(each) > 1 for each in lengths),
        "masked": sum(plan.needs_mask for plan in recording.plans),
        "sampling nothing": sum(not any(row.samples for row in plan.rows) for plan in recording.plans),
        "tokens": sum(len(logits) for logits in recording.logits),
    }


def assert_same(one: Recording, other: Recording) -> None:
    assert one.results == other.results
    for plan, mine, theirs in zip(one.plans, one.logits, other.logits, strict=True):
        assert torch.equal(mine, theirs), f"logits of step {plan.step_id} differ"


@pytest.mark.parametrize("kind", KINDS)
def test_pipelined_and_blocking_replay_bit_for_bit(
    recordings: dict[str, Recording], runtime: TorchRuntime, kind: str
) -> None:
    recording = recordings[kind]
    counts = sorts(recording)
    print(f"\n{kind}: {counts}")
    assert counts["from graphs"] > 5 and counts["decode rows beside prompts"] > 5
    assert (counts["masked"] > 0) == (kind == "full")
    states = []
    for slots in ((0, 1), (0,), (1,)):
        reset(runtime)
        assert_same(play(runtime, recording, slots), recording)
        states.append(state(runtime))
    assert not different(states[0], states[1])
    assert not different(states[0], states[2])


@pytest.mark.parametrize("kind", KINDS)
def test_replay_does_not_see_what_earlier_steps_left(
    recordings: dict[str, Recording], runtime: TorchRuntime, kind: str
) -> None:
    """Slots, rows and pages are reused, after larger steps that sampled in full mode."""
    play(runtime, recordings["full"], (1, 0))
    assert_same(play(runtime, recordings[kind], (0, 1)), recordings[kind])


class Eager:
    """Reruns each graphed step's kernels without a graph, and counts differences."""

    def __init__(self, runtime: TorchRuntime) -> None:
        assert isinstance(runtime.sampler, TritonSampler)
        self.runtime, self.sampler = runtime, runtime.sampler
        page_tables = runtime.page_tables
        self.forward = CudaForward(runtime.model, runtime.kv, runtime.tables, page_tables, read_gpu_traits())
        self.modes: set[Mode] = set()
        self.equal: list[Tensor] = []
        self.mixed = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        launch, sample = self.runtime.launch, self.runtime.sample

        def on_launch(slot: int, plan: StepPlan) -> None:
            launch(slot, plan)
            s, graphs = self.runtime.slots[slot], self.runtime.graphs
            assert graphs is not None
            shape = graphs.bucket(plan)
            if s.graphs is not None:
                places = places_like(s.graphs.logits)
                self.equal.append((s.graphs.logits == self.forward.decode(*self.inputs(slot), places)).all())
            elif shape is not None:
                self.equal += repeat_mixed(self.runtime, self.forward, slot, shape)
                self.mixed += 1

        def on_sample(slot: int, masks: Any) -> None:
            s = self.runtime.slots[slot]
            sample(slot, masks)
            if s.graphs is not None and s.packed is not None and s.plan is not None and s.plan.is_unconstrained_decode:
                rows, positions = self.inputs(slot)
                if masks is not None:
                    return
                mode, out = Mode.of(self.runtime.tables.sampling_needs(s.packed, False)), torch.empty_like(rows)
                with torch.inference_mode():
                    self.sampler.launch(mode, SamplingBatch(s.graphs.logits, rows, positions, out))
                self.modes.add(mode)
                count = len(s.packed.sample_rows)
                self.equal.append((out[:count] == s.sampled[:count]).all())

        with patch.multiple(self.runtime, launch=on_launch, sample=on_sample):
            yield

    def inputs(self, slot: int) -> tuple[Tensor, Tensor]:
        s = self.runtime.slots[slot]
        assert s.graphs is not None
        bucket = len(s.graphs.logits)
        return s.device_inputs[:bucket], s.device_inputs[bucket : 2 * bucket]


def test_graphs_give_the_bits_of_the_same_kernels_run_eagerly(
    recordings: dict[str, Recording], runtime: TorchRuntime
) -> None:
    eager = Eager(runtime)
    for recording in recordings.values():
        reset(runtime)
        with eager.watching():
            assert_same(play(runtime, recording, (0, 1)), recording)
    modes = sorted(mode.value for mode in eager.modes)
    print(f"\n{len(eager.equal)} comparisons, {eager.mixed} of them of mixed steps, sampling {modes}")
    assert eager.modes == set(Mode) - {Mode.MASKED} and eager.mixed > 20
    assert all(equal.item() for equal in eager.equal)


def test_graphs_agree_with_the_eager_path(recordings: dict[str, Recording], runtime: TorchRuntime) -> None:
    """Without graphs the same plans take other attention kernels: tokens are equal wherever the gap allows."""
    recording = recordings["greedy"]
    reset(runtime)
    with patch.object(runtime, "graphs", None):
        eager = play(runtime, recording, (0, 1))
    assert not any(eager.graphed)
    split: set[int] = set()
    error, compared, excluded, gaps = 0.0, 0, 0, list[float]()
    for number, plan in enumerate(recording.plans):
        samplers = [row for row in plan.rows if row.samples]
        for row, mine, theirs in zip(samplers, recording.logits[number], eager.logits[number], strict=True):
            if row.seq_id in split:
                excluded += 1
                continue
            compared += 1
            error = max(error, (mine.float() - theirs.float()).abs().max().item())
            if mine.argmax() != theirs.argmax():
                top = mine.float().topk(2).values
                gaps.append((top[0] - top[1]).item())
                split.add(row.seq_id)
    print(
        f"\ngraphs beside the eager path, bfloat16: max logit error {error:.3g}; {compared} compared, "
        f"{excluded} excluded after {len(gaps)} close calls (gaps {[f'{gap:.3g}' for gap in gaps]})"
    )
    assert all(gap <= 2 * error for gap in gaps)
    assert error < 1.0 and compared > excluded


def test_late_copies_bring_the_right_tokens(recordings: dict[str, Recording], runtime: TorchRuntime) -> None:
    """Copies to the host begin only when the device has sampled the next step."""
    recording = recordings["full"]
    steps = slice(0, 60)
    short = Recording(recording.plans[steps], recording.masks[steps])
    play(runtime, short, (0, 1))  # nothing is allocated or loaded for the first time while a copy is held
    reset(runtime)
    copies = LateCopies(runtime, short)
    with copies.holding():
        played = play(runtime, short, (0, 1))
    assert played.results == recording.results[steps]
    late = copies.were_late()
    # Before a step with masks nothing can be held, and most of these have some.
    assert len(late) > 10 and all(late), f"of {len(late)} copies that were held {sum(late)} were late"
