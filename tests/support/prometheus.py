"""A real Prometheus, that of Debian's package, on a port of the loopback."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import pytest

from tests.support.serving import free_port, until
from tests.test_architecture import ROOT

MONITORING = ROOT / "deploy" / "monitoring"
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="needs Debian's package prometheus, with promtool",
)
TIMEOUT = 120.0
NAME = re.compile(r"\b(?:tandem_|process_|python_|vllm:)\w+")


def promtool(*arguments: str | Path, text: str = "") -> str:
    """Run promtool, assert that it succeeds, and return what it said."""
    found = subprocess.run(["promtool", *map(str, arguments)], input=text, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout + found.stderr


def metric_names(expression: str) -> set[str]:
    """Return the names of the metrics that an expression reads, without what histograms and counters append."""
    return {re.sub(r"_(?:bucket|sum|count)$", "", name) for name in NAME.findall(expression)}


class Prometheus:
    """Prometheus with a shipped configuration, of which addresses, files and the interval are replaced."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self._folder = folder
        self._config = config
        self._client = httpx.Client(base_url=self.url, timeout=TIMEOUT)

    def __enter__(self) -> "Prometheus":
        config = self._folder / "prometheus.yml"
        # JSON is YAML.
        config.write_text(json.dumps(self._config))
        command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={self._folder / 'data'}"]
        listen = f"--web.listen-address={self.url.removeprefix('http://')}"
        with (self._folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen([*command, listen, "--log.level=warn"], stdout=log, stderr=log)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()
        self._process.terminate()
        self._process.wait(TIMEOUT)
        if error is not None:
            print((self._folder / "prometheus.log").read_text())

    def is_ready(self) -> bool:
        assert self._process.poll() is None, (self._folder / "prometheus.log").read_text()
        try:
            return self._client.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the series of an instant query; assert that Prometheus understands it."""
        answer = self._client.get("/api/v1/query", params={"query": expression}).json()
        assert answer["status"] == "success", f"{expression}: {answer}"
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    def get(self, path: str) -> Any:
        return self._client.get(f"/api/v1/{path}").json()["data"]

    def without_series(self, expressions: Sequence[str]) -> list[str]:
        """Wait until each expression has series; return those that have none in the end."""
        missing = list(expressions)
        try:
            until(lambda: not missing or self._try(missing), "series", TIMEOUT)
        except AssertionError:
            return missing
        return []

    def _try(self, missing: list[str]) -> bool:
        missing[:] = [expression for expression in missing if not self.query(expression)]
        return not missing


def panels(board: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the title and the expression of each query of a Grafana dashboard."""
    for panel in board["panels"]:
        yield from ((panel["title"], target["expr"]) for target in panel.get("targets", ()))
        yield from panels({"panels": panel.get("panels", ())})
