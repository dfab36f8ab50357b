"""How many replicas the tokens that wait, and the rows that run, ask for."""

from types import SimpleNamespace

import pytest
from tandem_ray.scaling import QUEUED_TOKENS, ROW_SHARE, QueuedTokensPolicy


@pytest.mark.parametrize(
    ("current", "queued", "rows", "wanted"),
    [
        pytest.param(1, [], [], 1, id="no statistics: as many as there are"),
        pytest.param(1, [0], [0.0], 1, id="idle: one"),
        pytest.param(1, [1000], [1.0], 1, id="queue at the target: no more"),
        pytest.param(1, [1001], [1.0], 2, id="queue above the target: one more"),
        pytest.param(2, [9000, 0], [1.0, 0.1], 9, id="long queue: as many as bring it to the target"),
        pytest.param(3, [0, 0, 0], [1.0, 1.0, 1.0], 3, id="busy without a queue: as many as there are"),
        pytest.param(3, [0, 0, 0], [0.4, 0.4, 0.4], 2, id="two would have free rows: one fewer"),
        pytest.param(3, [0, 0, 0], [0.1, 0.1, 0.1], 1, id="one would have free rows: one"),
        pytest.param(4, [1500, 0, 0, 0], [0.1, 0.1, 0.1, 0.1], 2, id="some queue: as many as it needs"),
        pytest.param(3, [0], [0.0], 3, id="two have not reported: none is given up"),
    ],
)
def test_number_of_replicas(current: int, queued: list[float], rows: list[float], wanted: int) -> None:
    metrics = {QUEUED_TOKENS: dict(enumerate(queued)), ROW_SHARE: dict(enumerate(rows))}
    context = SimpleNamespace(target_num_replicas=current, aggregated_metrics=metrics)
    assert QueuedTokensPolicy(1000)(context) == (wanted, {})


def test_a_context_without_metrics_leaves_the_number_of_replicas() -> None:
    context = SimpleNamespace(target_num_replicas=2, aggregated_metrics=None)
    assert QueuedTokensPolicy(1000)(context) == (2, {})
