"""Measure the durations of steps that verify drafts, at startup and at two lengths of context.

On a GPU the graphs of some row counts are replayed, with rows that read as much of the pool as a row of that length
would. Without graphs, steps of padding are run: their context is short, and the same for both lengths.
"""

from collections.abc import Callable
from functools import partial

import torch
from msgspec import structs

from tandem.engine_core.config import EngineConfig
from tandem.engine_core.graph_sizes import MAX_VERIFY_POSITIONS
from tandem.engine_core.kernels.delta_rule.state import RING
from tandem.engine_core.kernels.sampling.inputs import INT_COLUMNS
from tandem.engine_core.plan import PADDING_ROW, DraftSpan, NewSequence, ScheduledSequence, StepPlan
from tandem.engine_core.runtime.captured import DecodeGraphs, VerifyGraphs
from tandem.engine_core.runtime.graphs import StepGraphs
from tandem.engine_core.runtime.runtime import TorchRuntime
from tandem.engine_core.sampling.sampler import Mode
from tandem.engine_core.scheduler.draft_costs import DraftCosts
from tandem.engine_core.startup.step_timing import milliseconds, without_outliers
from tandem.engine_core.startup.warmup import GREEDY, run_step

ROW_COUNTS = (1, 8, 32, 64, 128, 256)
"""Rows of the measured steps, as far as there are graphs of them; the costs of others lie on lines between."""
CONTEXTS = (256, 4096)
"""Positions of each row; fewer if the model or the pool has no room for as many."""
REPEATS = 3
SPANS = (16, 512)
"""Positions of prompts of the draft model."""


@torch.inference_mode()
def measure_draft_costs(runtime: TorchRuntime, config: EngineConfig) -> DraftCosts | None:
    """Return the durations of steps with each number of drafts; None if nothing is chosen by them."""
    if not config.draft_sizes or runtime.speculator is None or config.options.speculate_tokens != "auto":
        return None
    contexts = tuple(sorted(min(length, max(2, config.max_len - 16)) for length in CONTEXTS))
    spans = _time_spans(runtime, config) if runtime.speculator.model is not None else (0.0, 0.0)
    graphs = runtime.graphs
    if graphs is None:
        return DraftCosts(_time_steps(runtime, config, contexts[0]), (contexts[0], contexts[1]), *spans)
    counts = _row_counts(config)
    timed = [
        {(rows, size): time for rows in counts for size, time in _time_graphs(runtime, graphs, config, rows, n).items()}
        for n in contexts
    ]
    _clear(runtime)
    short, long = map(without_outliers, timed)
    table = {size: (time, long[size]) for size, time in short.items()}
    return DraftCosts(table, (contexts[0], contexts[1]), *spans)


def _row_counts(config: EngineConfig) -> list[int]:
    """Return row counts that have graphs: the smallest one, some that have graphs of a draft, and the largest."""
    drafted = sorted({rows for rows, _ in config.verify_shapes})
    wanted = {next((rows for rows in drafted if rows >= count), drafted[-1]) for count in ROW_COUNTS}
    return sorted({drafted[0], *wanted, drafted[-1]})


def _time_graphs(
    runtime: TorchRuntime, graphs: StepGraphs, config: EngineConfig, rows: int, context: int
) -> dict[int, float]:
    """Return the milliseconds of a step by the number of drafts.

    Without a graph for these rows the time is extrapolated in proportion to the number of positions.
    """
    prepare = partial(_fill, runtime, rows, context)
    found = {0: _median(runtime, partial(_decode, graphs.decode[0][rows], context), prepare)}
    for size in config.draft_sizes:
        verify = graphs.verify[0].get((rows, size))
        if verify is None:
            last = max(found)
            found[size] = found[last] * (1 + (size - last) / (1 + last))
            continue
        found[size] = _median(runtime, partial(_replay, verify, size), prepare)
    return found


def _replay(verify: VerifyGraphs, drafts: int) -> None:
    """Run a step that verifies drafts."""
    if verify.drafts is not None:
        verify.drafts.replay(drafts, 0)
    verify.forward.replay()
    verify.sampling[Mode.GREEDY].replay()


def _decode(graphs: DecodeGraphs, context: int) -> None:
    """Run a plain step."""
    graphs.select(context).replay()
    graphs.sampling[Mode.GREEDY].replay()


