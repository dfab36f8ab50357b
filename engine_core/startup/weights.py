"""Assembly of what replaces the weights of an engine while it serves."""

import logging
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from tandem.engine_core.errors import ConfigError, WeightsError
from tandem.engine_core.loader.checkpoint import Checkpoint
from tandem.engine_core.loader.transfer import Progress
from tandem.engine_core.models.registry import open_checkpoint
from tandem.engine_core.scheduler.weight_switch import WeightSwitch
from tandem.engine_core.startup.checkpoint_stager import ProcessStager
from tandem.engine_core.startup.model_weights import ModelWeights
from tandem.engine_core.startup.runtime import ModelSource
from tandem.engine_core.weight_swaps import WeightSwaps
from tandem.protocol.weights_file import WeightsFile, read_weights_file, write_weights_file

logger = logging.getLogger(__name__)


class ActiveWeights(Struct, frozen=True):
    """The checkpoint that an engine loads at its start, and the version of its weights."""

    checkpoint: Checkpoint
    version: str


def open_active(source: ModelSource, file: Path | None) -> ActiveWeights:
    """Open the checkpoint that served last: that of a swap, or else that of the model.

    file: of the supervisor; None: there was no swap. Raises ConfigError.
    """
    try:
        stored = WeightsFile() if file is None else read_weights_file(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the file of the weights cannot be read: {error}") from None
    if stored.path:
        try:
            return ActiveWeights(open_checkpoint(Path(stored.path), source.model), stored.version)
        except ConfigError as error:
            logger.error("the weights of version %s are lost, --model serves again: %s", stored.version, error)
    return ActiveWeights(open_checkpoint(source.directory, source.model), WeightsFile().version)


def build_swaps(
    switch: WeightSwitch,
    source: ModelSource,
    active: ActiveWeights,
    weights: ModelWeights,
    file: Path | None,
    wake: Callable[[], None],
    on_swap: Callable[[], None],
    *,
    keeps_copy: bool,
) -> WeightSwaps:
    """Join what swaps need.

    file: where the weights are noted for the next engine; wake: ends a wait of the loop; on_swap: called once other
    weights of a folder serve; keeps_copy: True to copy what is staged (--swap-copy).
    """
    parent = None if file is None else file.parent
    stager = ProcessStager(source.directory, wake, keeps_copy=keeps_copy, parent=parent)

    def load(path: str, progress: Progress) -> None:
        try:
            folder = stager.staged_folder(path)
        except ConfigError as error:
            raise WeightsError(str(error), is_intact=True) from None
        active = Path(swaps.active_path) if swaps.active_path else None
        try:
            weights.swap(folder, active, source.model, progress)
        except WeightsError as error:
            raise WeightsError(str(error).replace(str(folder), path), is_intact=error.is_intact) from error

    def save(path: str, version: str) -> None:
        try:
            if file is not None:
                write_weights_file(file, WeightsFile(path, version))
            on_swap()
        except OSError as error:
            logger.error("a restarted engine would have the weights before: %s", error)

    swaps = WeightSwaps(switch, stager, load, str(active.checkpoint.directory), save)
    return swaps
