"""The settings of an engine core.

They are resolved here, once, from its options, the model and the machine: `resolve` is pure and returns a frozen
`StepConfig`.
"""

from msgspec import Struct

from tandem.engine_core import graph_sizes
from tandem.engine_core.errors import ConfigError, ConfigProblems
from tandem.engine_core.graph_sizes import (
    ADAPTED_GRAPH_TOKENS,
    MAX_ADAPTED_ROWS,
    MAX_VERIFY_POSITIONS,
    MIXED_GRAPH_TOKENS,
)
from tandem.engine_core.integers import ceil_div
from tandem.engine_core.page_counts import PageColumns, page_columns, tokens_of_pages
from tandem.protocol.engine_options import EngineOptions, PageSize, Policy, wrong_numbers

CPU_MAX_ROWS = 32
CUDA_MAX_ROWS = (1024, 512, 256)
"""Default rows on cuda: the first of these that leaves ROW_BYTES of GPU memory per row after the weights, else the
last."""
ROW_BYTES = 24 * 2**20
STATE_SHARE = 0.5
"""Share of the memory that the weights leave for the state of recurrent layers, by default."""
CPU_STEP_TOKENS, CUDA_STEP_TOKENS = 128, 8192
"""Default positions of a step, enough for a burst of prompts to be computed about as fast as possible."""
MAX_SESSIONS, SESSION_TTL = 256, 600.0
PAGE_SIZE = 16
GPU_SHARE = 0.9
"""Share of a GPU's memory for everything an engine holds there. The rest covers fragmentation of the allocator."""
MAX_DEFAULT_GRAMMAR_WORKERS = 4
MAX_PREDICTION = 8192
"""Number of token ids of a prediction that drafts are taken from: their table has room for as many for each row."""
STEP_UPLOADS = 65_536
"""Cached tokens of the prompts that may begin in one step."""

DTYPES = ("bfloat16", "float16", "float32")


class ModelShape(Struct, frozen=True):
    """The facts of a model that the settings depend on."""

    name: str
    max_positions: int
    longest_context: int = 0
    """Largest --max-len, if above `max_positions`."""
    weight_bytes: int = 0
    """Bytes of its weights in the engine's dtype, about."""
    row_bytes: int = 0
    """Bytes of the state of one row in its recurrent layers; 0: it has none."""
    state_interval: int = 0
    """Positions from one state of these layers that can be copied to the next."""
    chunk_grid: int = 0
    """Multiples of this at which their kernels cut prompts."""


