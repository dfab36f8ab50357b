"""The store of responses in SQLite, against a dictionary and at its bounds."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandem.frontend.store import sqlite_file, sqlite_store
from tandem.frontend.store.sqlite_file import FILE_NAME, SCHEMA_VERSION, create_tables, open_store
from tandem.frontend.store.sqlite_store import SIZE, SqliteStore
from tandem.frontend.store.store import (
    ItemPage,
    PageQuery,
    StoredItem,
    StoredResponse,
    StoredTooLargeError,
    StoreError,
    StoreLimits,
    UnknownItemError,
)
from tests.fakes.clock import FakeClock
from tests.support.effort import machine
from tests.support.stored import retrieved, stored

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
    assert store.get("me", "r1", ANY) == retrieved("r1", said=("q1", "q2"))
    assert store.get("me", "r2", ANY) == retrieved("r2", "r1", answered=("a", "b"))
    assert store.get("me", "r3", ANY) is None


def test_conversation_has_the_items_of_all_earlier_responses_in_order(store: SqliteStore) -> None:
    for response in (stored("r1"), stored("other"), stored("r2", "r1"), stored("side", "r1"), stored("r3", "r2")):
        store.save("me", response)
    assert names(store.conversation("me", "r3", ANY)) == ["r1-q", "r1-a", "r2-q", "r2-a", "r3-q", "r3-a"]
    assert names(store.conversation("me", "side", ANY)) == ["r1-q", "r1-a", "side-q", "side-a"]
    assert store.conversation("me", "r4", ANY) is None
    assert store.conversation("me", "r1", ANY) == [StoredItem("r1-q", b"r1-q"), StoredItem("r1-a", b"r1-a")]


def test_conversation_beyond_the_readers_bound_is_not_loaded(store: SqliteStore) -> None:
    store.save("me", stored("r1", size=1000))
    with pytest.raises(StoredTooLargeError) as caught:
        store.conversation("me", "r1", 1999)
    assert caught.value.size == 2000
    assert names(store.conversation("me", "r1", 2000)) == ["r1-q", "r1-a"]


def test_objects_of_another_owner_do_not_exist(store: SqliteStore) -> None:
    store.save("me", stored("r1"))
    assert store.get("you", "r1", ANY) is None
    assert store.conversation("you", "r1", ANY) is None
    assert store.find_items("you", ["r1-q"], ANY) == {}
    assert not store.delete("you", "r1")
    with pytest.raises(StoreError, match=r"\br1\b"):
        store.save("you", stored("r2", "r1"))
    assert store.get("me", "r1", ANY) is not None


def test_items_are_found_by_their_id_and_the_newest_wins(store: SqliteStore) -> None:
    store.save("me", stored("r1"))
    again = stored("r2")
    store.save("me", type(again)("r2", b"", (StoredItem("r1-a", b"newer"),)))
    assert store.find_items("me", ["r1-q", "r1-a", "none"], ANY) == {
        "r1-q": StoredItem("r1-q", b"r1-q"),
        "r1-a": StoredItem("r1-a", b"newer"),
    }


def test_deleted_response_is_gone_but_its_successors_go_on(store: SqliteStore) -> None:
    for response in (stored("r1"), stored("r2", "r1"), stored("r3", "r2")):
        store.save("me", response)
    assert store.delete("me", "r1")
    assert not store.delete("me", "r1")
    assert store.get("me", "r1", ANY) is None
    assert store.find_items("me", ["r1-q"], ANY) == {}
    assert names(store.conversation("me", "r3", ANY)) == ["r1-q", "r1-a", "r2-q", "r2-a", "r3-q", "r3-a"]
    with pytest.raises(StoreError, match=r"\br1\b"):
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
    assert store.get("me", "r1", ANY) is not None
    clock.now += 1
    assert store.get("me", "r1", ANY) is None
    assert store.get("me", "r2", ANY) is None
    assert store.conversation("me", "r2", ANY) is None
    assert store.find_items("me", ["r2-a"], ANY) == {}
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
    kept = [f"r{number}" for number in range(13) if store.get("me", f"r{number}", ANY)]
    assert "r0" in kept
    assert "r1" not in kept
    assert kept[-1] == "r12"
    assert store.get("me", "r0-next", ANY) is not None
    assert len(kept) >= 6


def test_conversation_that_alone_exceeds_the_bound_is_refused_and_kept(store: SqliteStore) -> None:
    store.save("me", stored("r1", size=400_000))
    with pytest.raises(StoreError, match="--store-size"):
        store.save("me", stored("r2", "r1", size=200_000))
    assert store.get("me", "r1", ANY) is not None
    assert store.get("me", "r2", ANY) is None
    with pytest.raises(StoreError, match="--store-size"):
        store.save("me", stored("r3", size=600_000))
    store.save("me", stored("r4"))
    assert rows(store) == (2, 2, 4)


def sizes(store: SqliteStore) -> list[tuple[int, int]]:
    """Return the bytes of each thread as it states them, and as its responses add up."""
    each = f"SELECT t.bytes, (SELECT sum({SIZE}) FROM responses r WHERE r.thread = t.num) FROM threads t"
    return store._connection.execute(each).fetchall()


def totals(store: SqliteStore) -> dict[str, int]:
    """Return the bytes of each owner."""
    return dict(store._connection.execute("SELECT name, bytes FROM owners").fetchall())


def test_a_key_beyond_its_quota_makes_room_among_its_own(tmp_path: Path, clock: FakeClock) -> None:
    store = open_store(tmp_path, StoreLimits(16 * MEBIBYTE, 100.0, max_owner_bytes=MEBIBYTE), clock)
    store.save("other", stored("o1", size=300_000))
    for number in range(3):
        clock.now += 1
        store.save("me", stored(f"r{number}", size=300_000))
    assert [store.get("me", f"r{number}", ANY) is not None for number in range(3)] == [False, False, True]
    assert store.get("other", "o1", ANY) is not None, "another key's conversation is older and stays"
    clock.now += 1
    with pytest.raises(StoreError, match=r"\b1048576\b.*--store-size-per-key"):
        store.save("me", stored("r2-next", "r2", size=300_000))
    assert store.get("me", "r2", ANY) is not None
    assert store.delete("me", "r2")
    store.save("me", stored("r3", size=500_000))
    store.close()


def save(store: SqliteStore, owner: str, name: str, previous: str | None = None, size: int = 0, count: int = 1) -> int:
    """Store a response of `count` items of the input; return the number of writes."""
    response = stored(name, previous, said=[f"q{n}" for n in range(count)], answered=(), size=size)
    calls = 1
    while not store.save(owner, response):
        calls += 1
    return calls


def kept(store: SqliteStore, owner: str, candidates: list[str]) -> list[str]:
    return [name for name in candidates if store.get(owner, name, ANY) is not None]


def test_one_owner_does_not_make_others_lose_what_they_stored(tmp_path: Path, clock: FakeClock) -> None:
    store = open_store(tmp_path, StoreLimits(8 * MEBIBYTE, 100.0), clock)
    victims = [f"v{n}" for n in range(4)]
    for name in victims:
        save(store, "victim", name, size=300_000)
    for n in range(40):
        clock.now += 1
        save(store, "flood", f"f{n}", size=1_000_000)
    assert kept(store, "victim", victims) == victims
    assert kept(store, "flood", [f"f{n}" for n in range(40)])[-1] == "f39"
    with pytest.raises(StoreError, match="--store-size"):
        save(store, "flood", "huge", size=9_000_000)
    for n in range(6):
        save(store, "flood", f"long{n}", f"long{n - 1}" if n else None, size=1_000_000)
    with pytest.raises(StoreError, match="--store-size"):  # a conversation makes no room for itself
        save(store, "flood", "long6", "long5", size=1_000_000)
    assert kept(store, "victim", victims) == victims
    for n in range(12):
        clock.now += 1
        save(store, "victim", f"w{n}", size=300_000)
    assert kept(store, "victim", victims) == victims, "an owner with less than its share takes room from the largest"
    store.close()


def test_room_is_made_in_parts_between_which_others_write(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_store, "REMOVED_BYTES", 64 * sqlite_store.REMOVED_ROW_BYTES)
    store = open_store(tmp_path, StoreLimits(4 * MEBIBYTE, 100.0), clock)
    for n in range(8):
        clock.now += 1
        save(store, "me", f"r{n}", size=500, count=1000)
    before = rows(store)
    clock.now += 1
    assert store.save("me", stored("large", size=1_000_000)) is False
    assert store.get("me", "large", ANY) is None
    assert 0 < before[2] - rows(store)[2] <= 64 + sqlite_store.PURGED_ROWS
    other, calls = stored("other"), 1
    assert store.save("me", other) in (True, False)
    while not store.save("me", stored("large", size=1_000_000)):
        calls += 1
    assert calls > 3
    assert store.get("me", "r7", ANY) == retrieved("r7", answered=())
    assert names(store.conversation("me", "r7", ANY)) == [f"r7-q{n}" for n in range(1000)]
    assert store.get("me", "large", ANY) is not None
    store.close()


def test_a_quota_reached_by_many_small_conversations_costs_one_look_each(tmp_path: Path, clock: FakeClock) -> None:
    """Count the statements that one large response takes: they grow with what makes room, not with its square."""
    store = open_store(tmp_path, StoreLimits(64 * MEBIBYTE, 1e6, max_owner_bytes=MEBIBYTE), clock)
    for n in range(900):
        clock.now += 1
        save(store, "me", f"r{n}", size=300)
    steps = 0

    def count() -> int:
        nonlocal steps
        steps += 1
        return 0

    store._connection.set_progress_handler(count, 100)
    assert store.save("me", stored("large", size=400_000))
    store._connection.set_progress_handler(None, 0)
    assert steps < 4_000
    assert totals(store)["me"] <= MEBIBYTE
    assert store.get("me", "r0", ANY) is None
    assert store.get("me", "r899", ANY) is not None
    store.close()


def test_what_made_room_is_removed_with_later_writes(tmp_path: Path, clock: FakeClock) -> None:
    store = open_store(tmp_path, StoreLimits(64 * MEBIBYTE, 100.0, max_owner_bytes=MEBIBYTE), clock)
    for n in range(6):
        clock.now += 1
        save(store, "me", f"r{n}", size=300, count=1000)
        assert rows(store)[2] <= 4000
    for n in range(60):
        clock.now += 1
        save(store, "me", f"small{n}")
    assert rows(store)[2] <= 1000 + 60
    store.close()


def test_a_page_of_items_ends_before_it_is_too_large(store: SqliteStore) -> None:
    store.save("me", stored("r1", said=("q0", "q1", "q2"), size=1000))
    store.save("me", stored("r2", "r1", said=("q0",), size=1000))

    def page(name: str, limit: int, most: int, after: str | None = None, ascending: bool = True) -> tuple[object, bool]:
        found = store.input_items("me", name, PageQuery(limit, most, ascending, after), ANY)
        assert found is not None
        return [item.id for item in found.items], found.has_more

    assert page("r1", 20, 10_000) == (["r1-q0", "r1-q1", "r1-q2"], False)
    assert page("r2", 20, 10_000) == (["r1-q0", "r1-q1", "r1-q2", "r1-a", "r2-q0"], False)
    assert page("r2", 20, 10_000, ascending=False) == (["r2-q0", "r1-a", "r1-q2", "r1-q1", "r1-q0"], False)
    assert page("r2", 20, 2000) == (["r1-q0", "r1-q1"], True)
    assert page("r2", 20, 2999, "r1-q1") == (["r1-q2", "r1-a"], True)
    assert page("r2", 1, 10_000, "r1-a") == (["r2-q0"], False)
    assert page("r2", 20, 10_000, "r2-q0") == ([], False)
    assert page("r2", 20, 10) == (["r1-q0"], True), "a page has one item at least"
    with pytest.raises(StoredTooLargeError) as caught:
        store.input_items("me", "r1", PageQuery(20, 2000), 1999)
    assert caught.value.size == 2000
    with pytest.raises(UnknownItemError):
        store.input_items("me", "r1", PageQuery(20, 2000, after="r2-q0"), ANY)
    for owner, name in (("you", "r1"), ("me", "none")):
        assert store.input_items(owner, name, PageQuery(20, 2000), ANY) is None


def test_pages_of_items_with_one_id_come_to_an_end(store: SqliteStore) -> None:
    items = tuple(StoredItem("last" if n == 3 else "same", b"%d" % n) for n in range(4))
    store.save("me", StoredResponse("r1", b"", items))
    first = store.input_items("me", "r1", PageQuery(1, 100, is_ascending=True), ANY)
    assert first == ItemPage([items[0]], True)
    assert store.input_items("me", "r1", PageQuery(1, 100, True, "same"), ANY) == ItemPage([items[3]], False)
    assert store.input_items("me", "r1", PageQuery(1, 100, False, "same"), ANY) == ItemPage([], False)


def test_what_is_too_large_for_its_reader_is_not_loaded(store: SqliteStore) -> None:
    store.save("me", stored("r1", answered=("a", "b"), size=1000))
    with pytest.raises(StoredTooLargeError) as caught:
        store.get("me", "r1", 2000)
    assert caught.value.size == 2000 + len(b"body of r1")
    assert store.get("me", "r1", caught.value.size) is not None
    for ids, size in ((["r1-q"], 1000), (["r1-q", "r1-a", "none"], 2000), (["r1-q"] * 120, 1000)):
        with pytest.raises(StoredTooLargeError) as found:
            store.find_items("me", ids, size - 1)
        assert found.value.size == size
        assert len(store.find_items("me", ids, size)) == size / 1000


def test_items_of_others_with_the_same_id_are_not_looked_at(store: SqliteStore) -> None:
    store.save("me", StoredResponse("r1", b"", (StoredItem("msg_1", b"mine"),)))
    many = tuple(StoredItem("msg_1", b"theirs") for _ in range(2 * sqlite_store.MAX_SAME_ID))
    store.save("you", StoredResponse("r2", b"", many))
    assert store.find_items("me", ["msg_1"], ANY) == {"msg_1": StoredItem("msg_1", b"mine")}
    store.save("me", StoredResponse("r3", b"", many))
    store.save("me", StoredResponse("r4", b"", (), (), "r3"))
    assert store.delete("me", "r3")
    assert store.find_items("me", ["msg_1"], ANY) == {"msg_1": StoredItem("msg_1", b"mine")}, "deleted ones hide none"


def test_delete_within_a_read_leaves_what_was_read_whole(tmp_path: Path) -> None:
    first, second = open_store(tmp_path, StoreLimits()), open_store(tmp_path, StoreLimits())
    first.save("me", stored("r1", said=("q0", "q1"), size=1000))
    deleted: list[bool] = []

    def delete_once(text: str) -> None:
        if "SELECT id, body" in text and not deleted:
            deleted.append(second.delete("me", "r1"))

    first._connection.set_trace_callback(delete_once)
    page = first.input_items("me", "r1", PageQuery(20, 10_000, True), ANY)
    assert deleted == [True]
    assert page is not None
    assert [len(item.body) for item in page.items] == [1000, 1000]
    assert first.input_items("me", "r1", PageQuery(20, 10_000, True), ANY) is None
    first.close()
    second.close()


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
    assert store.get("me", "small7", ANY) == retrieved("small7")
    store.close()


def test_store_of_the_first_version_is_taken_over(tmp_path: Path) -> None:
    open_store(tmp_path, StoreLimits()).close()
    with sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None) as old:
        for statement in (
            *(f"DROP TRIGGER {name}" for name in
              ("threads_added", "threads_resized", "threads_removed", "items_added", "responses_hidden")),
            "DROP TABLE owners", "DROP TABLE item_ids", "CREATE INDEX items_id ON items(id)",
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
    assert store.find_items("me", ["r1-q"], ANY) == {"r1-q": StoredItem("r1-q", b"r1-q")}
    store.save("me", stored("r2", "r1"))
    assert totals(store) == {"me": sum(said for said, _ in sizes(store))}
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
    assert store.get("me", "r2", ANY) is None
    assert store.get("me", "r1", ANY) == retrieved("r1")
    store._connection.execute("PRAGMA max_page_count = 10000")
    store.save("me", stored("r2", size=200_000))
    store.close()
    with pytest.raises(StoreError):
        store.get("me", "r1", ANY)


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
    assert second.get("me", "r1", ANY) == retrieved("r1")
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
        found, items = self.store.get(owner, name, ANY), self.store.conversation(owner, name, ANY)
        assert (found is not None, items is not None) == (self.exists(owner, name),) * 2
        if items is not None:
            assert names(items) == self.responses[name][1]
            answer = f"{name}-a"
            assert self.store.find_items(owner, [answer], ANY) == {answer: StoredItem(answer, answer.encode())}

    @invariant()
    def nothing_is_left_of_deleted_conversations(self) -> None:
        threads, responses, _ = rows(self.store)
        assert threads <= responses

    @invariant()
    def threads_know_their_bytes(self) -> None:
        assert all(said == added for said, added in sizes(self.store))
        each = "SELECT o.bytes, coalesce((SELECT sum(bytes) FROM threads WHERE owner = o.name), 0) FROM owners o"
        assert all(said == added for said, added in self.store._connection.execute(each))


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = machine(20, 30)


def test_a_full_disk_asks_for_space_and_a_damaged_file_to_be_moved(tmp_path: Path) -> None:
    with closing(sqlite3.connect(":memory:")) as small:
        small.execute("PRAGMA max_page_count = 2")
        with pytest.raises(sqlite3.OperationalError) as full:
            small.executescript("".join(f"CREATE TABLE t{number}(x);" for number in range(3)))
    said = str(sqlite_file._unusable(tmp_path / "store", full.value))
    assert str(full.value) in said and "--state-dir" in said
    (tmp_path / sqlite_file.FILE_NAME).write_bytes(b"no database" * 99)
    with pytest.raises(StoreError, match="--state-dir"):
        sqlite_file.check_store(tmp_path)
