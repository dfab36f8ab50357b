"""FlashInfer on a machine without it: a library that records its plans."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.engine_core.attention import triton as neighbour

NAME = "tandem.engine_core.attention.flashinfer"


def plain(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what was given, tensors as lists."""
    return tuple(one.tolist() if isinstance(one, Tensor) else one for one in given)


class Wrapper:
    """Fake of `BatchPrefillWithPagedKVCacheWrapper`, with the private parts that `flashinfer_hopper` uses."""

    def __init__(self, workspace: Tensor, kv_layout: str, for_graph: bool = False, *buffers: Tensor) -> None:
        assert kv_layout == "NHD"
        self._float_workspace_buffer = workspace
        self._int_workspace_buffer = torch.zeros(1)
        self._pin_memory_int_workspace_buffer = torch.zeros(2)
        self._cached_module: SimpleNamespace | None = None
        self.for_graph, self.buffers = for_graph, buffers
        self.given: tuple[Any, ...] = ()
        """Arguments of the last call of `plan`."""
        self.options: dict[str, Any] = {}
        """Its options."""
        self.planned: list[tuple[Any, ...]] = []
        """Arguments of each direct call of the planning function below `plan`."""

    def reset_workspace_buffer(self, workspace: Tensor, plans: Tensor) -> None:
        self._float_workspace_buffer, self._int_workspace_buffer = workspace, plans
        self._pin_memory_int_workspace_buffer = torch.zeros(3)

    def plan(self, *given: Any, **options: Any) -> None:
        self.given, self.options = plain(given), options | {"seq_lens": options["seq_lens"].tolist()}
        self._cached_module = SimpleNamespace(plan=self._plan)

    def _plan(self, workspace: Tensor, plans: Tensor, pinned: Tensor, *given: Any) -> None:
        assert workspace is self._float_workspace_buffer
        assert plans is self._int_workspace_buffer and pinned is self._pin_memory_int_workspace_buffer
        self.planned.append(plain(given))

    def run(self, query: Tensor, _pool: tuple[Tensor, Tensor], out: Tensor) -> None:
        out.copy_(query)


def load_over_double(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType]:
    """Load `attention.flashinfer` and `attention.flashinfer_hopper` once more, over the double."""
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
    return loaded[0], loaded[1]
