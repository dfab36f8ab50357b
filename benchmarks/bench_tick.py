"""CPU time of an engine tick by stage, with a runtime that computes nothing.

    python -m benchmarks.bench_tick [--rows 1 32 256] [--constrained 0] [--steps 2000] [--cached-pages 100000] [--save]

Everything but the device is real: mailbox over ZMQ to a frontend that reads, scheduler, pipeline, codec, and the
staging of each plan into its packed buffer. The prefix cache holds `--cached-pages` pages and the pool has no free
ones, so every page that a row grows by evicts one: 16 per tick at 256 rows. The target is under 400 us at 256 rows for
plan + stage + commit + encode, so that the loop never delays a GPU step of 1 ms. The ceiling shown with it is the time
of bare loops of dictionary lookups over 256 rows, the least that Python code can take.
"""

import argparse
import os
import statistics
import tempfile
import threading
import time
from array import array
from typing import Any

import numpy as np
import zmq
from llguidance import LLExecutor, LLMatcher

from benchmarks.measuring.results import save
from tandem.engine_core.constraints.compiler import GrammarCompiler, compile_lanes
from tandem.engine_core.constraints.grammars import Grammars
from tandem.engine_core.constraints.mask_builder import MaskBuilder
from tandem.engine_core.contracts import DeviceTimes, Masks, StepResult
from tandem.engine_core.engine import Engine
from tandem.engine_core.kv_cache.manager import KVManager
from tandem.engine_core.kv_cache.pages import CACHE, PageAllocator
from tandem.engine_core.kv_cache.radix import ROOT, RadixTree
from tandem.engine_core.plan import StepPlan
from tandem.engine_core.runtime.masks import MaskFiller
from tandem.engine_core.runtime.staging import capacity, pack
from tandem.engine_core.scheduler.admission import RowGate
from tandem.engine_core.scheduler.planner import SchedulerLimits
from tandem.engine_core.scheduler.scheduler import Scheduler
from tandem.engine_core.startup.engine import DEFAULT_MODEL
from tandem.engine_core.stats import STAGES, new_stats
from tandem.engine_core.wire.mailbox import ZmqMailbox
from tandem.engine_core.wire.wakeup import LoopWaker
from tandem.protocol.codec import decode_event, encode, pack_ids, runs, step_output
from tandem.protocol.commands import Hello, Submit
from tandem.protocol.events import Limits, ModelFacts, StepOutput
from tandem.protocol.params import SamplingParams
from tandem.protocol.sockets import bind_router, connect_dealer
from tandem.protocol.version import PROTOCOL_VERSION

EPOCH, VOCAB, MAX_LEN, PAGE_SIZE, STEP_TOKENS = 1, 128_256, 4096, 16, 8192
PROMPT = 64
ANYTHING = LLMatcher.grammar_from_regex(r"(.|\n)*")
"""Grammar without an end."""


