"""The device's memory between steps, and what warming up leaves in it."""

import numpy as np
import pytest
import torch

from tandem.engine_core.attention.torch import TorchPlanner
from tandem.engine_core.config import StepConfig
from tandem.engine_core.models.llama import LlamaModel
from tandem.engine_core.plan import NewSequence, ScheduledSequence, StepPlan
from tandem.engine_core.runtime.device import CpuDevice, open_device
from tandem.engine_core.runtime.sampling import TorchSampler
from tandem.engine_core.runtime.slots import StepSlot
from tandem.engine_core.runtime.staging import Packed, capacity, pack
from tandem.engine_core.runtime.tables import BIASED, PENALIZES, RANDOM, TRUNCATES, DeviceTables
from tandem.engine_core.startup.warmup import warm_up
from tandem.protocol.codec import pack_floats, pack_ids
from tandem.protocol.params import MAX_SEED, SamplingParams
from tests.support.tiny_llama import MAX_LEN, VOCAB, Shape, build_runtime

GREEDY = SamplingParams(4, temperature=0.0)


def tables() -> DeviceTables:
    return DeviceTables.allocate(4, 20, 5, torch.device("cpu"))


def staged(plan: StepPlan) -> tuple[torch.Tensor, Packed]:
    out = np.zeros(capacity(4, 40, 30, 40), dtype=np.int32)
    packed = pack(plan, 20, 5, out)
    return torch.from_numpy(out)[: packed.total], packed


def first(
    row: int, params: SamplingParams, tokens: list[int], pages: tuple[int, ...], ends: tuple[int, ...] = ()
) -> StepPlan:
    news = ScheduledSequence(row, row, 0, len(tokens), True, bool(ends), tokens=pack_ids(tokens), new_pages=pages)
    return StepPlan.of(1, (news,), (NewSequence(row, row, len(tokens), params, ends),))


def apply(target: DeviceTables, plan: StepPlan) -> tuple[torch.Tensor, Packed]:
    inputs, packed = staged(plan)
    target.note(plan.admitted)
    target.apply(inputs, packed)
    return inputs, packed


def test_news_land_in_their_row_alone() -> None:
    table = tables()
    apply(table, first(2, GREEDY, [7, 8, 9], (3, 4)))
    assert table.tokens[2].tolist() == [7, 8, 9] + [0] * 17
    assert table.pages[2].tolist() == [3, 4, 0, 0, 0]
    for row in (0, 1, 3, 4):
        assert not table.tokens[row].any()
        assert not table.pages[row].any()


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1, 2**32, 2**62 + 12345, MAX_SEED])
def test_seeds_survive_their_halves(seed: int) -> None:
    table = tables()
    inputs, packed = apply(table, first(1, SamplingParams(4, seed=seed, choice=6, top_k=2**31 - 1), [5], (1,)))
    rows = table.sampling_rows(inputs, packed)
    assert rows.draw is not None
    assert (rows.draw.seed.tolist(), rows.draw.choice.tolist(), rows.draw.position.tolist()) == ([seed], [6], [1])
    assert table.ints[1, 2] == 2**31 - 1


@pytest.mark.parametrize(
    ("params", "modes"),
    [
        (GREEDY, 0),
        (SamplingParams(4), RANDOM),
        (SamplingParams(4, top_k=3), RANDOM | TRUNCATES),
        (SamplingParams(4, temperature=0.0, top_k=3), 0),
        (SamplingParams(4, temperature=0.0, presence_penalty=0.1), PENALIZES),
        (SamplingParams(4, logit_bias_ids=pack_ids([5]), logit_bias_values=pack_floats([1.0])), RANDOM | BIASED),
    ],
)
def test_only_what_a_row_asks_for_is_gathered(params: SamplingParams, modes: int) -> None:
    table = tables()
    inputs, packed = apply(table, first(1, params, [5, 6], (1,)))
    rows = table.sampling_rows(inputs, packed)
    assert table.modes[1] == modes
    asked = (rows.draw, rows.truncation, rows.penalties, rows.bias)
    assert [group is not None for group in asked] == [
        bool(modes & bit) for bit in (RANDOM, TRUNCATES, PENALIZES, BIASED)
    ]
    assert rows.suppressed is None
    apply(table, first(1, GREEDY, [5], (1,)))
    assert table.modes[1] == 0, "the next sequence of the row asks for itself"


