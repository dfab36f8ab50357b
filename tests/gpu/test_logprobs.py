"""Log-probabilities on CUDA: against the CPU's, with graphs, and at no cost on the launch path."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from tandem.engine_core.contracts import StepResult
from tandem.engine_core.kernels.reference.sampling import logprob_records
from tandem.engine_core.plan import StepPlan
from tandem.engine_core.runtime.cuda_forward import CudaForward
from tandem.engine_core.runtime.device import read_gpu_traits
from tandem.engine_core.runtime.runtime import TorchRuntime
from tandem.engine_core.startup.engine import DEFAULT_MODEL
from tandem.protocol.codec import read_logprobs
from tandem.protocol.commands import Abort
from tandem.protocol.engine_options import Device, Dtype, EngineOptions
from tandem.protocol.params import SamplingParams
from tests.support.eager_places import places_like
from tests.support.engine_driver import CLIENT, DrivenEngine
from tests.support.launch_guards import PinnedCopies, around_launches, sync_is_an_error
from tests.support.plan_recording import runtime_of

pytestmark = pytest.mark.gpu

VOCAB, TOP, STEADY_STEPS = 4096, 20, 200
QUESTIONS = ["What does textwrap.dedent do?", "How do I join two paths?", "Explain json.dumps.", "def f(x):"] * 3
SLEEP_CYCLES = 40_000_000
Found = dict[int, tuple[float, list[int], list[float]]]


def found(driven: DrivenEngine, request_id: int) -> Found:
    """By position."""
    lines: Found = {}
    for part in driven.mailbox.logprobs[CLIENT, request_id]:
        lines |= dict(enumerate(read_logprobs(part), part.start))
    return lines


def answers(device: Device, dtype: Dtype) -> list[tuple[list[int], Found]]:
    """Prompt and output of every question, with their log-probabilities."""
    options = EngineOptions(device=device, dtype=dtype, pipeline="on", max_rows=16, prefill_chunk=7, kv_tokens=16384)
    driven = DrivenEngine.build(options)
    tokenizer = Tokenizer.from_file(str(DEFAULT_MODEL / "tokenizer.json"))
    prompts = [tokenizer.encode(question).ids for question in QUESTIONS]
    params = SamplingParams(24, temperature=0.0)
    ids = [driven.submit(prompt, params, logprobs=TOP, prompt_logprobs=TOP) for prompt in prompts]
    driven.run()
    return [
        (prompt + driven.tokens(number), found(driven, number)) for prompt, number in zip(prompts, ids, strict=True)
    ]


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 0.04), ("bfloat16", 2.0)])
def test_cuda_logprobs_agree_with_those_of_the_cpu(dtype: Dtype, bound: float) -> None:
    """Compared up to the first token that differs; a log-probability is off by at most twice its logits' error."""
    error, compared, swapped = 0.0, 0, 0
    for (tokens, mine), (expected, theirs) in zip(answers("cuda", dtype), answers("cpu", "float32"), strict=True):
        assert list(mine) == list(range(1, len(tokens)))
        for position in range(1, min(len(tokens), len(expected))):
            if tokens[: position + 1] != expected[: position + 1]:
                break
            (own, ids, values), (other, other_ids, other_values) = mine[position], theirs[position]
            compared += 1
            error = max([error, abs(own - other), *[abs(a - b) for a, b in zip(values, other_values, strict=True)]])
            swapped += ids != other_ids
    print(f"\n{dtype}: max abs error {error:.3g} over {compared} positions, {swapped} with tokens in another order")
    assert error < bound
    assert compared > 100


@pytest.fixture(scope="module")
def driven() -> DrivenEngine:
    """Steps of up to 8 rows fit a graph, steps of 9 to 12 do not."""
    options = EngineOptions(
        device="cuda",
        dtype="bfloat16",
        pipeline="on",
        max_rows=12,
        max_step_tokens=600,
        prefill_chunk=600,
        max_len=1024,
        kv_tokens=12288,
        graph_rows="1,2,4,8",
    )
    return DrivenEngine.build(options)


