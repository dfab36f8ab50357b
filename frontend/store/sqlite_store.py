"""A store of responses in one SQLite file.

The frontends of a service share it.
"""

import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tandem.frontend.store.store import ConversationTooLargeError, StoreError, StoreLimits
from tandem.frontend.store.stored_response import StoredItem, StoredResponse

ROW_BYTES = 320
"""Estimate of what a row takes beside its body: ids, indexes and the slack of its last page."""
PURGED_AT_ONCE = 64
"""Maximum number of expired conversations that one write removes."""
SPARE_PAGES = 256
"""Free pages that the file keeps for later writes."""
SHRUNK_AT_ONCE = 256
"""Maximum number of pages by which one write shrinks the file."""
SIZE = f"""length(r.body) + {ROW_BYTES} + coalesce(
(SELECT sum(length(i.body) + {ROW_BYTES}) FROM items i WHERE i.response = r.num), 0)"""
"""Expression for the bytes of a response `r` with its items."""

_LIVE = "NOT r.hidden AND t.used >= ?"
_ONE = f"""SELECT r.num, r.body, r.thread, p.id FROM responses r JOIN threads t ON t.num = r.thread
LEFT JOIN responses p ON p.num = r.previous WHERE r.id = ? AND r.owner = ? AND {_LIVE}"""
_CHAIN = f"""WITH RECURSIVE chain(num, previous) AS (
SELECT r.num, r.previous FROM responses r JOIN threads t ON t.num = r.thread WHERE r.id = ? AND r.owner = ? AND {_LIVE}
UNION ALL SELECT r.num, r.previous FROM responses r JOIN chain ON r.num = chain.previous)"""
_ITEM = f"""SELECT i.id, i.body FROM items i JOIN responses r ON r.num = i.response JOIN threads t ON t.num = r.thread
WHERE i.id = ? AND r.owner = ? AND {_LIVE} ORDER BY i.num DESC LIMIT 1"""


