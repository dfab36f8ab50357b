"""Preflight check of an engine: whether it would start on this machine, and with which choices.

No weights are loaded. `tandem doctor` and `--check` run it as `python -P -m tandem.engine_core.startup.preflight`, with
the flags of an engine, and read one JSON object from its stdout.
"""

import argparse
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import torch
from msgspec import Struct, structs

from tandem.engine_core.config import EngineConfig, uncached_by
from tandem.engine_core.errors import ConfigError, naming
from tandem.engine_core.kernels.gpu_traits import GpuTraits
from tandem.engine_core.layers.linear_choice import torch_build_context
from tandem.engine_core.loader.fit import check_fit
from tandem.engine_core.loader.header import TORCH_DTYPES
from tandem.engine_core.loader.slots import FLOAT_DTYPES
from tandem.engine_core.models.config_fields import ConfigSource
from tandem.engine_core.models.registry import (
    build_model,
    open_checkpoint,
    resolve_source,
    unmatched_entries,
    unmatched_text,
)
from tandem.engine_core.runtime.device import CpuDevice, read_gpu_traits
from tandem.engine_core.startup import pool_text
from tandem.engine_core.startup.device import check_gpu, check_installed
from tandem.engine_core.startup.device_memory import adapter_bytes, model_bytes, weight_bytes
from tandem.engine_core.startup.engine import DEFAULT_MODEL, ResolvedEngine, resolve_engine
from tandem.engine_core.startup.kv_sizing import GIB, Memory, short_pool, size_pool
from tandem.engine_core.startup.runtime import ModelSource, state_sizes
from tandem.engine_core.startup.weight_formats import WeightFormats, weight_formats
from tandem.protocol.engine_options import EngineOptions, add_engine_arguments, engine_options
from tandem.protocol.preflight import PreflightReport, Section


class Gpu(Struct, frozen=True):
    """A CUDA device and its memory in bytes."""

    traits: GpuTraits
    free: int
    total: int


def read_gpus() -> list[Gpu]:
    """Return the GPU that an engine would use, with its memory, or none."""
    if not torch.cuda.is_available():
        return []
    free, total = torch.cuda.mem_get_info()
    return [Gpu(read_gpu_traits(), free, total)]


def preflight(
    options: EngineOptions,
    gpus: list[Gpu],
    cpu_free: Callable[[], int],
    cpu_total: Callable[[], int],
    stored_bytes: int | None = None,
) -> PreflightReport:
    """Resolve the settings of an engine as its start does.

    cpu_free, cpu_total: return the bytes of main memory that are free, and of all of it. stored_bytes: size of weights
    that are not here yet.
    """
    lines = [_gpu_line(gpu) for gpu in gpus]
    model: Section = {}
    try:
        source = ConfigSource.open(Path(options.model) if options.model else DEFAULT_MODEL)
        model = {"architecture": source.architecture, "supported": "no"}
        config = resolve_source(source)
        model |= {"dtype": config.dtype or "not named", "positions": str(config.max_positions)}
        model["supported"] = "yes"
        gpu_bytes = gpus[0].total if gpus else 0
        resolved = resolve_engine(options, cuda=bool(gpus), gpu_bytes=gpu_bytes, cpu_bytes=cpu_free())
        if resolved.config.device == "cuda":
            check_installed()
            check_gpu(gpus[0].traits)
        is_dummy = options.load_format == "dummy"
        formats, weights = _check_weights(resolved.source, are_here=stored_bytes is None and not is_dummy)
        if stored_bytes is not None and not is_dummy:
            weights = _weight_bytes(resolved, stored_bytes)
        model["weights"] = _weights_line(resolved, weights, formats)
        if resolved.source.draft is not None:
            draft = resolved.source.draft
            with naming(f"--speculate model:{draft.directory}"):
                own_formats, taken = _check_weights(draft, are_here=not is_dummy)
            model["draft model"] = _draft_line(draft, taken, own_formats)
            weights += taken
        if formats.note:
            model["16-bit layers"] = formats.note
        if formats.unmatched:
            model["unused entries"] = formats.unmatched
        is_cpu = resolved.config.device == "cpu"
        free, total = (cpu_free(), cpu_total()) if is_cpu else (gpus[0].free, gpus[0].total)
        try:
            weights += adapter_bytes(resolved.config, resolved.source)
            memory, pool = _pool(resolved, weights, free, total)
        except ConfigError as error:
            shortage = str(error)
            with suppress(ConfigError):
                _pool(resolved, weights, total, total)
                return PreflightReport(lines, model, shortage=shortage)
            raise
    except ConfigError as error:
        return PreflightReport(lines, model, problems=list(error.problems))
    return PreflightReport(lines, model, _choices(options, resolved, pool, memory))