class StepConfig(Struct, frozen=True, kw_only=True):
    """The settings of one engine core without the size of its KV pool.

    That size follows from the memory that the steps need.
    """

    model_name: str
    device: str
    dtype: str
    depth: int
    """Largest number of steps in flight, 1 or 2."""
    max_rows: int
    max_len: int
    max_step_tokens: int
    prefill_chunk: int
    """Largest number of positions of one prompt in a step with decoding rows; 0: prompts are computed whole."""
    chunk_grid: int = 0
    """Chunks of prompts end at multiples of this, if they reach one; 0: anywhere."""
    page_size: int
    max_waiting: int
    kv_windows: tuple[int | None, ...] = (None,)
    """Window of each KV group; None for a group that keeps all positions."""
    max_prefill_chunks_per_step: int = 0
    """Maximum number of prompts per step; 0: any number."""
    max_itl: float | None = None
    """Maximum milliseconds of a step with decode rows; None: derived from the duration of those rows."""
    policy: Policy = "fcfs"
    static_batching: bool = False
    """True if each batch runs to its end before the next is admitted."""
    prefix_cache: bool = False
    max_sessions: int = 0
    session_ttl: float = 0.0
    graph_rows: tuple[int, ...] = ()
    """Row counts for which decode steps are captured in CUDA graphs, ascending; none on a CPU."""
    mixed_graph_rows: tuple[int, ...] = ()
    """Decode-row buckets captured together with each entry of `graph_tokens`, ascending."""
    graph_tokens: tuple[int, ...] = ()
    """Prompt positions for which mixed steps are captured in CUDA graphs, ascending."""
    draft_sizes: tuple[int, ...] = ()
    """Numbers of drafts that a step may verify for each row, ascending; none without speculation."""
    draft_prompt_tokens: tuple[int, ...] = ()
    """Prompt positions of a draft model that are captured in CUDA graphs, ascending."""
    max_adapters: int = 0
    """Number of adapters that the device holds at a time; 0: sequences have none."""
    max_mixed_tokens: int = MIXED_GRAPH_TOKENS
    """Maximum prompt positions that are captured together with decode rows."""
    options: EngineOptions = EngineOptions()
    """The options as given; settings that need no decision are read from here."""

    def mixed_rows(self, tokens: int) -> tuple[int, ...]:
        """Return the decode-row buckets that are captured with this number of prompt positions."""
        return self.mixed_graph_rows if tokens <= self.max_mixed_tokens else self.mixed_graph_rows[:1]

    def num_pages(self, positions: int) -> int:
        """Return the number of pages that this many positions of a row take."""
        return ceil_div(positions, self.page_size)

    @property
    def page_columns(self) -> tuple[PageColumns, ...]:
        """Columns of each KV group in the rows of the page table."""
        longest = max(self.max_step_tokens, 1 + self.max_lead)
        return page_columns(self.kv_windows, self.page_size, self.max_len, longest)

    @property
    def adapted_graph_rows(self) -> tuple[int, ...]:
        """Row counts for which decode steps with adapters are captured in CUDA graphs, ascending."""
        return tuple([rows for rows in self.graph_rows if self.max_adapters and rows <= MAX_ADAPTED_ROWS])

    def adapted_mixed_rows(self, tokens: int) -> tuple[int, ...]:
        """Return the decode-row buckets that are captured with this number of prompt positions and adapters."""
        if not self.max_adapters or tokens > ADAPTED_GRAPH_TOKENS:
            return ()
        return graph_sizes.adapted_mixed_rows(self.mixed_rows(tokens))

    @property
    def max_lead(self) -> int:
        """Positions beyond the host's count that a decoding row may compute: the drafts of all steps in flight."""
        return self.depth * self.max_drafts

    @property
    def max_drafts(self) -> int:
        """Largest number of drafts that a step verifies for each row; 0 without speculation."""
        return max(self.draft_sizes, default=0)

    @property
    def verify_shapes(self) -> tuple[tuple[int, int], ...]:
        """Rows and drafts of the steps that verify drafts and are captured in CUDA graphs."""
        shapes = [(rows, drafts) for rows in self.graph_rows for drafts in self.draft_sizes]
        return tuple([(rows, drafts) for rows, drafts in shapes if rows * (1 + drafts) <= MAX_VERIFY_POSITIONS])

    @property
    def draft_graph_rows(self) -> tuple[int, ...]:
        """Row counts for which the passes of the draft model are captured in CUDA graphs, ascending."""
        if self.options.draft_model is None:
            return ()
        return tuple(sorted({rows for rows, _ in self.verify_shapes}))

    @property
    def adapted_verify_shapes(self) -> tuple[tuple[int, int], ...]:
        """Rows and drafts of the steps with adapters that verify drafts and are captured in CUDA graphs."""
        limit = MAX_ADAPTED_ROWS if self.max_adapters else 0
        return tuple([(rows, drafts) for rows, drafts in self.verify_shapes if rows * (1 + drafts) <= limit])

    @property
    def max_draft_positions(self) -> int:
        """Maximum number of positions of a step that verifies drafts; 0 without speculation."""
        return max(MAX_VERIFY_POSITIONS, self.max_rows) if self.draft_sizes else 0

    @property
    def max_prediction(self) -> int:
        """Number of token ids of a request's prediction that drafts are taken from; 0 without n-gram drafts."""
        return min(MAX_PREDICTION, self.max_len) if self.draft_sizes and self.options.draft_model is None else 0

    @property
    def held_windows(self) -> tuple[int | None, ...]:
        """Windows of the groups by which pages of sequences are counted: a prompt computed whole has all its pages."""
        return self.kv_windows if self.prefill_chunk else (None,) * len(self.kv_windows)

    @property
    def max_page_entries(self) -> int:
        """Largest number of page table entries in one step.

        The size of the pool does not limit it, because rows may share pages.
        """
        return self.max_rows * sum(columns.count for columns in self.page_columns)

    @property
    def max_uploads(self) -> int:
        """Maximum number of cached tokens uploaded per step."""
        return min(self.max_rows * self.max_len, max(self.max_len, STEP_UPLOADS))


