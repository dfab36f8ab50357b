"""The keys of a server while it runs."""

import asyncio
import io
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from tandem.frontend.access.api_key import ApiKey, digest_of
from tandem.frontend.access.api_keys import ApiKeys
from tandem.frontend.access.key_file import key_table
from tandem.protocol.logs import AUDIT_LOGGER, LineHandler
from tests.support.api_keys import make_key, write_keys


def write(file: Path, *names: str) -> None:
    """Write a file of these keys; each is its own name."""
    write_keys(file, *map(make_key, names))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    write(path, "alice", "bob")
    return path


def test_a_server_without_keys_needs_none(file: Path) -> None:
    assert not ApiKeys().is_required
    assert ApiKeys(("a",)).is_required and ApiKeys((), file).is_required
    assert ApiKeys().reload()


def reloaded(caplog: pytest.LogCaptureFixture) -> dict[str, Any]:
    """Return the fields of the only line of the audit log."""
    handler = LineHandler("frontend-0", "json", io.StringIO())
    (line,) = [handler.format(record) for record in caplog.records if record.name == AUDIT_LOGGER]
    found: dict[str, Any] = json.loads(line)
    return found


def test_a_changed_file_is_followed(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    keys = ApiKeys(("given",), file)
    keys.load()
    before = keys.ring
    keys.refresh()
    assert keys.ring is before
    write(file, "bob", "carol")
    keys.refresh()
    assert [keys.ring.find(name) is not None for name in (b"given", b"alice", b"bob", b"carol")] == [
        True,
        False,
        True,
        True,
    ]
    fields = reloaded(caplog)
    assert fields["keys"] == 3
    assert ([name.split(" (")[0] for name in fields["added"]], fields["removed"][0][:7]) == (["carol"], "alice (")


@pytest.mark.parametrize("text", ["", "[[key]]", None])
def test_a_broken_file_keeps_the_keys_in_force_until_it_is_mended(
    file: Path, caplog: pytest.LogCaptureFixture, text: str | None
) -> None:
    keys = ApiKeys((), file)
    keys.load()
    if text is None:
        file.unlink()
    else:
        file.write_text(text)
    for _ in range(3):
        keys.refresh()
    assert keys.ring.find(b"alice") is not None
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 1
    assert not keys.reload()
    write(file, "carol")
    keys.refresh()
    assert keys.ring.find(b"alice") is None and keys.ring.find(b"carol") is not None


def test_a_mended_mode_is_noticed(file: Path) -> None:
    keys = ApiKeys((), file)
    keys.load()
    file.write_text(key_table(ApiKey("carol", digest_of(b"carol"))))
    file.chmod(0o666)
    keys.refresh()
    assert keys.ring.find(b"carol") is None
    file.chmod(0o600)
    keys.refresh()
    assert keys.ring.find(b"carol") is not None


def test_a_reload_is_read_in_another_thread_and_several_in_a_row_are_one(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers: list[threading.Thread] = []
    may_end = threading.Event()

    def slow_load(_: Path) -> list[ApiKey]:
        readers.append(threading.current_thread())
        assert may_end.wait(30)
        return [make_key("carol")]

    async def reload_twice(keys: ApiKeys) -> None:
        watching = asyncio.create_task(keys.watch())
        keys.reload_soon()
        keys.reload_soon()
        async with asyncio.timeout(120):
            while not readers:  # the loop goes on while the file is read
                await asyncio.sleep(0.01)
            may_end.set()
            while keys.ring.find(b"carol") is None:
                await asyncio.sleep(0.01)
        watching.cancel()

    keys = ApiKeys((), file)
    keys.load()
    monkeypatch.setattr("tandem.frontend.access.api_keys.load_key_file", slow_load)
    asyncio.run(reload_twice(keys))
    assert len(readers) == 1 and readers[0] is not threading.current_thread()


def test_a_line_of_the_log_names_some_of_many_keys(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    keys = ApiKeys((), file)
    keys.load()
    write(file, "alice", *(f"many{number:03}" for number in range(100)))
    keys.refresh()
    fields = reloaded(caplog)
    assert len(fields["added"]) == 33
    assert fields["added"][31].startswith("many031 (")
    assert (fields["added"][32], fields["removed"][0][:5]) == ("68 more", "bob (")


def test_a_key_of_the_file_that_is_also_given_otherwise_is_refused(file: Path) -> None:
    with pytest.raises(ValueError, match=r"\b2\b.*'bob'.*--api-key\b"):
        ApiKeys(("bob",), file).load()
