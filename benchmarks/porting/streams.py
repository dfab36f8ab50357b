"""Residual streams of a model at each layer, in Tandem and transformers.

The points have the same names in both: input of the first layer, output of each attention and MLP, final norm, logits.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.porting.local_engine import LocalEngine, small_options
from benchmarks.porting.reference import load_reference

Streams = dict[str, Tensor]
"""Tensors by point, [T, width] in float32 on the host, in the order of computation."""
NEEDED = ("layers", "norm")


class StructureError(Exception):
    """Raised for a model not built as described in `engine_core/models/README.md`."""


class Tap:
    """Proxy of a module that passes its outputs to a function."""

    def __init__(self, part: Any, see: Callable[[Any], None]) -> None:
        self._part = part
        self._see = see

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._part(*args, **kwargs)
        self._see(result)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)


class Recorder:
    """Parts of streams, by point."""

    def __init__(self) -> None:
        self._parts: dict[str, list[Tensor]] = {}

    def add(self, point: str, tensor: Tensor) -> None:
        flat = tensor.detach().reshape(-1, tensor.shape[-1])
        self._parts.setdefault(point, []).append(flat.to("cpu", torch.float32, copy=True))

    def streams(self) -> Streams:
        return {point: torch.cat(parts) for point, parts in self._parts.items()}


def after(layer: int) -> str:
    """Return the name of the point after a layer, -1 for the embedding."""
    return "embedding" if layer < 0 else f"layer {layer} mlp"


def of_tandem(folder: Path, ids: Sequence[int], *, device: str, dtype: str, singles: int = 0) -> Streams:
    """Run a model folder in Tandem.

    The last `singles` tokens are computed one per step, the others in one step.
    """
    engine = LocalEngine.open(small_options(folder, device, dtype, positions=len(ids)))
    recorder = Recorder()
    with tapped(engine.runtime.model, recorder):
        logits = engine.logits(ids, singles)
    recorder.add("logits", logits)
    return recorder.streams()


@contextmanager
def tapped(model: Any, recorder: Recorder) -> Iterator[None]:
    """Record the streams of a model of `engine_core/models`.

    Raises StructureError if its layers have no `attention` and `mlp` that return the residual stream.
    """
    layers, norm = (getattr(model, name, None) for name in NEEDED)
    if not layers or norm is None or not all(hasattr(one, "attention") and hasattr(one, "mlp") for one in layers):
        raise StructureError(
            f"{type(model).__name__} must have `layers`, each with `attention` and `mlp`, and `norm`; "
            "see engine_core/models/README.md"
        )
    kept = [(layer.attention, layer.mlp) for layer in layers]
    try:
        for index, layer in enumerate(layers):
            layer.attention = Tap(layer.attention, _see_stream(recorder, after(index - 1)))
            layer.mlp = Tap(layer.mlp, _see_stream(recorder, f"layer {index} attention"))
        model.norm = Tap(norm, _see_norm(recorder, len(layers)))
        yield
    finally:
        model.norm = norm
        for layer, (attention, mlp) in zip(layers, kept, strict=True):
            layer.attention, layer.mlp = attention, mlp


def _see_stream(recorder: Recorder, point: str) -> Callable[[Any], None]:
    # The norm before the next part adds the update to the stream and returns both.
    return lambda result: recorder.add(point, result[1])


def _see_norm(recorder: Recorder, layers: int) -> Callable[[Any], None]:
    def see(result: tuple[Tensor, Tensor]) -> None:
        recorder.add(after(layers - 1), result[1])
        recorder.add("final norm", result[0])

    return see


def of_transformers(folder: Path, ids: Sequence[int], *, device: str, dtype: str) -> Streams:
    """Run a model folder in transformers, all tokens in one pass."""
    model = load_reference(folder, device, dtype)
    recorder = Recorder()
    decoder = model.get_decoder()
    for index, layer in enumerate(decoder.layers):
        _watch_layer(layer, index, recorder)
    decoder.norm.register_forward_hook(lambda _, args, result: _see_norm(recorder, index + 1)((result, args[0])))
    with torch.inference_mode():
        recorder.add("logits", model(torch.tensor([list(ids)], device=device)).logits)
    return recorder.streams()


def _watch_layer(layer: Any, index: int, recorder: Recorder) -> None:
    entered: list[Tensor] = []

    def enter(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entered[:] = [args[0] if args else kwargs["hidden_states"]]
        recorder.add(after(index - 1), entered[0])

    def attended(_: Any, __: Any, result: Any) -> None:
        update = result[0] if isinstance(result, tuple) else result
        recorder.add(f"layer {index} attention", entered[0] + update)

    layer.register_forward_pre_hook(enter, with_kwargs=True)
    # With post-norms (Gemma, OLMo 2), a layer adds the output of the norm after attention.
    part = layer.post_attention_layernorm if hasattr(layer, "post_feedforward_layernorm") else layer.self_attn
    part.register_forward_hook(attended)