class EngineConfig(StepConfig, frozen=True, kw_only=True):
    """The settings of one engine core, including the size of its KV pool."""

    pages: int
    """Number of pages of the pool, including the reserved page 0."""
    state_slots: int = 0
    """Number of checkpoints of recurrent states that the prefix cache can hold."""

    @property
    def kv_tokens(self) -> int:
        """Number of positions that sequences of `max_len`, and a shorter one, can use."""
        return tokens_of_pages(self.held_windows, self.pages - 1, self.page_size, self.max_len, self.max_lead)


def resolve_device(options: EngineOptions, cuda: bool) -> str:
    """Choose the device, "cpu" or "cuda".

    Raises ConfigError if cuda is requested and not available. cuda: True if torch sees a CUDA device.
    """
    if options.device == "auto":
        return "cuda" if cuda else "cpu"
    if options.device == "cuda" and not cuda:
        raise ConfigError("--device cuda, but torch sees no CUDA device; use --device cpu, or check the driver")
    return options.device


def resolve_dtype(options: EngineOptions, device: str, checkpoint: str) -> str:
    """Choose the dtype of weights.

    checkpoint: dtype of the checkpoint. A CPU computes in float32: bfloat16 is slower there, and the tests compare
    float32. Raises ConfigError if the checkpoint's dtype cannot be used as it is.
    """
    if options.dtype != "auto":
        return options.dtype
    if device == "cpu":
        return "float32"
    if checkpoint not in DTYPES:
        supported = ", ".join(DTYPES)
        raise ConfigError(f"the checkpoint's dtype is {checkpoint}, which is not supported; choose --dtype {supported}")
    return checkpoint


