"""SQLite file of a store: tables, schema version and settings."""

import contextlib
import fcntl
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tandem.frontend.store.sqlite_store import SIZE, SqliteStore
from tandem.frontend.store.store import StoreError, StoreLimits

logger = logging.getLogger(__name__)

FILE_NAME = "store.sqlite3"
SCHEMA_VERSION = 3
"""Schema version. Version 1 had threads without owner and bytes, version 2 no totals per owner and one index of all
owners' items."""
BUSY_SECONDS = 5.0
"""Seconds that a write waits for writes of other frontends before it fails."""

_APPLICATION_ID = 0x7464_6D73
"""Identifies a file as a store of this server."""
_TABLES = (
    "CREATE TABLE threads(num INTEGER PRIMARY KEY, used REAL NOT NULL, "
    "owner TEXT NOT NULL DEFAULT '', bytes INTEGER NOT NULL DEFAULT 0)",
    "CREATE INDEX threads_used ON threads(used)",
    "CREATE INDEX threads_owner ON threads(owner, used)",
    "CREATE TABLE responses(num INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, "
    "thread INTEGER NOT NULL REFERENCES threads(num) ON DELETE CASCADE, "
    "previous INTEGER REFERENCES responses(num), hidden INTEGER NOT NULL DEFAULT 0, body BLOB NOT NULL)",
    "CREATE INDEX responses_thread ON responses(thread)",
    "CREATE INDEX responses_previous ON responses(previous)",
    "CREATE TABLE items(num INTEGER PRIMARY KEY, "
    "response INTEGER NOT NULL REFERENCES responses(num) ON DELETE CASCADE, "
    "side INTEGER NOT NULL, id TEXT NOT NULL, body BLOB NOT NULL)",
    "CREATE INDEX items_response ON items(response)",
)
_OWNERS = (
    "CREATE TABLE owners(num INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, bytes INTEGER NOT NULL)",
    "CREATE INDEX owners_bytes ON owners(bytes)",
    "CREATE TRIGGER threads_added AFTER INSERT ON threads BEGIN INSERT INTO owners(name, bytes) "
    "VALUES (new.owner, new.bytes) ON CONFLICT(name) DO UPDATE SET bytes = bytes + new.bytes; END",
    "CREATE TRIGGER threads_resized AFTER UPDATE OF bytes ON threads BEGIN "
    "UPDATE owners SET bytes = bytes + new.bytes - old.bytes WHERE name = new.owner; END",
    "CREATE TRIGGER threads_removed AFTER DELETE ON threads BEGIN "
    "UPDATE owners SET bytes = bytes - old.bytes WHERE name = old.owner; END",
)
"""Bytes of all threads of an owner, which each write needs."""
_ITEM_IDS = (
    "CREATE TABLE item_ids(item INTEGER PRIMARY KEY REFERENCES items(num) ON DELETE CASCADE, "
    "owner INTEGER NOT NULL, id TEXT NOT NULL)",
    "CREATE INDEX item_ids_id ON item_ids(owner, id)",
    "CREATE TRIGGER items_added AFTER INSERT ON items BEGIN INSERT INTO item_ids(item, owner, id) "
    "SELECT new.num, o.num, new.id FROM responses r JOIN owners o ON o.name = r.owner WHERE r.num = new.response; END",
    "CREATE TRIGGER responses_hidden AFTER UPDATE OF hidden ON responses WHEN new.hidden BEGIN "
    "DELETE FROM item_ids WHERE item IN (SELECT num FROM items WHERE response = new.num); END",
)
"""Items that can be referenced, by owner: repeating the id of another owner's item slows down only one's own
lookups."""
_FROM_VERSION_1 = (
    "ALTER TABLE threads ADD COLUMN owner TEXT NOT NULL DEFAULT ''",
    "ALTER TABLE threads ADD COLUMN bytes INTEGER NOT NULL DEFAULT 0",
    "CREATE INDEX threads_owner ON threads(owner, used)",
    "UPDATE threads SET owner = coalesce((SELECT owner FROM responses WHERE thread = threads.num), ''), "
    f"bytes = coalesce((SELECT sum({SIZE}) FROM responses r WHERE thread = threads.num), 0)",
)
_FROM_VERSION_2 = (
    *_OWNERS,
    "INSERT INTO owners(name, bytes) SELECT owner, sum(bytes) FROM threads GROUP BY owner",
    *_ITEM_IDS,
    "INSERT INTO item_ids(item, owner, id) SELECT i.num, o.num, i.id FROM items i "
    "JOIN responses r ON r.num = i.response JOIN owners o ON o.name = r.owner WHERE NOT r.hidden",
    "DROP INDEX items_id",
)
_INCREMENTAL = 2
"""Value of `auto_vacuum` that allows free pages to be returned to the file system."""


