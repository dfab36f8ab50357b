"""The store behind its thread: failures, their log and their count, the private directory."""

import asyncio
import logging
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from tandem.frontend.errors import ApiError
from tandem.frontend.metrics.frontend_metrics import FrontendMetrics
from tandem.frontend.store import store_worker
from tandem.frontend.store.store import ItemPage, PageQuery, StoredItem, StoredResponse, StoreError, StoreLimits
from tandem.frontend.store.store_worker import LOG_SECONDS, StoreWorker, open_store_worker
from tests.fakes.clock import FakeClock
from tests.support.stored import retrieved, stored


class BrokenStore:
    """A store of which every call fails."""

    def save(self, owner: str, response: StoredResponse) -> bool:
        raise StoreError("the disk is full")

    def get(self, owner: str, response_id: str, max_bytes: int) -> StoredResponse | None:
        raise StoreError("the disk is broken")

    def delete(self, owner: str, response_id: str) -> bool:
        raise StoreError("the disk is broken")

    def conversation(self, owner: str, response_id: str, max_bytes: int) -> list[StoredItem] | None:
        raise StoreError("the disk is broken")

    def input_items(self, owner: str, response_id: str, page: PageQuery, max_bytes: int) -> ItemPage | None:
        raise StoreError("the disk is broken")

    def find_items(self, owner: str, item_ids: Sequence[str], max_bytes: int) -> dict[str, StoredItem]:
        raise StoreError("the disk is broken")

    def close(self) -> None:
        pass


@pytest.fixture
def metrics() -> FrontendMetrics:
    return FrontendMetrics(CollectorRegistry())


def test_failures_of_the_store_are_counted_and_logged_once_a_minute(
    metrics: FrontendMetrics, caplog: pytest.LogCaptureFixture
) -> None:
    clock = FakeClock()
    worker = StoreWorker(BrokenStore(), metrics, clock=clock)

    async def run() -> None:
        for _ in range(3):
            assert not await worker.save("me", stored("r1"))
        for call in (worker.get("me", "x", 1), worker.delete("me", "x"), worker.conversation("me", "x", 1)):
            with pytest.raises(ApiError) as caught:
                await call
            assert caught.value.status == 503
        clock.advance(LOG_SECONDS)
        with pytest.raises(ApiError):
            await worker.find_items("me", ["x"], 1)
        await worker.close()

    with caplog.at_level(logging.ERROR):
        asyncio.run(run())
    first, last = caplog.messages
    assert re.search(r"\bsave .*\(1 .*\): the disk is full$", first)
    assert re.search(r"\bget .*\(6 .*\): the disk is broken$", last)
    counted = {name: metrics.store_failures.labels(name).value for name in ("save", "get", "delete")}
    assert counted == {"save": 3.0, "get": 3.0, "delete": 1.0}


def test_response_does_not_wait_for_a_store_that_hangs(
    metrics: FrontendMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_worker, "SAVE_SECONDS", 0.01)

    async def run() -> None:
        worker = open_store_worker(None, StoreLimits(), metrics)
        released = asyncio.Event()
        loop = asyncio.get_running_loop()
        busy = asyncio.create_task(
            worker._thread.run(lambda: asyncio.run_coroutine_threadsafe(released.wait(), loop).result(60))
        )
        await asyncio.sleep(0)  # the thread is taken
        assert not await worker.save("me", stored("r1"))
        released.set()
        await busy
        assert await worker.get("me", "r1", 1) is None
        await worker.close()

    asyncio.run(run())
    assert metrics.store_failures.labels("save").value == 1.0


def test_private_directory_is_removed_at_the_end_and_a_given_one_is_kept(
    tmp_path: Path, ipc_dir: Path, metrics: FrontendMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(ipc_dir))

    async def run(state_dir: Path | None) -> Path:
        worker = open_store_worker(state_dir, StoreLimits(), metrics)
        assert await worker.save("me", stored("r1"))
        assert await worker.get("me", "r1", 2**20) == retrieved("r1")
        place = state_dir or next(ipc_dir.glob("tandem-*"))
        assert (place / "store.sqlite3").exists()
        await worker.close()
        return place

    assert not asyncio.run(run(None)).exists()
    assert asyncio.run(run(tmp_path)).exists()
    (tmp_path / "file").touch()
    with pytest.raises(StoreError):
        open_store_worker(tmp_path / "file", StoreLimits(), metrics)
