"""The memory of a GPU that another process may still hold.

Such a process is an engine that was killed a moment ago.
"""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from msgspec import Struct

from tandem.engine_core.config import GPU_SHARE, StepConfig
from tandem.engine_core.layers.linear_choice import torch_build_context
from tandem.engine_core.layers.lora_linear import LoraSlots
from tandem.engine_core.loader.checkpoint import Checkpoint
from tandem.engine_core.loader.header import TORCH_DTYPES, StoredTensor
from tandem.engine_core.loader.slots import FLOAT_DTYPES, Loadable
from tandem.engine_core.models.registry import build_model
from tandem.engine_core.quantization.int4 import PER_WORD
from tandem.engine_core.quantization.quantization import FP8_AT_LOAD
from tandem.engine_core.runtime.device import Device
from tandem.engine_core.startup.kv_sizing import GIB
from tandem.engine_core.startup.runtime import ModelSource, state_sizes
from tandem.engine_core.wire.heartbeat import Status
from tandem.protocol.events import Phase

logger = logging.getLogger(__name__)

MAX_WAIT_SECONDS = 30.0
"""Longest wait for memory without which the engine cannot start."""
SETTLED_SECONDS = 2.0
"""Time without a change after which memory that the engine can do without counts as taken for good."""
POLL_SECONDS = 0.25


class MemoryDemand(Struct, frozen=True):
    """Bytes of a GPU that an engine asks for."""

    needed: int
    """Bytes without which it cannot start: weights, state of recurrent layers, and a KV pool of a given size."""
    wanted: int
    """Bytes that it uses if they are free."""


_SCALES = ("scales", "weight_scale", "weight_scale_inv")
_PACKED_ZEROS = ("qzeros", "weight_zero_point")
"""Last components of names of tensors that the engine stores unpacked, one byte for each number."""


def weight_bytes(source: ModelSource, checkpoint: Checkpoint) -> int:
    """Return the bytes of all tensors of the checkpoint as the engine stores them.

    Weights have the engine's dtype, quantized weights the checkpoint's.
    """
    return sum(math.prod(tensor.shape) * _itemsize(tensor, source) for tensor in checkpoint.tensors.values())


def dummy_bytes(source: ModelSource) -> int:
    """Return the bytes of the weights of a model that is served without a checkpoint."""
    context = torch_build_context(torch.device("meta"), source.dtype, source.model.quantization)
    return model_bytes(build_model(source.model, context))


def adapter_bytes(config: StepConfig, source: ModelSource) -> int:
    """Return the bytes of the slots of adapters, 0 without --enable-lora."""
    if not config.max_adapters:
        return 0
    context = torch_build_context(torch.device("meta"), source.dtype, source.model.quantization)
    lora = LoraSlots(config.max_adapters, config.options.max_lora_rank, context.kernels.group_tokens)
    build_model(source.model, replace(context, lora=lora))
    return lora.num_bytes


def model_bytes(model: Loadable) -> int:
    """Return the bytes of all parameters of a model; its tensors may be on the meta device, without memory."""
    # Parameters may be views of one tensor.
    storages = [slot.parameter.untyped_storage() for slot in model.weight_slots()]
    return sum({id(storage): storage.nbytes() for storage in storages}.values())


def _itemsize(tensor: StoredTensor, source: ModelSource) -> int:
    last = tensor.name.rpartition(".")[2]
    if source.model.quantization is not None and last in _SCALES:
        return torch.float32.itemsize
    if last in _PACKED_ZEROS:
        return PER_WORD
    if tensor.dtype not in FLOAT_DTYPES:
        return TORCH_DTYPES[tensor.dtype].itemsize
    is_quantized_now = source.model.quantization == FP8_AT_LOAD and (
        tensor.name.endswith(("_proj.weight", "in_proj_qkv.weight", "in_proj_z.weight")) or ".experts." in tensor.name
    )
    return 1 if is_quantized_now else source.dtype.itemsize


def memory_demand(config: StepConfig, source: ModelSource, weights: int, total: int) -> MemoryDemand:
    """Compute the memory that an engine asks for on a GPU.

    weights, total: bytes of the weights, and of the GPU.
    """
    options = config.options
    pool = options.kv_memory if options.kv_memory is not None else (options.kv_tokens or 0) * source.token_bytes
    share = GPU_SHARE if options.gpu_memory is None else options.gpu_memory
    # The existing checks refuse a model that no GPU of this size holds.
    fixed = weights + adapter_bytes(config, source) + state_sizes(config, source).rows
    needed = min(fixed + pool, total)
    return MemoryDemand(needed, needed if pool else max(needed, int(total * share)))


def wait_for_memory(
    device: Device,
    demand: MemoryDemand,
    status: Status,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Wait until the memory that an engine asks for is free.

    Return False if it is not in the end. It waits up to MAX_WAIT_SECONDS for the memory that it needs to start, and for
    more until nothing has changed for SETTLED_SECONDS. The heartbeat reports this meanwhile.
    """
    start = changed = clock()
    before = free = device.free_bytes()
    while free < demand.wanted:
        now = clock()
        if free != before:
            before, changed = free, now
        if now - start >= MAX_WAIT_SECONDS or (free >= demand.needed and now - changed >= SETTLED_SECONDS):
            logger.warning(
                "%.2f of the %.2f GiB that the engine asks for are free after %.0f s; other processes hold the rest",
                free / GIB,
                demand.wanted / GIB,
                now - start,
            )
            return False
        status.enter(
            Phase.LOADING, 0, f"waiting for device memory: {free / GIB:.2f} of {demand.wanted / GIB:.2f} GiB free"
        )
        sleep(POLL_SECONDS)
        free = device.free_bytes()
    status.enter(Phase.LOADING)
    return True
