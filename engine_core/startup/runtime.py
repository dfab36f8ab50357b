"""The assembly of the runtime, in the order that device memory requires (I7).

The order: weights; everything else that lives as long as the engine; a trial over a pool of one page, which measures
steps and graphs; the pool, from the remaining memory; graphs. Nothing is allocated on the device after that.
"""

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from msgspec import Struct

from tandem.engine_core.attention.base import AttentionPlanner
from tandem.engine_core.config import EngineConfig, StepConfig
from tandem.engine_core.errors import ConfigError, DeviceMemoryError, MemoryTooSmallError, naming
from tandem.engine_core.kernels.delta_rule.checkpoints import Checkpoints
from tandem.engine_core.kernels.delta_rule.state import ModelStates
from tandem.engine_core.kernels.speculation.reference import NgramRule
from tandem.engine_core.kv_cache.storage import KVLayout, KVStorage
from tandem.engine_core.layers.build_context import BuildContext
from tandem.engine_core.layers.lora_linear import LoraSlots
from tandem.engine_core.loader.checkpoint import Checkpoint
from tandem.engine_core.loader.weights import fill_with_noise, load_weights
from tandem.engine_core.model_config import ModelConfig
from tandem.engine_core.models.registry import Model, build_model, open_checkpoint
from tandem.engine_core.runtime.device import StepClock
from tandem.engine_core.runtime.forced_sampler import EagerDrafter, ForcedSampler
from tandem.engine_core.runtime.graphs import StepGraphs
from tandem.engine_core.runtime.masks import MaskFiller
from tandem.engine_core.runtime.model_drafter import DraftScratch, ModelDrafter
from tandem.engine_core.runtime.row_adapters import RowAdapters
from tandem.engine_core.runtime.runtime import TorchRuntime
from tandem.engine_core.runtime.slots import StepSlot
from tandem.engine_core.runtime.speculation import Drafter, Speculator
from tandem.engine_core.runtime.staging import capacity
from tandem.engine_core.runtime.tables import DeviceTables
from tandem.engine_core.sampling.processed_logprobs import ProcessedLogprobs
from tandem.engine_core.sampling.sampler import Sampler
from tandem.engine_core.sampling.scorer import TokenScorer
from tandem.engine_core.startup import kv_sizing, pool_text
from tandem.engine_core.startup.device import DeviceParts
from tandem.engine_core.startup.kv_calibration import calibrate_kv_scales
from tandem.engine_core.startup.kv_sizing import Memory, StateSizes
from tandem.engine_core.startup.loading_progress import LoadingProgress
from tandem.engine_core.startup.memory_trial import decode_trial, measure_graph_bytes, measure_step_bytes, mixed_trial
from tandem.engine_core.startup.sleep_ranges import SleepRanges, outside
from tandem.engine_core.startup.start_log import StartLog
from tandem.engine_core.startup.warmup import warm_up
from tandem.engine_core.wire.heartbeat import Status
from tandem.protocol.engine_options import EngineOptions
from tandem.protocol.events import Phase

logger = logging.getLogger(__name__)

MAX_SCAN = 16_384
"""Number of last positions in which n-gram drafts are looked for: four times as many take as many microseconds more."""


