"""Announcement of requests that are admitted to run."""

import pytest

from tandem.protocol.codec import pack_ids
from tandem.protocol.commands import Hello, Submit
from tandem.protocol.params import SamplingParams
from tandem.protocol.version import PROTOCOL_VERSION
from tests.support.recorded_engine import CLIENT, EPOCH, Bench


def test_cached_tokens_are_reported_before_the_first_token() -> None:
    bench = Bench(2)
    prompt = pack_ids(range(10, 20))
    for request_id in (1, 2):
        bench.say(Submit(request_id, prompt, SamplingParams(3, ignore_eos=True)))
        bench.finish()
    assert bench.mailbox.cached == {(CLIENT, 1): 0, (CLIENT, 2): 8}
    bench.engine.tick()
    assert (bench.stats.prefix_queries, bench.stats.prefix_hits, bench.stats.pages_cached) == (20, 8, 3)


def test_start_is_sent_before_the_first_launch() -> None:
    """What kills the engine's process in a launch is among the requests that their frontends know to have started."""
    bench = Bench(2, rows=1)
    bench.submit(1, 3)
    bench.submit(2, 3)
    bench.runtime.faults["launch 1"] = RuntimeError("device lost")
    known: list[set[int]] = []
    bench.mailbox.on_flush = lambda: known.append({number for _, number in bench.mailbox.cached})
    with pytest.raises(RuntimeError):
        bench.engine.tick()
    assert known == [{1}], "the second one has no row yet"


def test_requests_that_have_a_row_are_announced_with_the_step_that_begins_them() -> None:
    """Those that wait for room in a step are not to blame for one before."""
    bench = Bench(1, rows=4)
    for number in range(1, 4):
        prompt = pack_ids([10 + number] * 40)
        bench.say(Submit(number, prompt, SamplingParams(3, ignore_eos=True)))
    bench.engine.tick()
    assert len(bench.scheduler.running) == 3
    assert bench.mailbox.announced == {(CLIENT, 1), (CLIENT, 2)}, "64 positions of 120"
    bench.finish()
    assert bench.mailbox.announced == {(CLIENT, number) for number in range(1, 4)}
    assert bench.at_rest()


def test_start_of_a_request_that_lost_an_engine_has_left_the_process_before_the_first_launch() -> None:
    bench = Bench(2)
    bench.submit(1, 3)
    bench.finish()
    assert bench.mailbox.num_sent_waits == 0
    bench.say(Submit(2, pack_ids([10, 11]), SamplingParams(3, ignore_eos=True), lost_engines=1))
    bench.runtime.calls.clear()
    bench.mailbox.on_await_sent = lambda: bench.runtime.calls.append("await sent")
    bench.finish()
    assert bench.runtime.calls[0] == "await sent"
    assert bench.mailbox.num_sent_waits == 1


def test_rows_of_a_frontend_that_is_gone_at_its_start_serve_others_in_the_same_tick() -> None:
    bench = Bench(2, rows=1)
    bench.say(Hello(PROTOCOL_VERSION, EPOCH, "other"), client=b"other")
    bench.submit(1, 3)
    bench.submit(1, 3, client=b"other")
    bench.mailbox.gone.add(CLIENT)
    bench.engine.tick()
    assert [seq.client for seq in bench.scheduler.running.values()] == [b"other"]
    assert bench.runtime.calls[:1] == ["launch 1"]
    bench.finish()
    assert bench.at_rest()
