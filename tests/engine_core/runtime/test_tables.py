"""Device tables between steps, and what warm-up leaves in them."""

from unittest.mock import patch

import numpy as np
import pytest
import torch
from msgspec import structs

from tandem.engine_core.attention.torch import TorchPlanner
from tandem.engine_core.config import StepConfig
from tandem.engine_core.kernels.reference.sampling import SamplingRows
from tandem.engine_core.kernels.sampling.inputs import INT_COLUMNS
from tandem.engine_core.kv_cache.groups import KVGroup
from tandem.engine_core.kv_cache.storage import KVLayout, KVStorage
from tandem.engine_core.models.decoder import Decoder
from tandem.engine_core.page_counts import PageColumns
from tandem.engine_core.plan import NewSequence, ScheduledSequence, StepPlan
from tandem.engine_core.runtime import tables as tables_module
from tandem.engine_core.runtime.device import CpuDevice, open_device
from tandem.engine_core.runtime.slots import HEAD_WORDS, StepSlot
from tandem.engine_core.runtime.staging import NEWEST, Packed, capacity, pack
from tandem.engine_core.runtime.tables import DeviceTables, field
from tandem.engine_core.sampling.sampler import BIASED, PENALIZES, RANDOM, SUPPRESSES, TRUNCATES
from tandem.engine_core.sampling.torch_sampler import TorchSampler, gather
from tandem.engine_core.startup.warmup import run_step, warm_up
from tandem.protocol.codec import pack_floats, pack_ids
from tandem.protocol.params import MAX_SEED, SamplingParams
from tests.fakes.constraint import FakeFiller
from tests.fakes.fixed_masks import FixedMask
from tests.support.tiny_llama import MAX_LEN, VOCAB, Shape, build_runtime

GREEDY = SamplingParams(4, temperature=0.0)


def tables() -> DeviceTables:
    return DeviceTables.allocate(4, 20, (PageColumns(0, 5),), torch.device("cpu"))


def staged(plan: StepPlan) -> tuple[torch.Tensor, Packed]:
    out = np.zeros(capacity(4, 40, 30, 40, 6), dtype=np.int32)
    packed = pack(plan, 20, (PageColumns(0, 5),), out)
    return torch.from_numpy(out)[: packed.total], packed


def gathered(table: DeviceTables, inputs: torch.Tensor, packed: Packed) -> SamplingRows:
    """Gather what the torch sampler reads for the rows of a step that sample."""
    count = len(packed.sample_rows)
    # As a forward pass does first.
    table.sampling.find_positions(field(inputs, packed, "token_rows"), field(inputs, packed, "positions"))
    batch = table.sampling_batch(torch.zeros(count, 1), inputs, packed, None, torch.zeros(count, dtype=torch.int32))
    return gather(table.sampling, batch)


def first(
    row: int, params: SamplingParams, tokens: list[int], pages: tuple[int, ...], ends: tuple[int, ...] = ()
) -> StepPlan:
    news = ScheduledSequence(row, row, 0, len(tokens), True, tokens=pack_ids(tokens), new_pages=pages)
    return StepPlan.of(1, (news,), (NewSequence(row, row, len(tokens), params, ends),))


def apply(target: DeviceTables, plan: StepPlan) -> tuple[torch.Tensor, Packed]:
    inputs, packed = staged(plan)
    target.note(plan.admitted)
    target.apply(inputs, packed)
    return inputs, packed


def test_updates_are_written_to_their_row_only() -> None:
    table = tables()
    apply(table, first(2, GREEDY, [7, 8, 9], (3, 4)))
    assert table.tokens[2].tolist() == [7, 8, 9] + [0] * 17
    assert table.pages[2].tolist() == [3, 4, 0, 0, 0]
    assert table.sampling.lengths.tolist() == [1, 1, 3, 1, 1]
    for row in (0, 1, 3, 4):
        assert not table.tokens[row].any()
        assert not table.pages[row].any()


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1, 2**32, 2**62 + 12345, MAX_SEED])
def test_a_seed_is_joined_from_its_halves(seed: int) -> None:
    table = tables()
    inputs, packed = apply(table, first(1, SamplingParams(4, seed=seed, choice=6, top_k=2**31 - 1), [5], (1,)))
    rows = gathered(table, inputs, packed)
    assert rows.draw is not None
    assert (rows.draw.seed.tolist(), rows.draw.choice.tolist(), rows.draw.position.tolist()) == ([seed], [6], [1])
    assert table.sampling.ints[1, INT_COLUMNS.index("top_k")] == 2**31 - 1


