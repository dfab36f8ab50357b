"""A trainer's process, and its calls to a server."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from tests.fakes.scripted_engine import DEFAULT_MODEL
from tests.support.serving import Serving, free_port
from tests.support.trainer_weights import update_info

BUFFER_BYTES = 100_000
WORDS = {"started", "packed", "stopped", "sent"}
"""What the process prints, among lines of its libraries."""


def visible_gpus() -> list[str]:
    """Return the GPUs of this process, as CUDA_VISIBLE_DEVICES names them."""
    count, names = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    return names.split(",")[:count] if names else [str(number) for number in range(count)]


class ServedTrainer:
    """A context in which a trainer's process has joined the group of a server."""

    def __init__(
        self,
        serving: Serving,
        folder: Path = DEFAULT_MODEL,
        device: str = "cpu",
        buffer_bytes: int = BUFFER_BYTES,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Keep the parts. folder: of the served model; environment: of the process, on top of that of this one."""
        self.serving = serving
        self.join_seconds = 0.0
        self.update_info = update_info(folder)
        self._buffer_bytes = buffer_bytes
        self._port = free_port()
        arguments = [str(self._port), str(folder), device, str(buffer_bytes)]
        self._command = [sys.executable, "-m", "tests.support.trainer_process", *arguments]
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "ServedTrainer":
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(self._command, env=self._environment, **pipes)
        info = {"master_address": "127.0.0.1", "master_port": self._port, "rank_offset": 1, "world_size": 2}
        info |= {"packed": True, "packed_buffer_size_bytes": self._buffer_bytes}
        try:
            self.expect("started")
            began = time.perf_counter()
            self.call("init_weight_transfer_engine", {"init_info": info})
            self.join_seconds = time.perf_counter() - began
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def call(self, name: str, body: dict[str, Any], status: int = 200) -> dict[str, Any]:
        found, answer = self.serving.post(f"/{name}", body)
        assert found == status, (name, found, answer)
        return answer

    def prepare(self, seed: int, buffers: int = -1) -> None:
        """Have the process pack its weights. buffers: number that it will send before it stops, -1 for all."""
        self._tell(f"{seed} {buffers}")
        self.expect("packed")

    def send(self) -> None:
        """Have the process broadcast what it has packed."""
        self._tell("send")

    def expect(self, word: str) -> None:
        """Wait until the process prints a word. Raises AssertionError for another one, or none."""
        assert self._process is not None and self._process.stdout is not None
        while line := self._process.stdout.readline():
            if (found := line.strip()) in WORDS:
                assert found == word, f"the trainer printed {found!r} instead of {word!r}"
                return
        raise AssertionError(f"the trainer ended with {self._process.wait()} before it printed {word!r}")

    def update(self, seed: int) -> tuple[float, float]:
        """Update all weights; return the seconds of /update_weights and of /finish_weight_update."""
        self.prepare(seed)
        self.call("pause?mode=keep", {})
        self.call("start_weight_update", {"is_checkpoint_format": True})
        self.send()
        began = time.perf_counter()
        self.call("update_weights", {"update_info": self.update_info})
        middle = time.perf_counter()
        self.call("finish_weight_update", {"weight_version": f"seed-{seed}"})
        end = time.perf_counter()
        self.expect("sent")
        self.call("resume", {})
        return middle - began, end - middle

    def die_in_update(self, seed: int, buffers: int = 1) -> tuple[float, list[int]]:
        """Kill the process once it has sent some buffers.

        Return the seconds until the server answers the update, and the statuses of that answer and of the finish. The
        server has resumed afterwards.
        """
        self.prepare(seed, buffers)
        self.call("pause?mode=keep", {})
        self.call("start_weight_update", {})
        with ThreadPoolExecutor(1) as others:
            sending = others.submit(self.serving.post, "/update_weights", {"update_info": self.update_info})
            self.send()
            self.expect("stopped")
            self.kill()
            began = time.perf_counter()
            update, _ = sending.result()
        seconds = time.perf_counter() - began
        finish, _ = self.serving.post("/finish_weight_update", {})
        self.call("resume", {})
        return seconds, [update, finish]

    def kill(self) -> None:
        """End the process. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()

    def _tell(self, line: str) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
