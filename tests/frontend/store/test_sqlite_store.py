"""The store of responses in SQLite, against a dictionary and at its bounds."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandem.frontend.store import sqlite_file
from tandem.frontend.store.sqlite_file import FILE_NAME, SCHEMA_VERSION, create_tables, open_store
from tandem.frontend.store.sqlite_store import SIZE, SqliteStore
from tandem.frontend.store.store import ConversationTooLargeError, StoreError, StoreLimits
from tandem.frontend.store.stored_response import StoredItem
from tests.fakes.clock import FakeClock
from tests.support.effort import machine
from tests.support.stored import stored

MEBIBYTE = 2**20
ANY = 2**30


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(tmp_path: Path, clock: FakeClock) -> Iterator[SqliteStore]:
    opened = open_store(tmp_path, StoreLimits(MEBIBYTE, 100.0), clock)
    yield opened
    opened.close()


def names(items: list[StoredItem] | None) -> list[str] | None:
    return None if items is None else [item.id for item in items]


def test_response_is_returned_as_it_was_stored(store: SqliteStore) -> None:
    first = stored("r1", said=("q1", "q2"))
    second = stored("r2", "r1", answered=("a", "b"))
    store.save("me", first)
    store.save("me", second)
    assert store.get("me", "r1") == first
    assert store.get("me", "r2") == second
    assert store.get("me", "r3") is None


def test_conversation_has_the_items_of_all_earlier_responses_in_order(store: SqliteStore) -> None:
    for response in (stored("r1"), stored("other"), stored("r2", "r1"), stored("side", "r1"), stored("r3", "r2")):
        store.save("me", response)
    assert names(store.conversation("me", "r3", ANY)) == ["r1-q", "r1-a", "r2-q", "r2-a", "r3-q", "r3-a"]
    assert names(store.conversation("me", "side", ANY)) == ["r1-q", "r1-a", "side-q", "side-a"]
    assert store.conversation("me", "r4", ANY) is None
    assert store.conversation("me", "r1", ANY) == [StoredItem("r1-q", b"r1-q"), StoredItem("r1-a", b"r1-a")]


def test_conversation_beyond_the_readers_bound_is_not_loaded(store: SqliteStore) -> None:
    store.save("me", stored("r1", size=1000))
    with pytest.raises(ConversationTooLargeError) as caught:
        store.conversation("me", "r1", 1999)
    assert caught.value.size == 2000
    assert names(store.conversation("me", "r1", 2000)) == ["r1-q", "r1-a"]


def test_objects_of_another_owner_do_not_exist(store: SqliteStore) -> None:
    store.save("me", stored("r1"))
    assert store.get("you", "r1") is None
    assert store.conversation("you", "r1", ANY) is None
    assert store.find_items("you", ["r1-q"]) == {}
    assert not store.delete("you", "r1")
    with pytest.raises(StoreError, match="r1 was deleted"):
        store.save("you", stored("r2", "r1"))
    assert store.get("me", "r1") is not None


def test_items_are_found_by_their_id_and_the_newest_wins(store: SqliteStore) -> None:
    store.save("me", stored("r1"))
    again = stored("r2")
    store.save("me", type(again)("r2", b"", (StoredItem("r1-a", b"newer"),)))
    assert store.find_items("me", ["r1-q", "r1-a", "none"]) == {
        "r1-q": StoredItem("r1-q", b"r1-q"),
        "r1-a": StoredItem("r1-a", b"newer"),
    }


def test_deleted_response_is_gone_but_its_successors_go_on(store: SqliteStore) -> None:
    for response in (stored("r1"), stored("r2", "r1"), stored("r3", "r2")):
        store.save("me", response)
    assert store.delete("me", "r1")
    assert not store.delete("me", "r1")
    assert store.get("me", "r1") is None
    assert store.find_items("me", ["r1-q"]) == {}
    assert names(store.conversation("me", "r3", ANY)) == ["r1-q", "r1-a", "r2-q", "r2-a", "r3-q", "r3-a"]
    with pytest.raises(StoreError, match="r1 was deleted"):
        store.save("me", stored("r4", "r1"))
    assert store.delete("me", "r3")
    assert names(store.conversation("me", "r2", ANY)) == ["r1-q", "r1-a", "r2-q", "r2-a"]
    assert store.delete("me", "r2")
    assert rows(store) == (0, 0, 0)


def rows(store: SqliteStore) -> tuple[int, ...]:
    """Count the rows of each table."""
    tables = ("threads", "responses", "items")
    return tuple(store._connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in tables)


def test_conversation_expires_as_a_whole_after_its_last_response(store: SqliteStore, clock: FakeClock) -> None:
    store.save("me", stored("r1"))
    clock.now += 90
    store.save("me", stored("r2", "r1"))
    clock.now += 100
    assert store.get("me", "r1") is not None
    clock.now += 1
    assert store.get("me", "r1") is None
    assert store.get("me", "r2") is None
    assert store.conversation("me", "r2", ANY) is None
    assert store.find_items("me", ["r2-a"]) == {}
    assert not store.delete("me", "r2")
    store.save("me", stored("r3"))
    assert rows(store) == (1, 1, 2)


def test_conversations_unused_for_longest_make_room(store: SqliteStore, clock: FakeClock) -> None:
    for number in range(8):
        clock.now += 1
        store.save("me", stored(f"r{number}", size=50_000))
    clock.now += 1
    store.save("me", stored("r0-next", "r0", size=5_000))
    for number in range(8, 13):
        clock.now += 1
        store.save("me", stored(f"r{number}", size=50_000))
    kept = [f"r{number}" for number in range(13) if store.get("me", f"r{number}")]
    assert "r0" in kept
    assert "r1" not in kept
    assert kept[-1] == "r12"
    assert store.get("me", "r0-next") is not None
    assert len(kept) >= 6


def test_conversation_that_alone_exceeds_the_bound_is_refused_and_kept(store: SqliteStore) -> None:
    store.save("me", stored("r1", size=400_000))
    with pytest.raises(StoreError, match="raise --store-size"):
        store.save("me", stored("r2", "r1", size=200_000))
    assert store.get("me", "r1") is not None
    assert store.get("me", "r2") is None
    with pytest.raises(StoreError, match="raise --store-size"):
        store.save("me", stored("r3", size=600_000))
    store.save("me", stored("r4"))
    assert rows(store) == (2, 2, 4)


def sizes(store: SqliteStore) -> list[tuple[int, int]]:
    """Return the bytes of each thread as it states them, and as its responses add up."""
    each = f"SELECT t.bytes, (SELECT sum({SIZE}) FROM responses r WHERE r.thread = t.num) FROM threads t"
    return store._connection.execute(each).fetchall()


def test_a_key_beyond_its_quota_makes_room_among_its_own(tmp_path: Path, clock: FakeClock) -> None:
    store = open_store(tmp_path, StoreLimits(16 * MEBIBYTE, 100.0, max_owner_bytes=MEBIBYTE), clock)
    store.save("other", stored("o1", size=300_000))
    for number in range(3):
        clock.now += 1
        store.save("me", stored(f"r{number}", size=300_000))
    assert [store.get("me", f"r{number}") is not None for number in range(3)] == [False, False, True]
    assert store.get("other", "o1") is not None, "another key's conversation is older and stays"
    clock.now += 1
    with pytest.raises(StoreError, match=r"an API key may store 1048576: raise --store-size-per-key"):
        store.save("me", stored("r2-next", "r2", size=300_000))
    assert store.get("me", "r2") is not None
    assert store.delete("me", "r2")
    store.save("me", stored("r3", size=500_000))
    store.close()


def test_file_shrinks_when_much_is_deleted(tmp_path: Path) -> None:
    store = open_store(tmp_path, StoreLimits(64 * MEBIBYTE))

    def file_size() -> int:
        store._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return (tmp_path / FILE_NAME).stat().st_size

    for number in range(8):
        store.save("me", stored(f"r{number}", size=500_000))
    full = file_size()
    for number in range(8):
        assert store.delete("me", f"r{number}")
    for number in range(8):
        store.save("me", stored(f"small{number}"))
    assert full > 8_000_000
    assert file_size() < 2 * MEBIBYTE
    assert store.get("me", "small7") == stored("small7")
    store.close()


def test_store_of_the_first_version_is_taken_over(tmp_path: Path) -> None:
    open_store(tmp_path, StoreLimits()).close()
    with sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None) as old:
        for statement in (
            "DROP INDEX threads_owner", "ALTER TABLE threads DROP COLUMN owner",
            "ALTER TABLE threads DROP COLUMN bytes", "PRAGMA journal_mode = DELETE", "PRAGMA auto_vacuum = 0", "VACUUM",
            "PRAGMA user_version = 1", "INSERT INTO threads VALUES (1, 1e12)",
            "INSERT INTO responses(id, owner, thread, body) VALUES ('r1', 'me', 1, 'body of r1')",
            "INSERT INTO items(response, side, id, body) VALUES (1, 0, 'r1-q', CAST('r1-q' AS BLOB))",
        ):  # fmt: skip
            old.execute(statement)
    old.close()
    store = open_store(tmp_path, StoreLimits())
    assert names(store.conversation("me", "r1", ANY)) == ["r1-q"]
    store.save("me", stored("r2", "r1"))
    assert [said for said, _ in sizes(store)] == [added for _, added in sizes(store)]
    values = [store._connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("user_version", "auto_vacuum")]
    assert values == [SCHEMA_VERSION, 2]
    store.close()


def test_full_disk_undoes_the_write_and_leaves_the_rest(tmp_path: Path) -> None:
    store = open_store(tmp_path, StoreLimits(64 * MEBIBYTE))
    store.save("me", stored("r1"))
    # The quota of SQLite fails in the same way as a disk without room.
    store._connection.execute("PRAGMA max_page_count = 30")
    with pytest.raises(StoreError, match="full"):
        store.save("me", stored("r2", size=200_000))
    assert store.get("me", "r2") is None
    assert store.get("me", "r1") == stored("r1")
    store._connection.execute("PRAGMA max_page_count = 10000")
    store.save("me", stored("r2", size=200_000))
    store.close()
    with pytest.raises(StoreError):
        store.get("me", "r1")


def test_deleted_text_is_overwritten_in_the_file(tmp_path: Path, clock: FakeClock) -> None:
    store = open_store(tmp_path, StoreLimits(MEBIBYTE, 100.0), clock)
    for name, size in (("SECRET-SMALL", 0), ("SECRET-LARGE", 100_000), ("kept", 0)):
        store.save("me", stored(name, size=size))

    def written() -> bytes:
        store._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return (tmp_path / FILE_NAME).read_bytes()

    assert b"SECRET-SMALL" in written()
    assert store.delete("me", "SECRET-SMALL")
    assert store.delete("me", "SECRET-LARGE")
    assert b"SECRET" not in written()
    clock.now += 101
    store.save("me", stored("new"))
    assert b"kept" not in written(), "what has expired is overwritten when it makes room"
    store.close()


def test_store_survives_its_process(tmp_path: Path) -> None:
    first = open_store(tmp_path / "new" / "state", StoreLimits())
    first.save("me", stored("r1"))
    first.close()
    second = open_store(tmp_path / "new" / "state", StoreLimits())
    assert second.get("me", "r1") == stored("r1")
    second.close()
    assert (tmp_path / "new" / "state").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "new" / "state" / FILE_NAME).stat().st_mode & 0o777 == 0o600


def test_files_that_are_not_this_servers_store_are_refused(tmp_path: Path) -> None:
    def written(name: str, *statements: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        with sqlite3.connect(folder / FILE_NAME) as connection:
            for statement in statements:
                connection.execute(statement)
        connection.close()
        return folder

    open_store(tmp_path / "newer", StoreLimits()).close()
    with sqlite3.connect(tmp_path / "newer" / FILE_NAME) as connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    connection.close()
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / FILE_NAME).write_text("no database " * 100)
    (tmp_path / "file").touch()
    for folder, reason in (
        (tmp_path / "newer", f"schema version {SCHEMA_VERSION + 1}; this server knows {SCHEMA_VERSION}"),
        (written("foreign", "CREATE TABLE t(x)"), "database of another program"),
        (tmp_path / "text", "move it away"),
        (tmp_path / "file", "cannot be opened"),
    ):
        with pytest.raises(StoreError, match=reason):
            open_store(folder, StoreLimits())


class StoreMachine(RuleBasedStateMachine):
    """Any sequence of calls gives what a dictionary of whole conversations gives."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        connection = sqlite3.connect(":memory:", isolation_level=None)
        connection.execute("PRAGMA foreign_keys = ON")
        create_tables(connection, Path("memory"))
        self.store = SqliteStore(connection, StoreLimits(64 * MEBIBYTE, 100.0), self.clock)
        self.responses: dict[str, tuple[str, list[str], int]] = {}
        """Owner, ids of the whole conversation and number of the thread of each response."""
        self.used: dict[int, float] = {}

    def teardown(self) -> None:
        self.store.close()

    def exists(self, owner: str, response_id: str) -> bool:
        found = self.responses.get(response_id)
        return found is not None and found[0] == owner and self.used[found[2]] >= self.clock.now - 100.0

    owners = st.sampled_from(["a", "b"])
    picks = st.integers(0, 30)

    @rule(owner=owners, count=st.integers(0, 3))
    def begin(self, owner: str, count: int) -> None:
        self.save(owner, None, count)

    @rule(owner=owners, pick=picks, count=st.integers(0, 3))
    def follow(self, owner: str, pick: int, count: int) -> None:
        self.save(owner, f"r{pick}", count)

    def save(self, owner: str, previous: str | None, count: int) -> None:
        name = f"r{len(self.used)}"
        response = stored(name, previous, [f"q{i}" for i in range(count)])
        self.used[len(self.used)] = float("-inf")
        if previous is not None and not self.exists(owner, previous):
            with pytest.raises(StoreError):
                self.store.save(owner, response)
            return
        self.store.save(owner, response)
        _, before, thread = self.responses[previous] if previous is not None else ("", [], len(self.used) - 1)
        own = [item.id for item in (*response.input, *response.output)]
        self.responses[name] = (owner, [*before, *own], thread)
        self.used[thread] = self.clock.now

    @rule(owner=owners, pick=picks)
    def delete(self, owner: str, pick: int) -> None:
        existed = self.exists(owner, f"r{pick}")
        assert self.store.delete(owner, f"r{pick}") is existed
        if existed:
            del self.responses[f"r{pick}"]

    @rule(seconds=st.floats(0.0, 60.0))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @precondition(lambda self: self.used)
    @rule(owner=owners, pick=picks)
    def read(self, owner: str, pick: int) -> None:
        name = f"r{pick}"
        found, items = self.store.get(owner, name), self.store.conversation(owner, name, ANY)
        assert (found is not None, items is not None) == (self.exists(owner, name),) * 2
        if items is not None:
            assert names(items) == self.responses[name][1]
            answer = f"{name}-a"
            assert self.store.find_items(owner, [answer]) == {answer: StoredItem(answer, answer.encode())}

    @invariant()
    def nothing_is_left_of_deleted_conversations(self) -> None:
        threads, responses, _ = rows(self.store)
        assert threads <= responses

    @invariant()
    def threads_know_their_bytes(self) -> None:
        assert all(said == added for said, added in sizes(self.store))


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = machine(20, 30)


def test_a_full_disk_asks_for_space_and_a_damaged_file_to_be_moved(tmp_path: Path) -> None:
    with closing(sqlite3.connect(":memory:")) as small:
        small.execute("PRAGMA max_page_count = 2")
        with pytest.raises(sqlite3.OperationalError) as full:
            small.executescript("".join(f"CREATE TABLE t{number}(x);" for number in range(3)))
    said = str(sqlite_file._unusable(tmp_path / "store", full.value))
    assert said.endswith("database or disk is full; free space there, or choose another --state-dir")
    (tmp_path / sqlite_file.FILE_NAME).write_bytes(b"no database" * 99)
    with pytest.raises(StoreError, match="file is not a database; move it away, or choose another --state-dir"):
        sqlite_file.check_store(tmp_path)