@pytest.mark.parametrize(
    ("params", "needs"),
    [
        (GREEDY, 0),
        (SamplingParams(4), RANDOM),
        (SamplingParams(4, top_k=3), RANDOM | TRUNCATES),
        (SamplingParams(4, temperature=0.0, top_k=3), 0),
        (SamplingParams(4, temperature=0.0, presence_penalty=0.1), PENALIZES),
        (SamplingParams(4, logit_bias_ids=pack_ids([5]), logit_bias_values=pack_floats([1.0])), RANDOM | BIASED),
    ],
)
def test_only_parameters_that_a_row_needs_are_gathered(params: SamplingParams, needs: int) -> None:
    table = tables()
    inputs, packed = apply(table, first(1, params, [5, 6], (1,)))
    rows = gathered(table, inputs, packed)
    assert table.needs[1] == needs
    asked = (rows.draw, rows.truncation, rows.penalties, rows.bias)
    assert [group is not None for group in asked] == [
        bool(needs & bit) for bit in (RANDOM, TRUNCATES, PENALIZES, BIASED)
    ]
    assert rows.suppressed is None
    apply(table, first(1, GREEDY, [5], (1,)))
    assert table.needs[1] == 0, "the next sequence of the row asks for itself"


def test_a_sample_is_written_where_the_next_forward_reads() -> None:
    table = tables()
    inputs, packed = apply(table, first(3, GREEDY, [7, 8], (1,)))
    logits = torch.zeros(1, 60)
    logits[0, 55] = 1.0
    sampled = torch.zeros(1, dtype=torch.int32)
    TorchSampler(table.sampling).sample(table.sampling_batch(logits, inputs, packed, None, sampled))
    assert sampled.tolist() == [55]
    assert table.tokens[3, :4].tolist() == [7, 8, 55, 0]
    assert table.sampling.lengths.tolist() == [1, 1, 1, 3, 1]


def decoding(table: DeviceTables, *starts: int) -> tuple[torch.Tensor, Packed]:
    """Stage a step of rows 1, 2, ... at these positions."""
    rows = tuple(ScheduledSequence(row, row, start) for row, start in enumerate(starts, 1))
    table.sampling.lengths[1 : 1 + len(starts)] = torch.tensor(starts) + 1
    return staged(StepPlan.of(2, rows))


def test_end_ids_are_suppressed_until_a_row_has_its_min_tokens() -> None:
    """Two of them, and three: their samples at positions 1 and 2, and 1 to 3."""
    table = tables()
    for row, least in ((1, 2), (2, 3)):
        apply(table, first(row, structs.replace(GREEDY, min_tokens=least), [5], (1,), ends=(8, 9)))
    for starts, expected in (((0, 1), (8, 8)), ((1, 2), (8, 8)), ((2, 2), (-1, 8)), ((2, 1), (-1, 8))):
        inputs, packed = decoding(table, *starts)
        suppressed = gathered(table, inputs, packed).suppressed
        assert suppressed is not None
        assert suppressed[:, 0].tolist() == list(expected), starts
    inputs, packed = decoding(table, 2, 3)
    assert table.sampling_needs(packed, False) == 0, "nothing is left to suppress"
    assert gathered(table, inputs, packed).suppressed is None
    apply(table, first(1, structs.replace(GREEDY, min_tokens=1), [5], (1,), ends=(8, 9)))
    assert table.sampling_needs(decoding(table, 0)[1], False) == SUPPRESSES, "the next sequence of the row asks anew"


def test_decode_rows_are_at_the_devices_positions() -> None:
    table = tables()
    apply(table, first(1, GREEDY, [5, 6, 7], (1,)))
    apply(table, first(2, GREEDY, [5], (2,)))
    table.sampling.lengths[1] = 5
    rows = (ScheduledSequence(1, 1, 3), ScheduledSequence(2, 2, 1, 2, tokens=pack_ids([8, 9])))
    inputs, packed = apply(table, StepPlan.of(2, rows))
    positions = field(inputs, packed, "positions")
    assert positions.tolist() == [NEWEST, 1, 2]
    table.sampling.find_positions(field(inputs, packed, "token_rows"), positions)
    assert positions.tolist() == [4, 1, 2], "whatever the host counts"
    batch = table.sampling_batch(torch.zeros(2, 1), inputs, packed, None, torch.zeros(2, dtype=torch.int32))
    assert batch.positions.tolist() == [4, 2]