class StagingRuntime:
    """Runtime that stages every plan as the real one does and computes nothing.

    It yields the same token for every row.
    """

    def __init__(self, max_rows: int, filler: MaskFiller) -> None:
        words = capacity(max_rows, STEP_TOKENS, max_rows * MAX_LEN // PAGE_SIZE, max_rows * MAX_LEN)
        self.buffers = [np.zeros(words, dtype=np.int32) for _ in range(2)]
        self.rows = [0, 0]
        self.filler = filler
        self.masks = np.zeros((max_rows, VOCAB // 32), dtype=np.int32)

    def launch(self, slot: int, plan: StepPlan) -> None:
        pack(plan, MAX_LEN, MAX_LEN // PAGE_SIZE, self.buffers[slot])
        self.rows[slot] = len(plan.rows)

    def sample(self, slot: int, masks: Masks | None) -> None:
        if masks:
            self.filler.fill([(constraint, place) for place, (_, constraint) in enumerate(masks)], self.masks)

    def collect(self, slot: int) -> StepResult:
        return StepResult([1] * self.rows[slot], [7] * self.rows[slot])

    def synchronize(self) -> None:
        return None

    def device_times(self) -> DeviceTimes:
        return DeviceTimes()


def full_cache(pages: int) -> KVManager:
    """Build a pool with all pages in the prefix cache and none of them in use.

    The prompts in the cache have 64 pages each.
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
            tree.attach(nodes[-1], page)
        tree.lock(nodes)
        tree.unlock(nodes)
    return KVManager(allocator, PAGE_SIZE, tree)


def build(rows: int, cached_pages: int, router: Any, wakeup: LoopWaker) -> Engine:
    pages = cached_pages or rows * MAX_LEN // PAGE_SIZE
    memory = full_cache(pages) if cached_pages else KVManager(PageAllocator(pages + 1), PAGE_SIZE)
    stats = new_stats()
    threads = len(os.sched_getaffinity(0)) // 2
    mask_builder = MaskBuilder(LLExecutor(threads) if threads > 1 else None, [2], stats, time.monotonic)
    scheduler = Scheduler(RowGate(rows), memory, SchedulerLimits(STEP_TOKENS, STEP_TOKENS, 4096))
    mailbox = ZmqMailbox(router, wakeup)
    grammars = Grammars(DEFAULT_MODEL / "tokenizer.json", VOCAB, (2,))
    compiler = GrammarCompiler(grammars.compile, compile_lanes(), mailbox.wake, stats, time.monotonic)
    facts = ModelFacts("bench", VOCAB, MAX_LEN, [2], "", "none", "none", 0)
    limits = Limits(rows, pages * PAGE_SIZE, PAGE_SIZE, STEP_TOKENS, 4096)
    return Engine.assemble(
        scheduler,
        StagingRuntime(rows, mask_builder),
        mailbox,
        compiler,
        depth=2,
        epoch=EPOCH,
        model=facts,
        limits=limits,
        stats=stats,
        clock=time.monotonic,
        stage_clock=time.thread_time,
    )


def read_everything(dealer: Any, stop: threading.Event) -> None:
    """Receive everything as a frontend would.

    libzmq delivers without holding the interpreter lock.
    """
    while not stop.is_set():
        if dealer.poll(50):
            dealer.recv()


def measure(rows: int, steps: int, constrained: int, cached_pages: int) -> dict[str, float]:
    """Measure the median microseconds of each stage over full decode steps.

    constrained: percentage of rows that follow a grammar. CPU time of the loop's thread: masks are filled, and tokens
    accepted, by other threads, which it waits for.
    """
    context = zmq.Context()
    with tempfile.TemporaryDirectory() as directory:
        endpoint = f"ipc://{directory}/engine.sock"
        router, dealer = bind_router(context, endpoint), connect_dealer(context, endpoint)
        wakeup = LoopWaker.open()
        engine = build(rows, cached_pages, router, wakeup)
        dealer.send(encode(Hello(PROTOCOL_VERSION, EPOCH, "bench")))
        params = SamplingParams(MAX_LEN - PROMPT, ignore_eos=True)
        for request_id in range(rows):
            follows = (request_id + 1) * constrained // 100 > request_id * constrained // 100
            prompt = [request_id] * (PROMPT - request_id % PAGE_SIZE)
            dealer.send(encode(Submit(request_id, pack_ids(prompt), params, ANYTHING if follows else None)))
        while engine.stats.running < rows:
            engine.tick()
        stop = threading.Event()
        reader = threading.Thread(target=read_everything, args=(dealer, stop))
        reader.start()
        samples: dict[str, list[float]] = {stage: [] for stage in (*STAGES, "tick")}
        for _ in range(min(steps, MAX_LEN - PROMPT - 50)):
            before = dict(engine.stats.stage_seconds)
            start = time.thread_time()
            engine.tick()
            samples["tick"].append(time.thread_time() - start)
            for stage in STAGES:
                samples[stage].append(engine.stats.stage_seconds[stage] - before[stage])
        assert engine.stats.running == rows, "the run ended before its measurement"
        assert not engine.stats.preemptions and bool(engine.stats.pages_evicted) == bool(cached_pages)
        stop.set()
        reader.join()
        wakeup.close()
    context.destroy(linger=0)
    return {stage: statistics.median(values) * 1e6 for stage, values in samples.items()}


def median_us(call: Any, repeats: int = 2000) -> float:
    times = []
    for _ in range(repeats):
        start = time.thread_time()
        call()
        times.append(time.thread_time() - start)
    return statistics.median(times) * 1e6


def measure_messages(rows: int) -> dict[str, float]:
    """Measure encoding and decoding one step's output, in microseconds.

    The bare loops for comparison are measured with them.
    """
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument(
        "--constrained", type=int, default=0, metavar="PERCENT", help="share of rows that follow a grammar"
    )
    parser.add_argument(
        "--cached-pages", type=int, default=100_000, help="pages in the prefix cache; 0: no prefix cache"
    )
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/bench_tick.json")
    arguments = parser.parse_args()
    least = max(arguments.rows) * MAX_LEN // PAGE_SIZE
    if 0 < arguments.cached_pages < least:
        parser.error(f"--cached-pages {arguments.cached_pages}: rows that grow need {least}, or 0 for no cache")
    ticks = {
        rows: measure(rows, arguments.steps, arguments.constrained, arguments.cached_pages) for rows in arguments.rows
    }
    print(f"{'median us':>12}" + "".join(f"{rows:>10} rows" for rows in ticks))
    for stage in (*STAGES, "tick"):
        print(f"{stage:>12}" + "".join(f"{ticks[rows][stage]:>15.1f}" for rows in ticks))
    messages = {rows: measure_messages(rows) for rows in arguments.rows}
    for name in next(iter(messages.values())):
        print(f"{name:>40}" + "".join(f"{messages[rows][name]:>12.1f}" for rows in messages))
    if arguments.save:
        print(
            save(
                "bench_tick",
                {
                    "rows": arguments.rows,
                    "steps": arguments.steps,
                    "constrained": arguments.constrained,
                    "cached_pages": arguments.cached_pages,
                },
                {"ticks": ticks, "messages": messages},
            )
        )


if __name__ == "__main__":
    main()
