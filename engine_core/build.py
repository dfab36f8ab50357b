"""Puts an engine core together. The only place that knows every part."""

import hashlib
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from llguidance import LLExecutor
from msgspec import Struct

from engine_core import config as configuration
from engine_core.build_device import CpuParts, CudaParts, DeviceParts, check_installed
from engine_core.config import EngineConfig, Machine, ModelShape
from engine_core.constraints.compiler import GrammarCompiler
from engine_core.constraints.grammars import Grammars
from engine_core.constraints.matchers import Matchers
from engine_core.contracts import Mailbox
from engine_core.control import Control
from engine_core.engine import Engine
from engine_core.errors import ConfigError
from engine_core.heartbeat import Status
from engine_core.kv_cache.pages import PageAllocator
from engine_core.kv_cache.storage import KVStorage
from engine_core.loader.noise import fill_with_noise
from engine_core.loader.weights import load_weights
from engine_core.models.config import ModelConfig
from engine_core.models.registry import Model, build_model
from engine_core.pipeline import PipelineState
from engine_core.runtime.device import Device, open_device
from engine_core.runtime.mask_filler import MaskFiller
from engine_core.runtime.runtime import TorchRuntime
from engine_core.runtime.slots import StepSlot
from engine_core.runtime.staging import MAX_END_IDS, capacity
from engine_core.runtime.tables import DeviceTables
from engine_core.runtime.warmup import warm_up
from engine_core.scheduler.admission import PageGate, RowGate
from engine_core.scheduler.scheduler import Scheduler, SchedulerLimits
from engine_core.start_log import StartLog
from engine_core.stats import StageClock
from protocol.engine_options import EngineOptions
from protocol.events import EngineStats, Limits, ModelFacts, Phase

logger = logging.getLogger(__name__)

COMPILE_THREADS = 2
"""Grammars compiled at once."""
MASK_THREADS = 8
DEFAULT_MODEL = Path(__file__).parent / "default_model"


def build_engine(options: EngineOptions, mailbox: Mailbox, status: Status) -> Engine:
    """Loads the model, sizes and allocates everything, runs each path once. Raises ConfigError if it cannot be."""
    directory = Path(options.model) if options.model else DEFAULT_MODEL
    status.enter(Phase.LOADING)
    model_config = ModelConfig.read(directory)
    kind = configuration.resolve_device(options, torch.cuda.is_available())
    if len(model_config.eos_ids) > MAX_END_IDS:
        raise ConfigError(f"the model has {len(model_config.eos_ids)} end ids, at most {MAX_END_IDS} are supported")
    dtype = configuration.resolve_dtype(options, kind, model_config.dtype or "float32")
    if kind == "cpu":
        torch.set_num_threads(configuration.resolve_threads(options, len(os.sched_getaffinity(0))))
    if kind == "cuda":
        check_installed()
    device = open_device(kind)
    name = "tandem-default" if directory == DEFAULT_MODEL else directory.resolve().name
    log = StartLog(time.monotonic, device.held_bytes)
    source = Source(directory, name, model_config, getattr(torch, dtype))
    constraints = _start_constraints(source, mailbox, status.stats)
    runtime, config = _build_runtime(options, source, device, constraints.matchers, status, log)
    status.enter(Phase.WARMING, 90)
    warm_up(runtime, config)
    log.mark("warm-up")
    facts = _facts(config, model_config, directory)
    engine = _build_loop(config, runtime, mailbox, constraints, status, facts)
    logger.info(
        "%s on %s in %s: %d rows, %d KV tokens in pages of %d, %d positions a step, %s",
        config.model_name, config.device, config.dtype, config.max_rows, config.kv_tokens, config.page_size,
        config.max_step_tokens, "two steps in flight" if config.depth == 2 else "one step in flight",
    )  # fmt: skip
    return engine


class Source(Struct, frozen=True):
    """What is loaded."""

    directory: Path
    name: str
    model: ModelConfig
    dtype: torch.dtype

    @property
    def kv_shape(self) -> dict[str, int]:
        return {"layers": self.model.layers, "kv_heads": self.model.kv_heads, "head_dim": self.model.head_dim}


class Constraints(Struct, frozen=True):
    """What makes constraints, and what works with them."""

    compiler: GrammarCompiler
    matchers: Matchers


def _start_constraints(source: Source, mailbox: Mailbox, stats: EngineStats) -> Constraints:
    """Begins with the tokenizer at once, so that it is there by the time the weights are."""
    end_ids = source.model.eos_ids
    grammars = Grammars(source.directory / "tokenizer.json", source.model.vocab_size, end_ids)
    threads = ThreadPoolExecutor(COMPILE_THREADS, "grammars")
    threads.submit(grammars.prepare)
    return Constraints(
        GrammarCompiler(grammars.compile, threads, mailbox.wake, stats, time.monotonic),
        Matchers(_executor(), end_ids, stats, time.monotonic),
    )


