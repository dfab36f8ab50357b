"""Steps of two engines with different limits, in turns, and the loss between them."""

import pytest

from benchmarks.bench_decode import arguments_parser
from benchmarks.measuring.two_lengths import KINDS, MIN_LEN, Times, build, compare, line, loss_of
from tandem.engine_core.startup.engine import DEFAULT_MODEL
from tests.support.engine_driver import DrivenEngine
from tests.support.refusals import numbers_in


@pytest.fixture(scope="module")
def engines() -> tuple[DrivenEngine, DrivenEngine]:
    return build(DEFAULT_MODEL, (1024, 2048), max_rows=4, quantize="off", device="cpu")


def test_rows_fit_the_shorter_length(engines: tuple[DrivenEngine, DrivenEngine]) -> None:
    assert [driven.engine.control.model.max_len for driven in engines] == [1024, 2048]
    assert MIN_LEN <= 1024


@pytest.mark.parametrize("kind", list(KINDS))
def test_both_engines_compute_the_same_rows_in_turns(engines: tuple[DrivenEngine, DrivenEngine], kind: str) -> None:
    before = [driven.engine.stats.steps_committed for driven in engines]
    loss = compare(engines, rows=3, kind=kind, prompt=8, settle=1, window=2, windows=3)
    assert (loss.kind, loss.rows) == (kind, 3)
    assert min(loss.steps) > 0
    taken = [driven.engine.stats.steps_committed - steps for driven, steps in zip(engines, before, strict=True)]
    assert taken[0] == taken[1] >= 3 * 3 + 1
    outputs = [list(driven.mailbox.received.values()) for driven in engines]
    assert outputs[0] == outputs[1]
    assert not any(driven.engine.scheduler.num_open for driven in engines)


def test_loss_is_the_median_of_neighbouring_windows() -> None:
    pairs = [
        (Times(1.0, 0.5), Times(1.02, 0.5)),
        (Times(2.0, 0.5), Times(2.02, 0.6)),
        (Times(1.0, 0.5), Times(5.0, 0.55)),
    ]
    loss = loss_of("greedy", 8, pairs)
    assert loss.loss_percent == pytest.approx(2.0)
    assert loss.gpu_loss_percent == pytest.approx(10.0)
    assert loss.steps == pytest.approx((1000.0, 2020.0))
    text = line((4096, 131072), loss)
    assert "+2.00 %;" in text and text.endswith("+10.00 %") and numbers_in(text)[-3:] == [500, 550, 10]
    assert loss_of("greedy", 1, [(Times(1.0, 0.0), Times(1.0, 0.0))]).gpu_loss_percent == 0.0


def test_one_length_or_two_may_be_given() -> None:
    parse = arguments_parser().parse_args
    assert parse(["--shape", "x"]).max_len is None
    assert parse(["--shape", "x", "--max-len", "4096"]).max_len == [4096]
    assert parse(["--shape", "x", "--max-len", "4096", "131072"]).max_len == [4096, 131072]
