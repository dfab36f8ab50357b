"""Sources of API keys without names."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

import pytest

from tandem.frontend.access.key_sources import ENVIRONMENT, add_key_arguments, api_keys, key_environment


def parsed(*argv: str) -> Namespace:
    parser = ArgumentParser()
    add_key_arguments(parser.add_argument_group("keys"))
    return parser.parse_args(argv)


def test_api_keys_of_all_sources_are_merged_without_duplicates(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("file-1\n\n  file-2\nflag-1\n")
    arguments = parsed("--api-key", "flag-1", "--api-key", "flag-2", "--api-key-file", str(file))
    environ = {ENVIRONMENT: " env-1, env-2\n"}
    assert api_keys(arguments, environ) == ("flag-1", "flag-2", "env-1", "env-2", "file-1", "file-2")
    assert api_keys(parsed(), {}) == api_keys(parsed(), {ENVIRONMENT: ""}) == ()


def test_api_keys_pass_to_another_process_in_the_environment() -> None:
    environ = key_environment(("a", "b"), {"PATH": "/bin", ENVIRONMENT: "old"})
    assert environ["PATH"] == "/bin"
    assert api_keys(parsed(), environ) == ("a", "b")
    assert api_keys(parsed(), key_environment((), environ)) == ()


@pytest.mark.parametrize("key", ["", "two words", "a,b", "naïve", "x" * 513, "tab\t"])
def test_a_malformed_key_is_refused_without_being_printed(key: str) -> None:
    with pytest.raises(ValueError, match="ASCII") as caught:
        api_keys(parsed("--api-key", key), {})
    assert not key or key not in str(caught.value)


def test_a_key_file_without_keys_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("\n")
    for path, reason in (
        (empty, "contains no key"),
        (tmp_path / "none", "cannot be read"),
        (tmp_path, "cannot be read"),
    ):
        with pytest.raises(ValueError, match=reason):
            api_keys(parsed("--api-key-file", str(path)), {})


def test_a_key_file_may_have_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes("one\r\ntwo\r\n".encode("utf-8-sig"))
    assert api_keys(parsed("--api-key-file", str(file)), {}) == ("one", "two")
    file.write_bytes("one\r\n".encode("utf-16"))
    with pytest.raises(ValueError, match="UTF-16"):
        api_keys(parsed("--api-key-file", str(file)), {})
