"""The link to an engine, over real sockets."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from tandem.frontend.engine import link as link_module
from tandem.frontend.engine.link import EngineLink, encode_command
from tandem.frontend.engine.streams import OpenStreams
from tandem.frontend.errors import ApiError
from tandem.protocol.codec import decode_command, encode
from tandem.protocol.commands import Hello, Renew, Submit
from tandem.protocol.events import Closed, Limits, ModelFacts, Ready
from tandem.protocol.params import SamplingParams
from tandem.protocol.sockets import OUTPUT_HIGH_WATER_MARK, Transport, bind_router
from tandem.protocol.version import PROTOCOL_VERSION
from tests.fakes.engine import FakeEngine
from tests.frontend.conftest import RunningServer, get, post
from tests.support.refusals import numbers_in, raises_api_error

LIMIT = 30.0
"""Seconds after which a wait fails."""
FACTS = ModelFacts("m", 100, 128, [1], "", "cpu", "float32", 0)
READY = Ready(PROTOCOL_VERSION, 7, FACTS, Limits(4, 64, 16, 32, 8))


class Opened:
    """A link, the engine's socket that it is connected to, and the reasons for which it broke."""

    def __init__(self, link: EngineLink, router: Any, broken: "asyncio.Queue[str]") -> None:
        self.link = link
        self.router = router
        self.broken = broken
        self.identity = b""

    async def received(self) -> Any:
        self.identity, data = await asyncio.wait_for(self.router.recv_multipart(), LIMIT)
        return decode_command(data)

    async def reason(self) -> str:
        return await asyncio.wait_for(self.broken.get(), LIMIT)


def with_link(
    folder: Path,
    test: Callable[[Opened], Coroutine[Any, Any, None]],
    on_event: Callable[[object], None] = lambda _: None,
) -> None:
    """Run a test with a link that has sent its Hello."""

    async def run() -> None:
        context = zmq.asyncio.Context()
        broken: asyncio.Queue[str] = asyncio.Queue()
        router = bind_router(context, f"ipc://{folder}/engine")
        link = EngineLink(context, 7, OpenStreams(), on_event, broken.put_nowait)
        link.open(f"ipc://{folder}/engine", Transport(), "test", 0.0)
        opened = Opened(link, router, broken)
        try:
            assert await opened.received() == Hello(PROTOCOL_VERSION, 7, "test")
            await test(opened)
        finally:
            link.close()
            context.destroy(linger=0)

    asyncio.run(run())


def test_a_link_renews_its_lease_once_it_is_ready(ipc_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "RENEW_SECONDS", 0.01)

    async def test(opened: Opened) -> None:
        await asyncio.sleep(0.05)
        assert not await opened.router.poll(0), "an engine that has not answered the Hello has no lease to renew"
        opened.link.ready = READY
        for _ in range(3):
            assert await opened.received() == Renew()

    with_link(ipc_dir, test)


def test_a_link_that_the_engine_closes_breaks_with_the_reason(ipc_dir: Path) -> None:
    async def test(opened: Opened) -> None:
        await opened.router.send_multipart([opened.identity, encode(Closed("it was silent for 5 s"))])
        assert await opened.reason() == "it was silent for 5 s"

    with_link(ipc_dir, test)


def test_a_link_whose_engine_disconnects_breaks(ipc_dir: Path) -> None:
    async def test(opened: Opened) -> None:
        opened.router.close(linger=0)
        assert "closed" in await opened.reason()

    with_link(ipc_dir, test)


def test_what_an_engine_sent_before_it_ended_is_handled_before_its_link_breaks(
    ipc_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "MESSAGES_PER_TURN", 1)
    told: list[object] = []

    async def test(opened: Opened) -> None:
        for _ in range(OUTPUT_HIGH_WATER_MARK // 2):
            await opened.router.send_multipart([opened.identity, encode(READY)])
        opened.router.close(linger=int(1000 * LIMIT))
        assert "closed" in await opened.reason()
        assert told == [READY] * (OUTPUT_HIGH_WATER_MARK // 2)

    with_link(ipc_dir, test, told.append)


def submit(prompt_len: int) -> Submit:
    return Submit(1, bytes(4 * prompt_len), SamplingParams(8))


def test_a_command_that_is_too_large_is_refused_and_the_link_goes_on(
    ipc_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = submit(1000)
    most_bytes, sent_bytes = len(encode(most)), len(encode(submit(1001)))
    monkeypatch.setattr(link_module, "MAX_COMMAND_BYTES", most_bytes)

    async def test(opened: Opened) -> None:
        with pytest.raises(ApiError, match=rf"\b{sent_bytes}\b.*\b{most_bytes}\b") as refused:
            opened.link.send(submit(1001))
        assert (refused.value.status, refused.value.code) == (413, "request_too_large")
        opened.link.send(most)
        assert await opened.received() == most

    with_link(ipc_dir, test)


def test_the_largest_command_fits() -> None:
    """A prompt over 16 million positions long, which no model has yet."""
    with raises_api_error(413, "request_too_large"):
        encode_command(submit(2**24))
    assert len(encode_command(submit(2**24 - 64))) <= link_module.MAX_COMMAND_BYTES


def test_a_request_that_is_too_large_is_413_and_costs_no_other_one(
    server: RunningServer, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "MAX_COMMAND_BYTES", 2000)
    body = {"model": "fake-model", "prompt": [5] * 1000, "max_tokens": 2, "n": 2}
    refused = post(server.url + "/v1/completions", json=body)
    assert refused.status_code == 413
    assert refused.json()["error"]["code"] == "request_too_large"
    assert 2000 in numbers_in(refused.json()["error"]["message"])
    assert post(server.url + "/v1/completions", json=body | {"prompt": [5] * 100}).status_code == 200
    assert (len(engine.hellos), len(engine.submits)) == (1, 2)
    assert "tandem_frontend_num_requests_running 0.0" in get(server.url + "/metrics").text
