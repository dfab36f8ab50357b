"""Prompts of a mixture of experts, whose steps take almost the same time up to about 2,048 tokens."""

from tandem.engine_core.graph_sizes import GRAPH_TOKENS
from tandem.engine_core.scheduler.step_costs import AttentionShare, StepCosts
from tandem.engine_core.scheduler.time_budget import fitting_tokens

READ_MS, TOKEN_MS = 16.0, 0.0125
"""Milliseconds to read all weights of Qwen3-30B-A3B, and of a further token, about as on an H200."""


def costs(slowdown: float) -> StepCosts:
    """Costs of steps that take that of their tokens, but at least the time to read all weights."""
    table = {(0, size): slowdown * max(READ_MS, 4.0 + TOKEN_MS * size) for size in GRAPH_TOKENS}
    table |= {(rows, 0): slowdown * min(READ_MS, 2.0 + rows) for rows in (1, 8, 64)}
    return StepCosts(table, AttentionShare(context=1e-5, pairs=1e-5))


def test_a_lone_prompt_is_not_cut_below_4096_tokens() -> None:
    for length in (4096, 8192, 30000):
        assert fitting_tokens(costs(1.0), 0, 0, [(0, length)], None) >= 4096
