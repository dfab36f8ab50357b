"""The assembly of sleep: what releases memory, and what fills it again."""

import logging
from collections.abc import Callable

from tandem.engine_core.errors import ConfigError, SleepError
from tandem.engine_core.loader.weights import fill_with_noise, load_weights
from tandem.engine_core.memory.backup import Backup, FileBackup, PinnedBackup
from tandem.engine_core.memory.device_memory import DeviceMemory
from tandem.engine_core.memory.sleeping_memory import SleepingMemory
from tandem.engine_core.models.registry import Model, open_checkpoint
from tandem.engine_core.runtime.device import CpuDevice, Device
from tandem.engine_core.scheduler.sleep_switch import SleepSwitch
from tandem.engine_core.startup.model_weights import ModelWeights
from tandem.engine_core.startup.runtime import ModelSource
from tandem.engine_core.startup.sleep_ranges import SleepRanges
from tandem.engine_core.startup.weights import ActiveFiles
from tandem.protocol.engine_options import EngineOptions

logger = logging.getLogger(__name__)


def build_sleep(
    options: EngineOptions,
    ranges: SleepRanges,
    device: Device,
    source: ModelSource,
    weights: ModelWeights,
    draft: Model | None,
    files: ActiveFiles | None,
    has_updated: Callable[[], bool],
) -> SleepSwitch:
    """Join the parts of a sleep, and reserve memory for the weights on the host with --sleep-reserve.

    draft: the draft model, None without one; files: of the weights, None for dummy weights; has_updated: returns
    whether a trainer has replaced these. Raises ConfigError.
    """
    models = [weights.model] if draft is None else [weights.model, draft]
    backup: Backup = FileBackup()
    if device.kind == "cuda":
        backup = PinnedBackup(device.pin, device.synchronize, CpuDevice().free_bytes)
    if options.sleep_reserve:
        try:
            backup.reserve(sum(map(len, ranges.weights.tensors)))
        except SleepError as error:
            raise ConfigError(f"--sleep-reserve: {error}; leave it out") from None

    def has_folder() -> bool:
        return not has_updated() if files is None else files.folder is not None

    def reload() -> bool:
        if not has_folder():
            return False
        if files is None:
            fill_with_noise(weights.model)
        else:
            files.reload()
        return True

    def reload_draft() -> None:
        if draft is None or source.draft is None:
            return
        if files is None:
            fill_with_noise(draft)
        else:
            load_weights(draft, open_checkpoint(source.draft.directory, source.draft.model))

    tables = tables_of(ranges.weights, models)
    device.release_unused()
    logger.info("a sleep releases %d bytes of weights and %d of KV", ranges.weights.num_bytes, ranges.cache.num_bytes)
    given = backup, tables, device.free_bytes, device.release_unused, reload, reload_draft, has_folder
    return SleepSwitch(SleepingMemory(ranges.weights, ranges.cache, *given))


def tables_of(memory: DeviceMemory, models: list[Model]) -> list[int]:
    """Return the indices of the tensors that no checkpoint fills, such as tables of positions.

    A checkpoint fills each parameter whole that has a required slot (`loader.fit`).
    """
    slots = [slot for model in models for slot in model.weight_slots() if not slot.is_optional]
    filled = {slot.parameter.untyped_storage().data_ptr() for slot in slots}
    return [index for index, tensor in enumerate(memory.tensors) if tensor.data_ptr() not in filled]
