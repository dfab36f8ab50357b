"""Leases of frontends, judged in the time of the loop."""

from hypothesis import given
from hypothesis import strategies as st

from tandem.engine_core.wire.leases import MAX_GAP_SECONDS, Leases
from tests.fakes.clock import FakeClock


def pass_time(leases: Leases, clock: FakeClock, seconds: float, step: float = 0.25) -> None:
    """Let the loop drain its mailbox every `step` seconds."""
    for _ in range(round(seconds / step)):
        clock.advance(step)
        leases.advance()


def test_a_frontend_that_renews_is_kept_for_any_time() -> None:
    clock = FakeClock()
    leases = Leases(clock, 5.0)
    for _ in range(100):
        leases.renew(b"a")
        pass_time(leases, clock, 4.75)
        assert leases.take_expired() == []


def test_a_silent_frontend_expires_once_and_others_stay() -> None:
    clock = FakeClock()
    leases = Leases(clock, 5.0)
    leases.renew(b"a")
    leases.renew(b"b")
    pass_time(leases, clock, 3.0)
    leases.renew(b"a")
    pass_time(leases, clock, 2.0)
    assert leases.take_expired() == [b"b"]
    assert leases.take_expired() == []
    assert len(leases) == 1
    pass_time(leases, clock, 3.0)
    assert leases.take_expired() == [b"a"]
    assert len(leases) == 0


def test_a_stall_of_the_loop_expires_no_frontend() -> None:
    clock = FakeClock()
    leases = Leases(clock, 5.0)
    leases.renew(b"a")
    for _ in range(4):
        clock.advance(60.0)
        leases.advance()
        assert leases.take_expired() == []
    assert leases.now == 4 * MAX_GAP_SECONDS


@given(st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c"]), st.floats(0.0, 0.9)), max_size=60))
def test_a_lease_expires_by_the_last_message_of_its_frontend(messages: list[tuple[bytes, float]]) -> None:
    clock = FakeClock()
    leases = Leases(clock, 5.0)
    heard: dict[bytes, float] = {}
    for client, gap in messages:
        clock.advance(gap)
        leases.advance()
        expired = leases.take_expired()
        assert set(expired) == {name for name, at in heard.items() if leases.now - at >= 5.0}
        for name in expired:
            del heard[name]
        leases.renew(client)
        heard[client] = leases.now
    assert len(leases) == len(heard)
