"""Fused output quantization of decode attention, against a separate kernel."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.engine_core.kernels.attention import paged_decode as kernel
from tandem.engine_core.kernels.attention.paged_decode import paged_decode
from tandem.engine_core.kernels.kv_dtype import to_pool
from tandem.engine_core.kernels.quantize import quantize_by_amax
from tandem.engine_core.kernels.quantized_activation import (
    ActivationFormat,
    QuantizedActivation,
    empty_quantized_activation,
)
from tandem.engine_core.kernels.reference.quantized_activation import quantize
from tests.engine_core.kernels.attention.test_newest_token import projected, rotation_of
from tests.engine_core.kernels.attention.test_paged_decode import SMALL, Inputs, inputs
from tests.engine_core.kernels.test_quantize import check
from tests.fakes.launched_kernel import LaunchedKernel
from tests.support.thinned import thinned

# Rows of a tile beyond the heads are divided too, though not stored.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in divide")

FP8, INT8 = torch.float8_e4m3fn, torch.int8
LENGTHS = [1, 16, 17, 70, 40]
HEADS = [(4, 2, 32), (8, 8, 32), (3, 1, 96), (4, 1, 128)]
"""Query heads, KV heads and elements of a head."""


def format_of(dtype: torch.dtype, known: bool, head_dim: int, device: str) -> ActivationFormat:
    """A format with a static scale that some values exceed, or with one scale per head."""
    top = 20 if dtype == INT8 else 200
    return (
        ActivationFormat(dtype, scale=torch.full((1,), 1 / top, device=device))
        if known
        else ActivationFormat(dtype, head_dim)
    )


def stored_in(given: Inputs, dtype: torch.dtype) -> Inputs:
    """The same with query, keys and values in another dtype."""
    keys, values = (part.nan_to_num().to(dtype) for part in (given.keys, given.values))
    return given._replace(query=given.query.to(dtype), keys=keys, values=values)


def attend(given: Inputs, splits: int, **options: Any) -> Tensor:
    return paged_decode(*given, 0.2, splits, tile=SMALL, **options)


def assert_same(found: QuantizedActivation, expected: QuantizedActivation) -> None:
    """Check for equality, except for the last bit of a division on a GPU."""
    check(found, expected)
    if found.values.device.type == "cpu":
        count = found.count
        assert torch.equal(found.values[:count].float(), expected.values[:count].float())
        assert torch.equal(found.scales[:count], expected.scales[:count])


def assert_rounded(given: Inputs, to: ActivationFormat, splits: int, **options: Any) -> None:
    numbers = attend(given, splits, **options).flatten(1)
    quantized = empty_quantized_activation(len(numbers), numbers.shape[1], numbers.dtype, to, numbers.device)
    found = attend(given, splits, quantized=quantized, **options)
    assert found.data_ptr() == quantized.values.data_ptr()
    assert_same(quantized, quantize(numbers, to))


@pytest.mark.parametrize(("shape", "dtype", "known", "splits"), thinned(HEADS, [INT8, FP8], [False, True], [1, 3]))
def test_a_fused_quantization_equals_a_separate_kernel(
    shape: tuple[int, int, int], dtype: torch.dtype, known: bool, splits: int, device: str
) -> None:
    assert_rounded(inputs(LENGTHS, *shape, 8, device), format_of(dtype, known, shape[2], device), splits)


@pytest.mark.parametrize(
    ("query_dtype", "dtype", "known"), thinned([torch.bfloat16, torch.float16], [INT8, FP8], [False, True])
)
def test_values_are_rounded_to_the_querys_dtype_before_quantization(
    query_dtype: torch.dtype, dtype: torch.dtype, known: bool, device: str
) -> None:
    given = stored_in(inputs(LENGTHS, 4, 2, 64, 8, device), query_dtype)
    assert_rounded(given, format_of(dtype, known, 64, device), 1)


@pytest.mark.parametrize(
    ("byte_pool", "turns", "known", "splits"), thinned([False, True], [False, True], [False, True], [1, 3])
)
def test_quantization_follows_rope_and_the_value_scale(
    byte_pool: bool, turns: bool, known: bool, splits: int, device: str
) -> None:
    """Attention with fused RoPE stores the newest keys and values, the same in each call."""
    given = inputs(LENGTHS, 4, 2, 32, 8, device)
    options: dict[str, Any] = {"rotation": rotation_of(given, 32)} if turns else {}
    if turns:
        given = given._replace(query=projected(given, 4))
    if byte_pool:
        keys, values = (to_pool(part.nan_to_num(), FP8) for part in (given.keys, given.values))
        given, options["scales"] = given._replace(keys=keys, values=values), torch.tensor((0.5, 3.0), device=device)
    assert_rounded(given, format_of(INT8, known, 32, device), splits, **options)


@pytest.mark.parametrize(("shape", "splits"), thinned(HEADS, [1, 3]))
def test_amax_is_that_of_each_heads_output(shape: tuple[int, int, int], splits: int, device: str) -> None:
    given = inputs(LENGTHS, *shape, 8, device)
    amax = torch.full((5, shape[0]), torch.nan, device=device)
    found = attend(given, splits, amax=amax)
    assert torch.equal(found, attend(given, splits))
    assert torch.equal(amax, found.abs().amax(2))


@pytest.mark.parametrize("query_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [INT8, FP8])
def test_amax_is_rounded_to_the_querys_dtype_and_gives_row_scales(
    dtype: torch.dtype, query_dtype: torch.dtype, device: str
) -> None:
    given = stored_in(inputs(LENGTHS, 4, 2, 64, 8, device), query_dtype)
    amax = torch.full((5, 4), torch.nan, device=device)
    found = attend(given, 1, amax=amax)
    assert torch.equal(amax, found.float().abs().amax(2))
    numbers, to = found.flatten(1), ActivationFormat(dtype)
    assert_same(quantize_by_amax(numbers, amax, to), quantize(numbers, to))


def rows_of(to: ActivationFormat, count: int = 5) -> QuantizedActivation:
    return empty_quantized_activation(count, 128, torch.float32, to, torch.device("cpu"))


def scattered() -> QuantizedActivation:
    """Rows of heads with token-major scales."""
    rows = rows_of(ActivationFormat(INT8, 32))
    return QuantizedActivation(rows.values, rows.scales.contiguous(), rows.count, rows.dtype)


@pytest.mark.parametrize(
    ("quantized", "amax"),
    [
        (lambda: rows_of(ActivationFormat(INT8)), None),
        (lambda: rows_of(ActivationFormat(INT8, 64)), None),
        (lambda: rows_of(ActivationFormat(INT8, 32), 4), None),
        (scattered, None),
        (None, (5, 2)),
        (None, (4, 4)),
        (lambda: rows_of(ActivationFormat(INT8, 32)), (5, 4)),
    ],
    ids=["a scale a row", "groups of two heads", "fewer rows", "scales of a token", "of groups", "rows", "both"],
)
def test_outputs_of_the_wrong_shape_are_refused(
    quantized: Callable[[], QuantizedActivation] | None, amax: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a no-op kernel, since a real one would write out of bounds."""
    monkeypatch.setattr(kernel, "_paged_decode_kernel", LaunchedKernel())
    given = inputs(LENGTHS, 4, 2, 32, 8, "cpu")
    places = {"quantized": quantized and quantized(), "amax": amax and torch.empty(amax)}
    with pytest.raises(AssertionError):
        attend(given, 1, **places)
