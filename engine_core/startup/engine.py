"""Assembly of an engine core. No other module knows every part."""

import hashlib
import logging
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from msgspec import Struct, structs

from tandem.engine_core import config as configuration
from tandem.engine_core import graph_sizes
from tandem.engine_core.config import EngineConfig, ModelShape, StepConfig
from tandem.engine_core.constraints.compiler import GrammarCompiler, compile_lanes
from tandem.engine_core.constraints.grammar_advancer import BatchAdvancer
from tandem.engine_core.constraints.grammars import Grammars
from tandem.engine_core.constraints.mask_builder import MaskBuilder
from tandem.engine_core.constraints.workers.link import WorkerLink
from tandem.engine_core.constraints.workers.mask_memory import MaskMemory
from tandem.engine_core.constraints.workers.pool import WorkerPool
from tandem.engine_core.constraints.workers.settings import WorkerFacts
from tandem.engine_core.contracts import Mailbox
from tandem.engine_core.engine import Engine
from tandem.engine_core.errors import ConfigError, ConfigProblems, DeviceBusyError, MemoryTooSmallError
from tandem.engine_core.integers import ceil_div
from tandem.engine_core.kernels.delta_rule.state import PIECE, RING
from tandem.engine_core.kv_cache.groups import KVGroup, partition
from tandem.engine_core.kv_cache.manager import MAX_LONGEST_PATHS, MAX_NODES_PER_PAGE, KVManager
from tandem.engine_core.kv_cache.page_classes import page_classes
from tandem.engine_core.kv_cache.pages import PageAllocator
from tandem.engine_core.kv_cache.radix import RadixTree
from tandem.engine_core.kv_cache.sessions import Sessions
from tandem.engine_core.kv_cache.state_slots import StateSlots
from tandem.engine_core.kv_cache.states import StateCache
from tandem.engine_core.kv_cache.storage import KVLayout
from tandem.engine_core.loader.checkpoint import Checkpoint
from tandem.engine_core.lora.adapter_loader import SideCopies
from tandem.engine_core.lora.adapters import Adapters
from tandem.engine_core.model_config import ModelConfig
from tandem.engine_core.models.registry import read_config
from tandem.engine_core.quantization.quantization import FP8_AT_LOAD
from tandem.engine_core.runtime.device import CpuDevice
from tandem.engine_core.runtime.graphs import MAX_PROMPTS
from tandem.engine_core.runtime.runtime import TorchRuntime
from tandem.engine_core.runtime.staging import MAX_END_IDS
from tandem.engine_core.scheduler.admission import RowGate
from tandem.engine_core.scheduler.draft_costs import DraftCosts
from tandem.engine_core.scheduler.draft_policy import DraftPolicy
from tandem.engine_core.scheduler.planner import SchedulerLimits
from tandem.engine_core.scheduler.scheduler import Scheduler
from tandem.engine_core.scheduler.sleep_switch import SleepSwitch
from tandem.engine_core.scheduler.step_costs import StepCosts
from tandem.engine_core.scheduler.weight_switch import WeightSwitch
from tandem.engine_core.startup.adapters import build_adapters
from tandem.engine_core.startup.device import DeviceParts, open_parts
from tandem.engine_core.startup.device_memory import dummy_bytes, memory_demand, wait_for_memory, weight_bytes
from tandem.engine_core.startup.draft_model import resolve_draft
from tandem.engine_core.startup.draft_timing import measure_draft_costs
from tandem.engine_core.startup.kv_sizing import check_memory_flags
from tandem.engine_core.startup.model_weights import ModelWeights
from tandem.engine_core.startup.runtime import ModelSource, build_runtime
from tandem.engine_core.startup.sleep import build_sleep
from tandem.engine_core.startup.sleep_ranges import check_sleep_flags, open_ranges
from tandem.engine_core.startup.start_log import StartLog
from tandem.engine_core.startup.step_timing import measure_costs
from tandem.engine_core.startup.weight_formats import WeightFormats, weight_formats
from tandem.engine_core.startup.weight_updates import UpdatedMark, build_updates, guard_restart, transfer_backend
from tandem.engine_core.startup.weights import ActiveFiles, build_swaps, note_number, open_active
from tandem.engine_core.weight_swaps import WeightSwaps
from tandem.engine_core.weight_updates.hosts import parse_hosts
from tandem.engine_core.wire.heartbeat import Status
from tandem.protocol.engine_options import EngineOptions
from tandem.protocol.events import Limits, ModelFacts, PauseFacts, Phase
from tandem.protocol.logs import with_fields
from tandem.protocol.model_folder import template_fingerprint
from tandem.protocol.stats import EngineStats
from tandem.protocol.usable_cores import usable_cores
from tandem.protocol.weights_file import WeightsFile