@pytest.fixture(scope="module")
def runtime(driven: DrivenEngine) -> TorchRuntime:
    return runtime_of(driven)


def prompt_of(length: int, rng: Random) -> list[int]:
    return [rng.randrange(3, VOCAB) for _ in range(length)]


class Watch:
    """Recomputes each step's log-probabilities from a copy of its logits, and counts differences."""

    def __init__(self, runtime: TorchRuntime) -> None:
        self.runtime = runtime
        page_tables = runtime.page_tables
        self.forward = CudaForward(runtime.model, runtime.kv, runtime.tables, page_tables, read_gpu_traits())
        self.logits: dict[int, Tensor] = {}
        self.lines: dict[int, Tensor] = {}
        self.equal: list[bool] = []
        self.errors: list[float] = []
        self.graphed = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        calls = {"launch": self._launch, "sample": self._sample, "collect": self._collect}
        self.real = {name: getattr(self.runtime, name) for name in calls}
        with patch.multiple(self.runtime, **calls):
            yield

    def _launch(self, slot: int, plan: StepPlan) -> None:
        self.real["launch"](slot, plan)
        s = self.runtime.slots[slot]
        assert s.packed is not None and s.logits is not None
        count = len(s.packed.sample_rows)
        if s.graphs is None:
            self.logits[slot] = s.logits[:count].clone()
            return
        self.graphed += 1
        bucket = len(s.graphs.logits)
        inputs = s.device_inputs[:bucket], s.device_inputs[bucket : 2 * bucket]
        eager = self.forward.decode(*inputs, places_like(s.graphs.logits))
        self.logits[slot] = eager[:count].clone()

    def _sample(self, slot: int, masks: Any) -> None:
        s = self.runtime.slots[slot]
        assert s.plan is not None and s.packed is not None
        top, count = s.plan.logprobs, len(s.packed.sample_rows)
        self.real["sample"](slot, masks)
        if top < 0:
            return
        width = 1 + 2 * top
        mine = s.records[: count * width].view(count, width).clone()
        # Records of rows without logprobs are unspecified.
        rows = torch.from_numpy(self.runtime.tables.needs_logprobs[s.packed.sample_rows].nonzero()[0]).to(mine.device)
        with torch.inference_mode():
            again = torch.zeros_like(mine)
            self.runtime.scorer.run(self.logits[slot], s.sampled[:count], top, again)
            oracle = logprob_records(self.logits[slot], s.sampled[:count], top)[rows]
        mine, again = mine[rows], again[rows]
        self.equal += [torch.equal(mine, again), torch.equal(mine[:, 1 + top :], oracle[:, 1 + top :])]
        values, expected = (x[:, : 1 + top].contiguous().view(torch.float32) for x in (mine, oracle))
        if len(rows):
            self.errors.append((values - expected).abs().max().item())
        self.lines[slot] = s.records.clone()

    def _collect(self, slot: int) -> StepResult:
        """Check that the host has what was on the device then, though the next step may have been sampled since."""
        result: StepResult = self.real["collect"](slot)
        if result.logprobs is not None:
            records = result.logprobs.records
            self.equal.append(records == self.lines[slot].cpu().numpy().tobytes()[: len(records)])
        return result


