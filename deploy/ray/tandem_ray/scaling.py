"""Number of replicas for the prompt tokens that wait in them.

Ray's controller gets this module by value: it imports nothing of the application.
"""

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

QUEUED_TOKENS = "queued_prompt_tokens"
"""Statistic of a replica: prompt tokens that wait for their first output."""
ROW_SHARE = "row_share"
"""Statistic of a replica: share of the engine's rows that run a sequence, 0 to 1."""


class QueuedTokensPolicy:
    """Autoscaling policy that keeps the queues short.

    While more than `target` tokens wait in a replica on average, there are as many replicas as would bring that down to
    the target. Replicas are given up only while fewer would still have free rows: an empty queue alone does not say
    that fewer would keep it empty. Ray averages the statistics over its `look_back_period_s` and applies the delays and
    bounds of its configuration.
    """

    MAX_ROW_SHARE = 0.7
    """Share of the rows that the remaining replicas may use after others were given up."""

    def __init__(self, target: float) -> None:
        """Set the prompt tokens that may wait in one replica."""
        self._target = target

    def __call__(self, context: "AutoscalingContext") -> tuple[int, dict[str, Any]]:
        """Return the wanted number of replicas, and the state of the policy, of which there is none."""
        metrics = context.aggregated_metrics or {}
        return self.wanted(context.target_num_replicas, metrics.get(QUEUED_TOKENS, {}), metrics.get(ROW_SHARE, {})), {}

    def wanted(self, current: int, queued: dict[Any, float], row_shares: dict[Any, float]) -> int:
        """Return the wanted number of replicas.

        `queued` and `row_shares` have the statistics of each replica that reported. Without any the number stays.
        """
        if not queued:
            return current
        for_queue = math.ceil(sum(queued.values()) / self._target)
        if for_queue > current:
            return for_queue
        for_rows = max(1, math.ceil(sum(row_shares.values()) / self.MAX_ROW_SHARE))
        # A replica that has not reported yet is taken to be as busy as it may be.
        for_rows += max(0, current - len(row_shares))
        return min(current, max(for_queue, for_rows))
