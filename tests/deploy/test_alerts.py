"""The alert rules: what promtool says of them, their unit tests, and what the documents say of them."""

import re
from typing import Any

import pytest
import yaml

from tests.support.prometheus import MONITORING, metric_names, needs_prometheus, promtool
from tests.test_architecture import ROOT

ALERTS: list[dict[str, Any]] = [
    rule for group in yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"] for rule in group["rules"]
]
NAMES = [rule["alert"] for rule in ALERTS]
UNIT_TESTS: list[dict[str, Any]] = yaml.safe_load((MONITORING / "alerts_test.yml").read_text())["tests"]
METRICS = set(re.findall(r"`((?:tandem|process|python)_\w+)`", (ROOT / "frontend" / "METRICS.md").read_text()))


@needs_prometheus
def test_promtool_accepts_the_rules_and_their_unit_tests_pass() -> None:
    assert f"{len(ALERTS)} rules found" in promtool("check", "rules", MONITORING / "alerts.yml")
    assert "SUCCESS" in promtool("test", "rules", MONITORING / "alerts_test.yml")


@pytest.mark.parametrize("name", NAMES)
def test_an_alert_has_a_unit_test_with_an_instance_that_it_fires_for_and_one_that_it_does_not(name: str) -> None:
    (unit,) = UNIT_TESTS
    cases = [case["exp_alerts"] for case in unit["alert_rule_test"] if case["alertname"] == name]
    instances = [alert["exp_labels"]["instance"] for alerts in cases for alert in alerts]
    assert instances and all(len(alerts) <= 1 for alerts in cases)
    series = " ".join(row["series"] for row in unit["input_series"])
    for instance in instances:
        assert f'instance="{instance}"' in series and f'instance="{instance}-quiet"' in series


@pytest.mark.parametrize("rule", ALERTS, ids=NAMES)
def test_an_alert_reads_metrics_that_are_documented(rule: dict[str, Any]) -> None:
    assert metric_names(rule["expr"]) - METRICS == set()
    assert metric_names(rule["expr"]) or "up{" in rule["expr"]


def test_each_alert_has_a_severity_a_summary_and_the_place_of_its_runbook() -> None:
    for rule in ALERTS:
        assert rule["labels"]["severity"] in ("warning", "critical"), rule
        assert rule["annotations"]["summary"].endswith((".", "?")), rule
        assert rule["annotations"]["runbook"] == "deploy/monitoring/README.md#alerts", rule


def test_the_readme_says_of_each_alert_what_it_means_and_what_to_do() -> None:
    text = (MONITORING / "README.md").read_text()
    section = text.split("\n## Alerts\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(Tandem\w+)` \| (.+) \| (.+) \|$", section, re.MULTILINE)
    assert [name for name, _, _ in rows] == NAMES
    assert all(means and do for _, means, do in rows)
