"""The adapter of a request is the one that its model named when it arrived."""

from typing import Any

from tandem.protocol.events import AdapterFacts, AdapterList
from tests.fakes.engine import FakeEngine
from tests.frontend.conftest import RunningServer, post


def test_an_adapter_unloaded_while_a_prompt_is_encoded_is_not_replaced_by_the_model(
    engine: FakeEngine, server: RunningServer
) -> None:
    service = server.server._service
    adapters, admission = service.client.adapters, service.admission
    encode = admission._encode

    async def unload_and_encode(*arguments: Any) -> Any:
        adapters.observe(engine.epoch, AdapterList(2, []))
        return await encode(*arguments)

    adapters.observe(engine.epoch, AdapterList(1, [AdapterFacts("sql", "/sql", 1)]))
    admission._encode = unload_and_encode  # type: ignore[method-assign]
    body = {"model": "sql", "prompt": "a", "max_tokens": 1}
    assert post(f"{server.url}/v1/completions", json=body).status_code == 200, "the engine decides"
    assert [submit.adapter for submit in engine.submits] == ["sql"]
    assert post(f"{server.url}/v1/completions", json=body).status_code == 404
