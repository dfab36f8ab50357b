"""Stop matcher against a reference that sees the whole text, over all divisions into chunks."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.frontend.generation.stop_strings import StopMatcher


def reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Return the text before the stop string, and the stop string that ends first, of several the longest."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            longest = max(matches, key=len)
            return text[: end - len(longest)], longest
    return text, None


def run(chunks: list[str], stops: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    shown = ""
    for chunk in chunks:
        safe, stop = matcher.push(chunk)
        shown += safe
        if stop is not None:
            return shown, stop
    return shown + matcher.flush(), None


def cuts(text: str) -> list[list[str]]:
    """Yield every division of a text into non-empty chunks."""
    ways = []
    for marks in itertools.product((False, True), repeat=max(0, len(text) - 1)):
        chunks, start = [], 0
        for position, cut in enumerate(marks, 1):
            if cut:
                chunks.append(text[start:position])
                start = position
        ways.append([*chunks, text[start:]])
    return ways


@pytest.mark.parametrize(
    "stops", [["ab"], ["aab"], ["abab"], ["a", "ab"], ["ab", "b"], ["aba", "bb"], ["abb", "b"], ["aa", "aba", "bab"]]
)
def test_every_short_text_matches_in_every_chunking(stops: list[str]) -> None:
    for length in range(1, 7):
        for letters in itertools.product("ab", repeat=length):
            text = "".join(letters)
            expected = reference(text, stops)
            for chunks in cuts(text):
                assert run(chunks, stops) == expected, (chunks, stops)


alphabet = st.text("abc\n", min_size=1, max_size=5)


@given(st.lists(st.text("abc\n", max_size=6), max_size=12), st.lists(alphabet, min_size=1, max_size=4))
def test_any_chunking_matches_like_the_whole_text(chunks: list[str], stops: list[str]) -> None:
    assert run(chunks, stops) == reference("".join(chunks), stops)


@given(st.lists(st.text("abc\n", max_size=6), max_size=12), st.lists(alphabet, min_size=1, max_size=4))
def test_exactly_the_possible_stop_prefix_is_held_back(chunks: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = seen = ""
    for chunk in chunks:
        safe, stop = matcher.push(chunk)
        if stop is not None:
            return
        shown, seen = shown + safe, seen + chunk
        held = seen[len(shown) :]
        longest = max((size for stop in stops for size in range(len(stop)) if seen.endswith(stop[:size])), default=0)
        assert len(held) == longest


def test_a_fresh_matcher_starts_over() -> None:
    used = StopMatcher(["ab"])
    used.push("a")
    fresh = used.fresh()
    assert fresh.push("b") == ("b", None)
    assert fresh.push("ab") == ("", "ab")


def test_a_repetitive_stop_string_of_a_thousand_characters_matches() -> None:
    stop = "a" * 999 + "b"
    assert run(["a"] * 5000 + ["b", "never shown"], [stop]) == ("a" * 4001, stop)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        StopMatcher(["a", ""])


def test_a_matcher_without_stop_strings_passes_all_text() -> None:
    assert StopMatcher([]).push("text") == ("text", None)
