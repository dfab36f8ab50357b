"""The names under which a server offers its model."""

import pytest

from tandem.frontend.errors import ApiError
from tandem.frontend.request.served_names import ServedNames


@pytest.mark.parametrize(
    ("names", "listed", "known", "unknown"),
    [
        ((), ("own",), ["own"], ["other", "*"]),
        (("a", "b"), ("a", "b"), ["a", "b"], ["own", "c", "A"]),
        (("a", "*"), ("a",), ["a", "own", "claude-opus-4-8"], []),
        (("*",), ("own",), ["own", "anything"], []),
    ],
)
def test_names_are_listed_and_checked(
    names: tuple[str, ...], listed: tuple[str, ...], known: list[str], unknown: list[str]
) -> None:
    served = ServedNames(names)
    assert served.listed("own") == listed
    for name in known:
        assert served.resolve(name, "own") == name
    for absent in (None, ""):
        assert served.resolve(absent, "own") == listed[0]
    for name in unknown:
        with pytest.raises(ApiError) as caught:
            served.resolve(name, "own")
        assert (caught.value.status, caught.value.param, caught.value.code) == (404, "model", "model_not_found")


def test_an_unknown_name_is_repeated_only_in_part() -> None:
    with pytest.raises(ApiError) as caught:
        ServedNames().resolve("x" * 100_000, "own")
    assert len(caught.value.message) < 300
