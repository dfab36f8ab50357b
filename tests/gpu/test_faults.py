"""A CUDA failure ends every stream and the process, and nothing more: the next engine serves the next request.

Real processes, the shipped model on CUDA, faults made by `tests.support.faulty_engine` in the middle of four streams.
"""

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import pytest

from benchmarks.frontends.deployment import python_path
from tandem.protocol.errors import ExitCode
from tests.support.faulty_engine import FAULTS, ROWS, VARIABLE
from tests.support.faulty_serve import ENGINE
from tests.support.serving import GUARD_SECONDS, Serving, until

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
DEVICE = "cuda"
FLAGS = ("--max-rows", "8", "--kv-tokens", "32768", "--graph-rows", "1,2,4")
MODEL, RESTARTS = "tandem-default", "tandem_engine_restarts_total"
PROMPT = "Tell me about os.path.join"


class FaultyServing(Serving):
    """A `tandem serve` whose engine fails when the switch is set."""

    def __init__(self, log: Path, switch: Path, *flags: str) -> None:
        super().__init__(log, *flags, environment={VARIABLE: str(switch)} | python_path(ROOT / "src", ROOT))
        self.switch = switch

    def __enter__(self) -> "FaultyServing":
        popen = subprocess.Popen

        def start(command: list[str], **more: object) -> "subprocess.Popen[bytes]":
            ours = [sys.executable, "-m", "tests.support.faulty_serve", *command[1:]]
            return popen(ours, cwd=ROOT, **more)  # type: ignore[call-overload, no-any-return]

        with patch.object(subprocess, "Popen", start):
            super().__enter__()
        return self

    def exits(self) -> list[str]:
        """How the engine core has ended so far, from the supervisor's log."""
        return re.findall(r"the engine core ended with (.+);", self.log.read_text(errors="replace"))


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyServing]:
    folder = tmp_path_factory.mktemp("faults")
    with FaultyServing(folder / "log", folder / "switch", "--device", DEVICE, *FLAGS) as running:
        yield running


def stream(serving: FaultyServing) -> tuple[int, str]:
    """Reads one long stream to its end: how many chunks came, and what ended it."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1900, "stream": True, "ignore_eos": True}
    request = urllib.request.Request(
        serving.url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    chunks = 0
    with urllib.request.urlopen(request, timeout=GUARD_SECONDS) as reply:
        for line in reply:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                return chunks, f"error: {event['error']['message']}"
            chunks += 1
            if event["choices"] and event["choices"][0]["finish_reason"] is not None:
                return chunks, f"finished: {event['choices'][0]['finish_reason']}"
    return chunks, "cut off"


@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_cuda_failure_is_fatal_and_clean(serving: FaultyServing, fault: str) -> None:
    until(serving.ready, "an engine")
    before, exits = serving.engine_metric(RESTARTS), serving.exits()
    engine = serving.child(ENGINE)
    serving.switch.write_text(fault)
    with ThreadPoolExecutor(ROWS) as pool:
        ends = list(pool.map(lambda _: stream(serving), range(ROWS)))
    print(f"\n{fault}: " + "; ".join(f"{how[:120]} after {chunks} chunks" for chunks, how in ends))
    assert not serving.switch.exists(), "the fault was injected"
    assert all(chunks > 0 and how.startswith("error") and "engine" in how for chunks, how in ends)
    until(lambda: len(serving.exits()) > len(exits), "the engine's end")
    assert serving.exits()[len(exits) :] == [f"exit code {ExitCode.FATAL:d}"]
    until(lambda: serving.engine_metric(RESTARTS) == before + 1 and serving.ready(), "the next engine")
    assert serving.child(ENGINE).pid != engine.pid
    status, reply = serving.post("/v1/completions", {"model": MODEL, "prompt": PROMPT, "max_tokens": 8})
    assert (status, reply["choices"][0]["finish_reason"]) in ((200, "stop"), (200, "length"))
    assert serving.get("/health/live")[0] == 200
