"""Tiny checkpoints for the tools that compare with transformers, and a server for those that send requests."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.porting.tiny import save_tiny
from tests.fakes.completions_server import CompletionsServer

GUARD_SECONDS = 120.0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny("LlamaForCausalLM", folder)
    return folder


@pytest.fixture
def served() -> Iterator[CompletionsServer]:
    """Run a server on a loop in a thread, for runs with processes of their own."""
    server, loop = CompletionsServer(), asyncio.new_event_loop()
    loop.run_until_complete(server.__aenter__())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield server
    asyncio.run_coroutine_threadsafe(server.__aexit__(), loop).result(GUARD_SECONDS)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