logger = logging.getLogger(__name__)

DEFAULT_MODEL = Path(__file__).parents[1] / "default_model"


class ResolvedEngine(Struct, frozen=True):
    """The model and the settings of an engine, before anything is loaded."""

    source: ModelSource
    groups: tuple[KVGroup, ...]
    config: StepConfig


def resolve_engine(options: EngineOptions, cuda: bool, gpu_bytes: int = 0, cpu_bytes: int = 0) -> ResolvedEngine:
    """Resolve all settings but the size of the KV pool.

    Of the model only the configuration is read. cuda: True if torch sees a CUDA device; gpu_bytes: its memory;
    cpu_bytes: free main memory. Both are 0 if they are not known.

    Raises ConfigError if the engine cannot start as asked.
    """
    directory = Path(options.model) if options.model else DEFAULT_MODEL
    model_config, problems = read_config(directory), ConfigProblems()
    with problems.caught():
        model_config = _quantized(options, model_config)
    kind = "cuda" if options.device == "cuda" else "cpu"
    with problems.caught():
        kind = configuration.resolve_device(options, cuda)
    with problems.caught():
        _check_recurrent_layers(model_config, kind)
    with problems.caught():
        check_memory_flags(options, kind)
    with problems.caught():
        check_sleep_flags(options)
    with problems.caught():
        parse_hosts(options.weight_update_hosts)
    with problems.caught():
        _num_grammar_workers(options, kind)
    if len(model_config.eos_ids) > MAX_END_IDS:
        raise ConfigError(f"the model has {len(model_config.eos_ids)} end ids, at most {MAX_END_IDS} are supported")
    dtype = "float32"
    with problems.caught():
        dtype = configuration.resolve_dtype(options, kind, model_config.dtype or "float32")
    name = "tandem-default" if directory == DEFAULT_MODEL else directory.resolve().name
    weight_bytes = model_config.weight_bytes(getattr(torch, dtype).itemsize)
    drafts = max(graph_sizes.draft_sizes(options.speculate, options.speculate_tokens), default=0)
    row_bytes = model_config.recurrent_row_bytes(getattr(torch, dtype).itemsize, drafts)
    shape = ModelShape(name, model_config.max_positions, model_config.longest_context, weight_bytes, row_bytes)
    if row_bytes:
        shape = structs.replace(shape, state_interval=RING, chunk_grid=PIECE)
    with problems.caught():
        step_config = configuration.resolve(options, shape, kind, dtype, gpu_bytes, cpu_bytes)
    problems.check()
    groups = _kv_groups(model_config, step_config)
    model_config = _with_groups(model_config, groups)
    step_config = structs.replace(step_config, kv_windows=tuple([group.window for group in groups]))
    layout = _kv_layout(groups, step_config)
    source = ModelSource(directory, model_config, getattr(torch, dtype), layout)
    if options.draft_model is not None:
        source = structs.replace(source, draft=resolve_draft(Path(options.draft_model), source, step_config))
    return ResolvedEngine(source, groups, step_config)


