"""frontend/METRICS.md says what the code exports, and Prometheus has nothing against it."""

import re
import shutil
import subprocess

import pytest
from prometheus_client import CollectorRegistry

from tandem.engine_core.stats import count_verified, new_stats
from tandem.frontend.engine.metrics import HeartbeatCollector
from tandem.frontend.metrics.exposition import Exposition
from tandem.frontend.metrics.frontend_metrics import FrontendMetrics
from tandem.frontend.metrics.vllm_names import VLLM_NAMES
from tandem.protocol.events import Heartbeat, Phase
from tests.support.metric_tables import PAGE, engine_sources, render, sections, supervisor_sources, written


def test_the_page_has_every_metric_of_the_code_and_no_other() -> None:
    assert {title for title, _ in written()} == set(sections())
    for title, table in written():
        assert table == render(title), "run python -m tests.support.metric_tables"


def test_no_metric_is_explained_outside_the_tables_that_the_code_lacks() -> None:
    known = {row.family.name for rows in sections().values() for row in rows}
    named = set(re.findall(r"\b(?:tandem_[a-z0-9_]+)", PAGE.read_text()))
    assert {name for name in named if name.removesuffix("_total") not in known} == set()


def test_every_metric_with_a_name_in_vllm_exists() -> None:
    assert set(VLLM_NAMES) <= {row.family.name for rows in sections().values() for row in rows}


def everything(has_vllm_names: bool = False) -> str:
    registry = CollectorRegistry()
    metrics = FrontendMetrics(registry)
    metrics.requests.labels("/v1/completions", "200").inc()
    return Exposition([*engine_sources(), registry, *supervisor_sources()], lambda: "m", has_vllm_names).text()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, of Debian's package prometheus")
def test_promtool_has_nothing_to_say() -> None:
    checked = subprocess.run(["promtool", "check", "metrics"], input=everything(), capture_output=True, text=True)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def test_metrics_that_vllm_has_are_repeated_under_its_names() -> None:
    plain, repeated = everything(), everything(True)
    assert "vllm:" not in plain
    assert 'tandem_kv_cache_usage_perc{model_name="m"} 0.0' in plain
    for line in (
        'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.0',
        'vllm:gpu_cache_usage_perc{engine="0",model_name="m"} 0.0',
        'vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 0.0',
        'vllm:time_per_output_token_seconds_bucket{engine="0",le="0.0002",model_name="m"} 0.0',
        'vllm:e2e_request_latency_seconds_bucket{engine="0",le="7680.0",model_name="m"} 0.0',
        "# TYPE vllm:iteration_tokens_total histogram",
    ):
        assert line in repeated, line


def test_drafts_have_the_names_labels_and_numbers_of_vllm() -> None:
    """Three rows of steps with 3, 1 and 3 drafts, of which 2, 0 and 3 were right."""
    stats = new_stats()
    count_verified(stats, {(3, 2): 1, (1, 0): 1})
    count_verified(stats, {(3, 3): 1})
    text = Exposition([HeartbeatCollector(Heartbeat(1, Phase.READY, 100, "", 0, stats))], lambda: "m", True).text()
    assert [line for line in text.splitlines() if line.startswith("vllm:spec_decode")] == [
        'vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 3.0',
        'vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 7.0',
        'vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 5.0',
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 2.0',
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 2.0',
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 1.0',
    ]
