"""Updates of a served model by a trainer in a process of its own, over gloo."""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.serving import Serving, free_port, until
from tests.support.trained_engine import described
from tests.support.trainer_process import BUFFER_BYTES, noisy_weights

QUESTION = {"prompt": "What does textwrap.dedent do?", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


class Trainer:
    """A trainer's process, and its calls to a server."""

    def __init__(self, serving: Serving) -> None:
        self.serving = serving
        port = free_port()
        command = [sys.executable, "-m", "tests.support.trainer_process", str(port)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, **pipes)
        names, dtypes, shapes = described(noisy_weights(0))
        self.update_info = {"names": names, "dtype_names": dtypes, "shapes": shapes}
        info = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2, "packed": True}
        self.call("init_weight_transfer_engine", {"init_info": {**info, "packed_buffer_size_bytes": BUFFER_BYTES}})

    def call(self, name: str, body: dict[str, Any], status: int = 200) -> dict[str, Any]:
        found, answer = self.serving.post(f"/{name}", body)
        assert found == status, answer
        return answer

    def send(self, seed: int, buffers: int = -1) -> None:
        """Tell the process to broadcast its weights, or the first buffers of them."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{seed} {buffers}\n")
        self.process.stdin.flush()

    def update(self, seed: int) -> None:
        self.call("pause?mode=keep", {})
        self.call("start_weight_update", {"is_checkpoint_format": True})
        self.send(seed)
        self.call("update_weights", {"update_info": self.update_info})
        self.call("finish_weight_update", {"weight_version": f"seed-{seed}"})
        self.call("resume", {})

    def await_stop(self) -> None:
        """Wait until the process has sent what it was told to."""
        assert self.process.stdout is not None
        while self.process.stdout.readline().strip() != "stopped":
            assert self.process.poll() is None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    log = tmp_path_factory.mktemp("updates") / "log"
    with Serving(log, "--enable-weight-updates", "--logprobs-mode", "processed_logprobs") as running:
        yield running


def answer(serving: Serving) -> str:
    status, found = serving.post("/v1/completions", QUESTION)
    assert status == 200, found
    text: str = found["choices"][0]["text"]
    return text


def test_a_trainer_updates_a_server_until_it_dies(serving: Serving) -> None:
    first = answer(serving)
    trainer = Trainer(serving)
    answers = {}
    for seed in (1, 2, 0, 1):
        trainer.update(seed)
        found = answer(serving)
        assert answers.setdefault(seed, found) == found
    assert answers[0] == first and len(set(answers.values())) == 3

    with ThreadPoolExecutor(2) as others:
        trainer.call("pause?mode=keep", {})
        held = others.submit(serving.post, "/v1/completions", QUESTION)
        trainer.call("start_weight_update", {})
        trainer.send(2, buffers=2)
        sending = others.submit(trainer.call, "update_weights", {"update_info": trainer.update_info}, 409)
        trainer.await_stop()
        assert is_paused(serving), "heartbeats say so while the engine receives"
        trainer.kill()
        sending.result()
        status, refused = held.result()
    assert (status, refused["error"]["code"]) == (503, "weights_changed"), refused
    trainer.call("finish_weight_update", {}, 409)
    trainer.call("resume", {})
    assert serving.post("/v1/completions", QUESTION)[0] == 503

    second = Trainer(serving)
    second.update(2)
    assert answer(serving) == answers[2]
    second.kill()

    serving.engine.kill()
    until(lambda: is_paused(serving), "the next engine")
    until(lambda: serving.said("the weights that a trainer sent are lost"), "the line of the lost weights")
    assert serving.post("/resume", {})[0] == 200
    assert answer(serving) == first, "the weights on disk"


def is_paused(serving: Serving) -> bool:
    status, body = serving.get("/is_paused")
    return status == 200 and '"is_paused":true' in body.replace(" ", "")
