"""Arrivals of a step: how many commands one tick takes."""

from typing import Any

import pytest

from tests.support.recorded_engine import Bench


class TestArrivals:
    """A burst of requests, each of which takes the loop a third of a millisecond."""

    def burst(self, bench: Bench, count: int) -> None:
        apply = bench.control.apply

        def slow(client: bytes, command: Any) -> Any:
            bench.clock.advance(0.0003)
            return apply(client, command)

        bench.control.apply = slow  # type: ignore[method-assign]
        for request_id in range(10, 10 + count):
            bench.submit(request_id, 2)

    @pytest.mark.parametrize("depth", [1, 2])
    def test_running_streams_wait_for_a_millisecond_of_arrivals_at_most(self, depth: int) -> None:
        bench = Bench(depth)
        bench.submit(1, 20)
        bench.engine.tick()
        self.burst(bench, 10)
        left = []
        for _ in range(4):
            bench.engine.tick()
            left.append(len(bench.mailbox.inbox))
        assert left == [6, 2, 0, 0]
        bench.finish()
        assert len(bench.mailbox.outcomes) == 11

    def test_slow_command_is_still_taken_in_every_tick(self) -> None:
        bench = Bench(1)
        bench.submit(1, 20)
        bench.engine.tick()
        self.burst(bench, 3)
        bench.engine.stages.clock = bench.control.clock = lambda: bench.clock.now * 100
        bench.engine.tick()
        assert len(bench.mailbox.inbox) == 2

    def test_idle_engine_takes_all_arrivals_at_once(self) -> None:
        bench = Bench(2)
        self.burst(bench, 40)
        bench.engine.tick()
        assert not bench.mailbox.inbox
