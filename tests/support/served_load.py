"""A scheduler under the load of many streams, on a device of simulated time.

Two steps are in flight, as on cuda. A step takes what steps of its captured size took on an H200, and what attention
adds: reads of keys and values of the rows that decode, and for prompts tiles of positions, each of which one
multiprocessor takes through all that it attends to. So a chunk of a tile takes as long as one that fills the device.
The table of the planner lacks attention, as one of padded steps does, and every eighth step corrects it.
"""

import random
from bisect import bisect_left
from collections.abc import Iterable
from collections.abc import Sequence as Items
from heapq import heappop, heappush, heapreplace
from math import gcd

from msgspec import Struct

from tandem.engine_core.contracts import StepResult
from tandem.engine_core.graph_sizes import GRAPH_ROWS, GRAPH_TOKENS, MIXED_GRAPH_ROWS, MIXED_GRAPH_TOKENS
from tandem.engine_core.plan import StepPlan
from tandem.engine_core.runtime.graphs import MAX_PROMPTS
from tandem.engine_core.scheduler.scheduler import Scheduler
from tandem.engine_core.scheduler.step_costs import AttentionShare, StepCosts, StepWork
from tests.support.scheduling import new, sequence
from tests.support.step_tables import LLAMA_1B, LLAMA_8B, LLAMA_8B_FP8, ROWS, StepTable

HEADS, MULTIPROCESSORS = 32, 132
TIMED = 8
"""One step in so many corrects the table."""
Step = tuple[StepPlan, float, float]
"""A step in flight, the time of its end and its milliseconds."""