def _executor() -> LLExecutor | None:
    """Threads that fill masks: all cores but the loop's and one more. One thread would only be another to wake."""
    threads = min(len(os.sched_getaffinity(0)) - 2, MASK_THREADS)
    return LLExecutor(threads) if threads > 1 else None


def _build_runtime(
    options: EngineOptions, source: Source, device: Device, filler: MaskFiller, status: Status, log: StartLog
) -> tuple[TorchRuntime, EngineConfig]:
    """Weights first, then the KV pool from what memory they leave, then graphs (I7: the last to allocate)."""
    parts: DeviceParts = CudaParts(device) if device.kind.type == "cuda" else CpuParts(device)
    model = build_model(source.model, device.kind, source.dtype, options.max_len, parts.placement(source.dtype))
    _load(options, model, source.directory, status)
    log.mark("weights")
    config = _resolve(options, source, device)
    kv = _allocate_kv(config, source, device)
    log.mark("KV pool")
    vocab_size = source.model.vocab_size
    tables = DeviceTables.allocate(config.max_rows, config.max_len, config.pages_per_row, device.kind)
    words = capacity(config.max_rows, config.max_step_tokens, config.pages)
    slots = [
        StepSlot.allocate(
            device,
            words,
            config.max_rows,
            config.max_step_tokens,
            vocab_size,
            parts.attention(source.model, config, source.dtype),
        )
        for _ in range(config.depth)
    ]
    sampler = parts.sampler(tables, vocab_size, config.max_rows)
    scorer = parts.scorer(vocab_size, config.max_rows)
    log.mark("tables and slots")
    status.enter(Phase.WARMING)
    graphs = parts.graphs(config, model, kv, tables, sampler, slots, lambda p: status.enter(Phase.WARMING, p * 9 // 10))
    log.mark(
        f"graphs of {len(config.graph_rows)} row counts, {len(config.graph_singles) * len(config.graph_tokens)} mixed "
        f"shapes and {config.depth} slots"
    )
    return TorchRuntime(
        device, model, kv, tables, sampler, scorer, filler, slots, config.page_size, graphs=graphs, clock=parts.clock()
    ), config


def _resolve(options: EngineOptions, source: Source, device: Device) -> EngineConfig:
    bytes_per_token = KVStorage.bytes_per_token(**source.kv_shape, dtype=source.dtype)
    shape = ModelShape(source.name, source.model.max_positions, bytes_per_token)
    machine = Machine(device.kind.type, device.free_bytes())
    return configuration.resolve(options, shape, machine, str(source.dtype).removeprefix("torch."))


def _allocate_kv(config: EngineConfig, source: Source, device: Device) -> KVStorage:
    """Raises ConfigError if the memory is not there."""
    pages, page_size = config.pages, config.page_size
    try:
        return KVStorage.allocate(
            **source.kv_shape, pages=pages, page_size=page_size, dtype=source.dtype, device=device.kind
        )
    except RuntimeError as error:
        raise ConfigError(
            f"a KV pool of {config.kv_tokens} tokens cannot be had ({error}); lower --kv-tokens"
        ) from error


def _load(options: EngineOptions, model: Model, directory: Path, status: Status) -> None:
    if options.load_format == "dummy":
        fill_with_noise(model)
    else:
        load_weights(model, directory, lambda percent: status.enter(Phase.LOADING, int(percent)))


def _build_loop(
    config: EngineConfig,
    runtime: TorchRuntime,
    mailbox: Mailbox,
    constraints: Constraints,
    status: Status,
    facts: ModelFacts,
) -> Engine:
    stats = status.stats
    stats.rows_total, stats.pages_total = config.max_rows, config.pages - 1
    pages = PageGate(PageAllocator(config.pages), config.page_size)
    limits = SchedulerLimits(config.max_step_tokens, config.prefill_chunk, config.max_waiting)
    scheduler = Scheduler(RowGate(config.max_rows), pages, limits, constraints.matchers)
    wire_limits = Limits(
        config.max_rows, config.kv_tokens, config.page_size, config.max_step_tokens, config.max_waiting
    )
    compiler = constraints.compiler
    control = Control(scheduler, compiler, status.epoch, facts, wire_limits, stats, time.monotonic)
    stages = StageClock(stats.stage_seconds, time.monotonic)
    return Engine(scheduler, PipelineState(config.depth), runtime, mailbox, control, compiler, stats, stages)


def _facts(config: EngineConfig, model: ModelConfig, directory: Path) -> ModelFacts:
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
    )