class ModelSource(Struct, frozen=True):
    """The model that is loaded, its dtype, and the layout of its keys and values."""

    directory: Path
    model: ModelConfig
    dtype: torch.dtype
    layout: KVLayout
    draft: "ModelSource | None" = None
    """The draft model, None without one."""

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in the pages of all KV groups, and in those of the draft model."""
        return self.layout.token_bytes + (self.draft.layout.token_bytes if self.draft is not None else 0)


class DraftParts(NamedTuple):
    """The draft model and what it needs besides its KV pool."""

    model: Model
    sampler: Sampler
    scratch: DraftScratch
    planners: list[AttentionPlanner]
    """Of each slot."""


def state_sizes(config: StepConfig, source: ModelSource) -> StateSizes:
    """Return the bytes of the state of recurrent layers."""
    model, itemsize = source.model, source.dtype.itemsize
    row_bytes = model.recurrent_row_bytes(itemsize, config.max_drafts)
    return StateSizes((config.max_rows + 1) * row_bytes, model.checkpoint_bytes(itemsize))


class RuntimeBuilder(Struct, frozen=True):
    """The parts of a runtime other than its KV pool and graphs.

    The methods build the KV pool, the graphs and the runtime.
    """

    parts: DeviceParts
    source: ModelSource
    config: StepConfig
    model: Model
    tables: DeviceTables
    sampler: Sampler
    scorer: TokenScorer
    filler: MaskFiller
    slots: list[StepSlot]
    states: ModelStates | None
    """State of the recurrent layers; None if the model has none."""
    speculator: Speculator | None = None
    """None if no step verifies drafts."""
    lora: LoraSlots | None = None
    """Memory of adapters; None if the engine takes none."""
    draft: DraftParts | None = None
    """None without a draft model."""
    ranges: SleepRanges | None = None
    """Memory that a sleep releases; None: the engine never sleeps."""

    def build_pool(self, pages: int, state_slots: int = 0) -> KVStorage:
        """Allocate a KV pool, and slots for checkpoints of recurrent layers.

        Raises MemoryTooSmallError if the memory does not suffice.
        """
        layout, states, shape = self.source.layout, self.states, self.source.model.delta_rule
        recurrent = () if states is None else states.layers
        try:
            checkpoints = None
            if state_slots and states is not None and shape is not None:
                checkpoints = Checkpoints.allocate(shape, states.stacked, state_slots)
            draft = None if self.source.draft is None else self.source.draft.layout
            return KVStorage.allocate(layout, pages, self.parts.device.torch_device, recurrent, checkpoints, draft)
        except RuntimeError as error:
            size = pages * self.source.token_bytes * layout.page_size / len(layout.groups) / kv_sizing.GIB
            raise MemoryTooSmallError(
                f"a KV pool of {size:.2f} GiB cannot be allocated ({error}); lower --kv-tokens, --kv-memory or "
                "--gpu-memory"
            ) from error

    def build_runtime(self, kv: KVStorage, graphs: StepGraphs | None = None) -> TorchRuntime:
        """Join everything into a runtime over a KV pool."""
        return TorchRuntime(
            self.parts.device,
            self.model,
            kv,
            self.tables,
            self.sampler,
            self.scorer,
            self.filler,
            self.slots,
            self.tables.page_tables(kv),
            graphs,
            StepClock(self.parts.device.instant),
            self.speculator_of(kv),
            self.adapters,
            self.processed,
        )

    def speculator_of(self, kv: KVStorage) -> Speculator | None:
        """Return what drafts and verifies tokens, with the draft model's keys and values in a KV pool."""
        speculator, draft = self.speculator, self.draft
        if speculator is None or draft is None or kv.draft is None:
            return speculator
        given = draft.model, kv.draft, self.tables, draft.sampler, draft.scratch, self.parts.draft_kernels()
        drafter: Drafter
        drafter = model = ModelDrafter(*given, draft.planners, self.source.model.vocab_size)
        if isinstance(speculator.drafter, EagerDrafter):
            drafter = EagerDrafter(drafter, speculator.drafter.forced)
        states = speculator.states
        return Speculator(speculator.tables, speculator.sources, drafter, speculator.kernels, model, states)

    @property
    def processed(self) -> ProcessedLogprobs | None:
        """Scorer of sampled tokens; None if their log-probabilities are the model's own."""
        if self.config.options.logprobs_mode == "raw_logprobs":
            return None
        return ProcessedLogprobs(self.tables.sampling, self.scorer)

    @property
    def adapters(self) -> RowAdapters | None:
        """Look-up of the adapters of a step's tokens."""
        if self.lora is None:
            return None
        return RowAdapters(self.tables.sampling, self.lora)

    def capture_graphs(self, kv: KVStorage, status: Status) -> StepGraphs | None:
        """Capture all graphs of the configuration, reporting progress.

        Return None if it has none.
        """

        def progress(percent: int) -> None:
            status.enter(Phase.WARMING, percent * 9 // 10)

        given = self.config, self.model, kv, self.tables, self.sampler, self.slots, progress
        return self.parts.graphs(*given, self.speculator_of(kv), self.adapters)

    def capture_trial(self, config: StepConfig, kv: KVStorage, slots: int) -> object:
        """Capture the graphs of a trial for that many slots, which all are the first."""
        first = self.slots[:1] * slots
        given = config, self.model, kv, self.tables, self.sampler, first, lambda _: None
        return self.parts.graphs(*given, self.speculator_of(kv), self.adapters)

    def measure(self, free_at_start: int) -> Memory:
        """Measure the memory of steps and graphs by a trial.

        free_at_start: bytes that were free before the engine allocated any. A CPU skips the trial: its steps take
        little and share their memory with other processes.
        """
        device = self.parts.device
        if device.kind == "cpu":
            return Memory(free=device.free_bytes())
        steps, graphs = self._run_trial(self.build_pool(1))
        device.release_unused()
        return Memory(device.free_bytes(), device.total_bytes(), free_at_start, steps, graphs)

    def _run_trial(self, scratch: KVStorage) -> tuple[int, int]:
        """Return the bytes of steps and of graphs.

        scratch: a pool of one page, freed when this returns.
        """
        device = self.parts.device
        further = self.parts.prompt_graph_bytes(self.config, self.slots)
        decode, mixed = (
            partial(self.capture_trial, trial(self.config), scratch) for trial in (decode_trial, mixed_trial)
        )
        graphs = measure_graph_bytes(device, self.config, further, decode, mixed)
        return measure_step_bytes(device, self.build_runtime(scratch), self.config), graphs


def build_runtime(
    config: StepConfig,
    source: ModelSource,
    checkpoint: Checkpoint | None,
    parts: DeviceParts,
    filler: MaskFiller,
    status: Status,
    log: StartLog,
    ranges: SleepRanges | None = None,
) -> tuple[TorchRuntime, EngineConfig]:
    """Load, measure and allocate everything, and run each path once.

    checkpoint: None for dummy weights; ranges: memory for weights and KV that a sleep releases, None: it never sleeps.
    Raises ConfigError if the model cannot be loaded, MemoryTooSmallError if the
    memory does not suffice.
    """
    free_at_start = parts.device.free_bytes()
    try:
        builder = _new_builder(config, source, checkpoint, parts, filler, status, log, ranges)
        return _build(builder, free_at_start, status, log)
    except (RuntimeError, DeviceMemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        raise MemoryTooSmallError(
            f"the memory is too small for weights, steps, graphs and KV pool ({error}); lower --gpu-memory, "
            "--max-rows, --max-step-tokens, --graph-rows or --graph-tokens"
        ) from error


def _is_out_of_memory(error: Exception) -> bool:
    """Return True if a device had too little memory.

    The driver, which holds graphs and the code of kernels, has no class of errors for that: torch and Triton pass its
    words on.
    """
    return isinstance(error, torch.OutOfMemoryError | DeviceMemoryError) or "out of memory" in str(error)


def _build(
    builder: RuntimeBuilder, free_at_start: int, status: Status, log: StartLog
) -> tuple[TorchRuntime, EngineConfig]:
    source = builder.source
    status.enter(Phase.WARMING)
    memory = builder.measure(free_at_start)
    log.mark("trial of steps and graphs")
    states = state_sizes(builder.config, source)
    config = kv_sizing.size_pool(builder.config, memory, source.token_bytes, states)
    with outside() if builder.ranges is None else builder.ranges.hold_cache():
        kv = builder.build_pool(config.pages, config.state_slots)
    _log_memory(config, memory, source)
    log.mark("KV pool")
    warm_up(builder.build_runtime(kv), config)
    log.mark("warm-up")
    free = builder.parts.device.free_bytes()
    graphs = builder.capture_graphs(kv, status)
    if graphs is None:
        return builder.build_runtime(kv), config
    log.mark(
        f"graphs of {len(graphs.rows)} row counts, {len(graphs.mixed[0]) if graphs.mixed else 0} mixed shapes and "
        f"{config.depth} slots"
    )
    taken = free - builder.parts.device.free_bytes()
    logger.info(
        "graphs took %.2f GiB of the %.2f kept for them, the driver's part with them",
        taken / kv_sizing.GIB,
        memory.graphs / kv_sizing.GIB,
    )
    if config.draft_sizes:
        logger.info(
            "steps that verify drafts: %d of these graphs in each slot, %.1f s and %.2f GiB of the start",
            len(config.verify_shapes),
            graphs.verify_growth.seconds,
            graphs.verify_growth.bytes / kv_sizing.GIB,
        )
    runtime = builder.build_runtime(kv, graphs)
    warm_up(runtime, config)
    return runtime, config


def _new_builder(
    config: StepConfig,
    source: ModelSource,
    checkpoint: Checkpoint | None,
    parts: DeviceParts,
    filler: MaskFiller,
    status: Status,
    log: StartLog,
    ranges: SleepRanges | None,
) -> RuntimeBuilder:
    device = parts.device
    parts.check_kv(source.layout.dtype)
    context = parts.build_context(source.model, source.dtype)
    lora = None
    if config.max_adapters:
        lora = LoraSlots(config.max_adapters, config.options.max_lora_rank, context.kernels.group_tokens)
        context = replace(context, lora=lora)
    model = _load_model(config.options, source, checkpoint, context, status, ranges)
    log.mark("weights")
    if lora is not None:
        logger.info(
            "adapters: %s for %d slots of rank %d",
            pool_text.size_text(lora.num_bytes),
            lora.max_slots,
            lora.max_rank,
        )
    calibrate_kv_scales(model, source.layout, source.dtype, config.max_len)
    vocab_size = source.model.vocab_size
    sizes = config.max_rows, config.max_len, config.page_columns
    tables = DeviceTables.allocate(*sizes, device.torch_device, config.max_prediction)
    uploads = config.max_uploads, config.max_prediction, source.draft is not None
    words = capacity(config.max_rows, config.max_step_tokens, config.max_page_entries, *uploads)
    new_planner = parts.attention(source.model, config, source.dtype, source.layout)
    slots = [
        StepSlot.allocate(
            device,
            words,
            config.max_rows,
            config.max_step_tokens,
            vocab_size,
            new_planner(),
            filler,
            config.max_draft_positions,
        )
        for _ in range(config.depth)
    ]
    most_samples = max(config.max_rows, config.max_draft_positions)
    plain, scorer = parts.sampler(tables, vocab_size, most_samples), parts.scorer(vocab_size, most_samples)
    sampler: Sampler = plain
    speculator, options = None, config.options
    if config.draft_sizes:
        rule = NgramRule(options.speculate_min_match, options.speculate_max_match, MAX_SCAN)
        speculator = parts.speculator(tables, rule)
    if options.synthetic_acceptance is not None or options.teacher_tokens is not None:
        sampler = forced = _forced(plain, tables, config, vocab_size)
        if speculator is not None:
            speculator.drafter = EagerDrafter(speculator.drafter, forced)
    draft = None
    if source.draft is not None:
        draft = _build_draft(config, source.draft, parts, tables, plain, status, ranges)
        log.mark("draft model")
    log.mark("tables and slots")
    shape, layers = source.model.delta_rule, len(source.model.recurrent_layers)
    states = None
    if shape is not None:
        rows = config.max_rows + 1
        with outside() if ranges is None else ranges.hold_cache():
            states = ModelStates.allocate(shape, layers, rows, source.dtype, device.torch_device, config.max_drafts)
        if speculator is not None:
            speculator.states = states.stacked
        text = pool_text.states_text(config, source.model, source.dtype.itemsize)
        logger.info("recurrent state: %s", text)
        log.mark("recurrent state")
    given = (
        parts,
        source,
        config,
        model,
        tables,
        sampler,
        scorer,
        filler,
        slots,
        states,
        speculator,
        lora,
        draft,
        ranges,
    )
    return RuntimeBuilder(*given)


def _build_draft(
    config: StepConfig,
    source: ModelSource,
    parts: DeviceParts,
    tables: DeviceTables,
    sampler: Sampler,
    status: Status,
    ranges: SleepRanges | None,
) -> DraftParts:
    """Load the draft model."""
    checkpoint = None
    with naming(f"--speculate model:{source.directory}"):
        if config.options.load_format != "dummy":
            checkpoint = open_checkpoint(source.directory, source.model)
        context = parts.build_context(source.model, source.dtype)
        model = _load_model(config.options, source, checkpoint, context, status, ranges)
    calibrate_kv_scales(model, source.layout, source.dtype, config.max_len)
    new_planner = parts.attention(source.model, config, source.dtype, source.layout)
    planners = [new_planner() for _ in range(config.depth)]
    logger.info("draft model: %s in %s", source.model.architecture, source.directory)
    return DraftParts(model, sampler, DraftScratch.allocate(tables), planners)


def _forced(sampler: Sampler, tables: DeviceTables, config: StepConfig, vocab_size: int) -> ForcedSampler:
    """Return a sampler for benchmarks, which replaces the tokens of another.

    Raises ConfigError for a text that is not a list of token ids.
    """
    path, tokens = config.options.teacher_tokens, list[int]()
    if path is not None:
        try:
            tokens = msgspec.json.decode(Path(path).read_bytes(), type=list[int])
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(f"--teacher-tokens {path}: {error}; it must be a JSON list of token ids") from None
        if not all(0 <= token < vocab_size for token in tokens):
            raise ConfigError(f"--teacher-tokens {path}: the model's token ids are 0 to {vocab_size - 1}")
    device = tables.tokens.device
    text = torch.full((config.max_len,), -1, dtype=torch.int32)
    text[: len(tokens)] = torch.tensor(tokens[: config.max_len], dtype=torch.int32)
    acceptance = torch.tensor(config.options.synthetic_acceptance or 0.0, dtype=torch.float32)
    return ForcedSampler(sampler, tables.sampling, text.to(device), acceptance.to(device))


def _load_model(
    options: EngineOptions,
    source: ModelSource,
    checkpoint: Checkpoint | None,
    context: BuildContext,
    status: Status,
    ranges: SleepRanges | None,
) -> Model:
    with outside() if ranges is None else ranges.hold_weights():
        model = build_model(source.model, context, options.max_len, checkpoint)
    if checkpoint is None:
        fill_with_noise(model)
        return model
    load_weights(model, checkpoint, LoadingProgress(status).report)
    return model


def _log_memory(config: EngineConfig, memory: Memory, source: ModelSource) -> None:
    def gib(count: int) -> float:
        return count / kv_sizing.GIB

    layout = source.layout
    pool = config.pages * config.page_size * source.token_bytes // len(layout.groups)
    if config.device != "cpu":
        logger.info(
            "memory in GiB: %.2f in all, %.2f free at start; weights and tables %.2f, steps %.2f, graphs %.2f "
            "(the largest captured, the rest estimated from them with a margin), KV pool %.2f, checkpoints %.2f",
            gib(memory.total),
            gib(memory.free_at_start),
            gib(memory.free_at_start - memory.free),
            gib(memory.steps),
            gib(memory.graphs),
            gib(pool),
            gib(config.state_slots * state_sizes(config, source).checkpoint),
        )
    logger.info(
        "KV pool: %.2f GiB in %s, %s: %s",
        gib(pool),
        layout.dtype_name,
        pool_text.pages_text(config, layout),
        pool_text.capacity_text(config),
    )
    if checkpoints := pool_text.checkpoints_text(config, state_sizes(config, source).checkpoint):
        logger.info("checkpoints of the recurrent state: %s", checkpoints)
    if windows := pool_text.windows_text(config, source.model, layout):
        logger.info("%s; %s", windows, pool_text.sequence_text(config))
    page_bytes = config.page_size * source.token_bytes // len(layout.groups)
    if shortage := kv_sizing.short_pool(config, page_bytes):
        logger.warning("%s", shortage)