class SimulatedDevice(Struct, frozen=True):
    """Durations of a device's steps in milliseconds."""

    steps: StepTable
    context: float
    """For each position that a decoding row attends to."""
    layers: int
    tile: int
    """Positions of a prompt that a multiprocessor takes at once, for one of `HEADS`."""
    attended: float
    """For each position that such a tile attends to, in one layer."""
    row: float
    """For each row beyond those of the table."""
    share: AttentionShare
    prompts: float = 0.0
    """What a step with prompts takes beyond the table."""
    fixed: float = 0.05

    def base(self, rows: int, tokens: int) -> float:
        """Return the duration of a step that attends to nothing."""
        known, beyond = self.steps.by_size(), max(0, rows - ROWS[-1])
        rows -= beyond
        if not tokens:
            return (
                self.fixed
                + self.row * beyond
                + _between({size: ms for (size, none), ms in known.items() if not none}, rows)
            )
        by_tokens = {
            size: _between({count: ms for (count, of), ms in known.items() if of == size}, rows)
            for _, size in known
            if size
        }
        return self.fixed + self.prompts + self.row * beyond + _between(by_tokens, tokens)

    def attention(self, prompts: Iterable[tuple[int, int]]) -> float:
        """Return what the attention of prompts takes. prompts: start and length of each."""
        ends = [
            start + min(length, first + self.tile) for start, length in prompts for first in range(0, length, self.tile)
        ]
        busy = [0] * (MULTIPROCESSORS // gcd(MULTIPROCESSORS, HEADS))
        for end in sorted(ends, reverse=True):
            for _ in range(HEADS // gcd(MULTIPROCESSORS, HEADS)):
                heapreplace(busy, busy[0] + end)
        return self.layers * self.attended * max(busy)

    def table(self, rows: Items[int], mixed_rows: Items[int]) -> dict[tuple[int, int], float]:
        """Return the table of captured sizes. mixed_rows: those captured beside prompts."""
        sizes = [(count, 0) for count in rows]
        for tokens in GRAPH_TOKENS:
            sizes += [(count, tokens) for count in (mixed_rows if tokens <= MIXED_GRAPH_TOKENS else (0,))]
        return {size: self.base(*size) for size in sizes}


def _between(points: dict[int, float], at: int) -> float:
    """Return the value on the line between the points beside `at`; beyond the last it grows in proportion."""
    sizes = sorted(points)
    if at >= sizes[-1]:
        return points[sizes[-1]] * max(1.0, at / max(1, sizes[-1]))
    above = max(1, bisect_left(sizes, at))
    small, large = sizes[above - 1], sizes[above]
    return points[small] + (points[large] - points[small]) * max(0, at - small) / (large - small)


SMALL = SimulatedDevice(LLAMA_1B, 8.3e-6, 16, 192, 1.39e-5, 0.003, AttentionShare(1.3e-5, 5.3e-5))
"""A model of 1 billion weights."""
LARGE = SimulatedDevice(LLAMA_8B, 3.4e-5, 32, 128, 1.65e-5, 0.012, AttentionShare(8.2e-6, 3.3e-5))
"""A model of 8 billion weights."""
LARGE_FP8 = SimulatedDevice(LLAMA_8B_FP8, 3.4e-5, 32, 128, 1.65e-5, 0.008, AttentionShare(1.6e-5, 3.3e-5))
"""The same model with weights in FP8, and keys and values in 16 bits."""


class ServedLoad(Struct, frozen=True):
    """Streams, each of which sends its next request when its last has ended."""

    device: SimulatedDevice
    streams: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    requests: int
    """Of each stream."""
    max_rows: int = 256


class Figures(Struct):
    """What the streams of a load saw."""

    tokens_per_second: float
    ttft: float
    """Median, in milliseconds."""
    itl: float
    """99th percentile, in milliseconds."""
    decoding: float
    """Mean number of decoding rows."""


class LoadRun:
    """One run of a load."""

    def __init__(self, load: ServedLoad, by_time: bool = True, max_itl: float | None = None) -> None:
        """Start with every stream's first request on its way.

        by_time: False to limit prompts by 256 positions each and 2,048 in all, instead of by time; max_itl: as
        the flag.
        """
        self.load = load
        self.rows = [count for count in GRAPH_ROWS if count <= load.max_rows]
        self.mixed_rows = [count for count in MIXED_GRAPH_ROWS if count <= load.max_rows]
        table = load.device.table(self.rows, self.mixed_rows)
        self._base = table
        self.costs = StepCosts(table if by_time else {}, load.device.share)
        step, chunk = (8192, 8192) if by_time else (2048, 256)
        self.scheduler: Scheduler = new(
            load.max_rows, 60_000, step, chunk, load.streams, page_size=16, cache=False, costs=self.costs,
            max_itl=max_itl, prompts=MAX_PROMPTS,
        )  # fmt: skip
        self._random = random.Random(0)
        self._now = self._device_free = 0.0
        self._arriving: list[tuple[float, int, int]] = []
        """Time, number and stream of each request on its way."""
        self._left = [load.requests] * load.streams
        self._stream: dict[int, int] = {}
        self._sent: dict[int, float] = {}
        self._last: dict[int, float] = {}
        """Time of the last token of each sequence that has one."""
        self._ttft: list[float] = []
        self._itl: list[float] = []
        self._decoding: list[int] = []
        self._ended = 0
        for stream in range(load.streams):
            self._send(stream, 0.15 * stream)

    def run(self) -> Figures:
        """Answer all requests."""
        flights: list[Step] = []
        while self._ended < self.load.streams * self.load.requests:
            self._take_arrived()
            plan = self.scheduler.plan_step(len(self._decoding) + 1)
            if plan is not None:
                flights.append(self._launch(plan))
            if len(flights) == 2 or (flights and plan is None):
                self._commit(*flights.pop(0))
            elif not flights:
                self._now = max(self._now, self._arriving[0][0])
        self._ttft.sort()
        self._itl.sort()
        return Figures(
            1000 * (len(self._ttft) + len(self._itl)) / self._now,
            self._ttft[len(self._ttft) // 2],
            self._itl[len(self._itl) * 99 // 100],
            sum(self._decoding) / len(self._decoding),
        )

    def _send(self, stream: int, now: float) -> None:
        if self._left[stream]:
            self._left[stream] -= 1
            number = len(self._sent) + 1
            self._sent[number] = now
            heappush(self._arriving, (now + self._random.uniform(1, 3), number, stream))

    def _take_arrived(self) -> None:
        while self._arriving and self._arriving[0][0] <= self._now:
            _, number, stream = heappop(self._arriving)
            self._stream[number] = stream
            prompt, output = self._random.randint(*self.load.prompt), self._random.randint(*self.load.output)
            self.scheduler.add(sequence(number, prompt, output, first=1000 + number))
        self.scheduler.admit_waiting()

    def _launch(self, plan: StepPlan) -> Step:
        self.scheduler.on_launch(plan)
        work = StepWork.of(plan.rows)
        self._decoding.append(work.rows)
        milliseconds = self._milliseconds(work, [(row.start, row.length) for row in plan.rows if row.length > 1])
        self._now += 0.35 + 0.0015 * len(plan.rows) + bool(work.tokens)
        self._device_free = max(self._device_free, self._now) + milliseconds
        return plan, self._device_free, milliseconds

    def _milliseconds(self, work: StepWork, prompts: Items[tuple[int, int]]) -> float:
        """Return how long the device takes for a step: for the captured size that holds it, else as it is, eagerly."""
        device, rows, tokens, eager = self.load.device, work.rows, work.tokens, 0.0
        if not tokens:
            rows = self.rows[bisect_left(self.rows, rows)]
        elif not rows or tokens <= MIXED_GRAPH_TOKENS:
            rows = self.mixed_rows[bisect_left(self.mixed_rows, rows)]
            tokens = GRAPH_TOKENS[bisect_left(GRAPH_TOKENS, tokens)]
        else:
            eager = 1.5
        size = rows, tokens
        base = self._base[size] if size in self._base else device.base(rows, tokens)
        return base + eager + work.context * device.context + device.attention(prompts)

    def _commit(self, plan: StepPlan, end: float, milliseconds: float) -> None:
        self._now = max(self._now, end)
        sampled = [row.seq_id for row in plan.rows if row.samples]
        measured = milliseconds if plan.step_id % TIMED == 0 else 0.0
        result = StepResult([int(row.samples) for row in plan.rows], [10] * len(sampled), milliseconds=measured)
        updates = self.scheduler.commit(plan, result)
        self._now += 0.2 + 0.001 * len(plan.rows)
        for number in sampled:
            if number in self._last:
                self._itl.append(self._now - self._last[number])
            else:
                self._ttft.append(self._now - self._sent[number] + 1)
            self._last[number] = self._now
        for seq in updates.ended:
            self._ended += 1
            self._send(self._stream[seq.id], self._now + self._random.uniform(0.5, 1.5))