def resolve_grammar_workers(options: EngineOptions, device: str, cores: int, system: str, machine: str) -> int:
    """Choose the number of grammar worker processes.

    Raises ConfigError for --grammar-workers on other machines than x86-64: their stores may become visible in another
    order, which `workers.channel` does not allow for.
    """
    has_ordered_stores = (system, machine) == ("linux", "x86_64")
    if options.grammar_workers is None:
        return min(MAX_DEFAULT_GRAMMAR_WORKERS, cores // 4) if has_ordered_stores and device == "cuda" else 0
    if options.grammar_workers and not has_ordered_stores:
        raise ConfigError(
            f"--grammar-workers {options.grammar_workers} needs Linux on x86-64, and this is {system} on {machine}; "
            "leave the flag out"
        )
    return options.grammar_workers


def resolve_threads(options: EngineOptions, cores: int) -> int:
    """Choose the number of torch threads on a CPU, leaving one core to the frontends."""
    return options.threads or max(1, cores - 1)


def default_cuda_rows(room: int, most: int, row_bytes: int = 0) -> int:
    """Choose the default rows on cuda.

    room: bytes of GPU memory that the weights leave; most: rows that other settings allow; row_bytes: of the state of
    one row, which the padding row has too.
    """
    fitting = (rows for rows in CUDA_MAX_ROWS if rows <= most and rows * ROW_BYTES <= room)
    return _rows_with_states(next(fitting, CUDA_MAX_ROWS[-1]), room, row_bytes)


def _rows_with_states(rows: int, room: int, row_bytes: int) -> int:
    """Return the rows, or fewer if the state of recurrent layers would take more than its share of the memory.

    room: bytes that the weights leave, 0 or less if they are not known; row_bytes: as in `default_cuda_rows`.
    """
    if not row_bytes or room <= 0:
        return rows
    with_state = max(1, int(room * STATE_SHARE) // row_bytes - 1)
    return rows if rows <= with_state else max(1, with_state - with_state % 8 if with_state > 8 else with_state)


def resolve(
    options: EngineOptions, model: ModelShape, device: str, dtype: str, gpu_bytes: int = 0, cpu_bytes: int = 0
) -> StepConfig:
    """Resolve the settings of an engine core.

    gpu_bytes, cpu_bytes: memory of the GPU, and free main memory; 0 if they are not known. Raises ConfigError, with the
    numbers and what to change, for settings that contradict each other.
    """
    if wrong := wrong_numbers(options):
        raise ConfigError(*wrong.values())
    cpu, problems = device == "cpu", ConfigProblems()
    max_len = _max_len(options, model, problems)
    usual_rows = _rows_with_states(CPU_MAX_ROWS, cpu_bytes - model.weight_bytes if cpu_bytes else 0, model.row_bytes)
    max_rows = options.max_rows or (usual_rows if cpu else _cuda_rows(options, model, max_len, gpu_bytes))
    with problems.caught():
        _check_switches(options, model)
    step_tokens, chunk = CPU_STEP_TOKENS if cpu else CUDA_STEP_TOKENS, 0
    with problems.caught():
        step_tokens, chunk = _step_size(options, step_tokens, max_rows, max_len)
    page_size = PAGE_SIZE
    with problems.caught():
        page_size = _page_size(options.page_size, max_len)
    graph_rows, graph_tokens = _graphs(options, cpu, max_rows, step_tokens, max_rows * max_len, problems)
    problems.check()
    prefix_cache = _prefix_cache(options, model)
    return StepConfig(
        model_name=options.served_model_name or model.name,
        device=device,
        dtype=dtype,
        depth=2 if (options.pipeline or ("off" if cpu else "on")) == "on" else 1,
        max_rows=max_rows,
        max_len=max_len,
        max_step_tokens=step_tokens,
        prefill_chunk=chunk,
        chunk_grid=model.chunk_grid if chunk else 0,
        page_size=page_size,
        max_waiting=options.max_waiting or options.max_concurrent,
        max_prefill_chunks_per_step=options.max_prefill_chunks_per_step or 0,
        max_itl=options.max_itl,
        policy=options.policy,
        static_batching=options.batching == "static",
        prefix_cache=prefix_cache,
        max_sessions=_max_sessions(options, prefix_cache),
        session_ttl=SESSION_TTL if options.session_ttl is None else options.session_ttl,
        graph_rows=graph_rows,
        mixed_graph_rows=() if cpu else graph_sizes.mixed_rows(max_rows),
        graph_tokens=graph_tokens,
        draft_sizes=graph_sizes.draft_sizes(options.speculate, options.speculate_tokens),
        draft_prompt_tokens=graph_sizes.draft_prompts(step_tokens) if graph_rows and options.draft_model else (),
        max_adapters=options.max_loras if options.enable_lora else 0,
        options=options,
    )


def _max_len(options: EngineOptions, model: ModelShape, problems: ConfigProblems) -> int:
    """Choose the length of the longest sequence, within the model's positions."""
    longest = max(model.max_positions, model.longest_context)
    asked = options.max_len or model.max_positions
    with problems.caught():
        if asked > longest:
            raise ConfigError(
                f"--max-len {asked}, but the model's positions end at {longest}; lower it to that, or leave it out"
            )
    return min(asked, longest)


def _graphs(
    options: EngineOptions, cpu: bool, max_rows: int, step_tokens: int, positions: int, problems: ConfigProblems
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Choose the rows and the prompt positions of CUDA graphs.

    positions: of all rows together.
    """
    rows: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    with problems.caught():
        _check_graphs(options, cpu)
    if not cpu:
        with problems.caught():
            rows = graph_sizes.decode_rows(options.graph_rows, max_rows)
        with problems.caught():
            tokens = graph_sizes.prompt_tokens(options.graph_tokens, step_tokens, positions)
    return rows, tokens


def _cuda_rows(options: EngineOptions, model: ModelShape, max_len: int, gpu_bytes: int) -> int:
    """Choose the default rows on cuda.

    A step of --max-step-tokens, if given, has room for all of them.
    """
    share = GPU_SHARE if options.gpu_memory is None else options.gpu_memory
    most = max(CUDA_MAX_ROWS)
    if options.max_step_tokens is not None:
        most = options.max_step_tokens - (max_len if _whole_prompts(options) else 0)
    return default_cuda_rows(int(gpu_bytes * share) - model.weight_bytes, most, model.row_bytes)


def _whole_prompts(options: EngineOptions) -> bool:
    """Return True if prompts are computed whole."""
    return options.prefill_chunk == "off" or (options.prefill_chunk is None and options.batching == "static")


def _check_switches(options: EngineOptions, model: ModelShape) -> None:
    """Raise ConfigError for switches that exclude each other, naming both."""
    static = options.batching == "static"
    chunked = options.prefill_chunk not in (None, "off")
    cached = options.prefix_cache == "on"
    usual, least, most = EngineOptions(), options.speculate_min_match, options.speculate_max_match
    matches = [f"{flag} {length}" for flag, length, default in (
        ("--speculate-min-match", least, usual.speculate_min_match),
        ("--speculate-max-match", most, usual.speculate_max_match),
    ) if length != default]  # fmt: skip
    uncached, interval = not _prefix_cache(options, model), model.state_interval
    ttl = "" if options.session_ttl is None else f"--session-ttl {options.session_ttl:g}"
    found = [f"{one} and {other} exclude each other: {why}" for wrong, one, other, why in (
        (static and options.policy != "fcfs", "--batching static", f"--policy {options.policy}",
         "a batch is served in the order of its admission; leave the policy at fcfs"),
        (static and chunked, "--batching static", f"--prefill-chunk {options.prefill_chunk}",
         "a batch computes its prompts whole; use --prefill-chunk off"),
        (_whole_prompts(options) and options.max_itl is not None,
         "--prefill-chunk off" if options.prefill_chunk else "--batching static", f"--max-itl {options.max_itl or 0:g}",
         "prompts that are computed whole take as long as they do; leave the limit out"),
        (static and cached, "--batching static", "--prefix-cache on",
         "a batch's sequences cannot wait for each other's pages; use --prefix-cache off"),
        (options.page_size == "max" and cached, "--page-size max", "--prefix-cache on",
         "sequences share whole pages, and this page is a whole sequence's; use --prefix-cache off"),
        (_skips_states(options.page_size, model) and cached, f"--page-size {options.page_size}", "--prefix-cache on",
         f"this model's recurrent layers can be continued every {interval} positions; use a page size up to that"),
        (uncached and bool(options.max_sessions), uncached_by(options), f"--max-sessions {options.max_sessions}",
         "sessions keep their KV in the prefix cache; use --max-sessions 0"),
        (uncached and bool(ttl), uncached_by(options), ttl,
         "sessions keep their KV in the prefix cache; leave --session-ttl out"),
        (options.max_sessions == 0 and bool(ttl), "--max-sessions 0", ttl,
         "no session would be kept; leave one of them out"),
        (least > most, f"--speculate-min-match {least}", f"--speculate-max-match {most}",
         "no longer match is looked for; raise the second"),
        (options.speculate == "off" and options.speculate_tokens != "auto",
         f"--speculate-tokens {options.speculate_tokens}", "--speculate off",
         "no step verifies drafts; use --speculate ngram or model:PATH, or leave the number out"),
        (options.speculate != "ngram" and bool(matches), " and ".join(matches), f"--speculate {options.speculate}",
         "only n-gram drafts are found by matches; leave the lengths out"),
        (options.speculate != "off" and options.graph_rows == "off", f"--speculate {options.speculate}",
         "--graph-rows off", "steps that verify drafts run as CUDA graphs; leave --graph-rows out"),
        (options.synthetic_acceptance is not None and options.developer == "off",
         f"--synthetic-acceptance {options.synthetic_acceptance or 0:g}", "--developer off",
         "drafts would be accepted whatever the model says; benchmarks need --developer on"),
        (options.teacher_tokens is not None and options.developer == "off",
         f"--teacher-tokens {options.teacher_tokens}", "--developer off",
         "requests would generate this text whatever the model says; benchmarks need --developer on"),
        (options.synthetic_acceptance is not None and options.speculate == "off",
         f"--synthetic-acceptance {options.synthetic_acceptance or 0:g}", "--speculate off",
         "--speculate off drafts nothing; use --speculate ngram"),
    ) if wrong]  # fmt: skip
    if options.swap_copy and not options.enable_weight_updates:
        found.append("--swap-copy needs --enable-weight-updates; add it, or leave --swap-copy out")
    if found:
        raise ConfigError(*found)


def _check_graphs(options: EngineOptions, cpu: bool) -> None:
    """Raise ConfigError for graph flags that cannot be followed.

    These are CUDA graphs on a CPU, and mixed graphs without decode graphs.
    """
    given = (("--graph-rows", options.graph_rows), ("--graph-tokens", options.graph_tokens))
    if cpu and (asked := [f"{flag} {sizes}" for flag, sizes in given if sizes not in (None, "off")]):
        raise ConfigError(
            *(f"{flag} with --device cpu: graphs need --device cuda; leave the flag out" for flag in asked)
        )
    if options.graph_rows == "off" and options.graph_tokens not in (None, "off"):
        raise ConfigError(
            f"--graph-rows off and --graph-tokens {options.graph_tokens} exclude each other: steps with prompts are "
            "captured in addition to those without; leave --graph-tokens out, or give --graph-rows sizes"
        )


def _step_size(options: EngineOptions, usual: int, max_rows: int, max_len: int) -> tuple[int, int]:
    """Choose the maximum positions of a step, and of one prompt in a step.

    The second is 0 if prompts are computed whole. Raises ConfigError if either is too small for the rows, the sequences
    or the other.
    """
    whole = _whole_prompts(options)
    least = max_len + max_rows if whole else max_rows
    asked = None if options.prefill_chunk == "off" else options.prefill_chunk
    chunk = 0 if asked is None else min(asked, max_len)
    step_tokens = options.max_step_tokens or max(usual, least, chunk)
    if step_tokens < max_rows:
        raise ConfigError(
            f"--max-step-tokens {step_tokens} is below --max-rows {max_rows}"
            f"{' (its default here)' if options.max_rows is None else ''}: some decoding rows would starve; "
            "raise the first or lower the second"
        )
    if step_tokens < least:
        raise ConfigError(
            f"--max-step-tokens {step_tokens} does not hold a whole prompt of --max-len {max_len} and --max-rows "
            f"{max_rows}; raise it to {least}, lower the others, or give --prefill-chunk a number"
        )
    if whole:
        return step_tokens, 0
    if options.max_step_tokens is not None and asked is not None and asked > step_tokens:
        raise ConfigError(
            f"--prefill-chunk {asked} is more than the --max-step-tokens {step_tokens} of a whole step; lower the "
            "first or raise the second"
        )
    return step_tokens, chunk or step_tokens


def _prefix_cache(options: EngineOptions, model: ModelShape) -> bool:
    if options.prefix_cache is None:
        size = options.page_size
        return size != "max" and options.batching != "static" and not _skips_states(size, model)
    return options.prefix_cache == "on"


def _skips_states(page_size: PageSize | None, model: ModelShape) -> bool:
    """Return whether pages end at positions at which the state of recurrent layers cannot be copied."""
    return model.state_interval > 0 and isinstance(page_size, int) and page_size > model.state_interval


def uncached_by(options: EngineOptions) -> str:
    """Name the switch that turns the prefix cache off."""
    if options.prefix_cache == "off":
        return "--prefix-cache off"
    return "--batching static" if options.batching == "static" else f"--page-size {options.page_size}"


def _max_sessions(options: EngineOptions, prefix_cache: bool) -> int:
    if options.max_sessions is None:
        return MAX_SESSIONS if prefix_cache else 0
    return options.max_sessions


def _page_size(asked: PageSize | None, max_len: int) -> int:
    """Choose the positions of a page, a power of two because kernels divide by it.

    `max` is the smallest one that holds any sequence. Raises ConfigError for a size that is larger than that.
    """
    whole = 1 << (max_len - 1).bit_length()
    if asked is None:
        return PAGE_SIZE
    if asked == "max":
        return whole
    if asked > whole:
        raise ConfigError(
            f"--page-size {asked} is more than a sequence of --max-len {max_len} can use; use at most {whole}, or max"
        )
    return asked
