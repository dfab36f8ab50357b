"""The table of sampling fields against the parameters that it describes."""

import math

import pytest

from tandem.protocol.params import SAMPLING_FIELDS, SamplingField, SamplingParams


def test_every_field_is_a_parameter_with_its_neutral_value_as_default() -> None:
    params = SamplingParams(1)
    assert {field.name: getattr(params, field.name) for field in SAMPLING_FIELDS} == {
        field.name: field.neutral for field in SAMPLING_FIELDS
    }


def test_neutral_values_neither_truncate_nor_penalize() -> None:
    params = SamplingParams(1, **{field.name: field.neutral for field in SAMPLING_FIELDS})
    assert not (params.truncates or params.penalizes or params.greedy)


@pytest.mark.parametrize("field", SAMPLING_FIELDS, ids=lambda field: field.name)
def test_a_field_accepts_its_bounds_and_nothing_beyond(field: SamplingField) -> None:
    assert field.accepts(field.minimum) is not field.above_minimum
    assert field.accepts(field.maximum) and field.accepts(field.neutral)
    outside = (field.minimum - 1, field.maximum + 1, math.nan, math.inf, -math.inf)
    assert not any(field.accepts(value) for value in outside)


@pytest.mark.parametrize(
    ("name", "text"),
    [("temperature", "0 to 2"), ("top_p", "above 0 and at most 1"), ("top_k", "0 to 2147483647")],
)
def test_bounds_are_described_in_words(name: str, text: str) -> None:
    (field,) = (field for field in SAMPLING_FIELDS if field.name == name)
    assert field.describe_bounds() == text
