"""The scripted engine under a real supervisor: what tests of faults and benchmarks of frontends rest on."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.scripted_engine import Journal, Script
from tests.support.scripted_serving import ScriptedServing
from tests.support.serving import until
from tests.support.stream_client import Summary, completion, summary


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "journal"


@pytest.fixture
def serving(tmp_path: Path, journal: Path) -> Iterator[ScriptedServing]:
    script = Script(tokens_per_second=100.0, journal=str(journal))
    with ScriptedServing(tmp_path / "log", script=script) as running:
        yield running


def test_every_token_of_the_scripted_engine_arrives_once_and_is_in_its_journal(
    serving: ScriptedServing, journal: Path
) -> None:
    with serving.clients() as client:
        streams = [*client.open(completion(40), 30), *client.open(completion(30, stream=False), 3)]
        client.until_ended(streams)
        assert Summary.of(streams) == Summary(done=33, error=0, cut=0, open=0, problems=0), summary(streams)
        assert [stream.num_tokens for stream in streams] == [40] * 30 + [30] * 3
        until(serving.rows_and_pages_are_free, "no rows and pages in use")
        serving.child("tandem.engine_core").send_signal(signal.SIGTERM)
        until(journal.exists, "the journal of an engine that was told to end")
    kept = Journal.read(journal)
    assert set(kept.first) == {stream.request_id for stream in streams}
    ends = [kept.first[stream.request_id][0] + stream.num_tokens - 1 for stream in streams]
    assert max(ends) == len(kept.sent), "the last token came with the last step"
    assert kept.sent == sorted(kept.sent)
