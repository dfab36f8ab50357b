"""Updates of tables as graphs hold them."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from tandem.engine_core.kernels.attention.table_updates import update_tables_reference
from tandem.engine_core.kernels.sampling.inputs import UPDATE_FIELDS
from tandem.engine_core.page_counts import PageColumns
from tandem.engine_core.plan import NewSequence, ScheduledSequence, StepPlan
from tandem.engine_core.runtime.captured import Graph
from tandem.engine_core.runtime.device import CpuDevice
from tandem.engine_core.runtime.graphs import capture_updates
from tandem.engine_core.runtime.slots import HEAD_WORDS, StepSlot
from tandem.engine_core.runtime.staging import capacity, pack
from tandem.engine_core.runtime.tables import DeviceTables
from tandem.protocol.codec import pack_ids
from tandem.protocol.params import SamplingParams
from tests.fakes.constraint import FakeFiller
from tests.fakes.recording_gpu import RecordedGraph

ROWS, MAX_LEN, PAGES = 4, 20, 5
COLUMNS = (PageColumns(0, PAGES),)
PLAN = StepPlan.of(
    1,
    (ScheduledSequence(2, 2, 0, 3, True, tokens=pack_ids([7, 8, 9]), new_pages=(3, 4)),),
    (NewSequence(2, 2, 3, SamplingParams(4, seed=5), (6,)),),
)


class Recorder:
    """Implement `GraphRecorder` by calls, and take down what has run before each is recorded."""

    def __init__(self) -> None:
        self.calls = 0
        self.calls_before: list[int] = []

    def record(self, fn: Callable[[], Tensor | None]) -> tuple[Graph, Tensor | None]:
        self.calls_before.append(self.calls)
        return RecordedGraph(fn, None), None

    def synchronize(self) -> None:
        return None


def slot_of() -> StepSlot:
    words = capacity(ROWS, ROWS * MAX_LEN, ROWS * PAGES, ROWS * MAX_LEN)
    return StepSlot.allocate(CpuDevice(), words, ROWS, MAX_LEN, 64, cast("Any", None), cast("Any", FakeFiller()))


def load(slot: StepSlot) -> None:
    """Put a step into a slot, and copy it to the device."""
    packed = pack(PLAN, MAX_LEN, COLUMNS, slot.inputs_view)
    slot.locations_view[:] = packed.locate_updates()
    slot.device_memory.copy_(slot.host_memory)


def test_capture_runs_without_the_updates_that_an_earlier_step_has_left() -> None:
    """Its inputs are overwritten by then: the padding row would get what they hold."""
    tables, slots, recorder = (
        DeviceTables.allocate(ROWS, MAX_LEN, COLUMNS, torch.device("cpu")),
        [slot_of()],
        Recorder(),
    )
    load(slots[0])
    slots[0].device_inputs.zero_()

    def update(locations: Tensor, inputs: Tensor) -> None:
        recorder.calls += 1
        update_tables_reference(locations, inputs, tables.pages, tables.sampling)

    (graph,) = capture_updates(recorder, slots, update)
    assert recorder.calls_before == [1], "the kernel is compiled before it is captured"
    assert tables.sampling.lengths.tolist() == [1] * (ROWS + 1)
    assert not tables.tokens.any() and not tables.pages.any() and not tables.sampling.suppressed.any()
    load(slots[0])
    graph.replay()
    assert tables.tokens[2, :4].tolist() == [7, 8, 9, 0]
    assert tables.pages[2].tolist() == [3, 4, 0, 0, 0]
    assert tables.sampling.suppressed[2, :2].tolist() == [6, -1]


def test_each_slot_has_its_own_updates() -> None:
    tables, slots = (
        DeviceTables.allocate(ROWS, MAX_LEN, COLUMNS, torch.device("cpu")),
        [slot_of(), slot_of()],
    )
    update = partial(update_tables_reference, pages=tables.pages, tables=tables.sampling)
    graphs = capture_updates(Recorder(), slots, update)
    load(slots[1])
    graphs[0].replay()
    assert not tables.tokens.any()
    graphs[1].replay()
    assert tables.tokens[2, :3].tolist() == [7, 8, 9]


def test_inputs_are_aligned_behind_the_locations() -> None:
    """Kernels read 16 bytes at a time."""
    assert 2 * len(UPDATE_FIELDS) <= HEAD_WORDS and HEAD_WORDS % 4 == 0
    slot = slot_of()
    assert slot.device_inputs.data_ptr() == slot.device_memory.data_ptr() + 4 * HEAD_WORDS
    assert slot.device_locations.data_ptr() == slot.device_memory.data_ptr()
