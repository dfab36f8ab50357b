"""The application under a real Ray on this host's CPU, with two replicas of the default model.

It needs the packages of deploy/ray/requirements.txt in the environment that runs the test.
"""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from tandem_ray.settings import Settings

from tests.support.serving import free_port, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="needs Ray: pip install -r deploy/ray/requirements.txt"
    ),
]

FOLDER = Path(__file__).parents[3] / "deploy" / "ray"
TIMEOUT = 60.0
CLIENTS = 6
BODY = {"model": "tandem-default", "prompt": "What does textwrap.dedent do?", "temperature": 0, "stream": True}
ACTOR = re.compile(r"\(ServeReplica:tandem:tandem pid=(\d+)\)")


class RayServe:
    """`serve run` with a cluster of its own."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "log"
        self.config = folder / "serve.yaml"
        arguments = {"gpus": 0, "cpus": 0.5, "min_replicas": 2, "max_replicas": 2, "flags": "--frontends 1"}
        application = {"name": "tandem", "import_path": "tandem_ray.application:build", "args": arguments}
        options = {"host": "127.0.0.1", "port": self.port}
        # JSON is YAML.
        self.config.write_text(
            json.dumps({"proxy_location": "HeadOnly", "http_options": options, "applications": [application]})
        )

    def start(self) -> None:
        serve = str(Path(sys.executable).with_name("serve"))
        # A shell's job in the background ignores interrupts, and so would its children.
        command = ["env", "--default-signal=INT", serve, "run", "--address", "local", "--working-dir", "."]
        quiet = {"RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_COLOR_PREFIX": "0", "NO_COLOR": "1"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, str(self.config)], cwd=FOLDER, stdout=log, stderr=log, env={**os.environ, **quiet}
            )

    def stop(self) -> None:
        """End Serve and the cluster; a second call does nothing."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            with suppress(subprocess.TimeoutExpired):
                self.process.send_signal(number)
                self.process.wait(TIMEOUT)
                return

    def said(self) -> str:
        """Return the log without colours."""
        return re.sub(r"\x1b\[[0-9;]*m", "", self.log.read_text())

    def replicas(self) -> list["Replica"]:
        """Return the replicas that were ready and run now."""
        assert self.process.poll() is None, self.log.read_text()
        text = self.said()
        ready = [int(line[1]) for line in re.finditer(rf"{ACTOR.pattern} tandem is ready", text)]
        found = []
        for pid in ready:
            ops = re.search(rf"pid={pid}\) engine metrics on (\S+)/metrics", text)
            assert ops is not None
            with suppress(psutil.NoSuchProcess):
                found.append(Replica(psutil.Process(pid), ops[1]))
        return found


class Replica:
    """One replica: Ray's process, and the service below it."""

    def __init__(self, actor: psutil.Process, ops_url: str) -> None:
        self.actor = actor
        self.service = actor.children(recursive=True)
        self.ops_url = ops_url

    def metric(self, pattern: str) -> float:
        text = httpx.get(f"{self.ops_url}/metrics", timeout=TIMEOUT).text
        return sum(float(value) for value in re.findall(rf"^{pattern} (\S+)$", text, re.MULTILINE))

    def generated(self) -> float:
        return self.metric(r"tandem_generation_tokens_total(?:\{.*\})?")

    @property
    def supervisor(self) -> psutil.Process:
        return next(process for process in self.service if process.ppid() == self.actor.pid)


class Load:
    """Clients that stream answers one after another, and how each ended."""

    def __init__(self, url: str) -> None:
        self.outcomes: list[str] = []
        self._url = url
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(CLIENTS)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def whole(self) -> int:
        return self.outcomes.count("whole")

    def _run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=TIMEOUT) as client:
            while not self._is_over.is_set():
                self.outcomes.append(ask(client))


