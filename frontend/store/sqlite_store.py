"""Store of responses in a SQLite file.

It is shared by the frontends of a service.
"""

import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

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

ROW_BYTES = 320
"""Estimated overhead of a row in bytes: ids, indexes and the slack of its last page."""
PURGED_ROWS = 64
"""Minimum number of rows of removed conversations that a write purges; it also purges at least twice what it adds."""
REMOVED_BYTES = 16 * 2**20
"""Bytes after which a write that frees space yields to other writes."""
REMOVED_ROW_BYTES = 4096
"""Bytes counted towards `REMOVED_BYTES` per removed row besides its body, as it modifies some pages."""
SPARE_PAGES = 256
"""Free pages kept for later writes."""
SHRUNK_AT_ONCE = 256
"""Maximum number of pages by which one write shrinks the file."""
MAX_SAME_ID = 100
"""Maximum number of items of one owner and id, newest first, that are searched for an existing one."""
SIZE = f"""length(r.body) + {ROW_BYTES} + coalesce(
(SELECT sum(length(i.body) + {ROW_BYTES}) FROM items i WHERE i.response = r.num), 0)"""
"""SQL expression for the bytes of a response `r` with its items."""

_DROPPED = float("-inf")
"""Last use of an evicted thread: like an expired one, it no longer exists."""
_LIVE = "NOT r.hidden AND t.used >= ?"
_ONE = f"""FROM responses r JOIN threads t ON t.num = r.thread LEFT JOIN responses p ON p.num = r.previous
WHERE r.id = ? AND r.owner = ? AND {_LIVE}"""
_CHAIN = f"""WITH RECURSIVE chain(num, previous) AS (
SELECT r.num, r.previous FROM responses r JOIN threads t ON t.num = r.thread WHERE r.id = ? AND r.owner = ? AND {_LIVE}
UNION ALL SELECT r.num, r.previous FROM responses r JOIN chain ON r.num = chain.previous)"""
_OF_CHAIN = "FROM items INDEXED BY items_response WHERE response IN (SELECT num FROM chain)"
_READ = f"{_OF_CHAIN} AND NOT (response = (SELECT max(num) FROM chain) AND side = 1)"
"""SQL condition for the items that the last response of a chain has read."""
_ITEM = f"""SELECT i.num, length(i.body) FROM (SELECT item FROM item_ids
WHERE owner = (SELECT num FROM owners WHERE name = ?) AND id = ? ORDER BY item DESC LIMIT {MAX_SAME_ID}) f
JOIN items i ON i.num = f.item JOIN responses r ON r.num = i.response JOIN threads t ON t.num = r.thread
WHERE {_LIVE} ORDER BY i.num DESC LIMIT 1"""


