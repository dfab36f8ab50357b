"""Loads of many streams in simulated time: who waits how long, and how many rows decode."""

import pytest
from msgspec import structs

from tests.support.served_load import LARGE, LARGE_FP8, SMALL, LoadRun, ServedLoad

LOADS = {
    "8 streams, long prompts": (ServedLoad(SMALL, 8, (8192, 8192), (128, 128), 4), 90.0, 12.0),
    "128 streams, all lengths": (ServedLoad(SMALL, 128, (32, 1024), (16, 512), 6), 18.0, 7.7),
    "64 streams, large model": (ServedLoad(LARGE, 64, (256, 256), (128, 128), 6), 60.0, 28.0),
    "256 streams, large model": (ServedLoad(LARGE, 256, (256, 256), (128, 128), 6), 80.0, 29.0),
    "32 streams, long prompts, large model": (ServedLoad(LARGE, 32, (4096, 4096), (256, 256), 6), 250.0, 30.0),
    "16 streams, documents, large model": (ServedLoad(LARGE, 16, (2048, 2048), (64, 64), 6), 300.0, 20.0),
    "32 streams, long prompts, FP8": (ServedLoad(LARGE_FP8, 32, (4096, 4096), (256, 256), 6), 260.0, 45.0),
    "16 streams, documents, FP8": (ServedLoad(LARGE_FP8, 16, (2048, 2048), (64, 64), 6), 100.0, 25.0),
}
"""Loads, each with the most that half of its first tokens and 99 of 100 later ones may wait, in milliseconds."""
LARGE_LOADS = {
    "256 streams": (ServedLoad(SMALL, 256, (256, 256), (128, 128), 10), 38.0, 8.0),
    "1,024 streams": (ServedLoad(SMALL, 1024, (128, 128), (128, 128), 3, max_rows=1024), 100.0, 30.0),
}


def check(load: ServedLoad, ttft: float, itl: float) -> None:
    """Compare a load with its limits, and with chunks of 256 positions of each prompt and 2,048 in all."""
    by_time, by_chunks = LoadRun(load).run(), LoadRun(load, by_time=False).run()
    assert by_time.ttft <= min(ttft, by_chunks.ttft)
    assert by_time.itl <= min(itl, by_chunks.itl)
    assert by_time.tokens_per_second >= 0.98 * by_chunks.tokens_per_second, "what streams gain costs hardly any tokens"


@pytest.mark.parametrize(("load", "ttft", "itl"), LOADS.values(), ids=LOADS)
def test_streams_wait_no_longer_than_required(load: ServedLoad, ttft: float, itl: float) -> None:
    check(load, ttft, itl)


@pytest.mark.slow
@pytest.mark.parametrize(("load", "ttft", "itl"), LARGE_LOADS.values(), ids=LARGE_LOADS)
def test_many_streams_wait_no_longer_than_required(load: ServedLoad, ttft: float, itl: float) -> None:
    check(load, ttft, itl)


@pytest.mark.parametrize("prompts", [1.0, 2.5, 4.5])
def test_most_rows_decode_whatever_a_step_with_prompts_costs(prompts: float) -> None:
    device = structs.replace(LARGE, prompts=prompts)
    figures = LoadRun(ServedLoad(device, 64, (256, 256), (128, 128), 6, max_rows=64)).run()
    assert figures.decoding > 0.85 * 64


@pytest.mark.parametrize("streams", [16, 64])
def test_a_longer_limit_starts_streams_earlier_and_a_shorter_one_disturbs_less(streams: int) -> None:
    load = ServedLoad(LARGE, streams, (1024, 1024), (64, 128), 3)
    short, long = LoadRun(load, max_itl=15.0).run(), LoadRun(load, max_itl=60.0).run()
    assert short.itl < 15.0 + 1.0 < long.itl < 60.0 + 1.0, "the host takes less than a millisecond beside a step"
    assert long.ttft < short.ttft