def _quantized(options: EngineOptions, model: ModelConfig) -> ModelConfig:
    """Add the scheme of --quantize to the configuration of a model.

    Raises ConfigError for a checkpoint that has one.
    """
    if options.quantize == "off":
        return model
    if model.quantization is not None:
        raise ConfigError("--quantize fp8: the checkpoint is quantized already; leave the flag out")
    return structs.replace(model, quantization=FP8_AT_LOAD)


def _check_recurrent_layers(model: ModelConfig, kind: str) -> None:
    """Raise ConfigError for recurrent layers that the kernels of a device do not support."""
    if model.delta_rule is None or kind == "cpu":
        return
    try:
        model.delta_rule.check_heads()
    except ValueError as error:
        raise ConfigError(f"--device cuda: {error}; use --device cpu") from None


def build_engine(
    options: EngineOptions,
    mailbox: Mailbox,
    status: Status,
    new_parts: Callable[[str], DeviceParts] = open_parts,
    adapters_file: Path | None = None,
    updated_file: Path | None = None,
    weights_file: Path | None = None,
) -> Engine:
    """Load the model, size and allocate everything, and run each path once.

    new_parts: opens a device of the resolved kind, "cpu" or "cuda"; adapters_file: file of the adapters to load, None
    for none; updated_file: file that exists while the weights in memory are not those on disk, None for no restarts;
    weights_file: file of the weights that a swap has left, None for none.

    Raises ConfigError if the engine cannot start as asked; the message names the setting to change. Raises
    DeviceBusyError if it could with the memory that another process holds.
    """
    status.enter(Phase.LOADING)
    cuda = torch.cuda.is_available()
    gpu_bytes = torch.cuda.mem_get_info()[1] if cuda else 0
    resolved = resolve_engine(options, cuda, gpu_bytes, CpuDevice().free_bytes())
    source, kind = resolved.source, resolved.config.device
    if kind == "cpu":
        torch.set_num_threads(configuration.resolve_threads(options, usable_cores()))
    parts = new_parts(kind)
    active = None if options.load_format == "dummy" else open_active(source, weights_file)
    checkpoint = None if active is None else active.checkpoint
    has_memory = kind == "cpu" or _wait_for_memory(resolved, checkpoint, parts, status)
    log = StartLog(time.monotonic, parts.device.held_bytes)
    constraints = _start_constraints(_num_grammar_workers(options, kind), source, mailbox, status.stats)
    ranges = open_ranges(options, parts.device)
    try:
        builder = constraints.mask_builder
        runtime, config = build_runtime(resolved.config, source, checkpoint, parts, builder, status, log, ranges)
    except MemoryTooSmallError as error:
        if has_memory:
            raise
        raise DeviceBusyError(f"{error}; another process holds memory of the device (nvidia-smi shows it)") from error
    costs = measure_costs(runtime, config, source.model, source.layout)
    draft_costs = measure_draft_costs(runtime, config)
    log.mark("timing of steps")
    switch = None
    if options.enable_weight_updates:
        switch = WeightSwitch(WeightsFile().version) if active is None else WeightSwitch(active.version, active.highest)
        switch.on_number = partial(note_number, weights_file)
        status.weights = switch.facts
    weight_version = "" if switch is None else switch.version.name
    facts = _facts(config, source, weight_version)
    adapters = None
    if runtime.adapters is not None:
        device = parts.device.torch_device
        adapters = build_adapters(
            options,
            runtime.adapters,
            copies=SideCopies(device, runtime.adapters.lora) if device.type == "cuda" else None,
            file=adapters_file,
            status=status,
            wake=mailbox.wake,
            announce=mailbox.announce,
            weight_version=weight_version,
        )
        log.mark("adapters")
    swaps, files, mark = None, None, UpdatedMark(updated_file)
    weights = ModelWeights(runtime.model, source.layout, source.dtype, config.max_len)
    if switch is not None and active is not None:
        files = ActiveFiles(weights, source.model, active.checkpoint.directory, active.stamp)
        swaps = build_swaps(
            switch,
            source,
            weights,
            files,
            file=weights_file,
            wake=mailbox.wake,
            on_swap=mark.clear,
            keeps_copy=options.swap_copy,
        )
    sleep, is_updated = None, False
    if ranges is not None:
        drafting = None if runtime.speculator is None else runtime.speculator.model
        sleep = build_sleep(
            options,
            ranges,
            parts.device,
            source,
            weights,
            draft=None if drafting is None else drafting.model,
            files=files,
            has_updated=lambda: is_updated,
        )
        log.mark("memory for sleep")
    engine = _build_loop(
        config,
        resolved.groups,
        runtime,
        costs,
        draft_costs,
        mailbox,
        constraints,
        status,
        facts,
        adapters,
        switch=switch,
        swaps=swaps,
        sleep=sleep,
    )
    control = engine.control
    status.pause = lambda: PauseFacts(control.pause.mode, control.pause.refuses_new, bool(status.stats.paused))
    if switch is not None:

        def note_update() -> None:
            nonlocal is_updated
            is_updated = True
            mark.set()
            if files is not None:
                files.folder = None  # They are in memory only.

        updates = build_updates(
            options,
            switch,
            weights,
            source.model,
            parts.device.torch_device,
            wake=mailbox.wake,
            on_change=note_update,
        )
        control.updates = updates
        if swaps is not None:
            swaps.on_load = updates.abandon
            status.swap = lambda: swaps.facts
        guard_restart(control, mark)
    _log_settings(config, source)
    if options.page_size == "max" and config.page_size > config.max_len:
        text = "--page-size max: %d positions a sequence, --max-len %d rounded up to a power of two"
        logger.info(text, config.page_size, config.max_len)
    logger.info(
        "%s on %s in %s: %d rows, %d KV tokens in pages of %d, %d positions a step, %s",
        config.model_name,
        config.device,
        _formats(config, source, checkpoint),
        config.max_rows,
        config.kv_tokens,
        config.page_size,
        config.max_step_tokens,
        "two steps in flight" if config.depth == 2 else "one step in flight",
    )
    return engine


