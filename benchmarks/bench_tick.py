"""CPU time of an engine tick by stage, with a runtime that does no computation.

    python -m benchmarks.bench_tick [--rows 1 32 256] [--steps 2000] [--cached-pages 100000] [--save]
        [--constrained 0] [--grammar anything|strings|records|integers|text] [--length N] [--grammar-workers N ...]
        [--drafts K [--adapt]] [--wall]

Everything except the device is real: the mailbox over ZMQ to a frontend, scheduler, pipeline, codec, and staging of
each plan into its packed buffer. The prefix cache holds `--cached-pages` pages and no page is free, so every new page
evicts one: 16 per tick at 256 rows. The target for plan + stage + commit + encode is 400 us at 256 rows, so that the
loop never delays a GPU step of 1 ms. The lower bound shown with it is that of bare loops of dictionary lookups over 256
rows.

With --drafts every step verifies K drafts for each row without a grammar, and the row gets 1 to 1 + K tokens in turn.
With --adapt the steps verify up to K, as with `--speculate-tokens auto`, and the choice of the number is part of the
tick. The target for 64 rows and 3 drafts is 250 us.

All requests arrive before the first tick and none ends. With --length they end after that many tokens, the first ones
at random lengths, and are replaced, as in a server. This is needed to measure workers: a grammar is recompiled for them
only as requests arrive, and only later requests use the new copies. Ticks are measured once every request has been
replaced after that. Without --length, many rows of `text` may fail after some hundred steps (862 with 128,256 ids),
when their lexer reaches its maximum number of states.

From 24 constrained rows on, `--grammar-workers` processes share the grammars with the loop's. The loop's wait for them
shows in --wall and, as it polls, in CPU time. To measure their effect on a machine with 16 cores:

    python -m benchmarks.bench_tick --rows 64 256 --constrained 100 --grammar strings --length 128 --steps 400 --wall
        --grammar-workers 0 4
"""

import argparse
import random
import statistics
import tempfile
import time
from array import array
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from llguidance import LLMatcher
from msgspec import Struct

from benchmarks.measuring.grammars import ENDLESS
from benchmarks.measuring.results import save
from benchmarks.measuring.tick_requests import PROMPT, BetweenTicks, Requests, reach_steady_state
from tandem.engine_core.constraints.compiler import GrammarCompiler, compile_lanes
from tandem.engine_core.constraints.grammar_advancer import BatchAdvancer
from tandem.engine_core.constraints.grammars import Grammars
from tandem.engine_core.constraints.mask_builder import MaskBuilder
from tandem.engine_core.constraints.workers.mask_memory import MaskMemory
from tandem.engine_core.contracts import PENDING_TOKEN, ArrivingTokens, DeviceTimes, MaskedRows, StepResult
from tandem.engine_core.engine import Engine
from tandem.engine_core.graph_sizes import decode_rows, draft_sizes
from tandem.engine_core.kv_cache.manager import KVManager
from tandem.engine_core.kv_cache.pages import CACHE, PageAllocator
from tandem.engine_core.kv_cache.radix import ROOT, RadixTree
from tandem.engine_core.page_counts import PageColumns
from tandem.engine_core.plan import ScheduledSequence, StepPlan
from tandem.engine_core.runtime.masks import MaskFiller, index_masks, mask_indices
from tandem.engine_core.runtime.staging import Ints, capacity, pack
from tandem.engine_core.scheduler.admission import RowGate
from tandem.engine_core.scheduler.draft_policy import DraftPolicy
from tandem.engine_core.scheduler.planner import SchedulerLimits
from tandem.engine_core.scheduler.scheduler import Scheduler
from tandem.engine_core.startup.engine import DEFAULT_MODEL, grammar_workers
from tandem.engine_core.stats import STAGES, new_stats
from tandem.engine_core.wire.mailbox import ZmqMailbox
from tandem.engine_core.wire.wakeup import LoopWaker
from tandem.protocol.codec import decode_event, encode, runs, step_output
from tandem.protocol.events import Limits, ModelFacts, StepOutput
from tandem.protocol.sockets import bind_router, connect_dealer