def open_store(directory: Path, limits: StoreLimits, clock: Callable[[], float] = time.time) -> SqliteStore:
    """Open the store of a directory.

    The directory is created with mode 0700 if needed. Raises StoreError if the file cannot be used, or was written by a
    newer version.
    """
    path = directory / FILE_NAME
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            # SQLite creates its other files with the mode of this one.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    except (OSError, sqlite3.Error) as error:
        raise StoreError(f"the store {path} cannot be opened: {error}; choose another --state-dir") from None
    try:
        with _alone(directory):
            _prepare(connection, path, limits)
    except BaseException:
        connection.close()
        raise
    return SqliteStore(connection, limits, clock)


def check_store(directory: Path) -> None:
    """Raise StoreError if the store of an existing directory cannot be opened.

    The file is not modified.
    """
    path = directory / FILE_NAME
    if not directory.is_dir() or not os.access(directory, os.W_OK | os.X_OK):
        reason = "this user may not write there" if directory.is_dir() else "it is not a directory"
        raise StoreError(f"the store {path} cannot be opened: {reason}; choose another --state-dir")
    if not path.exists():
        return
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            stored_version(connection, path)
    except sqlite3.Error as error:
        raise _unusable(path, error) from None


def _unusable(path: Path, error: sqlite3.Error) -> StoreError:
    is_full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
    remedy = "free space there" if is_full else "move it away"
    return StoreError(f"the store {path} cannot be used: {error}; {remedy}, or choose another --state-dir")


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Lock out other processes that prepare the same file.

    Changing the journal mode does not wait for them.
    """
    lock = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _prepare(connection: sqlite3.Connection, path: Path, limits: StoreLimits) -> None:
    """Check or create the tables, and configure the connection."""
    try:
        # Takes effect at once in an empty file, otherwise with the next VACUUM.
        connection.execute(f"PRAGMA auto_vacuum = {_INCREMENTAL}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA foreign_keys = ON")
        # FAST would leave deleted data on free pages.
        connection.execute("PRAGMA secure_delete = ON")
        connection.execute("BEGIN IMMEDIATE")
        create_tables(connection, path)
        connection.execute("COMMIT")
        if connection.execute("PRAGMA auto_vacuum").fetchone()[0] != _INCREMENTAL:
            _rewrite(connection, path)
        page_size = connection.execute("PRAGMA page_size").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {limits.max_bytes // page_size}")
    except sqlite3.Error as error:
        raise _unusable(path, error) from None


def _rewrite(connection: sqlite3.Connection, path: Path) -> None:
    """Rewrite a file that was created without `auto_vacuum`, so that it can shrink.

    If another frontend uses the file, or the disk has no space for a copy, it is left for a later start.
    """
    try:
        connection.execute("VACUUM")
    except sqlite3.OperationalError as error:
        logger.warning("the store %s does not shrink before a later start: %s", path, error)


def create_tables(connection: sqlite3.Connection, path: Path) -> None:
    """Create the tables of an empty database, or check and upgrade its version.

    Raises StoreError for a database of another program or a newer version; `path` is its name in the message.

    """
    version = stored_version(connection, path)
    if version == SCHEMA_VERSION:
        return
    statements = {
        0: (*_TABLES, *_OWNERS, *_ITEM_IDS, f"PRAGMA application_id = {_APPLICATION_ID}"),
        1: (*_FROM_VERSION_1, *_FROM_VERSION_2),
        2: _FROM_VERSION_2,
    }
    for statement in (*statements[version], f"PRAGMA user_version = {SCHEMA_VERSION}"):
        connection.execute(statement)


def stored_version(connection: sqlite3.Connection, path: Path) -> int:
    """Return the schema version of a store; 0 for an empty database.

    Raises StoreError for a database of another program or a newer version; `path` is its name in the message.

    """
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    if (version, application) == (0, 0) and not connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
        return 0
    if application != _APPLICATION_ID:
        raise StoreError(f"{path} is a database of another program; choose another --state-dir")
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"the store {path} has schema version {version}; this server knows {SCHEMA_VERSION}: start the newer "
            "version that wrote it, or choose another --state-dir"
        )
    return version
