"""Updates of a server on one GPU by a trainer on another, through NCCL, with the shipped model.

The trainer joins the group as vLLM's do. It dies in the middle of an update, and another completes the weights.
"""

from collections.abc import Iterator

import pytest

from tests.support.nccl_trainer import ANY_HOST
from tests.support.served_trainer import ServedTrainer, visible_gpus
from tests.support.serving import Serving, write_console_script

GPUS = visible_gpus()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(len(GPUS) < 2, reason="needs two GPUs of one host"),
]

FLAGS = ("--max-rows", "8", "--kv-tokens", "32768", "--graph-rows", "1,2,4", "--speculate", "off")
QUESTION = {"prompt": "What does textwrap.dedent do?", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
DEVICE = "cuda"


def trainer(serving: Serving) -> ServedTrainer:
    return ServedTrainer(serving, device=DEVICE, environment={"CUDA_VISIBLE_DEVICES": GPUS[1]})


def answer(serving: Serving) -> str:
    status, found = serving.post("/v1/completions", QUESTION)
    assert status == 200, found
    text: str = found["choices"][0]["text"]
    return text


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("updates")
    flags = ("--device", DEVICE, "--enable-weight-updates", "--weight-update-hosts", ANY_HOST, "--update-timeout", "20")
    script, environment = write_console_script(folder), {"CUDA_VISIBLE_DEVICES": GPUS[0]}
    with Serving(folder / "log", *flags, *FLAGS, tandem=script, environment=environment) as running:
        yield running


def test_a_trainer_on_another_gpu_updates_until_it_dies(serving: Serving) -> None:
    first = answer(serving)
    answers: dict[int, str] = {}
    with trainer(serving) as one:
        for seed in (1, 2, 0, 1):
            one.update(seed)
            found = answer(serving)
            assert answers.setdefault(seed, found) == found
        assert answers[0] == first and len(set(answers.values())) == 3
        _, statuses = one.die_in_update(2, buffers=2)
    assert statuses == [409, 409]
    assert serving.post("/v1/completions", QUESTION)[0] == 503
    with trainer(serving) as another:
        another.update(2)
    assert answer(serving) == answers[2]
