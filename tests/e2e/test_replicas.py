"""Frontends as processes on one store: one continues what another has stored, whatever happens to that one."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.fakes.engine import FakeEngine
from tests.frontend.conftest import get, until
from tests.support.reasoning_model import answer_with, write_reasoning_model
from tests.support.serving import free_port

TEMPLATE = "<|begin|>{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}assistant:"
ROOT = Path(__file__).parents[2]


@contextmanager
def frontend(folder: Path, endpoint: str, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run a frontend as a process until the end of the block."""
    command = [sys.executable, "-m", "tandem.frontend", "--endpoint", endpoint, "--model-dir", str(folder)]
    command += ["--port", str(port), "--state-dir", str(folder / "state"), "--log-level", "warning"]
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"})
    try:
        yield process
    finally:
        process.kill()
        process.wait(60)


def is_ready(port: int) -> bool:
    try:
        return get(f"http://127.0.0.1:{port}/health/ready").status_code == 200
    except Exception:
        return False


@pytest.mark.slow
def test_a_frontend_continues_what_another_stored(tmp_path: Path) -> None:
    folder = write_reasoning_model(tmp_path, TEMPLATE)
    ports = [free_port(), free_port()]
    with ExitStack() as stack:
        # Short enough for a socket, and of mode 0700.
        endpoint = f"ipc://{stack.enter_context(tempfile.TemporaryDirectory(prefix='tdm-'))}/engine"
        engine = FakeEngine(endpoint, answer_with("answer")).start()
        stack.callback(engine.die)
        processes = [stack.enter_context(frontend(folder, endpoint, port)) for port in ports]
        until(lambda: all(map(is_ready, ports)), "both frontends are ready")
        clients = [
            stack.enter_context(openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0))
            for port in ports
        ]
        previous: Any = None
        for turn in range(6):
            made = clients[turn % 2].responses.create(
                model="fake-model", input=f"turn {turn}", previous_response_id=previous
            )
            assert clients[1 - turn % 2].responses.retrieve(made.id).to_dict() == made.to_dict()
            previous = made.id
        processes[1].send_signal(signal.SIGKILL)
        processes[1].wait(60)
        last = clients[0].responses.create(model="fake-model", input="alone", previous_response_id=previous)
        items = list(clients[0].responses.input_items.list(last.id, order="asc", limit=100))
        said = [item.content[0].text for item in items if item.type == "message"]
        assert said == [text for turn in range(6) for text in (f"turn {turn}", "answer")] + ["alone"]
        stack.enter_context(frontend(folder, endpoint, ports[1]))
        until(lambda: is_ready(ports[1]), "the second frontend is back")
        assert clients[1].responses.retrieve(last.id).output_text == "answer"