def _weights_line(resolved: ResolvedEngine, weights: int, formats: WeightFormats) -> str:
    size, dtype = f"{weights / GIB:.2f} GiB", resolved.config.dtype
    quantization = resolved.source.model.quantization
    if quantization is None:
        return f"{size} in {dtype}"
    named = formats.text or f"linear layers in {quantization}"
    if formats.text and not formats.num_quantized:
        return f"{size} in {dtype}, {named}"
    slow = "; slow on a CPU: each matmul dequantizes them" if resolved.config.device == "cpu" else ""
    return f"{size}, {named}, the rest in {dtype}{slow}"


def _draft_line(draft: ModelSource, weights: int, formats: WeightFormats) -> str:
    """Describe the memory of a draft model."""
    kind = formats.text or str(draft.model.quantization or str(draft.dtype).removeprefix("torch."))
    return (
        f"{draft.model.architecture}, weights {weights / GIB:.2f} GiB in {kind}, keys and values "
        f"{draft.layout.token_bytes} bytes a token"
    )


def _gpu_line(gpu: Gpu) -> str:
    traits = gpu.traits
    capability = f"{traits.capability[0]}.{traits.capability[1]}"
    memory = f"{gpu.total / GIB:.1f} GiB, {gpu.free / GIB:.1f} free"
    return f"{traits.name}, compute capability {capability}, {traits.multiprocessors} multiprocessors, {memory}"


def _check_weights(source: ModelSource, are_here: bool) -> tuple[WeightFormats, int]:
    """Return the formats of the linear layers, and the bytes of the weights.

    are_here: False for weights that are not downloaded: at most their names are known, from the index. Otherwise only
    headers are read, and weights that may be tied, to compare them.

    Raises ConfigError if the model cannot be built, or the tensors of its checkpoint do not fit it.
    """
    context = torch_build_context(torch.device("meta"), source.dtype, source.model.quantization)
    checkpoint = open_checkpoint(source.directory, source.model) if are_here else None
    model = build_model(source.model, context, checkpoint=checkpoint)
    if checkpoint is not None:
        check_fit(checkpoint, model.weight_slots())
    quantization = source.model.quantization
    formats = WeightFormats() if checkpoint is None else weight_formats(checkpoint, quantization)
    if quantization is not None and (entries := unmatched_entries(quantization, model)):
        formats = structs.replace(formats, unmatched=unmatched_text(entries))
    return formats, model_bytes(model) if checkpoint is None else weight_bytes(source, checkpoint)


def _weight_bytes(resolved: ResolvedEngine, stored_bytes: int) -> int:
    """Return the bytes of a checkpoint that is not here, in the dtype of the engine.

    Raises ConfigError if it has a dtype that is not read.
    """
    if resolved.source.model.quantization is not None:
        return stored_bytes  # With --quantize it is less.
    return stored_bytes * resolved.source.dtype.itemsize // _stored_itemsize(resolved.source.model.dtype)


