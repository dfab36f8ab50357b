"""Connections of frontends: leases as the engine answers for them, and names in its log."""

import pytest

from tandem.protocol.commands import Goodbye, Hello, Renew
from tandem.protocol.events import Closed, Ready, Refused
from tandem.protocol.version import PROTOCOL_VERSION
from tests.support.recorded_engine import CLIENT, EPOCH, Bench


def test_renew_keeps_a_connection_and_is_answered_on_one_that_has_ended() -> None:
    control = Bench(1).control
    control.apply(b"a", Hello(PROTOCOL_VERSION, EPOCH, "x"))
    assert control.apply(b"a", Renew()) is None
    control.forget(b"a")
    assert isinstance(control.apply(b"a", Renew()), Closed)
    assert isinstance(control.apply(b"a", Hello(PROTOCOL_VERSION, EPOCH, "x")), Ready)
    assert control.apply(b"a", Renew()) is None


def test_names_of_frontends_are_quoted_and_cut(caplog: pytest.LogCaptureFixture) -> None:
    name = "line\nERROR forged " + "x" * 1000
    Bench(1).control.apply(b"a", Hello(PROTOCOL_VERSION, EPOCH + 1, name))
    answer = Bench(1).control.apply(b"a", Hello(PROTOCOL_VERSION + 1, EPOCH, name))
    assert isinstance(answer, Refused)
    for text in (caplog.messages[0], answer.message):
        assert "\n" not in text
        assert len(text) < 300


def test_requests_of_a_frontend_that_is_gone_end_and_free_their_pages() -> None:
    bench = Bench(2)
    bench.submit(1, 30)
    for _ in range(3):
        bench.engine.tick()
    assert not bench.at_rest()
    bench.mailbox.gone.add(CLIENT)
    bench.finish()
    assert bench.at_rest()
    assert bench.control.clients == {}


@pytest.mark.parametrize("says_goodbye", [True, False])
@pytest.mark.parametrize("stopping", [False, True])
def test_only_a_frontend_that_leaves_without_a_goodbye_is_logged_as_gone(
    says_goodbye: bool, stopping: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where the Goodbye is read by an engine that shuts down, as that of `LLM` does right after it."""
    bench = Bench(2)
    bench.submit(1, 30)
    for _ in range(3):
        bench.engine.tick()
    if says_goodbye:
        bench.mailbox.inbox.append((CLIENT, Goodbye()))
    bench.mailbox.gone.add(CLIENT)
    bench.engine.stopping = stopping
    if stopping:
        bench.engine.run()
    else:
        bench.finish()
    assert bench.control.clients == {}
    assert any(record.levelname == "WARNING" for record in caplog.records) == (not says_goodbye)
