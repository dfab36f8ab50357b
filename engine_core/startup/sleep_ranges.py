"""Memory of the device that an engine can give back: weights, KV pool and recurrent states are allocated in it."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from msgspec import Struct

from tandem.engine_core.errors import ConfigError, DeviceMemoryError
from tandem.engine_core.memory.cuda_memory import CudaMemory, open_driver
from tandem.engine_core.memory.device_memory import CACHE, WEIGHTS, AllocatedIn, DeviceMemory
from tandem.engine_core.memory.host_memory import HostMemory
from tandem.engine_core.runtime.device import Device
from tandem.protocol.engine_options import EngineOptions

logger = logging.getLogger(__name__)


class SleepRanges(Struct, frozen=True):
    """Memory of the device that is released during a sleep."""

    device: torch.device
    weights: DeviceMemory
    cache: DeviceMemory
    """Of the KV pool and of recurrent states."""

    @contextmanager
    def hold_weights(self) -> Iterator[None]:
        """Allocate the weights of models that are built in this context."""
        with AllocatedIn(self.weights, self.device, WEIGHTS):
            yield

    @contextmanager
    def hold_cache(self) -> Iterator[None]:
        """Allocate KV pools and recurrent states in this context."""
        with AllocatedIn(self.cache, self.device, CACHE):
            yield


@contextmanager
def outside() -> Iterator[None]:
    """Allocate as usual in this context."""
    yield


def check_sleep_flags(options: EngineOptions) -> None:
    """Raise ConfigError for --sleep-reserve on an engine that never sleeps."""
    if options.sleep_reserve and not options.enable_weight_updates:
        raise ConfigError("--sleep-reserve is for engines that can sleep; add --enable-weight-updates or leave it out")


def open_ranges(options: EngineOptions, device: Device) -> SleepRanges | None:
    """Return memory that can be released; None without --enable-weight-updates, or if the device has none.

    Ranges of a GPU take addresses only, until something is allocated.
    """
    if not options.enable_weight_updates:
        return None
    if device.kind == "cpu":
        return SleepRanges(device.torch_device, HostMemory(), HostMemory())
    try:
        given = open_driver(), device.torch_device, device.total_bytes(), device.synchronize
        _try(CudaMemory(*given))
        return SleepRanges(device.torch_device, CudaMemory(*given), CudaMemory(*given))
    except Exception as error:  # The bindings raise errors of their own.
        logger.warning("the engine cannot sleep, as virtual memory of this GPU does not work: %s", error)
        return None


def _try(memory: DeviceMemory) -> None:
    """Raise an error unless a tensor keeps its address over a release. Only the bindings of the driver are in doubt."""
    tensor = memory.allocate(1).fill_(1)
    memory.release()
    memory.restore()
    if tensor.data_ptr() != memory.tensors[0].data_ptr() or tensor.item() != 0:
        raise DeviceMemoryError("a tensor has lost its memory")
