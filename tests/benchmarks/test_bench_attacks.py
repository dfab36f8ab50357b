"""Attackers without an API key and with one: what the benchmark shows, and what it must not show."""

import pytest

from benchmarks.bench_attacks import MAX_GROWTH, MAX_LATENCY, MAX_TENANT_GROWTH, Figures, run, table
from benchmarks.frontends.attackers import ATTACKS


def test_table_has_a_line_for_each_attack_and_the_ceilings() -> None:
    lines = table([Figures("50 MB URL", 5.0, 1.25, 0.0313, 40, 1, 0.46, {"414": 9, "closed": 1})]).splitlines()
    assert len(lines) == 4
    assert lines[1].split() == ["50", "MB", "URL", "1.2", "31.3", "40", "1", "46%", "414:", "9,", "closed:", "1"]
    assert lines[2].split() == ["(ceiling)", "64.0", "500.0", "0"]
    assert lines[3].split() == ["(ceiling,", "tenant)", "512.0", "500.0", "0"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_attackers_cost_little_memory_and_stop_no_other_client() -> None:
    """Ten times the ceiling of latency is allowed here, for machines that do other work beside."""
    figures = run(64, 2.0, [attack.name for attack in ATTACKS])
    assert [row.attack for row in figures] == [attack.name for attack in ATTACKS]
    for row, attack in zip(figures, ATTACKS, strict=True):
        assert row.growth <= (MAX_TENANT_GROWTH if row.is_tenant else MAX_GROWTH), row
        assert row.failed == 0, row
        assert row.worst <= 10 * MAX_LATENCY, row
        statuses = {str(status) for status in attack.statuses}
        assert row.outcomes.keys() <= statuses | {"closed"}, row
        # Those of a tenant depend on which requests meet.
        assert statuses & row.outcomes.keys() if attack.is_tenant and statuses else statuses <= row.outcomes.keys(), row
