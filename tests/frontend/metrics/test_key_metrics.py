"""Usage of API keys, as it is collected."""

import pytest
from prometheus_client import CollectorRegistry

from tandem.frontend.metrics.exposition import Exposition
from tandem.frontend.metrics.key_metrics import KeyMetrics, KeyUsage
from tests.support.scrape import value

SERIES = ("tandem_key_requests_total", "tandem_key_prompt_tokens_total", "tandem_key_generation_tokens_total")


class Tokens:
    """Number of tokens that a request has got."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self) -> int:
        return self.number


@pytest.mark.parametrize(("is_streamed", "while_open"), [(True, [1, 7, 3]), (False, [1, 0, 0])])
def test_open_streams_are_counted_and_whole_answers_at_their_end(is_streamed: bool, while_open: list[int]) -> None:
    registry, tokens = CollectorRegistry(), Tokens()
    metrics = KeyMetrics(registry)
    page = Exposition([registry], lambda: "m")
    usage = KeyUsage("alice", 7, tokens)
    metrics.begin(usage, is_streamed)
    assert [value(page.text(), name) for name in SERIES] == [1, 0, 0]
    tokens.number = 3
    for _ in range(2):
        assert [value(page.text(), name + '{key="alice"}') for name in SERIES] == while_open
    tokens.number = 5
    metrics.end(usage)
    tokens.number = 50
    for _ in range(2):
        assert [value(page.text(), name + '{key="alice"}') for name in SERIES] == [1, 7, 5]


def test_a_request_without_tokens_has_used_no_prompt() -> None:
    registry = CollectorRegistry()
    metrics = KeyMetrics(registry)
    usage = KeyUsage("alice", 7, lambda: 0)
    metrics.begin(usage, True)
    metrics.end(usage)
    text = Exposition([registry], lambda: "m").text()
    assert [value(text, name) for name in SERIES] == [1, 0, 0]
