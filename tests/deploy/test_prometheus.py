"""Debian's Prometheus scrapes a real service; then every query of the rules and the dashboard has series."""

import hashlib
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.support.prometheus import MONITORING, Prometheus, metric_names, needs_prometheus, panels, promtool
from tests.support.serving import Serving, until
from tests.test_architecture import ROOT

pytestmark = needs_prometheus

BOARD: dict[str, Any] = json.loads((MONITORING / "grafana" / "dashboards" / "tandem.json").read_text())
QUERIES = list(panels(BOARD))
VARIABLES = {variable["name"]: variable for variable in BOARD["templating"]["list"]}
METRICS = set(re.findall(r"`((?:tandem|process|python)_\w+)`", (ROOT / "frontend" / "METRICS.md").read_text()))
SCRAPER, CLIENT = "key-of-the-scraper", "key-of-a-client"
TIMEOUT = 120.0


VLLM = (
    *(
        f"histogram_quantile(0.99, sum by(le) (rate(vllm:{name}_seconds_bucket{{$}}[1m])))"
        for name in ("e2e_request_latency", "time_to_first_token", "time_per_output_token", "inter_token_latency")
    ),
    "rate(vllm:e2e_request_latency_seconds_sum{$}[1m]) / rate(vllm:e2e_request_latency_seconds_count{$}[1m])",
    "rate(vllm:prompt_tokens_total{$}[1m])",
    "rate(vllm:generation_tokens_total{$}[1m])",
    "vllm:num_requests_running{$}",
    "vllm:num_requests_waiting{$}",
    "vllm:kv_cache_usage_perc{$}",
    "vllm:gpu_cache_usage_perc{$}",
    "sum by(le) (increase(vllm:request_prompt_tokens_bucket{$}[1m]))",
    "sum by(le) (increase(vllm:request_generation_tokens_bucket{$}[1m]))",
    "sum by(finished_reason) (increase(vllm:request_success_total{$}[1m]))",
    "rate(vllm:request_queue_time_seconds_sum{$}[1m])",
    "rate(vllm:request_prefill_time_seconds_sum{$}[1m])",
    "rate(vllm:request_decode_time_seconds_sum{$}[1m])",
    "rate(vllm:request_max_num_generation_tokens_sum{$}[1m])",
    "rate(vllm:prefix_cache_hits_total{$}[1m]) / rate(vllm:prefix_cache_queries_total{$}[1m])",
    "increase(vllm:num_preemptions_total{$}[1m])",
    "rate(vllm:iteration_tokens_total_sum{$}[1m]) / rate(vllm:iteration_tokens_total_count{$}[1m])",
)
"""Queries of vLLM's dashboards of serving and performance, with their selector of the model left out."""


def shipped(name: str) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((MONITORING / name).read_text())
    return config


def config(folder: Path, running: Serving) -> dict[str, Any]:
    """Return a configuration that has the jobs of two shipped ones, for the ports of a service."""
    credentials = folder / "tandem.key"
    credentials.write_text(SCRAPER)
    (ops_job,) = shipped("prometheus.yml")["scrape_configs"]
    (shared_job,) = shipped("prometheus-shared-port.yml")["scrape_configs"]
    assert ops_job["static_configs"] == [{"targets": ["127.0.0.1:8100"]}]
    assert shared_job["static_configs"] == [{"targets": ["127.0.0.1:8000"]}]
    ops_job["static_configs"] = [{"targets": [f"127.0.0.1:{running.ops_port}"]}]
    shared_job |= {"job_name": "shared", "static_configs": [{"targets": [f"127.0.0.1:{running.port}"]}]}
    shared_job["authorization"]["credentials_file"] = str(credentials)
    return {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(MONITORING / "alerts.yml")],
        "scrape_configs": [ops_job, shared_job],
    }