def test_pages_of_each_group_are_written_to_its_columns() -> None:
    """A row uploads pages 0 to 5, of which a group with a window keeps 4, then one more, in the oldest column."""
    columns = PageColumns(0, 8), PageColumns(8, 8, 4), PageColumns(16, 8)
    table = DeviceTables.allocate(2, 32, columns, torch.device("cpu"))

    def bring(*rows: ScheduledSequence) -> None:
        out = np.zeros(capacity(4, 40, 60, 40), dtype=np.int32)
        packed = pack(StepPlan.of(1, rows), 32, columns, out)
        index = packed.read("page_index").view(np.int64)
        assert len(set(index.tolist())) == len(index), "a GPU writes in any order"
        table.apply(torch.from_numpy(out)[: packed.total], packed)

    ids = tuple(range(10, 16)), (0, 0, 22, 23, 24, 25), (0, 0, 0, 0, 34, 35)
    other = ScheduledSequence(2, 2, 4, 1, new_pages=(91, 92, 93, 94, 95, 96), first_page=1)
    bring(ScheduledSequence(1, 1, 23, 1, new_pages=sum(ids, ())), other)
    full, ring, last = (table.pages[:, own.first : own.first + own.count].tolist() for own in columns)
    assert (full[1], full[2]) == ([*ids[0], 0, 0], [0, 91, 92, 0, 0, 0, 0, 0])
    assert (ring[1], ring[2]) == ([24, 25, 22, 23] * 2, [0, 93, 94, 0] * 2)
    assert (last[1], last[2]) == ([*ids[2], 0, 0], [0, 95, 96, 0, 0, 0, 0, 0])
    bring(ScheduledSequence(1, 1, 24, 1, new_pages=(16, 26, 36), first_page=6))
    full, ring, last = (table.pages[1, own.first : own.first + own.count].tolist() for own in columns)
    assert (full[6], ring, last[6]) == (16, [24, 25, 26, 23] * 2, 36)