def _wait_for_memory(
    resolved: ResolvedEngine, checkpoint: Checkpoint | None, parts: DeviceParts, status: Status
) -> bool:
    """Wait until no other process holds memory that the engine asks for.

    Return False if another process still holds some. checkpoint: None for dummy weights.
    """
    source = resolved.source
    weights = dummy_bytes(source) if checkpoint is None else weight_bytes(source, checkpoint)
    if source.draft is not None:
        weights += dummy_bytes(source.draft)
    demand = memory_demand(resolved.config, source, weights, parts.device.total_bytes())
    return wait_for_memory(parts.device, demand, status)


def _formats(config: EngineConfig, source: ModelSource, checkpoint: Checkpoint | None) -> str:
    """Name the dtype, and the dtypes of weights, keys and values if they differ."""
    names = [config.dtype]
    quantization = source.model.quantization
    if quantization is not None:
        if checkpoint is None or quantization == FP8_AT_LOAD:
            formats = WeightFormats()
        else:
            formats = weight_formats(checkpoint, quantization)
        is_mixed = formats.num_quantized < formats.num_layers
        names.append(formats.text if is_mixed else f"weights in {quantization}")
        if config.device == "cpu" and (formats.num_quantized or not formats.num_layers):
            logger.warning("quantized weights are slow on a CPU: each matmul dequantizes them")
    if source.layout.dtype != source.dtype:
        names.append(f"keys and values in {source.layout.dtype_name}")
    return ", ".join(names)


def _log_settings(config: EngineConfig, source: ModelSource) -> None:
    """Log all settings of this engine, each as a field of the line."""
    settings = {name: value for name, value in structs.asdict(config).items() if name != "options"} | {
        "kv_tokens": config.kv_tokens,
        "kv_dtype": source.layout.dtype_name,
        "quantization": None if source.model.quantization is None else str(source.model.quantization),
    }
    if config.device == "cpu":
        settings["threads"] = torch.get_num_threads()
    logger.debug("settings", extra=with_fields(**settings))