def key_file(folder: Path) -> Path:
    """Write a key file with a key that may only scrape, and one that may only generate."""
    found = folder / "keys.toml"
    keys = {"prometheus": (SCRAPER, "metrics"), "team-a": (CLIENT, "generate")}
    tables = (
        f'[[key]]\nname = "{name}"\nsha256 = "{hashlib.sha256(text.encode()).hexdigest()}"\nrights = ["{right}"]\n'
        for name, (text, right) in keys.items()
    )
    found.write_text("\n".join(tables))
    return found


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("service")
    flags = ("--frontends", "1", "--api-keys", str(key_file(folder)), "--metric-aliases", "vllm")
    with Serving(folder / "log", *flags) as serving:
        yield serving


@pytest.fixture(scope="module")
def prometheus(running: Serving, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Prometheus that has scraped a service before, during and after some traffic."""
    folder = tmp_path_factory.mktemp("prometheus")
    with Prometheus(folder, config(folder, running)) as found:
        until(found.is_ready, "Prometheus")
        until(lambda: len(found.query("up == 1")) == 2, "the first scrape of both ports")
        send_traffic(running)
        yield found


def send_traffic(running: Serving) -> None:
    """Send some requests of several kinds, refused ones among them."""
    with socket.create_connection(("127.0.0.1", running.port), TIMEOUT) as broken:
        broken.sendall(b"no request\r\n\r\n")
        assert broken.recv(100).startswith(b"HTTP/1.1 400")
    with httpx.Client(base_url=running.url, headers={"authorization": f"Bearer {CLIENT}"}, timeout=TIMEOUT) as client:
        prompt = {"model": "tandem-default", "prompt": "What does textwrap.dedent do? " * 8, "max_tokens": 8}
        for stream in (False, True, True):
            assert client.post("/v1/completions", json={**prompt, "stream": stream}).status_code == 200
        chat = {"model": "tandem-default", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        assert client.post("/v1/chat/completions", json=chat).status_code == 200
        schema = {"json_schema": {"name": "a", "schema": {"type": "boolean"}}, "type": "json_schema"}
        assert client.post("/v1/chat/completions", json={**chat, "response_format": schema}).status_code == 200
        assert client.post("/v1/completions", json={**prompt, "model": "no-such"}).status_code == 404
        assert client.get("/metrics").status_code == 403
        assert client.get("/v1/models", headers={"authorization": "Bearer wrong"}).status_code == 401


def filled_in(expression: str) -> str:
    """Return a query of the dashboard as Grafana sends it, with all values of each variable chosen."""
    values = {
        "$__rate_interval": "1m",
        **{f"${name}": text.get("allValue") or name for name, text in VARIABLES.items()},
    }
    for name, value in sorted(values.items(), reverse=True):
        expression = expression.replace(name, value)
    assert "$" not in expression
    return expression


def test_prometheus_accepts_each_shipped_configuration(tmp_path: Path) -> None:
    (tmp_path / "alerts.yml").write_text((MONITORING / "alerts.yml").read_text())
    for path in MONITORING.glob("prometheus*.yml"):
        copy = shipped(path.name)
        for job in copy["scrape_configs"]:
            if "authorization" in job:
                job["authorization"]["credentials_file"] = str(tmp_path / "key")
                (tmp_path / "key").write_text("secret")
        (tmp_path / path.name).write_text(yaml.safe_dump(copy))
        assert "SUCCESS" in promtool("check", "config", tmp_path / path.name)


@pytest.mark.slow
@pytest.mark.usefixtures("prometheus")
def test_promtool_has_no_complaint_of_the_metrics_of_either_port(running: Serving) -> None:
    ops = httpx.get(f"http://127.0.0.1:{running.ops_port}/metrics", timeout=TIMEOUT)
    shared = httpx.get(f"{running.url}/metrics", headers={"authorization": f"Bearer {SCRAPER}"}, timeout=TIMEOUT)
    for answer in (ops, shared):
        assert answer.status_code == 200
        # promtool refuses a colon, which vLLM's own names have.
        lines = (line for line in answer.text.splitlines(keepends=True) if "vllm:" not in line)
        assert promtool("check", "metrics", text="".join(lines)) == ""


@pytest.mark.slow
def test_the_ops_port_needs_no_key_and_the_shared_port_one_with_the_right_to_scrape(prometheus: Prometheus) -> None:
    targets = prometheus.get("targets")["activeTargets"]
    assert {(target["labels"]["job"], target["health"], target["lastError"]) for target in targets} == {
        ("tandem", "up", ""),
        ("shared", "up", ""),
    }


@pytest.mark.slow
def test_both_ports_give_the_same_sums(prometheus: Prometheus) -> None:
    def sums() -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for name in ("tandem_generation_tokens_total", "tandem_http_requests_total", "tandem_request_success_total"):
            rows = prometheus.query(f"sum by (job) ({name})")
            found[name] = {f"{row['metric']['job']} {row['value'][1]}" for row in rows}
        return found

    def are_equal() -> bool:
        return all(len(rows) == 2 and len({row.split()[1] for row in rows}) == 1 for rows in sums().values())

    until(are_equal, f"equal sums of both ports: {sums()}", TIMEOUT)


@pytest.mark.slow
def test_prometheus_evaluates_every_rule(prometheus: Prometheus) -> None:
    def rules() -> list[dict[str, Any]]:
        return [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]

    until(lambda: rules() and all(rule["health"] != "unknown" for rule in rules()), "an evaluation", TIMEOUT)
    assert [(rule["name"], rule["health"], rule["state"]) for rule in rules()] == [
        (rule["name"], "ok", "inactive") for rule in rules()
    ]


@pytest.mark.slow
def test_every_metric_of_a_rule_has_series(prometheus: Prometheus) -> None:
    rules = [rule for group in shipped("alerts.yml")["groups"] for rule in group["rules"]]
    names = sorted(set().union(*(metric_names(rule["expr"]) for rule in rules)))
    expressions = [f'{{__name__=~"{name}(_bucket)?"}}' for name in names]
    assert not (missing := prometheus.without_series(expressions)), "\n".join(missing)


@pytest.mark.slow
def test_every_query_of_the_dashboard_has_series(prometheus: Prometheus) -> None:
    expressions = [filled_in(expression) for _, expression in QUERIES]
    assert not (missing := prometheus.without_series(expressions)), "\n".join(missing)


@pytest.mark.slow
def test_queries_of_a_dashboard_made_for_vllm_have_series(prometheus: Prometheus) -> None:
    expressions = [query.replace("$", 'model_name="tandem-default"') for query in VLLM]
    assert not (missing := prometheus.without_series(expressions)), "\n".join(missing)


@pytest.mark.slow
def test_every_variable_of_the_dashboard_has_values(prometheus: Prometheus) -> None:
    for variable in VARIABLES.values():
        if variable["type"] == "query":
            series, label = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"]).groups()  # type: ignore[union-attr]
            assert {row["metric"].get(label, "") for row in prometheus.query(series)} - {""}, variable["name"]


@pytest.mark.parametrize("title", sorted({title for title, _ in QUERIES}))
def test_a_panel_reads_metrics_that_are_documented(title: str) -> None:
    for name, expression in QUERIES:
        if name == title:
            assert metric_names(expression) - METRICS == set()
            assert metric_names(expression) or expression.startswith("up{")


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids)
    assert BOARD["uid"] == "tandem" and BOARD["schemaVersion"] >= 38
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and max(x for x, _ in cells) < 24, f"{panel['title']} lies over another panel"
        taken |= cells
        assert panel["type"] == "row" or panel["description"].endswith(".")
        assert all(target["datasource"]["uid"] == "${datasource}" for target in panel.get("targets", ()))


def test_provisioning_installs_the_data_source_and_the_folder_of_the_dashboard() -> None:
    provisioning = MONITORING / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    interval = shipped("prometheus.yml")["global"]["scrape_interval"]
    assert source["type"] == "prometheus" and source["jsonData"]["timeInterval"] == interval
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "tandem.yml").read_text())["providers"]
    assert provider["options"]["path"] == "/var/lib/grafana/dashboards"