def test_page_tables_are_views_of_the_columns_of_their_groups() -> None:
    groups = KVGroup((0,), 1, 8), KVGroup((1,), 1, 8, 6)
    kv = KVStorage.allocate(KVLayout(groups=groups, page_size=4, dtype=torch.float32), 3, "cpu")
    table = DeviceTables.allocate(2, 32, (PageColumns(0, 8), PageColumns(8, 6, 3)), torch.device("cpu"))
    full, local = table.page_tables(kv)
    assert (full.window, full.ring, full.pages.shape) == (None, 0, (3, 8))
    assert (local.window, local.ring, local.pages.shape) == (6, 3, (3, 6))
    table.pages[2, 8] = 7
    assert local.pages[2, 0] == 7 and full.page_stride == local.page_stride == 8


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("max_len", [2, 3, 4, 5, MAX_LEN])
def test_warm_up_writes_to_the_padding_row_and_page_only(model: Decoder, depth: int, max_len: int) -> None:
    runtime = build_runtime(model, Shape(depth))
    pages_per_row = -(-max_len // 4)
    runtime.tables = DeviceTables.allocate(4, max_len, (PageColumns(0, pages_per_row),), torch.device("cpu"))
    runtime.page_tables = runtime.tables.page_tables(runtime.kv)
    runtime.sampler = TorchSampler(runtime.tables.sampling)
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
    def test_open_device_of_cpu_returns_it(self) -> None:
        device = open_device("cpu")
        assert isinstance(device, CpuDevice)
        assert device.free_bytes() > 0
        device.synchronize()
        with device.copy():
            event = device.event()
            event.record()
            event.wait()
            event.synchronize()

    def test_host_buffers_are_zeroed(self) -> None:
        buffer = CpuDevice().host_buffer(3, 4)
        assert buffer.shape == (3, 4)
        assert buffer.dtype == torch.int32
        assert not buffer.any()

    def test_a_slot_writes_through_its_view(self) -> None:
        slot = StepSlot.allocate(CpuDevice(), 10, 4, 8, 33, TorchPlanner([]), FakeFiller())
        slot.inputs_view[3] = 7
        assert slot.host_memory[HEAD_WORDS + 3] == 7
        slot.masks_view[2] = 9
        assert slot.host_masks[2].tolist() == [9, 9]
        assert slot.device_masks.tolist() == [[-1, -1]] + 4 * [[0, 0]], "one mask allows everything"
        assert slot.plan is None


def test_a_constrained_row_without_a_mask_does_not_depend_on_earlier_steps(model: Decoder) -> None:
    """Its token is not needed, but the same steps have to give the same results."""
    found = []
    for masks in ([(1, FixedMask(np.full(-(-VOCAB // 32), 1 << 5, dtype=np.int32)))], []):
        runtime = build_runtime(model, Shape(depth=1))
        run_step(runtime, 0, first(1, GREEDY, [5, 6], (1,)))
        for step_id, now in ((2, masks), (3, [])):
            row = ScheduledSequence(1, 1, step_id, constrained=True, tokens=pack_ids([7]))
            runtime.launch(0, StepPlan.of(step_id, (row,)))
            runtime.sample(0, now)
            (token,) = runtime.collect(0).tokens
        found.append(token)
    assert found[0] == found[1] != 5


def test_a_new_sequence_in_a_row_has_none_of_the_biases_of_the_last() -> None:
    table = tables()
    biased = SamplingParams(4, logit_bias_ids=pack_ids([5, 6]), logit_bias_values=pack_floats([1.0, -2.0]))
    assert (table.sampling.bias[0] == -1).all()
    for params, expected in ((biased, [5, 6]), (GREEDY, []), (GREEDY, []), (biased, [5, 6]), (biased, [5, 6])):
        apply(table, first(2, params, [7], (1,)))
        ids, values = table.sampling.bias[:, 2]
        assert ids[ids >= 0].tolist() == expected
        assert values[ids >= 0].view(torch.float32).tolist() == [1.0, -2.0][: len(expected)]
        assert (table.sampling.bias[0][[0, 1, 3, 4]] == -1).all()


def test_biases_that_were_written_in_part_are_cleared_for_the_next_sequence() -> None:
    """As where memory for their update runs out, and with it the request ends."""
    table = tables()
    biased = structs.replace(GREEDY, logit_bias_ids=pack_ids([5, 6]), logit_bias_values=pack_floats([1.0, 2.0]))
    scatter, calls = tables_module._scatter, list[int]()

    def fail_at_values(target: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> None:
        calls.append(len(index))
        if len(calls) == 5:
            raise torch.OutOfMemoryError
        scatter(target, index, values)

    with patch.object(tables_module, "_scatter", fail_at_values), pytest.raises(torch.OutOfMemoryError):
        apply(table, first(2, biased, [7], (3,)))
    assert table.sampling.bias[0, 2, :2].tolist() == [5, 6]
    apply(table, first(2, GREEDY, [8], (3,)))
    assert (table.sampling.bias[0, 2] == -1).all()


def test_a_prediction_is_written_to_its_row_only() -> None:
    """The next sequence of a row without one has a length of 0, whatever the table holds."""
    table = DeviceTables.allocate(4, 20, (PageColumns(0, 5),), torch.device("cpu"), 6)
    news = [ScheduledSequence(row, row, 0, 1, True, tokens=pack_ids([5]), new_pages=(row,)) for row in (1, 2, 3)]
    predictions = (b"", pack_ids([7, 8]), pack_ids([9, 10, 11, 12, 13, 14]))
    admitted = [
        NewSequence(row.seq_id, row.row, 1, GREEDY, prediction=own) for row, own in zip(news, predictions, strict=True)
    ]
    apply(table, StepPlan.of(1, tuple(news), tuple(admitted)))
    column = INT_COLUMNS.index("prediction_len")
    assert table.sampling.ints[:, column].tolist() == [0, 0, 2, 6, 0]
    assert table.predictions.tolist() == [[0] * 6, [0] * 6, [7, 8, 0, 0, 0, 0], [9, 10, 11, 12, 13, 14], [0] * 6]
    apply(table, first(3, GREEDY, [5], (1,)))
    assert table.sampling.ints[3, column] == 0
