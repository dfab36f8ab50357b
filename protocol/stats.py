"""Counters and gauges of the engine core.

Each is declared with the metric that it is exported as.
"""

from bisect import bisect_left
from typing import Annotated, Literal

from msgspec import Struct, field


class Metric(Struct, frozen=True):
    """Prometheus metric of one field of `EngineStats`.

    The field is annotated with it.
    """

    kind: Literal["gauge", "counter", "histogram"]
    name: str
    help: str
    label: str = ""
    """Label with the keys of a dict field as values; "" for other fields."""


class Histogram(Struct, array_like=True):
    """Counts of observations by bucket, and their sum.

    Each count is of the observations up to its bound and above the bound before, not cumulative. There is one count
    more than bounds: the last is of the observations above all of them.
    """

    bounds: list[float]
    counts: list[int]
    total: float = 0.0

    def observe(self, value: float) -> None:
        """Count one observation in the first bucket with a bound of at least `value`."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


def _gauge(name: str, text: str) -> Metric:
    return Metric("gauge", name, text)


def _counter(name: str, text: str, label: str = "") -> Metric:
    return Metric("counter", name, text, label)


def _histogram(name: str, text: str) -> Metric:
    return Metric("histogram", name, text)


def _empty_histogram() -> Histogram:
    return Histogram([], [0])


class EngineStats(Struct, array_like=True):
    """Counters and gauges of the engine, cumulative since its start.

    Times are in seconds. A field annotated with a `Metric` is exported as that metric by the supervisor without further
    code. New fields are appended, with a default: the order is the wire's.
    """

    running: Annotated[int, _gauge("tandem_num_requests_running", "Sequences that hold a row.")] = 0
    waiting: Annotated[int, _gauge("tandem_num_requests_waiting", "Requests that wait for a row or pages.")] = 0
    rows_total: Annotated[int, _gauge("tandem_num_rows", "Rows in total.")] = 0
    pages_used: int = 0
    """KV pages held by requests and sessions; exported as a share of `pages_total`."""
    pages_total: Annotated[int, _gauge("tandem_kv_cache_pages", "KV pages in total, of all groups of layers.")] = 0
    steps_in_flight: Annotated[int, _gauge("tandem_steps_in_flight", "Steps launched and not committed.")] = 0
    steps_launched: Annotated[int, _counter("tandem_engine_steps_launched", "Steps launched.")] = 0
    steps_committed: Annotated[int, _counter("tandem_engine_steps_committed", "Steps committed.")] = 0
    oldest_wait: Annotated[
        float,
        _gauge("tandem_oldest_wait_seconds", "Time since the oldest waiting request was queued, 0 without one."),
    ] = 0.0
    """Seconds in the queue of the request that entered it first, on arrival or after a preemption."""
    prompt_tokens: Annotated[int, _counter("tandem_prompt_tokens", "Prompt tokens of admitted requests.")] = 0
    generation_tokens: Annotated[int, _counter("tandem_generation_tokens", "Tokens generated.")] = 0
    zombie_rows: Annotated[int, _counter("tandem_zombie_rows", "Rows computed for sequences that had ended.")] = 0
    """Rows of steps that were launched before the end of their sequence was known: the cost of pipelining."""
    requests_accepted: Annotated[int, _counter("tandem_requests_accepted", "Requests accepted.")] = 0
    requests_finished: Annotated[
        dict[str, int],
        _counter(
            "tandem_request_success",
            "Sequences that ended: `stop` (stop strings too), `length`, `abort` or `error`.",
            "finished_reason",
        ),
    ] = field(default_factory=dict)
    requests_failed: Annotated[
        dict[str, int],
        _counter("tandem_request_failed", "Requests that ended by an error or were refused by the engine.", "code"),
    ] = field(default_factory=dict)
    stage_seconds: Annotated[
        dict[str, float],
        _counter(
            "tandem_engine_stage_seconds",
            "Wall time of the engine's loop by stage; collect is the wait for the device.",
            "stage",
        ),
    ] = field(default_factory=dict)
    """Seconds of the loop by stage: drain, plan, launch, sample, collect, commit, send."""
    queue_time: Annotated[
        Histogram, _histogram("tandem_request_queue_time_seconds", "Time from the arrival of a request to its row.")
    ] = field(default_factory=_empty_histogram)
    step_rows: Annotated[Histogram, _histogram("tandem_engine_step_rows", "Rows of a step.")] = field(
        default_factory=_empty_histogram
    )
    gpu_busy_seconds: Annotated[
        float, _counter("tandem_gpu_busy_seconds", "Time in timed steps (a sample) that the GPU worked.")
    ] = 0.0
    """Seconds from the first work of a timed step to its last, summed over the timed steps."""
    gpu_idle_seconds: Annotated[
        float,
        _counter(
            "tandem_gpu_idle_seconds", "Time in a timed step and up to the next in which the GPU waited for the CPU."
        ),
    ] = 0.0
    """Seconds from the last work of a timed step to the first of the next, summed over the timed steps."""
    gpu_timed_steps: Annotated[int, _counter("tandem_gpu_timed_steps", "Steps that were timed on the GPU.")] = 0
    requests_constrained: Annotated[
        int, _counter("tandem_requests_constrained", "Accepted requests with a grammar.")
    ] = 0
    compile_time: Annotated[
        Histogram,
        _histogram("tandem_grammar_compile_time_seconds", "Compilation time of grammars that were not cached."),
    ] = field(default_factory=_empty_histogram)
    mask_rows: Annotated[int, _counter("tandem_mask_rows", "Rows of steps whose sampling was masked by a grammar.")] = 0
    mask_seconds: Annotated[float, _counter("tandem_mask_seconds", "Wall time of filling those masks.")] = 0.0
    pages_cached: Annotated[
        int, _gauge("tandem_kv_cache_cached_pages", "KV pages in the prefix cache, in use or not.")
    ] = 0
    prefix_queries: Annotated[
        int, _counter("tandem_prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
    ] = 0
    prefix_hits: Annotated[int, _counter("tandem_prefix_cache_hits", "Prompt tokens found in the prefix cache.")] = 0
    pages_evicted: Annotated[int, _counter("tandem_kv_cache_evicted_pages", "Pages evicted from the prefix cache.")] = 0
    preemptions: Annotated[
        int, _counter("tandem_num_preemptions", "Times that a running request gave up its pages.")
    ] = 0
    sessions: Annotated[int, _gauge("tandem_num_sessions", "Sessions that keep their KV.")] = 0
    sessions_evicted: Annotated[
        int, _counter("tandem_sessions_evicted", "Sessions ended for lack of memory or of room for more sessions.")
    ] = 0
    paused: Annotated[int, _gauge("tandem_engine_paused", "1 while the engine is paused by its operators.")] = 0
    """1 once a `Pause` has drained the pipeline, until the `Resume`."""
    page_size: int = 0
    """Tokens of a KV page; a label of the metric of the cache's size."""
    queued_prompt_tokens: Annotated[
        int, _gauge("tandem_num_queued_prompt_tokens", "Prompt tokens of requests that wait for their first output.")
    ] = 0
    prompt_tokens_cached: Annotated[
        int, _counter("tandem_prompt_tokens_cached", "Prompt tokens of requests with output that were not computed.")
    ] = 0
    """Counted at the first token: a prompt may find more in the cache after its admission."""
    iteration_tokens: Annotated[
        Histogram, _histogram("tandem_iteration_tokens", "Tokens of a step, of prompts and outputs.")
    ] = field(default_factory=_empty_histogram)
    prefill_time: Annotated[
        Histogram,
        _histogram("tandem_request_prefill_time_seconds", "Time from a sequence's row to its first token."),
    ] = field(default_factory=_empty_histogram)
    decode_time: Annotated[
        Histogram, _histogram("tandem_request_decode_time_seconds", "Time from a sequence's first token to its end.")
    ] = field(default_factory=_empty_histogram)
    inference_time: Annotated[
        Histogram, _histogram("tandem_request_inference_time_seconds", "Time from a sequence's row to its end.")
    ] = field(default_factory=_empty_histogram)
    request_prompt_tokens: Annotated[
        Histogram, _histogram("tandem_request_prompt_tokens", "Prompt tokens of a sequence that has run.")
    ] = field(default_factory=_empty_histogram)
    request_generation_tokens: Annotated[
        Histogram, _histogram("tandem_request_generation_tokens", "Tokens generated for a sequence that has run.")
    ] = field(default_factory=_empty_histogram)
    request_max_tokens: Annotated[
        Histogram, _histogram("tandem_request_params_max_tokens", "`max_tokens` of a sequence that has run.")
    ] = field(default_factory=_empty_histogram)
    pause_changes: int = 0
    """Times that `paused` has changed, odd while it is 1.

    It orders heartbeats and answers, which come by two sockets."""
    grammar_workers: Annotated[int, _gauge("tandem_grammar_workers", "Running processes that follow grammars.")] = 0
    grammar_workers_lost: Annotated[
        int, _counter("tandem_grammar_workers_lost", "Processes that followed grammars and ended or did not answer.")
    ] = 0
    frontends: Annotated[int, _gauge("tandem_num_frontends", "Connected frontends.")] = 0
    start_seconds: Annotated[
        float, _gauge("tandem_engine_start_seconds", "Time from the start of the engine's process to its readiness.")
    ] = 0.0
    spec_decode_num_drafts: Annotated[
        int, _counter("tandem_spec_decode_num_drafts", "Rows of steps that verified at least one draft.")
    ] = 0
    spec_decode_num_draft_tokens: Annotated[
        int, _counter("tandem_spec_decode_num_draft_tokens", "Tokens that were drafted and verified.")
    ] = 0
    spec_decode_num_accepted_tokens: Annotated[
        int, _counter("tandem_spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.")
    ] = 0
    spec_decode_num_accepted_tokens_per_pos: Annotated[
        dict[str, int],
        _counter(
            "tandem_spec_decode_num_accepted_tokens_per_pos", "Accepted tokens by their index in the draft.", "position"
        ),
    ] = field(default_factory=dict)
    state_slots: Annotated[
        int,
        _gauge("tandem_state_checkpoints_capacity", "Checkpoints of recurrent states that the prefix cache can hold."),
    ] = 0
    state_slots_used: Annotated[
        int, _gauge("tandem_state_checkpoints", "Checkpoints of recurrent states in the prefix cache.")
    ] = 0
    states_evicted: Annotated[
        int, _counter("tandem_state_checkpoints_evicted", "Checkpoints of recurrent states given up for others.")
    ] = 0
    lora_requests: Annotated[
        dict[str, int],
        Metric("gauge", "tandem_lora_requests", "Open sequences of each adapter.", "adapter"),
    ] = field(default_factory=dict)
    lora_rows: dict[str, int] = field(default_factory=dict)
    """Sequences of each adapter that hold a row; exported by name with those that wait."""
    max_loras: int = 0
    """Slots of adapters; 0: the engine takes none."""
    sleeping: Annotated[
        int, _gauge("tandem_engine_sleeping", "1 while memory of the weights or of the KV pool is released by a sleep.")
    ] = 0
