"""The file of API keys with names, rights and limits."""

import os
import re
from operator import add
from pathlib import Path
from string import ascii_letters, digits

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.frontend.access.api_key import ApiKey, KeyLimits, Right, digest_of
from tandem.frontend.access.key_file import KnownKeys, key_table, load_key_file

ALNUM = ascii_letters + digits
A, B = (digest_of(secret).hex() for secret in (b"a", b"b"))
ALICE = f'[[key]]\nname = "alice"\nsha256 = "{A}"\n'
TWIN = f'[[key]]\nname = "alice"\nsha256 = "{B}"\n'


def write(folder: Path, text: str, mode: int = 0o600) -> Path:
    file = folder / "keys.toml"
    file.write_text(text)
    file.chmod(mode)
    return file


def test_fields_that_are_left_out_give_the_right_to_generate_and_no_limits_but_that_of_priority(tmp_path: Path) -> None:
    (key,) = load_key_file(write(tmp_path, ALICE))
    assert key == ApiKey("alice", digest_of(b"a"), frozenset((Right.GENERATE,)), KeyLimits(max_priority=0), "@alice")


@given(
    st.builds(add, st.sampled_from(ALNUM), st.text(f"{ALNUM}._-", max_size=20)).filter(
        lambda name: not name.startswith("key-")
    ),
    st.frozensets(st.sampled_from(Right), min_size=1),
    st.builds(
        KeyLimits, st.none() | st.integers(1, 2**31 - 1), st.none() | st.integers(1, 2**31 - 1), st.integers(-100, 100)
    ),
)
def test_a_printed_table_reads_as_the_same_key(
    tmp_path_factory: pytest.TempPathFactory, name: str, rights: frozenset[Right], limits: KeyLimits
) -> None:
    key = ApiKey(name, digest_of(b"x"), rights, limits, "@" + name)
    assert load_key_file(write(tmp_path_factory.getbasetemp(), key_table(key))) == [key]


def test_two_keys_may_share_a_name_if_rights_and_limits_agree(tmp_path: Path) -> None:
    limits = 'rights = ["admin", "generate"]\nmax_concurrent = 2\n'
    old, new = load_key_file(write(tmp_path, ALICE + limits + TWIN + limits))
    assert old.name == new.name and old.owner == new.owner and old.digest != new.digest


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "[[key]] table; `tandem api-key NAME`"),
        ("[key]\nname = 'x'\n", "no [[key]] table"),
        ("key = 3\n", "no [[key]] table"),
        ("[[key\n", "valid TOML"),
        ("[[keys]]\n" + ALICE, "'keys' "),
        (ALICE + "max_concurent = 3\n", "[[key]] table 1 (name 'alice'): the field 'max_concurent'"),
        (ALICE + "[[key]]\nname = 'b'\n", "[[key]] table 2 (name 'b'): sha256 "),
        (f"[[key]]\nsha256 = '{A}'\n", "[[key]] table 1: name "),
        (f"[[key]]\nname = 'a b'\nsha256 = '{A}'\n", "name is 'a b'; use 1 to 64"),
        (f"[[key]]\nname = 3\nsha256 = '{A}'\n", "name is 3;"),
        (f"[[key]]\nname = 'key-0123abcd'\nsha256 = '{A}'\n", "keys of --api-key;"),
        ("[[key]]\nname = 'a'\nsha256 = 'sk-secret'\n", "64 hex digits"),
        (
            f"[[key]]\nname = 'a'\nsha256 = '{digest_of(b'').hex()}'\n",
            "empty text; `tandem",
        ),
        (ALICE + "rights = []\n", "rights must be a list"),
        (ALICE + "rights = 'admin'\n", "rights must be a list"),
        (ALICE + "rights = ['root']\n", '\'root\'; use "generate", "metrics", "admin"'),
        (ALICE + "rights = [['admin']]\n", "rights has ['admin'];"),
        (
            ALICE + "max_concurrent = 0\n",
            "max_concurrent is 0; give a whole number from 1 to 2147483647",
        ),
        (ALICE + "max_concurrent = true\n", "max_concurrent is True;"),
        (ALICE + "tokens_per_minute = 1.5\n", "tokens_per_minute is 1.5;"),
        (ALICE + "max_priority = 101\n", "max_priority is 101; give a whole number from -100 to 100"),
        (
            ALICE + ALICE.replace("alice", "bob"),
            "[[key]] table 2 (name 'bob'): sha256 is that of table 1 ('alice')",
        ),
        (
            ALICE + TWIN + "max_concurrent = 3\n",
            "table 1 has the same name",
        ),
        (ALICE + TWIN + "rights = ['admin']\n", "table 1 has the same name"),
    ],
)
def test_a_malformed_file_is_refused_with_its_name_the_table_and_a_remedy(
    tmp_path: Path, text: str, message: str
) -> None:
    file = write(tmp_path, text)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        load_key_file(file)
    assert str(caught.value).startswith(f"--api-keys {file}")
    assert "sk-secret" not in str(caught.value)


def _denied(*_: object, **__: object) -> None:
    raise PermissionError(13, "Permission denied")


def test_a_file_that_others_may_write_or_that_is_missing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for mode in (0o620, 0o602, 0o666):
        with pytest.raises(ValueError, match=rf"\b{mode:04o}\b.*chmod"):
            load_key_file(write(tmp_path, ALICE, mode))
    assert load_key_file(write(tmp_path, ALICE, 0o644))
    with pytest.raises(ValueError, match=r"\bnone\b.*api-key"):
        load_key_file(tmp_path / "none")
    monkeypatch.setattr("os.open", _denied)
    with pytest.raises(ValueError, match=rf"\b{os.geteuid()}\b"):
        load_key_file(tmp_path / "keys.toml")
    monkeypatch.undo()
    with pytest.raises(ValueError, match="directory"):
        load_key_file(tmp_path)


def test_a_pipe_is_refused_without_waiting_for_its_writer(tmp_path: Path) -> None:
    pipe = tmp_path / "keys.toml"
    os.mkfifo(pipe)
    with pytest.raises(ValueError, match=re.escape(str(pipe))):
        load_key_file(pipe)


def test_each_key_is_compared_with_those_of_its_digest_or_name_only() -> None:
    compared = 0

    class Digest(bytes):
        __hash__ = bytes.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return bytes.__eq__(self, other)  # type: ignore[arg-type]

    known = KnownKeys()
    for number in range(500):
        known.add(ApiKey(f"key{number}", Digest(digest_of(b"%d" % number))), number)
    assert len(known.keys) == 500 and compared < 500


def test_a_file_may_have_a_byte_order_mark(tmp_path: Path) -> None:
    file = write(tmp_path, ALICE)
    file.write_bytes(ALICE.replace("\n", "\r\n").encode("utf-8-sig"))
    assert [key.name for key in load_key_file(file)] == ["alice"]
    file.write_bytes(ALICE.encode("utf-16"))
    with pytest.raises(ValueError, match="UTF-16"):
        load_key_file(file)