def _median(runtime: TorchRuntime, call: Callable[[], None], prepare: Callable[[], None] = lambda: None) -> float:
    """Return the median milliseconds of a call, which runs once before."""
    times = []
    for _ in range(1 + REPEATS):
        prepare()
        times.append(milliseconds(runtime, call))
    return sorted(times[1:])[REPEATS // 2]


def _fill(runtime: TorchRuntime, rows: int, context: int) -> None:
    """Let the first rows have this many tokens, and pages of their own as far as the pool has them."""
    slot, tables = runtime.slots[0], runtime.tables
    lengths = torch.tensor(_lengths(runtime, context), dtype=torch.int32)
    slot.device_inputs.zero_()
    numbers = torch.arange(rows, dtype=torch.int32, device=slot.device_inputs.device)
    slot.device_inputs[:rows] = numbers % (len(tables.tokens) - 1) + 1
    slot.device_inputs[rows : 2 * rows] = -1
    tables.sampling.lengths[1:] = lengths
    tables.sampling.ints[1:, INT_COLUMNS.index("total_len")] = tables.tokens.shape[1]
    tables.sampling.ints[1:, INT_COLUMNS.index("max_drafts")] = 7
    pages, usable = tables.pages[1:], max(1, runtime.kv.pages - 1)
    numbers = torch.arange(pages.numel(), dtype=torch.int32, device=pages.device) % usable + runtime.kv.pages - usable
    pages.copy_(numbers.view_as(pages))
    if runtime.speculator is not None and runtime.speculator.model is not None:
        runtime.speculator.model.scratch.state.lengths[1:] = lengths - 1


def _lengths(runtime: TorchRuntime, context: int) -> list[int]:
    """Return the number of tokens of each row. Recurrent layers fold their ring at multiples of its size."""
    tokens = runtime.tables.tokens
    length = min(context, tokens.shape[1] - 16)
    return [max(2, length - index % RING) if runtime.kv.recurrent else length for index in range(len(tokens) - 1)]


def _clear(runtime: TorchRuntime) -> None:
    """Leave the tables and the pool as at the start."""
    runtime.synchronize()
    tables, sampling = runtime.tables, runtime.tables.sampling
    for table in (tables.tokens, tables.pages, sampling.ints, runtime.kv.pool, runtime.slots[0].device_inputs):
        table.zero_()
    sampling.lengths.fill_(1)
    if runtime.kv.draft is not None:
        runtime.kv.draft.pool.zero_()
    if runtime.speculator is not None and runtime.speculator.model is not None:
        runtime.speculator.model.scratch.state.lengths.zero_()
    # The first steps are uploaded on a stream of their own, which does not wait for this.
    runtime.synchronize()


def _time_steps(
    runtime: TorchRuntime, config: EngineConfig, context: int
) -> dict[tuple[int, int], tuple[float, float]]:
    """Return the milliseconds of steps without graphs, of one row and of the most that verify the most drafts.

    They are padding, but with recurrent layers rows of a context: padding has no state.
    """
    table = {}
    row, new = ScheduledSequence(-1, PADDING_ROW, 4), NewSequence(-1, PADDING_ROW, 1, GREEDY)
    run_step(runtime, 0, StepPlan.of(0, (row,), (new,)))
    most = min(config.max_rows, MAX_VERIFY_POSITIONS // (1 + config.max_drafts))
    for rows in sorted({1, most}):
        own, prepare = (row,) * rows, partial(_fill, runtime, rows, context)
        if runtime.kv.recurrent:
            ends = enumerate(_lengths(runtime, context)[:rows], 1)
            own = tuple([ScheduledSequence(-1, number, end - 1) for number, end in ends])
        for size in (0, *config.draft_sizes):
            plan = StepPlan.decode_only(0, own, needs_mask=False, logprobs=-1, updated_rows=(), num_drafts=size)
            step = partial(run_step, runtime, 0, plan)
            time = _median(runtime, step, prepare) if runtime.kv.recurrent else _median(runtime, step)
            table[rows, size] = time, time
    if runtime.kv.recurrent:
        _clear(runtime)
    return table


def _time_spans(runtime: TorchRuntime, config: EngineConfig) -> tuple[float, float]:
    """Return by how many milliseconds positions that the draft model computes as a prompt prolong a step.

    The first is for each of them, the second for all. They are computed without a graph. While the device computes the
    step before, the host enqueues their kernels, so a graph is replayed first.
    """
    row, graphs = ScheduledSequence(-1, PADDING_ROW, 4), runtime.graphs
    plain = StepPlan.of(0, (row,), (NewSequence(-1, PADDING_ROW, 1, GREEDY),))

    def run(plan: StepPlan) -> None:
        if graphs is not None:
            runtime.slots[0].device_inputs.zero_()
            graphs.decode[0][graphs.rows[0]].forward.replay()
        run_step(runtime, 0, plan)

    lengths = [min(length, config.max_len - 1, config.max_step_tokens) for length in SPANS]
    plans = [plain, *[structs.replace(StepPlan.of(0, (row,)), draft_spans=(_span(length),)) for length in lengths]]
    alone, *with_spans = [_median(runtime, partial(run, plan)) for plan in plans]
    short, long = [max(0.0, time - alone) for time in with_spans]
    token_ms = max(0.0, long - short) / (lengths[1] - lengths[0]) if lengths[1] > lengths[0] else long / lengths[1]
    return token_ms, max(0.0, short - lengths[0] * token_ms)


def _span(length: int) -> DraftSpan:
    return DraftSpan(-1, PADDING_ROW, 0, length)
