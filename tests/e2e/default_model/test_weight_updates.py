"""Updates of a served model by a trainer in a process of its own, over gloo."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.served_trainer import ServedTrainer
from tests.support.serving import Serving, until

QUESTION = {"prompt": "What does textwrap.dedent do?", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


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
    answers: dict[int, str] = {}
    with ThreadPoolExecutor(2) as others, ServedTrainer(serving) as trainer:
        for seed in (1, 2, 0, 1):
            trainer.update(seed)
            found = answer(serving)
            assert answers.setdefault(seed, found) == found
        assert answers[0] == first and len(set(answers.values())) == 3

        trainer.prepare(2, buffers=2)
        trainer.call("pause?mode=keep", {})
        held = others.submit(serving.post, "/v1/completions", QUESTION)
        trainer.call("start_weight_update", {})
        sending = others.submit(trainer.call, "update_weights", {"update_info": trainer.update_info}, 409)
        trainer.send()
        trainer.expect("stopped")
        until(lambda: is_paused(serving), "heartbeats that say so")
        assert not sending.done(), "the engine answers no calls while it receives"
        trainer.kill()
        sending.result()
        status, refused = held.result()
        assert (status, refused["error"]["code"]) == (503, "weights_changed"), refused
        trainer.call("finish_weight_update", {}, 409)
        trainer.call("resume", {})
    assert serving.post("/v1/completions", QUESTION)[0] == 503

    with ServedTrainer(serving) as second:
        second.update(2)
    assert answer(serving) == answers[2]

    serving.engine.kill()
    until(lambda: is_paused(serving), "the next engine")
    until(lambda: serving.said("the weights that a trainer sent are lost"), "the line of the lost weights")
    assert serving.post("/resume", {})[0] == 200
    assert answer(serving) == first, "the weights on disk"


def is_paused(serving: Serving) -> bool:
    status, body = serving.get("/is_paused")
    return status == 200 and '"is_paused":true' in body.replace(" ", "")