class SqliteStore:
    """Responses in SQLite.

    Responses that continue one another are a thread. A thread expires and makes room as a whole, so that what exists
    can be continued. Every method is one transaction.
    """

    def __init__(
        self, connection: sqlite3.Connection, limits: StoreLimits, clock: Callable[[], float] = time.time
    ) -> None:
        self._connection = connection
        self._limits = limits
        self._clock = clock

    def save(self, owner: str, response: StoredResponse) -> None:
        with self._transaction("BEGIN IMMEDIATE"):
            now = self._clock()
            previous, thread = self._continued(owner, response.previous)
            if thread is None:
                thread = self._execute("INSERT INTO threads(used, owner) VALUES (?, ?)", now, owner).lastrowid
            needed = _size(response)
            self._make_room(owner, needed, thread)
            used = "UPDATE threads SET used = max(used, ?), bytes = bytes + ? WHERE num = ?"
            self._execute(used, now, needed, thread)
            added = self._execute(
                "INSERT INTO responses(id, owner, thread, previous, body) VALUES (?, ?, ?, ?, ?)",
                *(response.id, owner, thread, previous, response.body),
            )
            sides = ((response.input, 0), (response.output, 1))
            rows = [(added.lastrowid, side, item.id, item.body) for items, side in sides for item in items]
            self._connection.executemany("INSERT INTO items(response, side, id, body) VALUES (?, ?, ?, ?)", rows)
            self._shrink()

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        with self._transaction():
            row = self._execute(_ONE, response_id, owner, self._oldest).fetchone()
            if row is None:
                return None
            num, body, _, previous = row
            items: tuple[list[StoredItem], list[StoredItem]] = ([], [])
            for side, item_id, text in self._execute(
                "SELECT side, id, body FROM items WHERE response = ? ORDER BY num", num
            ):
                items[side].append(StoredItem(item_id, text))
            return StoredResponse(response_id, body, tuple(items[0]), tuple(items[1]), previous)

    def delete(self, owner: str, response_id: str) -> bool:
        with self._transaction("BEGIN IMMEDIATE"):
            row = self._execute(_ONE, response_id, owner, self._oldest).fetchone()
            if row is None:
                return False
            num, _, thread, _ = row
            self._execute("UPDATE responses SET hidden = 1 WHERE num = ?", num)
            self._remove_unused(num, thread)
            empty = "NOT EXISTS (SELECT 1 FROM responses WHERE thread = ?)"
            self._execute(f"DELETE FROM threads WHERE num = ? AND {empty}", thread, thread)
            self._shrink()
            return True

    def conversation(self, owner: str, response_id: str, max_bytes: int) -> list[StoredItem] | None:
        wanted = (response_id, owner, self._oldest)
        with self._transaction():
            size, count = self._execute(
                f"{_CHAIN} SELECT (SELECT sum(length(body)) FROM items WHERE response IN (SELECT num FROM chain)), "
                "(SELECT count(*) FROM chain)",
                *wanted,
            ).fetchone()
            if not count:
                return None
            if (size or 0) > max_bytes:
                raise ConversationTooLargeError(size)
            # A response is saved after the one that it continues, so its numbers are higher.
            found = f"{_CHAIN} SELECT id, body FROM items WHERE response IN (SELECT num FROM chain) ORDER BY num"
            return [StoredItem(*row) for row in self._execute(found, *wanted)]

    def find_items(self, owner: str, item_ids: Sequence[str]) -> dict[str, StoredItem]:
        with self._transaction():
            rows = [self._execute(_ITEM, item_id, owner, self._oldest).fetchone() for item_id in item_ids]
            return {row[0]: StoredItem(*row) for row in rows if row is not None}

    def close(self) -> None:
        self._connection.close()

    @property
    def _oldest(self) -> float:
        """Time of the last use before which a thread is expired."""
        return self._clock() - self._limits.ttl

    @contextmanager
    def _transaction(self, begin: str = "BEGIN") -> Iterator[None]:
        """Run one transaction; anything that fails undoes all of it."""
        try:
            self._connection.execute(begin)
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                # A full disk has ended the transaction already.
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise StoreError(f"the store failed: {error}") from None

    def _execute(self, statement: str, *values: object) -> sqlite3.Cursor:
        return self._connection.execute(statement, values)

    def _continued(self, owner: str, previous: str | None) -> tuple[int | None, int | None]:
        """Return the numbers of the response that a new one continues, and of its thread."""
        if previous is None:
            return None, None
        row = self._execute(_ONE, previous, owner, self._oldest).fetchone()
        if row is None:
            raise StoreError(f"the response {previous} was deleted while it was continued")
        return row[0], row[2]

    def _remove_unused(self, num: int | None, thread: int) -> None:
        """Remove a deleted response that none continues, from its thread.

        Then remove those before it of which that is true.
        """
        while num is not None:
            unused = "num = ? AND hidden AND NOT EXISTS (SELECT 1 FROM responses WHERE previous = ?)"
            row = self._execute(f"SELECT previous, {SIZE} FROM responses r WHERE {unused}", num, num).fetchone()
            if row is None:
                return
            self._execute("DELETE FROM responses WHERE num = ?", num)
            self._execute("UPDATE threads SET bytes = bytes - ? WHERE num = ?", row[1], thread)
            num = row[0]

    def _make_room(self, owner: str, needed: int, thread: int | None) -> None:
        """Remove expired threads, then the least recently used until `needed` bytes fit.

        Those of the owner go first, until its own bound holds. Raises StoreError if removing everything but the thread
        itself is not enough.
        """
        expired = "SELECT num FROM threads WHERE used < ? ORDER BY used LIMIT ?"
        self._execute(f"DELETE FROM threads WHERE num IN ({expired})", self._oldest, PURGED_AT_ONCE)
        quota = self._limits.max_owner_bytes
        while quota is not None and self._owner_bytes(owner) + needed > quota:
            oldest = "SELECT num FROM threads WHERE owner = ? AND num != ? ORDER BY used LIMIT 1"
            if not self._execute(f"DELETE FROM threads WHERE num IN ({oldest})", owner, thread).rowcount:
                raise StoreError(
                    f"the response needs {needed} bytes beside the {self._owner_bytes(owner)} of its conversation; an "
                    f"API key may store {quota}: raise --store-size-per-key"
                )
        # A few pages of every index are partly empty.
        room = self._limits.max_bytes - self._limits.max_bytes // 16 - needed
        while self._used_bytes() > room:
            oldest = "SELECT num FROM threads WHERE num != ? ORDER BY used LIMIT 1"
            if not self._execute(f"DELETE FROM threads WHERE num IN ({oldest})", thread).rowcount:
                raise StoreError(
                    f"the response needs {needed} bytes beside the {self._used_bytes()} of its conversation; the store "
                    f"holds {self._limits.max_bytes}: raise --store-size"
                )

    def _owner_bytes(self, owner: str) -> int:
        total: int = self._execute("SELECT coalesce(sum(bytes), 0) FROM threads WHERE owner = ?", owner).fetchone()[0]
        return total

    def _shrink(self) -> None:
        """Return some of the free pages beyond the spare ones to the file system."""
        free: int = self._execute("PRAGMA freelist_count").fetchone()[0]
        for _ in range(min(free - SPARE_PAGES, SHRUNK_AT_ONCE)):
            # One page is one step of the statement, and sqlite3 makes one step of a statement without rows.
            self._execute("PRAGMA incremental_vacuum(1)")

    def _used_bytes(self) -> int:
        pages, free, size = (
            self._execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
        )
        return int((pages - free) * size)


def _size(response: StoredResponse) -> int:
    """Estimate what a response with its items takes of the file.

    It is what `SIZE` says in SQL.
    """
    items = (*response.input, *response.output)
    return len(response.body) + sum([len(item.body) for item in items]) + ROW_BYTES * (len(items) + 1)