class Constraints(Struct, frozen=True):
    """The compiler of grammars, and those that advance them and build their masks."""

    compiler: GrammarCompiler
    mask_builder: MaskBuilder
    advancer: BatchAdvancer


def _num_grammar_workers(options: EngineOptions, device: str) -> int:
    return configuration.resolve_grammar_workers(options, device, usable_cores(), sys.platform, platform.machine())


def _start_constraints(num_workers: int, source: ModelSource, mailbox: Mailbox, stats: EngineStats) -> Constraints:
    """Build the constraints' parts and start to load the tokenizer.

    The tokenizer loads on another thread, to be ready by the time the weights are.
    """
    model = source.model
    grammars = Grammars(source.directory / "tokenizer.json", model.vocab_size, model.eos_ids)
    lanes = compile_lanes()
    lanes[0].submit(grammars.prepare)
    memory = MaskMemory()
    workers = grammar_workers(num_workers, grammars, memory, stats) if num_workers else None
    return Constraints(
        GrammarCompiler(grammars.compile, lanes, mailbox.wake, stats, time.monotonic, workers=workers),
        MaskBuilder(model.eos_ids, stats, time.monotonic, workers=workers, memory=memory),
        BatchAdvancer(workers, memory),
    )


def grammar_workers(count: int, grammars: Grammars, memory: MaskMemory, stats: EngineStats) -> WorkerPool:
    """Build a pool of workers, which start once they are needed."""
    file, mask_bytes = str(grammars.tokenizer_file), 4 * ceil_div(grammars.vocab_size, 32)
    facts = WorkerFacts(file, grammars.vocab_size, grammars.end_ids, mask_bytes)
    return WorkerPool(count, partial(WorkerLink.start, facts, memory), stats)


def scheduler_limits(config: StepConfig) -> SchedulerLimits:
    """Return the limits of a scheduler.

    Without a flag, a step takes no more prompts than a graph holds: with more it would run eagerly, which takes the
    host longer than two steps from a graph.
    """
    return SchedulerLimits(
        config.max_step_tokens,
        config.prefill_chunk,
        config.max_waiting,
        config.max_prefill_chunks_per_step or (MAX_PROMPTS if config.graph_tokens else 0),
        config.max_uploads,
        config.static_batching,
        config.max_itl,
        config.chunk_grid,
    )


def draft_policy(config: StepConfig, costs: DraftCosts | None = None) -> DraftPolicy:
    """Return the choice of the number of drafts of each step."""
    tokens = config.options.speculate_tokens
    fixed = tokens if isinstance(tokens, int) else None
    has_model = config.options.draft_model is not None
    return DraftPolicy(config.draft_sizes, fixed, config.graph_rows, config.max_step_tokens, has_model, costs)


def _build_loop(
    config: EngineConfig,
    kv_groups: tuple[KVGroup, ...],
    runtime: TorchRuntime,
    costs: StepCosts,
    draft_costs: DraftCosts | None,
    mailbox: Mailbox,
    constraints: Constraints,
    status: Status,
    facts: ModelFacts,
    adapters: Adapters | None,
    *,
    switch: WeightSwitch | None,
    swaps: WeightSwaps | None,
    sleep: SleepSwitch | None,
) -> Engine:
    stats = status.stats
    stats.rows_total, stats.pages_total = config.max_rows, config.pages - 1
    memory = _kv_manager(config, kv_groups, bool(runtime.kv.recurrent))
    drafts = draft_policy(config, draft_costs)
    # As in vLLM, a series for each position exists from the start.
    stats.spec_decode_num_accepted_tokens_per_pos = dict.fromkeys(map(str, range(drafts.most)), 0)
    rows, limits = RowGate(config.max_rows), scheduler_limits(config)
    scheduler = Scheduler(rows, memory, limits, config.policy, costs, drafts, adapters)
    wire_limits = Limits(
        config.max_rows,
        config.kv_tokens,
        config.page_size,
        config.max_step_tokens,
        config.max_waiting,
        config.options.max_concurrent,
        config.options.max_queued_tokens,
        config.max_prediction,
    )
    return Engine.assemble(
        scheduler,
        runtime,
        mailbox,
        constraints.compiler,
        depth=config.depth,
        epoch=status.epoch,
        model=facts,
        limits=wire_limits,
        stats=stats,
        clock=time.monotonic,
        stage_clock=time.monotonic,
        advancer=constraints.advancer,
        weights=switch,
        swaps=swaps,
        sleep=sleep,
        publish_weights=partial(setattr, status, "weights") if switch is not None else lambda _: None,
    )


