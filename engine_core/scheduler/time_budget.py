"""Time limit of a step with prompts, and the positions that fit it."""

from bisect import bisect_left
from collections.abc import Sequence
from functools import cache

from tandem.engine_core.scheduler.step_costs import StepCosts, StepWork, max_qk_pairs

MIN_STEP_MS, DECODE_STEP_RATIO = 5.0, 2.5
"""Limit of a step with decode rows: the larger of these milliseconds, and this multiple of a decode step of all
rows, including the prompts' rows. `--max-itl` replaces both."""
MAX_STRETCH = 1.25
"""Maximum factor by which the limit grows while many of the rows wait for their prompts; not with `--max-itl`."""
EFFICIENT_MS, MAX_POSITION_COST = 40.0, 1.3
"""Milliseconds up to which a step may exceed that limit to use the device better, and the cost of a prompt position
relative to the cheapest below which a larger step is not worth the wait; not with `--max-itl`."""
IDLE_MS, IDLE_STEP_RATIO = 100.0, 5.0
"""Limit of a step without decode rows: the larger of these milliseconds, as a new request waits for at most two such
steps, and this multiple of a step of one position: a slow device would otherwise compute prompts one by one."""


def allowed_milliseconds(costs: StepCosts, rows: int, context: int, prompts: int, max_itl: float | None) -> float:
    """Return the limit on the expected duration of a step with prompts, in milliseconds.

    The prompts' rows count as if they decoded too: with fewer decoding rows steps would be shorter, prompts would wait
    longer, still fewer rows would decode, and an engine under full load would stay half empty. The limit grows with the
    prompts' share besides, as a prompt that waits costs its stream more than a longer step costs the others.

    rows, context: number of the rows that decode, and of the positions that they attend to; prompts: their number;
    max_itl: `--max-itl` in milliseconds, which replaces the limit of steps with decode rows.
    """
    if not rows:
        return max(IDLE_MS, IDLE_STEP_RATIO * costs.milliseconds(StepWork(1, 0)))
    if max_itl:
        return max_itl
    alone = costs.milliseconds(StepWork(rows + prompts, context))
    return min(MAX_STRETCH, 1 + prompts / rows) * max(MIN_STEP_MS, DECODE_STEP_RATIO * alone)


def fitting_tokens(
    costs: StepCosts,
    rows: int,
    context: int,
    prompts: Sequence[tuple[int, int]],
    max_itl: float | None,
    copies: int = 0,
) -> int:
    """Return the number of prompt positions that a step may compute.

    This is the largest size in the table that `allowed_milliseconds` admits, and at least the smallest size, so that
    prompts always advance. If this leaves much of the device unused, a larger size is used: the smallest size for which
    a position costs at most `MAX_POSITION_COST` times what it costs at the best size of up to `EFFICIENT_MS`.

    prompts: start and lacking positions of each; copies: number of copies of recurrent states, which come before the
    step and take from its time; the others as for `allowed_milliseconds`.
    """
    sizes = costs.mixed_token_sizes if rows else costs.token_sizes

    @cache
    def milliseconds(size: int) -> float:
        return costs.milliseconds(StepWork(rows, context, size, max_qk_pairs(prompts, size)))

    def fitting(limit: float) -> int:
        return bisect_left(sizes, True, lo=1, key=lambda size: milliseconds(size) > limit)

    copying = copies * costs.state_copy_ms
    allowed = allowed_milliseconds(costs, rows, context, len(prompts), max_itl) - copying
    count = fitting(allowed)
    if rows and not max_itl and allowed < EFFICIENT_MS - copying:
        larger = sizes[count - 1 : fitting(EFFICIENT_MS - copying)]
        position_costs = [milliseconds(size) / size for size in larger]
        efficient = MAX_POSITION_COST * min(position_costs)
        return next(size for size, cost in zip(larger, position_costs, strict=True) if cost <= efficient)
    return sizes[count - 1]
