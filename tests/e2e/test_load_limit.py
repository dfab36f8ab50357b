"""The limit on open sequences, which the processes of several frontends share."""

from pathlib import Path

from tests.fakes.scripted_engine import Script
from tests.support.scripted_serving import ScriptedServing
from tests.support.serving import until
from tests.support.stream_client import completion, summary

LIMIT, MANY = 20, 60


def test_all_frontends_together_keep_as_many_sequences_open_as_the_limit(tmp_path: Path) -> None:
    script = Script(tokens_per_second=5.0)
    flags = ("--frontends", "3", "--max-concurrent", str(LIMIT))
    with ScriptedServing(tmp_path / "log", *flags, script=script) as serving:
        until(lambda: serving.num_serving() == 3, "all frontends serve")
        with serving.clients() as client:
            streams = client.open(completion(2000), MANY)
            client.until(lambda: all(stream.status for stream in streams), "an answer to each")
            taken = [stream for stream in streams if stream.status == 200]
            assert len(taken) == LIMIT, summary(streams)
            assert {stream.status for stream in streams} == {200, 429}
            lines = [f"frontend-{slot} INFO tandem.access" for slot in range(3)]

            def is_refused_by_each() -> bool:
                # Others accept in the place of one that was held up.
                more = client.open(completion(2000), 10)
                client.until(lambda: all(stream.status for stream in more), "an answer to each")
                assert {stream.status for stream in more} == {429}, summary(more)
                return all(map(serving.said, lines))

            until(is_refused_by_each, "each frontend has refused some")
            for stream in taken[:5]:
                client.drop(stream)
            client.until(lambda: serving.engine_metric("tandem_num_requests_running") == LIMIT - 5, "five places")
            later = client.open(completion(2000), 10)
            client.until(lambda: all(stream.status for stream in later), "an answer to each")
            assert sorted(stream.status for stream in later) == [200] * 5 + [429] * 5, summary(later)
        until(serving.rows_and_pages_are_free, "no rows and pages in use")