def test_samples_are_appended_where_the_next_forward_looks() -> None:
    table = tables()
    inputs, packed = apply(table, first(3, GREEDY, [7, 8], (1,)))
    table.append(inputs, packed, torch.tensor([55], dtype=torch.int32))
    assert table.tokens[3, :4].tolist() == [7, 8, 55, 0]


def test_ends_are_suppressed_while_a_row_says_so() -> None:
    table = tables()
    inputs, packed = apply(table, first(1, GREEDY, [5], (1,), ends=(8, 9)))
    suppressed = table.sampling_rows(inputs, packed).suppressed
    assert suppressed is not None
    assert suppressed[0, :3].tolist() == [8, 9, -1]
    rows = (
        ScheduledSequence(1, 1, 1, 1, True, suppress_ends=False),
        ScheduledSequence(2, 2, 4, 1, True, suppress_ends=True),
    )
    suppressed = table.sampling_rows(*staged(StepPlan.of(2, rows))).suppressed
    assert suppressed is not None
    assert (suppressed[0] == -1).all()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("max_len", [2, 3, 4, 5, MAX_LEN])
def test_warming_up_touches_padding_alone(model: LlamaModel, depth: int, max_len: int) -> None:
    runtime = build_runtime(model, Shape(depth))
    pages_per_row = -(-max_len // 4)
    runtime.tables = DeviceTables.allocate(4, max_len, pages_per_row, torch.device("cpu"))
    runtime.page_table = runtime.kv.page_table(runtime.tables.pages)
    runtime.sampler = TorchSampler(runtime.tables)
    config = StepConfig(
        model_name="x", device="cpu", dtype="float32", depth=depth, max_rows=4, max_len=max_len, max_step_tokens=30,
        prefill_chunk=30, page_size=4, max_waiting=10,
    )  # fmt: skip
    warm_up(runtime, config)
    assert len(runtime.results) == depth * 7
    assert all(0 <= token < VOCAB for result in runtime.results for token in result.tokens)
    counts = [count for result in runtime.results for count in result.counts]
    assert all(counts) == (max_len > 2), "a decode row at the last position has no room for a sample"
    assert not runtime.tables.tokens[1:].any(), "a row that requests use was written"
    assert not runtime.tables.pages.any()
    assert not runtime.kv.pool[1:].any(), "a page that requests use was written"
    assert all(slot.plan is None for slot in runtime.slots)


class TestCpuDevice:
    def test_is_what_cpu_opens(self) -> None:
        device = open_device("cpu")
        assert isinstance(device, CpuDevice)
        assert device.free_bytes() > 0
        device.synchronize()
        with device.copy():
            event = device.event()
            event.record()
            event.wait()
            event.synchronize()

    def test_host_buffers_are_zeros(self) -> None:
        buffer = CpuDevice().host_buffer(3, 4)
        assert buffer.shape == (3, 4)
        assert buffer.dtype == torch.int32
        assert not buffer.any()

    def test_a_slot_writes_through_its_view(self) -> None:
        slot = StepSlot.allocate(CpuDevice(), 10, 4, 8, 33, TorchPlanner([]))
        slot.inputs_view[3] = 7
        assert slot.host_inputs[3] == 7
        slot.masks_view[2] = 9
        assert slot.host_masks[2].tolist() == [9, 9]
        assert slot.device_masks.tolist() == [[-1, -1]] + 4 * [[0, 0]], "one mask allows everything"
        assert slot.plan is None
