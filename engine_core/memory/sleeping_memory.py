"""The memory that an engine gives back while it sleeps: its weights and its KV pool."""

import logging
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from tandem.engine_core.errors import ConfigError, DeviceMemoryError, SleepError
from tandem.engine_core.memory.backup import Backup
from tandem.engine_core.memory.device_memory import DeviceMemory
from tandem.protocol.commands import SleepTag

logger = logging.getLogger(__name__)


class SleepingMemory:
    """Implement `contracts.SleepMemory`. Called with nothing in flight on the device."""

    def __init__(
        self,
        weights: DeviceMemory,
        cache: DeviceMemory,
        backup: Backup,
        tables: Sequence[int],
        free_bytes: Callable[[], int],
        release_unused: Callable[[], None],
        reload: Callable[[], bool],
        reload_draft: Callable[[], None],
        find_folder: Callable[[], bool] = lambda: True,
    ) -> None:
        """Keep the parts.

        backup: for copies of the weights; tables: indices of the tensors of `weights` that no checkpoint fills;
        free_bytes: of the device; release_unused: releases what torch caches on it; reload: loads the weights from the
        folder that they came from, returns False if there is none; reload_draft: loads those of the draft model. Both
        raise ConfigError. find_folder: returns whether the weights are in a folder.
        """
        self._memory: dict[SleepTag, DeviceMemory] = {"weights": weights, "kv_cache": cache}
        self._backup = backup
        self._tables = tables
        self._free_bytes = free_bytes
        self._release_unused = release_unused
        self._reload = reload
        self._reload_draft = reload_draft
        self._find_folder = find_folder
        self._kept: list[Tensor] | None = None
        """Copies of the tables; None: the backup has a copy of everything."""

    @property
    def has_folder(self) -> bool:
        return self._find_folder()

    def release(self, tags: Collection[SleepTag], keep_weights: bool) -> int:
        if "weights" in tags:
            tensors = self._memory["weights"].tensors
            if keep_weights:
                self._backup.save(tensors)
            self._kept = None if keep_weights else [tensors[index].cpu().clone() for index in self._tables]
        before = self._free_bytes()
        released = 0
        for tag in tags:
            self._memory[tag].release()
            released += self._memory[tag].num_bytes
        self._release_unused()
        after = self._free_bytes()
        logger.info("%d bytes of %s released; %d bytes are free, %d before", released, _names(tags), after, before)
        return released

    def restore(self, tags: Collection[SleepTag]) -> None:
        # What a load or an update has used meanwhile, such as the buffer of an update, is in no use any more.
        self._release_unused()
        needed, free = sum(self._memory[tag].num_bytes for tag in tags), self._free_bytes()
        if needed > free:
            raise SleepError(f"{_names(tags)} take {needed} bytes, but {free} are free; try again later", is_lack=True)
        restored: list[SleepTag] = []
        try:
            for tag in tags:
                self._memory[tag].restore()
                restored.append(tag)
            if "weights" in tags:
                self._fill()
        except (DeviceMemoryError, ConfigError, SleepError, RuntimeError, OSError) as error:
            for tag in restored:
                self._memory[tag].release()
            is_lack = isinstance(error, DeviceMemoryError | torch.OutOfMemoryError)
            numbers = f" ({needed} bytes are needed, {self._free_bytes()} are free)" if is_lack else ""
            raise SleepError(f"{_names(tags)} cannot be restored: {error}{numbers}", is_lack=is_lack) from error

    def reload(self) -> bool:
        try:
            return self._reload()
        except Exception as error:  # Layers may raise anything on a bad checkpoint.
            logger.exception("the weights cannot be loaded again")
            raise SleepError(f"the weights cannot be loaded again: {error}") from error

    def _fill(self) -> None:
        tensors, kept = self._memory["weights"].tensors, self._kept
        if kept is None:
            self._backup.load(tensors)
            return
        for index, copy in zip(self._tables, kept, strict=True):
            tensors[index].copy_(copy)
        self._reload_draft()


def _names(tags: Collection[SleepTag]) -> str:
    return " and ".join(sorted(tags, reverse=True))