@pytest.mark.parametrize("late", [False, True])
def test_graphs_and_chunks_equal_the_same_kernels_run_eagerly_and_the_oracle(
    driven: DrivenEngine, runtime: TorchRuntime, late: bool
) -> None:
    watch, rng = Watch(runtime), Random(3)
    copy = runtime.device.copy

    @contextmanager
    def delayed() -> Iterator[None]:
        with copy():
            if late:
                torch.cuda._sleep(SLEEP_CYCLES)
            yield

    wanted = [(None, None), (0, None), (20, 20), (3, 1), (None, 5), (1, None), (20, None), (7, 20)] * 2
    with watch.watching(), patch.object(runtime.device, "copy", delayed):
        for index, (logprobs, prompt_logprobs) in enumerate(wanted):
            params = SamplingParams(12, temperature=float(index % 3), top_p=0.9, seed=index, ignore_eos=True)
            asked = {"logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
            driven.submit(prompt_of(rng.choice([1, 30, 590]), rng), params, **asked)
        driven.run()
    print(f"\n{len(watch.equal)} comparisons, {watch.graphed} steps from graphs, max error {max(watch.errors):.3g}")
    assert all(watch.equal)
    assert max(watch.errors) < 1e-4
    assert watch.graphed > 10


def test_a_long_prompt_in_slices_equals_one_log_softmax(driven: DrivenEngine, runtime: TorchRuntime) -> None:
    """600 positions are 3 slices in one step; the logits of all of them at once are the reference."""
    prompt = prompt_of(600, Random(4))
    hidden: list[Tensor] = []
    forward = runtime.model.forward

    def keep(batch: Any, kv: Any) -> Tensor:
        hidden.append(forward(batch, kv))
        return hidden[-1]

    with patch.object(runtime.model, "forward", keep), patch.object(runtime, "graphs", None):
        request = driven.submit(prompt, SamplingParams(1, temperature=0.0), prompt_logprobs=5)
        driven.run()
    lines = found(driven, request)
    assert list(lines) == list(range(1, 600))
    with torch.inference_mode():
        states = torch.cat([part[1:] for part in hidden if len(part) > 1])
        expected = runtime.model.logits(states).float().log_softmax(-1)
    assert len(expected) == 599
    own = torch.tensor([lines[position][0] for position in range(1, 600)], device="cuda")
    error = (own - expected.gather(1, torch.tensor(prompt[1:], device="cuda")[:, None])[:, 0]).abs().max().item()
    print(f"\nmax abs error {error:.3g}")
    # Another number of rows may take another kernel for the head: one bfloat16 rounding of a logit.
    assert error < 0.5


@contextmanager
def steady(driven: DrivenEngine, tops: Sequence[int]) -> Iterator[None]:
    """Rows that only decode, until the end of the block."""
    rng, engine = Random(len(tops)), driven.engine
    params = SamplingParams(900, temperature=0.9, top_p=0.9, seed=3, ignore_eos=True)
    ids = [driven.submit(prompt_of(20, rng), params, logprobs=top) for top in tops]
    while any(len(driven.mailbox.received[CLIENT, number]) < 8 for number in ids):
        engine.tick()
    yield
    driven.mailbox.inbox.append((CLIENT, Abort(ids)))
    engine.tick()
    while engine.pipeline.in_flight:
        engine.tick()


def test_steady_steps_allocate_nothing(driven: DrivenEngine, runtime: TorchRuntime) -> None:
    """Neither the driver nor torch's own pool is asked for memory, and torch sees no wait."""
    engine = driven.engine
    with steady(driven, [0, 1, 5, 20, 20]), around_launches(runtime, sync_is_an_error):
        runtime.synchronize()
        before, steps = torch.cuda.memory_stats(), engine.stats.steps_committed
        while engine.stats.steps_committed < steps + STEADY_STEPS:
            engine.tick()
        after = torch.cuda.memory_stats()
    for name in ("num_device_alloc", "num_device_free", "allocation.all.allocated", "reserved_bytes.all.current"):
        assert after[name] == before[name], f"{name} went from {before[name]} to {after[name]}"


def test_prompts_are_scored_without_a_wait(driven: DrivenEngine, runtime: TorchRuntime) -> None:
    rng = Random(6)
    for guard in (sync_is_an_error, PinnedCopies):
        with around_launches(runtime, guard):
            for length in (1, 2, 300, 599):
                params = SamplingParams(4, temperature=0.0, ignore_eos=True)
                driven.submit(prompt_of(length, rng), params, logprobs=2, prompt_logprobs=20)
            driven.run()