EPOCH, VOCAB, MAX_LEN, PAGE_SIZE, STEP_TOKENS = 1, 128_256, 4096, 16, 8192
COLUMNS = (PageColumns(0, MAX_LEN // PAGE_SIZE),)
LONGEST = MAX_LEN - PROMPT
"""Maximum tokens of a request."""
ANYTHING = LLMatcher.grammar_from_regex(r"(.|\n)*")
"""Endless grammars."""
GRAMMARS = {"anything": ANYTHING} | {
    name: LLMatcher.grammar_from_json_schema(schema) for name, schema in ENDLESS.items()
}


class StagingRuntime:
    """Runtime that stages every plan like the real one but does no computation.

    Rows with a grammar other than `anything` yield a token that their mask allows, other rows always the same token.
    """

    def __init__(self, max_rows: int, filler: MaskFiller, samples_masks: bool, drafts: int = 0) -> None:
        words = capacity(max_rows, STEP_TOKENS, max_rows * MAX_LEN // PAGE_SIZE, max_rows * MAX_LEN)
        self.buffers = [np.zeros(words, dtype=np.int32) for _ in range(2)]
        self.rows: list[tuple[ScheduledSequence, ...]] = [(), ()]
        self.plans: list[StepPlan | None] = [None, None]
        self.filler = filler
        self.masks = [self._allocate(max_rows, VOCAB // 32) for _ in range(2)]
        self.results = [self._allocate(1, max_rows * (1 + drafts))[0] for _ in range(2)]
        self.views = [results.data for results in self.results]
        self.indices: list[dict[int, int]] = [{}, {}]
        self.samples_masks = samples_masks
        self.random = random.Random(0)

    def needs_exact_positions(self, plan: StepPlan) -> bool:
        return False

    def stage(self, slot: int, plan: StepPlan) -> None:
        return None

    def launch(self, slot: int, plan: StepPlan) -> None:
        pack(plan, MAX_LEN, COLUMNS, self.buffers[slot])
        self.rows[slot], self.indices[slot], self.plans[slot] = plan.rows, mask_indices(plan), plan

    def arriving_tokens(self, slot: int, masks: MaskedRows) -> ArrivingTokens:
        sampled = [row.row for row in self.rows[slot] if row.samples]
        if len(masks) == len(sampled):
            return ArrivingTokens(self.views[slot], range(len(masks)))
        index = dict(zip(sampled, range(len(sampled)), strict=True))
        return ArrivingTokens(self.views[slot], [index[row] for row, _ in masks])

    def prefetch_masks(self, slot: int, masks: MaskedRows) -> None:
        self.filler.prefetch(index_masks(masks, self.indices[slot]), self.masks[slot])

    def sample(self, slot: int, masks: MaskedRows | None) -> None:
        indices, masked = self.indices[slot], set[int]()
        self.results[slot][:] = PENDING_TOKEN
        if masks is not None:
            self.filler.fill(index_masks(masks, indices), self.masks[slot])
            masked = {row for row, _ in masks} if self.samples_masks else masked
        sampled = [row.row for row in self.rows[slot] if row.samples]
        self.results[slot][: len(sampled)] = 7
        for index in [index for index, row in enumerate(sampled) if row in masked] if masked else ():
            self.results[slot][index] = self._allowed(self.masks[slot][indices[sampled[index]]])

    def collect(self, slot: int) -> StepResult:
        plan = self.plans[slot]
        if plan is not None and plan.num_drafts:
            return self._verified(plan, self.results[slot])
        counts = [int(row.samples) for row in self.rows[slot]]
        return StepResult(counts, self.results[slot][: sum(counts)].tolist())

    def _verified(self, plan: StepPlan, tokens: Ints) -> StepResult:
        """Return runs of 1 to 1 + K tokens for rows without a grammar: each row has the next longer one every step."""
        queries = 1 + plan.num_drafts
        counts = [1 if row.constrained else 1 + (plan.step_id + index) % queries for index, row in enumerate(plan.rows)]
        runs = [[int(tokens[index])] * count for index, count in enumerate(counts)]
        drafts = [0 if row.constrained else plan.num_drafts for row in plan.rows]
        return StepResult(counts, [token for run in runs for token in run], num_drafts=drafts)

    def _allocate(self, rows: int, columns: int) -> Ints:
        memory = self.filler.allocate(rows, columns)
        return np.zeros((rows, columns), dtype=np.int32) if memory is None else memory

    def _allowed(self, words: Ints) -> int:
        """Return a random allowed token, from the first mask word found that allows any."""
        start = self.random.randrange(len(words))
        # Most masks allow nearly everything, so few words are inspected.
        for part in (words[start : start + 8], words[start:], words):
            found = part.nonzero()[0]
            if len(found):
                offset = int(found[0]) + (0 if part is words else start)
                bits = int(words[offset]) & 0xFFFFFFFF
                lowest = (bits & -bits).bit_length() - 1
                return offset * 32 + lowest
        raise AssertionError("a mask allows nothing")

    def synchronize(self) -> None:
        return None

    def device_times(self) -> DeviceTimes:
        return DeviceTimes()


class Options(Struct, frozen=True):
    """Settings of a run."""

    steps: int
    cached_pages: int
    constrained: int
    """Percentage of constrained rows."""
    length: int
    """Output tokens after which a request is replaced; 0 for never."""
    grammar: str
    tokenizer: Path
    """tokenizer.json; ids beyond its vocabulary are never allowed."""
    grammar_workers: int
    clock: Callable[[], float]
    """Clock of the stages in seconds: CPU time of the loop's thread, or wall time."""
    drafts: int = 0
    """Drafts that every step verifies for each row; 0: none."""
    adapt: bool = False
    """True if a step may verify fewer, as the acceptance of the last steps suggests."""


def full_cache(pages: int, max_lead: int = 0) -> KVManager:
    """Build a pool with all pages in the prefix cache, as unused prompts of 64 pages each.

    max_lead: as of `KVManager`.
    """
    tree = RadixTree(PAGE_SIZE)
    allocator = PageAllocator(pages + 1)
    for first in range(0, pages, 64):
        path = allocator.allocate(CACHE, min(64, pages - first))
        assert path is not None
        nodes: list[int] = []
        for index, page in enumerate(path):
            parent = nodes[-1] if nodes else ROOT
            tokens = array("i", [first + index] * PAGE_SIZE)
            nodes.append(tree.insert(tree.key(b"", tokens, 0, parent), parent))
            tree.attach(nodes[-1:], [[page]])
        tree.lock(nodes)
        tree.unlock(nodes)
    return KVManager(allocator, PAGE_SIZE, tree, max_lead=max_lead)


def build(rows: int, options: Options, router: Any, wakeup: LoopWaker) -> Engine:
    pages = options.cached_pages or rows * MAX_LEN // PAGE_SIZE
    lead = 2 * options.drafts
    memory = (
        full_cache(pages, lead)
        if options.cached_pages
        else KVManager(PageAllocator(pages + 1), PAGE_SIZE, max_lead=lead)
    )
    drafts = None
    if options.drafts:
        sizes = draft_sizes("ngram", options.drafts) if options.adapt else (options.drafts,)
        drafts = DraftPolicy(sizes, None if options.adapt else options.drafts, decode_rows(None, rows))
    stats = new_stats()
    grammars, masks = Grammars(options.tokenizer, VOCAB, (2,)), MaskMemory()
    workers = grammar_workers(options.grammar_workers, grammars, masks, stats) if options.grammar_workers else None
    mask_builder = MaskBuilder([2], stats, time.monotonic, workers=workers, memory=masks)
    scheduler = Scheduler(RowGate(rows), memory, SchedulerLimits(STEP_TOKENS, STEP_TOKENS, 4096), drafts=drafts)
    mailbox = ZmqMailbox(router, wakeup)
    compiler = GrammarCompiler(grammars.compile, compile_lanes(), mailbox.wake, stats, time.monotonic, workers=workers)
    facts = ModelFacts("bench", VOCAB, MAX_LEN, [2], "", "none", "none", 0)
    limits = Limits(rows, pages * PAGE_SIZE, PAGE_SIZE, STEP_TOKENS, 4096)
    return Engine.assemble(
        scheduler,
        StagingRuntime(rows, mask_builder, options.grammar != ANYTHING, options.drafts),
        mailbox,
        compiler,
        depth=2,
        epoch=EPOCH,
        model=facts,
        limits=limits,
        stats=stats,
        clock=time.monotonic,
        stage_clock=options.clock,
        advancer=BatchAdvancer(workers, masks),
    )


def measure(rows: int, options: Options) -> dict[str, float]:
    """Measure the median microseconds of each stage over decode steps, and the mean of a tick.

    The tick excludes `collect`, in which this runtime chooses tokens.
    """
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        context = zmq.Context()
        stack.callback(context.destroy, linger=0)
        wakeup = LoopWaker.open()
        stack.callback(wakeup.close)
        endpoint = f"ipc://{directory}/engine.sock"
        router, dealer = bind_router(context, endpoint), connect_dealer(context, endpoint)
        engine = build(rows, options, router, wakeup)
        stack.callback(engine.compiler.close)
        requests = Requests(rows, LONGEST, options.length, options.constrained, options.grammar, VOCAB)
        frontend = BetweenTicks(dealer, engine.stats, requests)
        frontend.begin(EPOCH)
        reach_steady_state(engine, frontend)
        found = measure_ticks(engine, frontend, options)
        stats = engine.stats
        assert options.length or stats.running == rows, "the run ended before its measurement"
        assert not stats.preemptions and bool(stats.pages_evicted) == bool(options.cached_pages)
    return found


def measure_ticks(engine: Engine, frontend: BetweenTicks, options: Options) -> dict[str, float]:
    """Measure ticks, except idle ones."""
    stats, clock = engine.stats, options.clock
    samples: dict[str, list[float]] = {stage: [] for stage in (*STAGES, "tick")}
    steps, step_rows = stats.steps_launched, stats.step_rows.total
    longest = LONGEST // (1 + options.drafts) - 50
    wanted = options.steps if options.length else min(options.steps, longest)
    while len(samples["tick"]) < wanted:
        assert not stats.requests_failed, f"requests failed after {stats.steps_launched} steps: {stats.requests_failed}"
        before = dict(stats.stage_seconds)
        start = clock()
        worked = engine.tick()
        seconds = clock() - start
        frontend.turn()
        if not worked:
            continue
        for stage in STAGES:
            samples[stage].append(stats.stage_seconds[stage] - before[stage])
        samples["tick"].append(seconds - samples["collect"][-1])
    medians = {stage: statistics.median(values) * 1e6 for stage, values in samples.items()}
    mean = statistics.fmean(samples["tick"]) * 1e6
    return medians | {"tick mean": mean, "rows": (stats.step_rows.total - step_rows) / (stats.steps_launched - steps)}


def median_us(call: Any, repeats: int = 2000) -> float:
    times = []
    for _ in range(repeats):
        start = time.thread_time()
        call()
        times.append(time.thread_time() - start)
    return statistics.median(times) * 1e6


def measure_messages(rows: int) -> dict[str, float]:
    """Measure encoding and decoding a step's output, and the bare loops, in microseconds."""
    ids, tokens = list(range(rows)), [7] * rows
    message: StepOutput = step_output(1, ids, tokens)
    data = encode(message)

    def decode() -> list[tuple[int, list[int]]]:
        event = decode_event(data)
        assert isinstance(event, StepOutput)
        return list(runs(event))

    table = {row: object() for row in ids}
    return {
        "build and encode us": median_us(lambda: encode(step_output(1, ids, tokens))),
        "decode and split us": median_us(decode),
        "bytes": len(data),
        "ceiling: three loops of lookups us": 3 * median_us(lambda: [table[row] for row in ids]),
    }


def arguments_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--drafts", type=int, default=0, metavar="K", help="drafts that each row verifies in a step")
    parser.add_argument("--adapt", action="store_true", help="choose up to --drafts by the accepted ones")
    parser.add_argument(
        "--constrained", type=int, default=0, metavar="PERCENT", help="share of rows that follow a grammar"
    )
    parser.add_argument("--grammar", choices=list(GRAMMARS), default="anything", help="their grammar")
    parser.add_argument(
        "--length", type=int, default=0, metavar="N", help="tokens of a request that another follows; 0: none ends"
    )
    parser.add_argument(
        "--tokenizer", type=Path, default=DEFAULT_MODEL / "tokenizer.json", help="tokenizer of the masks"
    )
    parser.add_argument(
        "--grammar-workers",
        type=int,
        nargs="+",
        default=[0],
        metavar="N",
        help="0: the loop follows all grammars",
    )
    parser.add_argument("--wall", action="store_true", help="measure time instead of CPU time of the loop's thread")
    parser.add_argument(
        "--cached-pages", type=int, default=100_000, help="pages in the prefix cache; 0: no prefix cache"
    )
    parser.add_argument(
        "--save", metavar="NAME", nargs="?", const="bench_tick", help="write benchmarks/results/NAME.json"
    )
    return parser


def main() -> None:
    parser = arguments_parser()
    arguments = parser.parse_args()
    least = max(arguments.rows) * MAX_LEN // PAGE_SIZE
    if 0 < arguments.cached_pages < least:
        parser.error(f"--cached-pages {arguments.cached_pages}: rows that grow need {least}, or 0 for no cache")
    if not 0 <= arguments.length <= LONGEST:
        parser.error(f"--length {arguments.length}: a request has up to {LONGEST} tokens; 0: none ends")
    names = ("steps", "cached_pages", "constrained", "length", "drafts", "adapt")
    settings = {name: getattr(arguments, name) for name in names}
    settings |= {"grammar": GRAMMARS[arguments.grammar], "tokenizer": arguments.tokenizer}
    clock = time.perf_counter if arguments.wall else time.thread_time
    found = {}
    for workers in arguments.grammar_workers:
        options = Options(**settings, grammar_workers=workers, clock=clock)
        ticks = found[workers] = {rows: measure(rows, options) for rows in arguments.rows}
        kind = "time" if arguments.wall else "CPU time"
        print(f"medians of {kind} in us and the mean of the tick, {workers} workers for grammars")
        print(" " * 12 + "".join(f"{rows:>10} rows" for rows in ticks))
        for stage in (*STAGES, "tick", "tick mean", "rows"):
            print(f"{stage:>12}" + "".join(f"{ticks[rows][stage]:>15.1f}" for rows in ticks))
    messages = {rows: measure_messages(rows) for rows in arguments.rows}
    for name in next(iter(messages.values())):
        print(f"{name:>40}" + "".join(f"{messages[rows][name]:>12.1f}" for rows in messages))
    if arguments.save:
        names = (
            "rows",
            "steps",
            "constrained",
            "cached_pages",
            "grammar",
            "length",
            "grammar_workers",
            "drafts",
            "adapt",
            "wall",
        )
        config = {name: getattr(arguments, name) for name in names}
        ticks = found[arguments.grammar_workers[0]]
        print(save(arguments.save, config, {"ticks": ticks, "ticks_by_workers": found, "messages": messages}))


if __name__ == "__main__":
    main()
