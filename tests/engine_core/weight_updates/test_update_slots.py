"""Which tensors an update may announce, and what is missing at its end."""

import pytest
import torch
from torch import Tensor

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.loader.slots import WeightSlot
from tandem.engine_core.weight_updates.tensors import TensorSpec
from tandem.engine_core.weight_updates.update_slots import UpdateSlots


def slots() -> list[WeightSlot]:
    """Return those of a projection that is fused from three parts or given whole, and of a tied embedding."""
    fused, embedding = torch.zeros(6, 2), torch.zeros(3, 2)
    parts = [WeightSlot(f"{name}.weight", fused, 0, 2 * index, 2) for index, name in enumerate("qkv")]
    whole = WeightSlot.whole("qkv.weight", fused)
    head = WeightSlot("head.weight", embedding, 0, 0, 3, tied_to="embedding.weight")
    return [*parts, whole, WeightSlot.whole("embedding.weight", embedding), head]


def rename(name: str) -> str | None:
    return None if name.startswith("vision.") else name.removeprefix("text.")


def specs(*names: str, rows: int = 2) -> list[TensorSpec]:
    return [TensorSpec(name, "F32", (rows, 2)) for name in names]


def fill(update: UpdateSlots, names: str) -> None:
    for name in names:
        update.write(f"{name}.weight", torch.ones(2, 2))


def test_half_of_a_fused_projection_is_missing() -> None:
    update = UpdateSlots(slots(), rename)
    update.write("embedding.weight", torch.ones(3, 2))
    fill(update, "qv")
    assert update.missing == ["k.weight"]
    fill(update, "k")
    assert not update.missing


@pytest.mark.parametrize("first", ["q.weight", "v.weight"])
def test_a_projection_is_not_given_whole_and_in_parts(first: str) -> None:
    for order in ([*specs(first), *specs("qkv.weight", rows=6)], [*specs("qkv.weight", rows=6), *specs(first)]):
        for calls in ([order], [order[:1], order[1:]]):
            update = UpdateSlots(slots(), rename)
            for announced in calls[:-1]:
                update.check(announced)
            with pytest.raises(ConfigError) as caught:
                update.check(calls[-1])
            assert first in str(caught.value) and "qkv.weight" in str(caught.value)
            update.check(calls[0][:1])  # A refused call counts for nothing.


def test_two_names_of_one_tensor_are_refused() -> None:
    update = UpdateSlots(slots(), rename)
    update.check(specs("q.weight"))
    update.check(specs("q.weight"))  # Sent again.
    with pytest.raises(ConfigError) as caught:
        update.check(specs("text.q.weight"))
    assert "text.q.weight" in str(caught.value)


@pytest.mark.parametrize("order", [("embedding.weight", "head.weight"), ("head.weight", "embedding.weight")])
def test_tied_tensors_are_equal(order: tuple[str, str]) -> None:
    update = UpdateSlots(slots(), rename)
    update.check(specs(*order, rows=3))
    values: list[Tensor] = [torch.ones(3, 2, dtype=dtype) for dtype in (torch.float32, torch.float64)]
    for name, value in zip(order, values, strict=True):
        update.write(name, value)
    with pytest.raises(ConfigError) as caught:
        update.write(order[1], torch.zeros(3, 2))
    assert all(name in str(caught.value) for name in order)


def test_tensors_that_are_not_read_fit_in_any_shape() -> None:
    update = UpdateSlots(slots(), rename)
    update.check(specs("vision.q.weight", "vision.extra", rows=1000))
    update.write("vision.extra", torch.ones(1000, 2))