def ask(client: httpx.Client) -> str:
    """Stream one answer; return "whole", "broken" (the connection), the status of a refusal, or what was wrong."""
    try:
        with client.stream("POST", "/v1/completions", json={**BODY, "max_tokens": 24, "ignore_eos": True}) as answer:
            text = "".join(answer.iter_text())
    except httpx.TransportError:
        return "broken"
    if answer.status_code != 200:
        return str(answer.status_code)
    return "whole" if text.endswith("data: [DONE]\n\n") and '"finish_reason":"length"' in text else f"cut: {text}"


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayServe]:
    running = RayServe(tmp_path_factory.mktemp("ray"))
    running.start()
    try:
        until(lambda: len(running.replicas()) == 2, "two replicas")
        with httpx.Client(base_url=running.url, timeout=TIMEOUT) as client:
            until(lambda: is_up(client), "Ray's proxy")
        yield running
    finally:
        running.stop()
        print(running.log.read_text())


def is_up(client: httpx.Client) -> bool:
    try:
        return client.get("/health/ready").status_code == 200
    except httpx.TransportError:
        return False


def test_an_answer_streams_through_ray(serve: RayServe) -> None:
    with httpx.stream(
        "POST", f"{serve.url}/v1/completions", json={**BODY, "max_tokens": 8}, headers={"x-request-id": "r-1"}
    ) as answer:
        events = [line for line in answer.iter_lines() if line]
    assert answer.status_code == 200
    assert answer.headers.get_list("x-request-id") == ["r-1"]
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert events[-1] == "data: [DONE]"
    assert "".join(json.loads(event[6:])["choices"][0]["text"] for event in events[:-1]).startswith(" textwrap.dedent(")


def test_an_error_reaches_the_client_as_the_service_said_it(serve: RayServe) -> None:
    answer = httpx.post(f"{serve.url}/v1/completions", json={"model": "no-such", "prompt": "x"}, timeout=TIMEOUT)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"


def test_a_client_that_leaves_ends_its_request_in_the_engine(serve: RayServe) -> None:
    def aborts() -> float:
        return sum(
            replica.metric(r'tandem_request_success_total\{.*finished_reason="abort".*\}')
            for replica in serve.replicas()
        )

    before = aborts()
    body = {**BODY, "max_tokens": 1900, "ignore_eos": True}
    with httpx.stream("POST", f"{serve.url}/v1/completions", json=body, timeout=TIMEOUT) as answer:
        next(answer.iter_lines())
    until(lambda: aborts() == before + 1, "an abort")


@pytest.mark.parametrize("victim", ["replica", "supervisor"])
def test_one_replica_killed_under_load_leaves_the_other_serving_until_ray_replaces_it(
    serve: RayServe, victim: str
) -> None:
    with Load(serve.url) as load:
        until(lambda: load.whole() >= CLIENTS, "answers")
        killed, survivor = serve.replicas()
        until(lambda: killed.generated() and survivor.generated(), "tokens of both replicas")
        whole, tokens = load.whole(), survivor.generated()
        # A replica ends with its supervisor, and all that it started ends with it.
        (killed.actor if victim == "replica" else killed.supervisor).kill()
        until(
            lambda: not any(is_alive(process) for process in (killed.actor, *killed.service)), "the end of the replica"
        )
        until(lambda: load.whole() >= whole + 4 * CLIENTS, "answers of the survivor")
        assert survivor.generated() > tokens
        until(lambda: len(serve.replicas()) == 2, "a replacement")
        replacement = next(replica for replica in serve.replicas() if replica.actor.pid != survivor.actor.pid)
        until(lambda: replacement.generated() > 0, "tokens of the replacement")
    ends = Counter(load.outcomes)
    assert set(ends) <= {"whole", "broken", "500", "503"}, ends
    # Each client loses what it had open, and little more before Ray has noticed.
    assert ends.total() - ends["whole"] <= 10 * CLIENTS, ends


def is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def test_a_stop_of_ray_drains_the_services(serve: RayServe) -> None:
    replicas = serve.replicas()
    serve.stop()
    for replica in replicas:
        assert re.search(rf"pid={replica.actor.pid}\).* stopping", serve.said())
        assert not any(is_alive(process) for process in replica.service)


def test_the_shipped_configuration_has_arguments_that_the_application_takes() -> None:
    (application,) = yaml.safe_load((FOLDER / "serve.yaml").read_text())["applications"]
    settings: dict[str, Any] = application["args"]
    assert Settings(**settings).gpus == 1
