"""Measure the durations of steps at startup.

Graphs are replayed with padding, at `TIMED_POSITION` if they have no prompts; without graphs, the smallest and the
largest steps are run. Neither reads much context: `StepCosts` adds the cost of more.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import TypeVar

import torch
from msgspec import structs

from tandem.engine_core.attention.base import Span
from tandem.engine_core.config import StepConfig
from tandem.engine_core.kernels.delta_rule.state import RING
from tandem.engine_core.kv_cache.storage import KVLayout
from tandem.engine_core.model_config import ModelConfig
from tandem.engine_core.plan import PADDING_ROW, NewSequence, ScheduledSequence, StepPlan
from tandem.engine_core.runtime.graph_bucket import GraphBucket
from tandem.engine_core.runtime.graphs import StepGraphs
from tandem.engine_core.runtime.runtime import TorchRuntime
from tandem.engine_core.sampling.sampler import Mode
from tandem.engine_core.scheduler.step_costs import AttentionShare, StepCosts
from tandem.engine_core.startup.warmup import GREEDY, padding_prompt, run_step
from tandem.protocol.codec import pack_ids

Table = dict[tuple[int, int], float]
_Size = TypeVar("_Size", bound=tuple[int, int])

LONG_MS = 20.0
"""Milliseconds of a step from which the next is timed at its first replay: the overhead of a first replay is small
then. Steps of rows and prompts that take as long are not timed: the device is so busy that the kind of their
positions matters little."""

TIMED_POSITION = 128
"""Position of the rows of timed decode steps, in page 0. A row's first positions cost latency, which every row has, and
further ones bandwidth, which `StepCosts` adds."""

WORTH_PADDING, WORTH_PADDING_MS = 0.05, 0.2
"""Share of its time, and milliseconds, by which a graph must be slower than a larger one that is to take its steps."""


@torch.inference_mode()
def measure_costs(runtime: TorchRuntime, config: StepConfig, model: ModelConfig, layout: KVLayout) -> StepCosts:
    """Return the expected durations of a runtime's steps.

    Tokens are routed to experts uniformly: padding by itself has none, and equal tokens would all have the same ones.
    """
    graphs, routing = runtime.graphs, runtime.model.routing
    with nullcontext() if routing is None else routing.uniform():
        table = _time_steps(runtime, config) if graphs is None else _time_graphs(runtime, graphs, config)
        if graphs is not None:
            graphs.prefer(_faster_graphs(runtime, graphs, table))
    share = attention_share(model, layout, config.max_len)
    timed = 0 if graphs is None or runtime.kv.recurrent else timed_position(config.max_len)
    return StepCosts(without_outliers(table), share, _time_state_copies(runtime), timed)


def without_outliers(table: Table) -> Table:
    """Return the table with times that do not decrease with size.

    Each was timed once or twice, and something else may have held it up. Steps with prompts and those without run
    other kernels, and are not compared.
    """
    return {size: min(table[larger] for larger in _holding(size, table)) for size in table}


def faster_buckets(milliseconds: Mapping[GraphBucket, float]) -> dict[GraphBucket, GraphBucket]:
    """Return the fastest larger graph for each that is slower than one.

    It must be clearly faster, because small differences are chance, and padding is not free of cost where rows attend
    to much. A step that computes prompts takes no graph without them, nor the other way round.
    """
    faster = {}
    for bucket, time in milliseconds.items():
        best = min(_holding(bucket, milliseconds), key=lambda other: (milliseconds[other], other))
        if time - milliseconds[best] >= max(WORTH_PADDING * time, WORTH_PADDING_MS):
            faster[bucket] = best
    return faster


def _holding(size: tuple[int, int], sizes: Iterable[_Size]) -> list[_Size]:
    """Return the sizes that hold steps of a size and run the same kernels.

    A size is rows and tokens.
    """
    rows, tokens = size
    return [other for other in sizes if other[0] >= rows and other[1] >= tokens and bool(other[1]) == bool(tokens)]


def prompts_alone(table: Table, positions: int) -> float:
    """Return the expected milliseconds of a step without decoding rows.

    They lie on the line between the two sizes of the table next to `positions`. 0.0 above the largest size. As in
    `without_outliers`, no size takes longer than a larger one.
    """
    sizes = sorted(size for rows, size in table if size and not rows)
    above = bisect_left(sizes, positions)
    if above == len(sizes):
        return 0.0
    small, large = sizes[max(0, above - 1)], sizes[above]
    slow = min(table[0, size] for size in sizes[above:])
    fast = min(table[0, small], slow)
    return fast + (slow - fast) * max(0, positions - small) / max(1, large - small)


def attention_share(model: ModelConfig, layout: KVLayout, max_len: int) -> AttentionShare:
    """Return the work of attention relative to the GEMMs, from a model's sizes.

    Work grows in proportion to the context, as `StepCosts` expects, so that of layers with a window is spread over
    `max_len` positions.
    """
    weights = model.active_weights + model.vocab_size * model.hidden_size
    windows = [min(model.attention[layer].window or max_len, max_len) for layer in model.attention_layers]
    attended = sum(windows) / (len(windows) * max_len)
    # A prompt of max_len positions has w * (max_len - w / 2) pairs in a layer with a window of w.
    paired = sum(window * (2 * max_len - window) for window in windows) / max_len**2
    # A pair takes two dot products of the head size per head and layer, a position one multiplication per weight.
    return AttentionShare(
        context=attended * layout.token_bytes / (weights * layout.dtype.itemsize),
        pairs=2 * paired * model.heads * model.head_dim / weights,
    )


def _time_graphs(runtime: TorchRuntime, graphs: StepGraphs, config: StepConfig) -> Table:
    """Time every graph of a slot, and the longest step if no graph holds it."""
    table: Table = {(rows, 0): _time_graph(runtime, graphs, GraphBucket(rows, 0)) for rows in graphs.decode[0]}
    last = 0.0
    for rows, tokens in sorted(graphs.mixed[0]) if graphs.mixed else ():
        if rows and (alone := prompts_alone(table, rows + tokens)) >= LONG_MS:
            table[rows, tokens] = alone
            continue
        last = _time_graph(runtime, graphs, GraphBucket(rows, tokens), again=bool(rows) or last < LONG_MS)
        table[rows, tokens] = last
    longest = _step(_apart(runtime, _longest_step(config).rows))
    largest = max(graphs.shapes, default=0)
    if longest.total_tokens > largest:
        known = (largest, table[0, largest]) if largest else (1, table[graphs.rows[0], 0])
        eager = {size: time for size, time in _line(known, _time_step(runtime, longest)) if size > largest}
        table |= {(0, size): time for size, time in eager.items()}
        if graphs.mixed:  # These sizes also run with decode rows: no graph holds either.
            rows = config.max_rows
            table |= {(rows, size): time * (rows + size) / size for size, time in eager.items()}
    if graphs.mixed and not any(bucket.num_decode_tokens for bucket in graphs.mixed[0]):
        # With decode rows, every step with prompts runs eagerly. Without these entries, the smallest would be the
        # longest.
        table |= _beside_rows((1, table[graphs.rows[0], 0]), _time_step(runtime, longest), config)
    return table


def _beside_rows(least: tuple[int, float], most: tuple[int, float], config: StepConfig) -> Table:
    """Return the times of steps that no graph holds, of rows and prompts.

    Rows count like prompts. The times lie on the line through two points, each a size and its time.
    """
    line = _line(least, most)
    (small, fast), (large, slow) = line[0], line[-1]
    rise = (slow - fast) / max(1, large - small)
    return {(rows, size): time + rise * rows for rows in config.mixed_graph_rows if rows for size, time in line}


def _time_graph(runtime: TorchRuntime, graphs: StepGraphs, bucket: GraphBucket, again: bool = True) -> float:
    """Time a graph of the first slot; with `again`, its second replay."""
    fill_inputs(runtime, bucket)
    if bucket.num_prefill_tokens:
        mixed = graphs.mixed[0][bucket]
        # The planner may hold the plan of a larger step, with tiles outside a smaller graph's queries.
        mixed.prompts.plan([Span(PADDING_ROW, 0, 0, 1)])
        mixed.prompts.gather_pages()
        calls = [mixed.forward.replay]
    else:
        decode = graphs.decode[0][bucket.num_decode_tokens]
        calls = [decode.forward.replay, decode.sampling[Mode.GREEDY].replay]
    if again:
        calls[0]()
    return milliseconds(runtime, *calls)


def fill_inputs(runtime: TorchRuntime, bucket: GraphBucket) -> None:
    """Write the inputs of a graph of the first slot: padding, and for recurrent layers `distinct_rows`."""
    # Data of the last step would be read as rows and positions.
    inputs, max_len = runtime.slots[0].device_inputs.zero_(), runtime.tables.tokens.shape[1]
    if runtime.kv.recurrent:
        filled = torch.tensor(distinct_rows(bucket, len(runtime.tables.tokens) - 1, max_len), dtype=torch.int32)
        inputs[: filled.numel()] = filled.flatten().to(inputs.device)
    elif not bucket.num_prefill_tokens:
        inputs[bucket.num_decode_tokens : 2 * bucket.num_decode_tokens] = timed_position(max_len)


def timed_position(max_len: int) -> int:
    """Return the position of the rows of timed decode steps, for sequences of up to max_len positions."""
    return min(TIMED_POSITION, max(0, max_len - 2))


def distinct_rows(bucket: GraphBucket, max_rows: int, max_len: int) -> tuple[list[int], list[int]]:
    """Return rows and positions of all tokens of a step, for models with recurrent layers.

    Each row has a state of its own: the state of one row for all would be read from the cache, and padding reads none.
    One in RING decode rows writes its base, as in a long run.
    """
    count, tokens = bucket
    rows = [1 + index % max_rows for index in range(count)]
    positions = [min(RING + index % RING, max_len - 2) for index in range(count)]
    rows += [1 + (count + index // max_len) % max_rows for index in range(tokens)]
    positions += [index % max_len for index in range(tokens)]
    return rows, positions


def _faster_graphs(runtime: TorchRuntime, graphs: StepGraphs, table: Table) -> dict[GraphBucket, GraphBucket]:
    """Return the faster of the larger graphs for each that is slower than one.

    Both are timed again: the slower time may be an outlier, and some times are estimates.
    """
    buckets = [GraphBucket(rows, 0) for rows in graphs.rows] + (list(graphs.mixed[0]) if graphs.mixed else [])
    confirmed: dict[GraphBucket, GraphBucket] = {}
    for bucket, other in faster_buckets({bucket: table[bucket] for bucket in buckets}).items():
        pair = {size: _time_graph(runtime, graphs, size) for size in (bucket, other)}
        confirmed |= faster_buckets(pair)
    return confirmed


def _time_steps(runtime: TorchRuntime, config: StepConfig) -> Table:
    """Time a step of one position, one of all rows and the longest one.

    The others lie between.
    """
    if runtime.kv.recurrent:
        _begin_rows(runtime, config)
    row = ScheduledSequence(-1, PADDING_ROW, min(4, config.max_len - 2))
    one = _time_step(runtime, _step(_apart(runtime, (row,))))
    all_rows = _step(_apart(runtime, (row,) * config.max_rows))
    longest = _step(_apart(runtime, _longest_step(config).rows))
    return {(size, 0): time for size, time in _line(one, _time_step(runtime, all_rows))} | {
        (0, size): time for size, time in _line(one, _time_step(runtime, longest))
    }


def _begin_rows(runtime: TorchRuntime, config: StepConfig) -> None:
    """Have each row at the position of `distinct_rows`: unused rows are at position 0, and read no state there."""
    rows, positions = distinct_rows(GraphBucket(config.max_rows, 0), config.max_rows, config.max_len)
    places = list(zip(rows, positions, strict=True))
    begun = tuple([ScheduledSequence(-1, row, position, tokens=pack_ids([0])) for row, position in places])
    # With room for one token, decode steps compute this position each time, also at the end of the longest sequence.
    params = structs.replace(GREEDY, max_tokens=1)
    admitted = tuple([NewSequence(-1, row, position + 1, params) for row, position in places])
    run_step(runtime, 0, StepPlan.of(0, begun, admitted))


def _apart(runtime: TorchRuntime, rows: tuple[ScheduledSequence, ...]) -> tuple[ScheduledSequence, ...]:
    """Give each row of a step a state of its own, if the model has recurrent layers; see `distinct_rows`."""
    if not runtime.kv.recurrent:
        return rows
    return tuple([structs.replace(row, row=index + 1) for index, row in enumerate(rows)])


def _step(rows: tuple[ScheduledSequence, ...]) -> StepPlan:
    return StepPlan.of(0, rows, (NewSequence(-1, PADDING_ROW, 1, GREEDY),))


def _longest_step(config: StepConfig) -> StepPlan:
    """Plan a step with the maximum number of positions, in the smallest number of prompts."""
    first, more = divmod(config.max_step_tokens, config.max_len - 1)
    lengths = [config.max_len - 1] * first + [more] * bool(more)
    return _step(tuple([padding_prompt(length) for length in lengths[: config.max_rows]]))


def _time_step(runtime: TorchRuntime, plan: StepPlan) -> tuple[int, float]:
    """Return the positions of a step, and the milliseconds that it takes."""
    return plan.total_tokens, milliseconds(runtime, lambda: run_step(runtime, 0, plan))


def _time_state_copies(runtime: TorchRuntime) -> float:
    """Return the mean milliseconds of saving and loading a checkpoint, 0 without any; no slot holds one yet."""
    checkpoints = runtime.kv.checkpoints
    if checkpoints is None:
        return 0.0
    calls = [partial(checkpoints.save, PADDING_ROW, 0, RING), partial(checkpoints.load, 0, PADDING_ROW, RING)]
    milliseconds(runtime, *calls)
    return milliseconds(runtime, *calls) / len(calls)


def _line(least: tuple[int, float], most: tuple[int, float]) -> list[tuple[int, float]]:
    """Return sizes up to the second point's, with their times.

    These lie on the line through both points, each a size and its time; the line does not fall.
    """
    (small, fast), (large, slow) = least, most
    rise = max(0.0, slow - fast) / max(1, large - small)
    return [(size, fast + rise * (size - small)) for size in _sizes(large)]


def _sizes(largest: int) -> list[int]:
    """Return sizes at most half as large again as the one before, up to the largest."""
    sizes, size = [1], 2
    while sizes[-1] < largest:
        sizes += [size, size + size // 2]
        size *= 2
    return [*sorted({size for size in sizes if size < largest}), largest]


def milliseconds(runtime: TorchRuntime, *calls: Callable[[], None]) -> float:
    """Time calls on the device."""
    begun, ended = runtime.device.instant(), runtime.device.instant()
    begun.record()
    for call in calls:
        call()
    ended.record()
    runtime.synchronize()
    return begun.elapsed_time(ended)
