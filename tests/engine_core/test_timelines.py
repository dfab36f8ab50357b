"""Times of traced sequences, as the engine reports them."""

import pytest

from tandem.engine_core.wire.outbox import Outbox
from tandem.protocol.codec import decode_event, encode, pack_ids, step_output
from tandem.protocol.commands import Abort, Submit
from tandem.protocol.events import DetailedOutput, SequenceTimes, StepOutput
from tandem.protocol.params import SamplingParams
from tests.support.recorded_engine import CLIENT, Bench


def submit(bench: Bench, request_id: int, max_tokens: int, is_traced: bool = True) -> None:
    params = SamplingParams(max_tokens, ignore_eos=True)
    bench.say(Submit(request_id, pack_ids([3, 4, 5]), params, is_traced=is_traced))


def ticking_bench(depth: int = 1, rows: int = 4) -> Bench:
    """Return an engine whose clock goes on by a second before each tick."""
    bench = Bench(depth, rows)
    bench.mailbox.on_drain = lambda: bench.clock.advance(1.0)
    return bench


@pytest.mark.parametrize("depth", [1, 2])
def test_times_come_with_the_first_token_and_with_the_end(depth: int) -> None:
    bench = ticking_bench(depth)
    submit(bench, 1, 4)
    bench.finish()
    first, last = bench.mailbox.times[CLIENT, 1]
    assert first.ended is None and first.num_steps >= 1
    assert (last.admitted, last.launched, last.first_token) == (0.0, 0.0, first.first_token)
    assert last.first_token is not None and last.ended is not None
    assert 0 < last.first_token < last.ended
    assert last.num_steps == sum(call.startswith("launch") for call in bench.runtime.calls)
    assert len(bench.engine.timelines) == 0


def test_time_in_the_queue_is_reported() -> None:
    bench = ticking_bench(rows=1)
    submit(bench, 1, 3, is_traced=False)
    submit(bench, 2, 2)
    bench.finish()
    last = bench.mailbox.times[CLIENT, 2][-1]
    assert last.admitted is not None and last.admitted >= 3.0
    assert (CLIENT, 1) not in bench.mailbox.times


def test_a_sequence_that_never_ran_has_its_end_alone() -> None:
    bench = ticking_bench(rows=1)
    submit(bench, 1, 3)
    submit(bench, 2, 2)
    bench.engine.tick()
    bench.say(Abort([2]))
    bench.finish()
    (only,) = bench.mailbox.times[CLIENT, 2]
    assert only.admitted is None and only.ended is not None and only.num_steps == 0


def test_only_a_message_with_times_grows() -> None:
    box = Outbox()
    box.request_ids, box.tokens = [7], [3]
    plain = box.encode(1)
    assert plain == encode(step_output(1, [7], [3]))
    assert type(decode_event(plain)) is StepOutput
    times = SequenceTimes(7, 0.5, 0.75, 1.0, None, 2, 1)
    box.times.append(times)
    assert box.has_new
    traced = decode_event(box.encode(2))
    assert isinstance(traced, DetailedOutput) and traced.times == [times]
    assert not box.has_new
