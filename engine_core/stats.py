"""Counters of the engine.

The loop writes them, the heartbeat thread encodes them; nothing else reads them.
"""

from collections.abc import Callable, Mapping

from tandem.engine_core.sequence import Sequence
from tandem.protocol.events import Failure, Finished
from tandem.protocol.stats import EngineStats, Histogram

QUEUE_SECONDS = [
    *(0.001, 0.0015, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75),
    *(1.0, 1.5, 2.5, 5.0, 7.5, 10.0, 15.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 3840.0, 7680.0),
]
"""Bucket bounds of the times of a request, in seconds.

Each is at most twice the one before, so that a percentile read from them is accurate to a factor of two."""
COMPILE_SECONDS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0]
"""Bucket bounds of the compile time of grammars, in seconds."""
STEP_ROWS = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0]
"""Bucket bounds of the number of rows in a step."""
TOKENS = [float(digit * 10**power) for power in range(6) for digit in (1, 2, 5)] + [1e6]
"""Bucket bounds of numbers of tokens of a request."""
STEP_TOKENS = [1.0, *(float(2**power) for power in range(3, 17))]
"""Bucket bounds of the number of tokens in a step."""
STAGES = ("drain", "plan", "launch", "sample", "collect", "commit", "send")
"""Stages of one tick of the loop."""


def new_stats() -> EngineStats:
    """Return counters at zero, with every label present.

    So a scrape shows every series from the start.
    """
    return EngineStats(
        requests_finished={"stop": 0, "length": 0, "abort": 0, "error": 0},
        stage_seconds=dict.fromkeys(STAGES, 0.0),
        queue_time=_histogram(QUEUE_SECONDS),
        step_rows=_histogram(STEP_ROWS),
        compile_time=_histogram(COMPILE_SECONDS),
        iteration_tokens=_histogram(STEP_TOKENS),
        prefill_time=_histogram(QUEUE_SECONDS),
        decode_time=_histogram(QUEUE_SECONDS),
        inference_time=_histogram(QUEUE_SECONDS),
        request_prompt_tokens=_histogram(TOKENS),
        request_generation_tokens=_histogram(TOKENS),
        request_max_tokens=_histogram(TOKENS),
    )


def _histogram(bounds: list[float]) -> Histogram:
    return Histogram(bounds, [0] * (len(bounds) + 1))


def count_outcome(stats: EngineStats, outcome: Finished | Failure) -> None:
    """Count the end of a request by its finish reason or its error code."""
    if isinstance(outcome, Finished):
        stats.requests_finished[outcome.reason] = stats.requests_finished.get(outcome.reason, 0) + 1
    else:
        stats.requests_failed[outcome.code] = stats.requests_failed.get(outcome.code, 0) + 1


def count_start(stats: EngineStats, seq: Sequence, now: float) -> None:
    """Count the first admission of a sequence.

    Its grammar may have forced tokens already.
    """
    seq.times.admitted = now
    stats.queue_time.observe(now - seq.arrival)
    stats.prompt_tokens += seq.prompt_len
    if seq.generated:
        count_first_token(stats, seq, now)


def count_first_token(stats: EngineStats, seq: Sequence, now: float) -> None:
    """Count the first output of a sequence."""
    seq.times.first_token = now
    stats.prompt_tokens_cached += seq.cache.num_cached_tokens


def count_verified(stats: EngineStats, verified: Mapping[tuple[int, int], int]) -> None:
    """Count the drafts of a step.

    verified: number of rows by their drafts and accepted drafts, as `SchedulerUpdates.verified`.
    """
    by_index = stats.spec_decode_num_accepted_tokens_per_pos
    for (drafted, accepted), rows in verified.items():
        if drafted:
            stats.spec_decode_num_drafts += rows
            stats.spec_decode_num_draft_tokens += drafted * rows
            stats.spec_decode_num_accepted_tokens += accepted * rows
            for index in range(accepted):
                by_index[str(index)] = by_index.get(str(index), 0) + rows


def count_end(stats: EngineStats, seq: Sequence, now: float) -> None:
    """Count the end of an accepted sequence, and its tokens and times if it has run."""
    assert seq.outcome is not None, f"ended without an outcome: {seq}"
    count_outcome(stats, seq.outcome)
    if isinstance(seq.outcome, Failure):
        stats.requests_finished["error"] = stats.requests_finished.get("error", 0) + 1
    admitted, first_token = seq.times.admitted, seq.times.first_token
    if admitted is None:
        return
    stats.request_prompt_tokens.observe(seq.prompt_len)
    stats.request_generation_tokens.observe(seq.generated)
    stats.request_max_tokens.observe(seq.total_len - seq.prompt_len)
    stats.inference_time.observe(now - admitted)
    if first_token is not None:
        stats.prefill_time.observe(first_token - admitted)
        stats.decode_time.observe(now - first_token)


class StageClock:
    """Divide the loop's time among its stages.

    Each mark adds the time since the mark before.
    """

    def __init__(self, seconds: dict[str, float], clock: Callable[[], float]) -> None:
        self.seconds = seconds
        self.clock = clock
        self._last = 0.0

    def start(self) -> float:
        """Begin a tick; return the time now."""
        self._last = self.clock()
        return self._last

    def mark(self, stage: str) -> float:
        """End a stage; return the time now."""
        now = self.clock()
        self.seconds[stage] += now - self._last
        self._last = now
        return now
