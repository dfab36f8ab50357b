"""Versions of the weights in the usage of a request."""

import msgspec
import pytest

from tandem.frontend.generation.usage import Usage, WeightSpan, summarize, weight_spans


@pytest.mark.parametrize(
    ("versions", "num_tokens", "spans"),
    [
        ([("1", 0)], 5, [("1", 0, 5)]),
        ([("1", 0), ("2", 3)], 5, [("1", 0, 3), ("2", 3, 5)]),
        ([("1", 0), ("2", 0)], 5, [("2", 0, 5)]),
        ([("1", 0), ("2", 3), ("3", 3)], 5, [("1", 0, 3), ("3", 3, 5)]),
        ([("1", 0), ("2", 9)], 5, [("1", 0, 5)]),
        ([("1", 0)], 0, []),
    ],
)
def test_spans_cover_the_tokens_of_a_choice(
    versions: list[tuple[str, int]], num_tokens: int, spans: list[tuple[str, int, int]]
) -> None:
    assert weight_spans(1, versions, num_tokens) == [WeightSpan(1, *span) for span in spans]


def test_spans_are_reported_if_tokens_have_several_versions() -> None:
    one, other, rest = WeightSpan(0, "1", 0, 5), WeightSpan(1, "1", 0, 4), WeightSpan(1, "2", 0, 4)
    assert summarize([one, other], "2") == ("1", msgspec.UNSET)
    assert summarize([one, rest], "2") == ("2", [one, rest])
    assert summarize([], "2") == ("2", msgspec.UNSET)


def test_usage_has_no_version_unless_weights_can_change() -> None:
    assert "weight" not in msgspec.json.encode(Usage(1, 2, 3)).decode()
    usage = Usage(1, 2, 3, weight_version="4", weight_versions=[WeightSpan(0, "4", 0, 2)])
    assert usage.version_fields == {"weight_version": "4", "weight_versions": [WeightSpan(0, "4", 0, 2)]}