def _stored_itemsize(name: str | None) -> int:
    """Return the bytes of an element in the dtype that an unquantized checkpoint names.

    Without a name, or with one that torch does not have, such as auto, it is float32. Raises ConfigError for a dtype
    that is read from quantized checkpoints only.
    """
    dtype = getattr(torch, (name or "").removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        return torch.float32.itemsize
    if dtype not in (TORCH_DTYPES[read] for read in FLOAT_DTYPES):
        raise ConfigError(
            f"the checkpoint's dtype is {name} without a quantization_config, which is not supported; serve one in "
            "bfloat16, float16 or float32"
        )
    return dtype.itemsize


def _pool(resolved: ResolvedEngine, weights: int, free: int, total: int) -> tuple[Memory, EngineConfig]:
    """Return the memory after the weights are loaded, and the settings with pages.

    The memory of steps and graphs is not known without running them. weights, free, total: bytes. Raises ConfigError
    if the memory is too small.
    """
    if weights > free:
        raise ConfigError(f"the weights take {weights / GIB:.2f} GiB, but {free / GIB:.2f} GiB are free")
    is_cpu, states = resolved.config.device == "cpu", state_sizes(resolved.config, resolved.source)
    held = weights + states.rows
    if held > free:
        raise ConfigError(
            f"weights and the state of {resolved.config.max_rows} rows take {held / GIB:.2f} GiB, but "
            f"{free / GIB:.2f} GiB are free; lower --max-rows"
        )
    memory = Memory(free=free - held) if is_cpu else Memory(free - held, total, free)
    return memory, size_pool(resolved.config, memory, resolved.source.token_bytes, states)


def _page_bytes(resolved: ResolvedEngine) -> int:
    """Return the bytes of a page, with that of the draft model."""
    source = resolved.source
    return source.layout.page_bytes + (source.draft.layout.page_bytes if source.draft is not None else 0)


def _choices(options: EngineOptions, resolved: ResolvedEngine, pool: EngineConfig, memory: Memory) -> Section:
    """Name each choice and its reason."""
    config, layout = resolved.config, resolved.source.layout
    device = config.device

    def chosen(flag: str, given: object, usual: str) -> str:
        return f"given as {flag}" if given not in (None, "auto") else usual

    seen = "torch sees a CUDA device" if device == "cuda" else "torch sees no CUDA device"
    kept = f"auto on {device}; the checkpoint is {resolved.source.model.dtype or 'float32'}"
    size = f"{pool_text.capacity_text(pool)}, {pool.pages * _page_bytes(resolved) / GIB:.2f} GiB"
    if len(layout.groups) > 1:
        size += f" in pages of {layout.page_shape[0]} layers"
    if layout.dtype != resolved.source.dtype:
        size += f" of {layout.dtype_name}"
    if windows := pool_text.windows_text(pool, resolved.source.model, layout):
        size += f", {windows}"
    sized = next(
        (flag for flag, value in (("--kv-tokens", options.kv_tokens), ("--kv-memory", options.kv_memory)) if value), ""
    )
    share = f"--gpu-memory {options.gpu_memory or 0.9:g} less weights; steps and CUDA graphs take some of it"
    usual_rows = "by the memory that the weights leave" if device == "cuda" else f"default on {device}"
    usual = share if device == "cuda" else f"a share of {memory.free / GIB:.2f} GiB free after weights"
    states = state_sizes(config, resolved.source)
    choices = {
        "device": f"{device} ({chosen('--device', options.device, seen)})",
        "dtype": f"{config.dtype} ({chosen('--dtype', options.dtype, kept)})",
        "rows": f"{config.max_rows} ({chosen('--max-rows', options.max_rows, usual_rows)})",
        "context": f"{config.max_len} ({chosen('--max-len', options.max_len, 'positions of the model')})",
        "step tokens": f"{config.max_step_tokens} "
        f"({chosen('--max-step-tokens', options.max_step_tokens, f'default on {device}')})",
        "KV cache": f"{'at most ' if device == 'cuda' and not sized else ''}{size} "
        f"({f'given as {sized}' if sized else usual})",
        "prefix cache": "on" if config.prefix_cache else f"off ({uncached_by(options)})",
    }
    if shortage := short_pool(pool, _page_bytes(resolved)):
        choices["warning"] = shortage
    if states.rows:
        source = resolved.source
        choices["recurrent state"] = pool_text.states_text(config, source.model, source.dtype.itemsize)
        choices["checkpoints"] = pool_text.checkpoints_text(pool, states.checkpoint)
    return choices


def main() -> None:
    """Print the preflight report for the flags of the command line."""
    parser = argparse.ArgumentParser(prog="python -m tandem.engine_core.startup.preflight", allow_abbrev=False)
    add_engine_arguments(parser)
    parser.add_argument("--weight-bytes", type=int, help="size of the weights, if they are not in the folder yet")
    arguments = parser.parse_args()
    cpu = CpuDevice()
    found = preflight(
        engine_options(arguments),
        read_gpus(),
        cpu.free_bytes,
        cpu.total_bytes,
        stored_bytes=arguments.weight_bytes,
    )
    sys.stdout.write(msgspec.json.encode(found).decode() + "\n")


if __name__ == "__main__":
    main()
