"""Profiler scopes around the modules of a model, by operation."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.profiler import record_function

from tandem.engine_core.runtime.runtime import TorchRuntime

PREFIX = "tandem:"
"""Prefix of scope names in a trace."""
STEP = "step"


class Scoped:
    """Proxy of a module that runs calls in a profiler scope."""

    def __init__(self, part: Any, operation: str) -> None:
        self._part = part
        self._operation = operation

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with record_function(PREFIX + self._operation):
            return self._part(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._part, name)
        return Scoped(found, self._operation) if callable(found) and not isinstance(found, Tensor) else found


class ScopedPlanner:
    """Proxy of an attention planner that runs steps in a profiler scope."""

    def __init__(self, planner: Any) -> None:
        self._planner = planner

    def plan(self, *args: Any) -> Scoped:
        with record_function(PREFIX + "attention"):
            return Scoped(self._planner.plan(*args), "attention")


@contextmanager
def scoped(runtime: TorchRuntime) -> Iterator[None]:
    """Wrap every module of a runtime's model in the scope of its operation.

    Affects eager steps only: graphs replay without Python.
    """
    kept: list[tuple[Any, str, Any]] = []

    def put(owner: Any, name: str, wrapper: Any) -> None:
        kept.append((owner, name, getattr(owner, name)))
        setattr(owner, name, wrapper)

    model: Any = runtime.model
    for layer in model.layers:
        for owner in (layer, layer.attention):
            for name in _norms(owner):
                put(owner, name, Scoped(getattr(owner, name), "norm"))
        for name, operation in (("qkv", "qkv"), ("output", "attention output"), ("kernels", "rotary")):
            put(layer.attention, name, Scoped(getattr(layer.attention, name), operation))
        put(layer, "mlp", Scoped(layer.mlp, "mlp"))
    for name, operation in (("embedding", "embedding"), ("norm", "norm"), ("head", "head")):
        put(model, name, Scoped(getattr(model, name), operation))
    for slot in runtime.slots:
        put(slot, "attention", ScopedPlanner(slot.attention))
    put(runtime, "sampler", Scoped(runtime.sampler, "sampling"))
    try:
        yield
    finally:
        for owner, name, part in reversed(kept):
            setattr(owner, name, part)


def _norms(owner: Any) -> list[str]:
    """Return the attribute names of a module's norms."""
    names = getattr(type(owner), "__slots__", None) or vars(owner)
    return [name for name in names if hasattr(getattr(owner, name), "eps")]
