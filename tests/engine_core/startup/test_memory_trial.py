"""The memory of steps and graphs, as a trial measures it."""

import pytest
from msgspec import structs

from tandem.engine_core.config import StepConfig
from tandem.engine_core.contracts import Masks
from tandem.engine_core.plan import StepPlan
from tandem.engine_core.startup.memory_trial import measure_graph_bytes, measure_mixed_graph_bytes, measure_step_bytes
from tandem.engine_core.startup.warmup import full_step
from tests.fakes.counted_device import CountedDevice, Held
from tests.fakes.runtime import FakeRuntime

SHARED, DRIVER, KERNELS = 5000, 300, 900
"""Bytes that all graphs share, of the driver for each capture, and of code loaded once."""
BUFFERS, PROMPT = 800, 60
"""Bytes that all mixed graphs share, and those that the graphs of one token count share."""


def config(graph_rows: tuple[int, ...] = (1, 4, 16), depth: int = 2, **changed: int) -> StepConfig:
    sizes = {"max_rows": 16, "max_len": 64, "max_step_tokens": 40} | changed
    return StepConfig(
        model_name="m", device="cuda", dtype="float32", depth=depth, prefill_chunk=40, page_size=16, max_waiting=9,
        graph_rows=graph_rows, **sizes,
    )  # fmt: skip


class Captures:
    """Captures that take the memory of a counted device."""

    def __init__(self, device: CountedDevice) -> None:
        self.device = device
        self.code: list[Held] = []

    def __call__(self, count: int) -> list[Held]:
        if not self.code:
            self.code.append(self.device.take(KERNELS))
        return [self.device.take(SHARED), *(self.device.take(DRIVER) for _ in range(count))]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("graph_rows", [(16,), (1, 16), (1, 2, 4, 8, 16)])
def test_bytes_of_all_decode_graphs_are_estimated_from_the_largest(graph_rows: tuple[int, ...], depth: int) -> None:
    device = CountedDevice()
    found = measure_graph_bytes(device, config(graph_rows, depth), Captures(device))
    assert found == SHARED + depth * len(graph_rows) * DRIVER
    assert device.held_bytes() == KERNELS, "nothing of the trial is left but code"


def test_nothing_is_captured_without_graph_rows() -> None:
    device = CountedDevice()
    captures = Captures(device)
    assert measure_graph_bytes(device, config(()), captures) == 0
    assert not captures.code


class MixedCaptures(Captures):
    """One decode graph, and mixed graphs that share buffers and the attention of their token count."""

    def __call__(self, count: int) -> list[Held]:
        held = super().__call__(1)
        if count:
            held.append(self.device.take(BUFFERS + PROMPT))
        return held + [self.device.take(DRIVER) for _ in range(count)]


@pytest.mark.parametrize("depth", [1, 2])
def test_bytes_of_all_mixed_graphs_are_estimated_from_the_two_largest(depth: int) -> None:
    device = CountedDevice()
    sizes = structs.replace(config((1, 16), depth), mixed_graph_rows=(0, 8, 16), graph_tokens=(64, 128))
    further = (depth * 2 - 1) * PROMPT
    found = measure_mixed_graph_bytes(device, sizes, further, MixedCaptures(device))
    assert found == BUFFERS + depth * 2 * (PROMPT + 3 * DRIVER)
    assert device.held_bytes() == KERNELS


def test_nothing_is_captured_without_graph_tokens() -> None:
    device = CountedDevice()
    captures = MixedCaptures(device)
    sizes = structs.replace(config(), mixed_graph_rows=(0, 8), graph_tokens=(64,))
    assert measure_mixed_graph_bytes(device, structs.replace(sizes, graph_tokens=()), 0, captures) == 0
    assert measure_mixed_graph_bytes(device, structs.replace(sizes, graph_rows=()), 0, captures) == 0
    assert not captures.code


class HungryRuntime(FakeRuntime):
    """A runtime that takes memory for each position of a step, which the allocator keeps."""

    def __init__(self, device: CountedDevice) -> None:
        super().__init__(16, 10, 4)
        self.device = device
        self.plans: list[StepPlan] = []

    def launch(self, slot: int, plan: StepPlan) -> None:
        self.plans.append(plan)
        del [self.device.take(plan.total_tokens * 10)][0]

    def sample(self, slot: int, masks: Masks | None) -> None:
        return None

    def collect(self, slot: int) -> list[int]:
        return []


def test_step_bytes_are_those_of_the_largest_step() -> None:
    device = CountedDevice()
    device.unused = 77
    runtime = HungryRuntime(device)
    assert measure_step_bytes(device, runtime, config()) == 40 * 10
    largest = max(runtime.plans, key=lambda plan: plan.total_tokens)
    assert (len(largest.rows), largest.total_tokens) == (16, 40)


@pytest.mark.parametrize(
    ("rows", "tokens", "max_len", "total"), [(16, 40, 64, 40), (16, 16, 64, 16), (4, 4096, 64, 4 * 63), (3, 10, 2, 3)]
)
def test_a_full_step_has_every_row_and_as_many_positions_as_fit(
    rows: int, tokens: int, max_len: int, total: int
) -> None:
    plan = full_step(config(max_rows=rows, max_step_tokens=tokens, max_len=max_len))
    assert (len(plan.rows), plan.total_tokens) == (rows, total)
    assert all(row.samples and row.end < max_len for row in plan.rows)
    assert max(row.length for row in plan.rows) - min(row.length for row in plan.rows) <= 1
