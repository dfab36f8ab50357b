"""The tensors that a trainer announces, and their packing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.weight_updates.tensors import WORDS, TensorSpec, packed, tensor_specs, unpacked
from tests.support.gloo_trainer import packed_broadcast

DTYPES = ("bfloat16", "float16", "float32", "int8", "float8_e4m3fn", "int64")
SHAPES = st.lists(st.integers(0, 5), max_size=3)


@given(st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES), max_size=8), st.sampled_from([0, 1, 16, 100, 2**30]))
def test_buffers_of_the_producer_are_unpacked_to_its_tensors(found: list[tuple[str, list[int]]], size: int) -> None:
    tensors = {}
    for number, (dtype, shape) in enumerate(found):
        data = torch.randint(0, 255, (max(1, int(torch.tensor(shape).prod())) * 8,), dtype=torch.uint8)
        count = int(torch.tensor(shape, dtype=torch.int64).prod()) if shape else 1
        kind = getattr(torch, dtype)
        tensors[str(number)] = data[: count * kind.itemsize].clone().view(kind).view(shape)
    specs = tensor_specs(list(tensors), [dtype for dtype, _ in found], [shape for _, shape in found])
    buffers: list[torch.Tensor] = []
    packed_broadcast(iter(tensors.items()), buffers.append, size)
    chunks = list(packed(specs, size))
    assert [sum(spec.nbytes for spec in chunk) for chunk in chunks] == [len(buffer) for buffer in buffers]
    for chunk, buffer in zip(chunks, buffers, strict=True):
        for spec, tensor in zip(chunk, unpacked(buffer, chunk), strict=True):
            sent = tensors[spec.name]
            assert tensor.shape == sent.shape and tensor.dtype == sent.dtype
            assert torch.equal(tensor.reshape(-1).view(torch.uint8), sent.reshape(-1).view(torch.uint8))


def test_dtypes_have_the_names_of_torch() -> None:
    assert WORDS["bfloat16"] == "BF16" and WORDS["float8_e4m3fn"] == "F8_E4M3"
    assert tensor_specs(["a"], ["torch.float32"], [[2, 3]]) == (TensorSpec("a", "F32", (2, 3)),)


@pytest.mark.parametrize(
    ("names", "dtypes", "shapes"),
    [
        (["a"], [], []),
        (["a"], ["float33"], [[1]]),
        (["a"], ["float32"], [[-1]]),
        (["a"], ["float32"], [[1] * 9]),
        (["a"], ["float32"], [[2**30, 2**30]]),
        (["a", "b", "a"], ["float32"] * 3, [[1]] * 3),
        (["a"] * 100_001, ["float32"] * 100_001, [[1]] * 100_001),
    ],
)
def test_values_that_no_tensor_can_have_are_refused(
    names: list[str], dtypes: list[str], shapes: list[list[int]]
) -> None:
    with pytest.raises(ConfigError):
        tensor_specs(names, dtypes, shapes)
