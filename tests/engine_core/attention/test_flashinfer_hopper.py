"""What the planner of graphs on Hopper tells a double of FlashInfer."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.engine_core.attention import triton as neighbour
from tandem.engine_core.attention.base import LayerAttention, Span
from tandem.engine_core.kernels.page_table import PageTable

KINDS = LayerAttention(0.125, window=32), LayerAttention(0.5, softcap=20.0)
PAGE, WIDTH, ROWS, TOKENS = 8, 6, 4, 64
NAME = "tandem.engine_core.attention.flashinfer"


class Wrapper:
    """Stands in for `BatchPrefillWithPagedKVCacheWrapper`, whose private parts the planner uses."""

    def __init__(self, workspace: Tensor, kv_layout: str, for_graph: bool = False, *buffers: Tensor) -> None:
        assert kv_layout == "NHD"
        self._float_workspace_buffer = workspace
        self._pin_memory_int_workspace_buffer = torch.zeros(3)
        self.for_graph, self.buffers = for_graph, buffers
        self.first: tuple[Any, ...] = ()
        self.planned: list[tuple[Any, ...]] = []
        self._cached_module = SimpleNamespace(plan=self.planning)

    def reset_workspace_buffer(self, _workspace: Tensor, plans: Tensor) -> None:
        self._int_workspace_buffer = plans

    def plan(self, *given: Any, **options: Any) -> None:
        self.first = (*given, options)

    def planning(self, *given: Any) -> None:
        self.planned.append(tuple(one.tolist() if isinstance(one, Tensor) else one for one in given[3:]))


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of the planner, loaded once more with its neighbour over the library's double."""
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Wrapper))  # type: ignore[arg-type]
    loaded = []
    for name in (NAME, f"{NAME}_hopper"):
        path = Path(neighbour.__file__).with_name(name.rpartition(".")[2] + ".py")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        loaded.append(module)
    return loaded[1]


def build(module: ModuleType, table: PageTable) -> Any:
    library = sys.modules[NAME]
    heads = library.HeadShape(4, 2, 64, torch.bfloat16)
    eager = library.FlashInferPlanner.allocate(
        KINDS, lambda count: torch.zeros(count, dtype=torch.int32), torch.device("cpu"), heads, ROWS, 64, is_fa3=True
    )
    return module.HopperGraphPlanner.build(eager, ROWS, TOKENS, table)


def test_a_plan_names_the_first_pages_of_its_rows_in_the_page_table(hopper: ModuleType) -> None:
    """Rows in any order; as many as there is room for, fewer, and none; the same for each kind of layer."""
    table = PageTable(torch.arange(5 * WIDTH, dtype=torch.int32).view(5, WIDTH), PAGE, PAGE)
    planner = build(hopper, table)
    for kind, window in zip(KINDS, (31, -1), strict=True):
        wrapper = planner.step.wrappers[kind]
        assert wrapper.for_graph and wrapper.buffers[2].data_ptr() == table.pages.data_ptr()
        options = wrapper.first[-1]
        assert (options["sm_scale"], options["window_left"], options["logits_soft_cap"]) == (
            kind.scale, window, kind.softcap,
        )  # fmt: skip
    assert planner.step.tokens == TOKENS
    planner.plan([Span(2, 0, 0, 12), Span(1, 12, 3, 5), Span(4, 17, 40, 1), Span(3, 18, 1, 46)])
    planner.plan([Span(3, 0, 9, 2)])
    planner.plan([])
    planner.take_pages()
    for kind, window in zip(KINDS, (31, -1), strict=True):
        full, one, none = planner.step.wrappers[kind].planned
        rest = (TOKENS, ROWS, 4, 2, PAGE, True, 64, 64, True, window)
        assert full[3:] == one[3:] == none[3:] == rest
        assert full[0] == [0, 12, 17, 18, 64]
        assert full[1][:ROWS] == [12, 6, 24, 18]
        assert full[2] == [12, 8, 41, 47]
        assert (one[0], one[1][0], one[2]) == ([0, 2, 2, 2, 2], 18, [11, 0, 0, 0])
        assert (none[0], none[2]) == ([0] * 5, [0] * 4)


def test_more_rows_than_a_graph_has_are_refused(hopper: ModuleType) -> None:
    planner = build(hopper, PageTable(torch.zeros(9, WIDTH, dtype=torch.int32), PAGE, PAGE))
    with pytest.raises(AssertionError, match="5 rows in a plan of 4"):
        planner.plan([Span(row, row, 0, 1) for row in range(5)])