def _kv_groups(model: ModelConfig, config: StepConfig) -> tuple[KVGroup, ...]:
    """Return the groups of layers that share pages.

    A window that no sequence exceeds is none. With one page per sequence no page can be given up either. Recurrent
    layers are in no group.
    """
    own = model.attention_layers
    windows = [model.attention[layer].window for layer in own]
    if config.options.page_size == "max":
        windows = [None] * len(windows)
    kept = [None if window is None or window >= config.max_len else window for window in windows]
    groups = partition(kept, model.kv_heads, model.head_dim)
    return tuple([structs.replace(group, layers=tuple([own[index] for index in group.layers])) for group in groups])


def _with_groups(model: ModelConfig, groups: tuple[KVGroup, ...]) -> ModelConfig:
    """Return the configuration of a model with the group of each layer."""
    group_of = {layer: index for index, group in enumerate(groups) for layer in group.layers}
    attention = tuple([replace(layer, group=group_of.get(index, 0)) for index, layer in enumerate(model.attention)])
    return structs.replace(model, attention=attention)


def _kv_layout(groups: tuple[KVGroup, ...], config: StepConfig) -> KVLayout:
    dtype = getattr(torch, config.dtype) if config.options.kv_dtype == "auto" else torch.float8_e4m3fn
    return KVLayout(groups=groups, page_size=config.page_size, dtype=dtype)


def _kv_manager(config: EngineConfig, groups: tuple[KVGroup, ...], recurrent: bool) -> KVManager:
    windows, tree, states = tuple([group.window for group in groups]), None, None
    if config.prefix_cache:
        classes = page_classes(windows, config.page_size)
        paths = MAX_LONGEST_PATHS * ceil_div(config.max_len, config.page_size)
        tree = RadixTree(config.page_size, classes, max(MAX_NODES_PER_PAGE * config.pages, paths))
        if recurrent:
            states = StateCache(StateSlots(config.state_slots), tree, RING, config.chunk_grid)
    sessions = Sessions(tree, config.max_sessions, config.session_ttl)
    return KVManager(PageAllocator(config.pages), config.page_size, tree, sessions, windows, config.max_lead, states)


def _facts(config: EngineConfig, source: ModelSource, weight_version: str) -> ModelFacts:
    model, directory, draft = source.model, source.directory, source.draft
    tokenizer = directory / "tokenizer.json"
    fingerprint = hashlib.sha256(tokenizer.read_bytes()).hexdigest() if tokenizer.is_file() else ""
    return ModelFacts(
        name=config.model_name,
        vocab_size=model.vocab_size,
        max_len=config.max_len,
        end_ids=list(model.eos_ids),
        tokenizer_fingerprint=fingerprint,
        device=config.device,
        dtype=config.dtype,
        created=int(time.time()),
        template_fingerprint=template_fingerprint(directory),
        weight_format=str(model.quantization or config.dtype),
        kv_dtype=source.layout.dtype_name,
        logprobs_mode=config.options.logprobs_mode,
        weight_transfer=transfer_backend(config.options, config.device),
        max_loras=config.max_adapters,
        max_lora_rank=config.options.max_lora_rank if config.max_adapters else 0,
        draft_model="" if draft is None else draft.directory.resolve().name,
        draft_weight_version="" if draft is None else weight_version,
    )
