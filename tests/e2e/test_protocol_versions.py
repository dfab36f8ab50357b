"""An engine and a frontend of different protocol versions, as processes with a link between them."""

import json
from pathlib import Path

import pytest

from tandem.protocol.version import PROTOCOL_VERSION
from tests.fakes.scripted_engine import Script
from tests.support.remote_engine import SeparateServing
from tests.support.serving import until


class Mismatched(SeparateServing):
    """An engine and a frontend that do not fit, so that no readiness is waited for."""

    def ready(self) -> bool:
        """Tell whether the frontend has refused the engine."""
        return '"refused"' in self.get("/health/ready")[1]


@pytest.mark.slow
@pytest.mark.parametrize(("difference", "older"), [(-1, "engine"), (1, "frontend")])
def test_both_logs_and_the_readiness_name_both_versions_and_which_to_upgrade(
    tmp_path: Path, difference: int, older: str
) -> None:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    theirs = PROTOCOL_VERSION + difference
    link = ("--endpoint", f"ipc://{folder}/e")
    remedy = f"upgrade tandem-llm on the host of the {older}"
    with Mismatched(tmp_path / "log", Script(protocol_version=theirs), link, (*link, "--frontends", "1")) as serving:
        status, body = serving.get("/health/ready")
        assert status == 503
        reason = json.loads(body)["reason"]
        for part in (f"protocol {PROTOCOL_VERSION}", str(theirs), remedy):
            assert part in reason

        def lines(process: str) -> list[str]:
            return [line for line in serving.log.read_text().splitlines() if f" {process}" in line and remedy in line]

        for process in ("engine ", "frontend"):
            until(lambda process=process: lines(process), f"the reason in the log of the {process}")
            assert f"protocol {PROTOCOL_VERSION}" in lines(process)[0] and str(theirs) in lines(process)[0]
        assert serving.process is not None and serving.process.poll() is None