class SqliteStore:
    """Responses in SQLite.

    Responses that continue one another form a thread. A thread expires and is evicted as a whole, so that every
    existing response can be continued. It disappears at once, and its rows are removed by later writes. Every method is
    one transaction. Sizes are checked before data is loaded, so that nothing larger than the reader's limit is.
    """

    def __init__(
        self, connection: sqlite3.Connection, limits: StoreLimits, clock: Callable[[], float] = time.time
    ) -> None:
        self._connection = connection
        self._limits = limits
        self._clock = clock

    def save(self, owner: str, response: StoredResponse) -> bool:
        with self._transaction("BEGIN IMMEDIATE"):
            previous, thread = self._continued(owner, response.previous)
            needed = _size(response)
            items = [(side, item) for side, items in enumerate((response.input, response.output)) for item in items]
            purged = max(PURGED_ROWS, 2 * len(items)) * REMOVED_ROW_BYTES
            has_room = self._make_room(owner, needed, thread, purged)
            if has_room:
                now = self._clock()
                if thread is None:
                    thread = self._execute("INSERT INTO threads(used, owner) VALUES (?, ?)", now, owner).lastrowid
                used = "UPDATE threads SET used = max(used, ?), bytes = bytes + ? WHERE num = ?"
                self._execute(used, now, needed, thread)
                added = self._execute(
                    "INSERT INTO responses(id, owner, thread, previous, body) VALUES (?, ?, ?, ?, ?)",
                    *(response.id, owner, thread, previous, response.body),
                )
                rows = [(added.lastrowid, side, item.id, item.body) for side, item in items]
                self._connection.executemany("INSERT INTO items(response, side, id, body) VALUES (?, ?, ?, ?)", rows)
            self._shrink()
            return has_room

    def get(self, owner: str, response_id: str, max_bytes: int) -> StoredResponse | None:
        with self._transaction():
            wanted = (response_id, owner, self._oldest)
            row = self._execute(f"SELECT r.num, length(r.body), p.id {_ONE}", *wanted).fetchone()
            if row is None:
                return None
            num, size, previous = row
            output = "FROM items WHERE response = ? AND side = 1"
            size += self._execute(f"SELECT coalesce(sum(length(body)), 0) {output}", num).fetchone()[0]
            if size > max_bytes:
                raise StoredTooLargeError(size)
            body = self._execute("SELECT body FROM responses WHERE num = ?", num).fetchone()[0]
            found = self._execute(f"SELECT id, body {output} ORDER BY num", num)
            return StoredResponse(response_id, body, (), tuple(StoredItem(*item) for item in found), previous)

    def delete(self, owner: str, response_id: str) -> bool:
        with self._transaction("BEGIN IMMEDIATE"):
            num, thread = self._number(owner, response_id)
            if num is None:
                return False
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
                f"{_CHAIN} SELECT (SELECT sum(length(body)) {_OF_CHAIN}), (SELECT count(*) FROM chain)", *wanted
            ).fetchone()
            if not count:
                return None
            if (size or 0) > max_bytes:
                raise StoredTooLargeError(size)
            # A response is saved after the one that it continues, so its numbers are higher.
            found = self._execute(f"{_CHAIN} SELECT id, body {_OF_CHAIN} ORDER BY num", *wanted)
            return [StoredItem(*row) for row in found]

    def input_items(self, owner: str, response_id: str, page: PageQuery, max_bytes: int) -> ItemPage | None:
        wanted = (response_id, owner, self._oldest)
        order, last, beyond = ("ASC", "max", ">") if page.is_ascending else ("DESC", "min", "<")
        with self._transaction():
            if not self._execute(f"{_CHAIN} SELECT count(*) FROM chain", *wanted).fetchone()[0]:
                return None
            start: tuple[int, ...] = ()
            if page.after is not None:
                # Of several items with this id the last one; otherwise a reader would loop.
                start = self._execute(f"{_CHAIN} SELECT {last}(num) {_READ} AND id = ?", *wanted, page.after).fetchone()
                if start[0] is None:
                    raise UnknownItemError(page.after)
            listed = f"{_READ} AND num {beyond} ?" if start else _READ
            rows = self._execute(
                f"{_CHAIN} SELECT num, length(body) {listed} ORDER BY num {order} LIMIT ?",
                *(*wanted, *start, page.limit + 1),
            ).fetchall()
            shown, size = _fitting(rows[: page.limit], page.max_bytes)
            if size > max_bytes:
                raise StoredTooLargeError(size)
            return ItemPage([self._item(num) for num in shown], len(rows) > len(shown))

    def find_items(self, owner: str, item_ids: Sequence[str], max_bytes: int) -> dict[str, StoredItem]:
        with self._transaction():
            found = [
                self._execute(_ITEM, owner, item_id, self._oldest).fetchone() for item_id in dict.fromkeys(item_ids)
            ]
            rows = [row for row in found if row is not None]
            size = sum([size for _, size in rows])
            if size > max_bytes:
                raise StoredTooLargeError(size)
            items = [self._item(num) for num, _ in rows]
            return {item.id: item for item in items}

    def close(self) -> None:
        self._connection.close()

    @property
    def _oldest(self) -> float:
        """Last use before which a thread has expired."""
        return self._clock() - self._limits.ttl

    @contextmanager
    def _transaction(self, begin: str = "BEGIN") -> Iterator[None]:
        """Run one transaction; roll it back on any failure."""
        try:
            self._connection.execute(begin)
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                # SQLite ends the transaction itself if the disk is full.
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise StoreError(f"the store failed: {error}") from None

    def _execute(self, statement: str, *values: object) -> sqlite3.Cursor:
        return self._connection.execute(statement, values)

    def _item(self, num: int) -> StoredItem:
        return StoredItem(*self._execute("SELECT id, body FROM items WHERE num = ?", num).fetchone())

    def _number(self, owner: str, response_id: str) -> tuple[int | None, int | None]:
        """Return the row ids of a response and of its thread; None if it does not exist."""
        found = self._execute(f"SELECT r.num, r.thread {_ONE}", response_id, owner, self._oldest).fetchone()
        return (None, None) if found is None else (found[0], found[1])

    def _continued(self, owner: str, previous: str | None) -> tuple[int | None, int | None]:
        """Return the row ids of the response that a new one continues, and of its thread."""
        if previous is None:
            return None, None
        found = self._number(owner, previous)
        if found[0] is None:
            raise StoreError(f"the response {previous} was deleted while it was continued")
        return found

    def _remove_unused(self, num: int | None, thread: int | None) -> None:
        """Remove a deleted response without continuations from its thread.

        Then remove predecessors in the same state.
        """
        while num is not None:
            unused = "num = ? AND hidden AND NOT EXISTS (SELECT 1 FROM responses WHERE previous = ?)"
            row = self._execute(f"SELECT previous, {SIZE} FROM responses r WHERE {unused}", num, num).fetchone()
            if row is None:
                return
            self._execute("DELETE FROM responses WHERE num = ?", num)
            self._execute("UPDATE threads SET bytes = bytes - ? WHERE num = ?", row[1], thread)
            num = row[0]

    def _make_room(self, owner: str, needed: int, thread: int | None, purged: int) -> bool:
        """Evict threads until `needed` bytes fit; return False if a later call has to evict more.

        The owner's own threads are evicted first if its limit is exceeded, then those of the owner that would use the
        most, so that owners below their share lose nothing. About `purged` bytes of expired threads are removed in any
        case. Raises StoreError if everything but the thread itself is not enough.
        """
        found = self._execute("SELECT bytes FROM threads WHERE num = ?", thread).fetchone()
        stored = found[0] if found else 0
        conversation = f"the response needs {needed} bytes in addition to the {stored} of its conversation"
        required = needed + stored
        # A few pages of every index are partly empty.
        limit = self._limits.max_bytes - self._limits.max_bytes // 16
        too_large = StoreError(f"{conversation}; the store holds {self._limits.max_bytes}: raise --store-size")
        if required > limit:
            raise too_large
        quota = self._limits.max_owner_bytes
        if quota is not None and required > quota:
            raise StoreError(f"{conversation}; an API key may store {quota}: raise --store-size-per-key")
        while quota is not None and self._owner_bytes(owner) + needed > quota:
            if not self._drop_oldest(owner, thread):
                break
        self._remove_dropped(purged)
        left = REMOVED_BYTES
        while self._used_bytes() > limit - needed:
            if left <= 0:
                return False
            removed = self._remove_dropped(left)
            left -= removed
            if not removed and not self._drop_oldest(self._largest_owner(owner, needed), thread):
                raise too_large
        return True

    def _largest_owner(self, owner: str, needed: int) -> str:
        """Return the owner that will use the most bytes after `needed` bytes are added to the given owner."""
        others = "SELECT name, bytes FROM owners WHERE name != ? ORDER BY bytes DESC LIMIT 1"
        other = self._execute(others, owner).fetchone()
        return owner if other is None or self._owner_bytes(owner) + needed >= other[1] else str(other[0])

    def _drop_oldest(self, owner: str, spared: int | None) -> bool:
        """Evict the least recently used thread of an owner; return False if only `spared` is left."""
        oldest = "SELECT num FROM threads WHERE owner = ? AND used > ? AND num IS NOT ? ORDER BY used LIMIT 1"
        dropped = f"UPDATE threads SET used = ?, bytes = 0 WHERE num = ({oldest})"
        return self._execute(dropped, _DROPPED, owner, _DROPPED, spared).rowcount > 0

    def _remove_dropped(self, limit: int) -> int:
        """Remove rows of expired or evicted threads; return their bytes, `limit` or slightly more.

        A thread may have many rows, so part of it may be left to a later write.
        """
        removed = 0
        while removed < limit:
            found = self._execute(
                "SELECT num FROM threads WHERE used < ? ORDER BY used LIMIT 1", self._oldest
            ).fetchone()
            if found is None:
                break
            # Newest first, since the last response of a thread has no continuation.
            newest = "SELECT num, length(body) FROM responses WHERE thread = ? ORDER BY num DESC LIMIT 1"
            response = self._execute(newest, found[0]).fetchone()
            if response is None:
                self._execute("DELETE FROM threads WHERE num = ?", found[0])
                removed += REMOVED_ROW_BYTES
                continue
            count = (limit - removed) // REMOVED_ROW_BYTES + 1
            rows = self._execute("SELECT num, length(body) FROM items WHERE response = ? LIMIT ?", response[0], count)
            items = rows.fetchall()
            for num, size in items:
                if removed >= limit:
                    return removed
                self._execute("DELETE FROM items WHERE num = ?", num)
                removed += size + REMOVED_ROW_BYTES
            if len(items) < count:
                self._execute("DELETE FROM responses WHERE num = ?", response[0])
                removed += response[1] + REMOVED_ROW_BYTES
        return removed

    def _owner_bytes(self, owner: str) -> int:
        found = self._execute("SELECT bytes FROM owners WHERE name = ?", owner).fetchone()
        return 0 if found is None else int(found[0])

    def _shrink(self) -> None:
        """Return some free pages beyond the reserve to the file system."""
        free: int = self._execute("PRAGMA freelist_count").fetchone()[0]
        for _ in range(min(free - SPARE_PAGES, SHRUNK_AT_ONCE)):
            # Each step of the statement frees one page, and sqlite3 makes one step of a statement without rows.
            self._execute("PRAGMA incremental_vacuum(1)")

    def _used_bytes(self) -> int:
        pages, free, size = (
            self._execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
        )
        return int((pages - free) * size)


def _size(response: StoredResponse) -> int:
    """Estimate the bytes of a response with its items in the file.

    This mirrors `SIZE` in SQL.
    """
    items = (*response.input, *response.output)
    return len(response.body) + sum([len(item.body) for item in items]) + ROW_BYTES * (len(items) + 1)


def _fitting(rows: Sequence[tuple[int, int]], max_bytes: int) -> tuple[list[int], int]:
    """Return the first of these ids whose sizes fit into `max_bytes`, but at least one, and their total size."""
    totals = list(accumulate(size for _, size in rows))
    count = max(1, sum(total <= max_bytes for total in totals))
    shown = rows[:count]
    return [num for num, _ in shown], totals[len(shown) - 1] if shown else 0
