"""Assembly of what replaces the weights of an engine while it serves."""

import logging
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct, structs

from tandem.engine_core.errors import ConfigError, WeightsError
from tandem.engine_core.loader.checkpoint import Checkpoint
from tandem.engine_core.loader.transfer import Progress
from tandem.engine_core.model_config import ModelConfig
from tandem.engine_core.models.registry import open_checkpoint
from tandem.engine_core.scheduler.weight_switch import WeightSwitch
from tandem.engine_core.startup.checkpoint_stager import ProcessStager
from tandem.engine_core.startup.file_stamps import Stamp, weights_stamp
from tandem.engine_core.startup.model_weights import ModelWeights
from tandem.engine_core.startup.runtime import ModelSource
from tandem.engine_core.startup.served_model import ServedModel
from tandem.engine_core.weight_swaps import WeightSwaps
from tandem.engine_core.weight_version import number_of
from tandem.protocol.weights_file import WeightsFile, read_weights_file, write_weights_file

logger = logging.getLogger(__name__)

_WAY_OUT = "(tandem swap), after a sleep once the tag weights alone is awake, or restart the engine"


class ActiveWeights(Struct, frozen=True):
    """The checkpoint that an engine loads at its start, and the version of its weights."""

    checkpoint: Checkpoint
    version: str
    stamp: Stamp
    highest: int = 0
    """Highest number that a version has had."""


class ActiveFiles:
    """The files that the weights in memory came from, which may change on disk."""

    def __init__(self, weights: ModelWeights, config: ModelConfig, folder: Path, stamp: Stamp) -> None:
        """Keep the parts. config: of the model; folder, stamp: of the files."""
        self.folder: Path | None = folder
        """None: the weights are in no folder."""
        self.stamp = stamp
        self._weights = weights
        self._config = config

    def reload(self) -> None:
        """Load the weights again. Raises ConfigError if they are in no folder, or if its files are others now."""
        if self.folder is None:
            raise ConfigError("the weights before were in memory only")
        self._check(self.folder)
        self._weights.load(self.folder, self._config)
        self._check(self.folder)

    def _check(self, folder: Path) -> None:
        try:
            stamp = weights_stamp(open_checkpoint(folder, self._config))
        except ConfigError as error:
            raise ConfigError(f"{error}; swap to another checkpoint {_WAY_OUT}") from None
        if stamp != self.stamp:
            raise ConfigError(
                f"the files in {folder} have changed since they were loaded, and may hold other weights; swap to them "
                f"{_WAY_OUT}"
            )


def open_active(source: ModelSource, file: Path | None) -> ActiveWeights:
    """Open the checkpoint that served last: that of a swap, or else that of the model.

    If its files have changed since, or are lost, the version is a new one. file: of the supervisor, which notes what is
    loaded; None: there was no engine before. Raises ConfigError.
    """
    try:
        stored = WeightsFile() if file is None else read_weights_file(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the file of the weights cannot be read: {error}") from None
    highest = max(stored.highest, number_of(stored.version))
    try:
        checkpoint = open_checkpoint(Path(stored.path) if stored.path else source.directory, source.model)
    except ConfigError as error:
        if not stored.path:
            raise
        logger.error("the weights of version %s are lost, --model serves again: %s", stored.version, error)
        stored = WeightsFile("", str(highest + 1))
        checkpoint = open_checkpoint(source.directory, source.model)
    version, stamp = stored.version, weights_stamp(checkpoint)
    if stored.stamp and stamp != stored.stamp:
        version = str(highest + 1)
        logger.warning(
            "the files in %s have changed: they are version %s of the weights", checkpoint.directory, version
        )
    highest = max(highest, number_of(version))
    _note(file, WeightsFile(stored.path, version, stamp, highest))
    return ActiveWeights(checkpoint, version, stamp, highest)


def note_number(file: Path | None, number: int) -> None:
    """Note the highest number of a version for the next engine. file: as in `open_active`."""
    if file is not None:
        try:
            _note(file, structs.replace(read_weights_file(file), highest=number))
        except (OSError, ValueError) as error:
            logger.error("a restarted engine may give the version %d again: %s", number, error)


def _note(file: Path | None, contents: WeightsFile) -> bool:
    """Note the weights for the next engine; return False if that fails. file: None: there is none."""
    try:
        if file is not None:
            write_weights_file(file, contents)
    except OSError as error:
        logger.error("a restarted engine would have the weights before: %s", error)
        return False
    return True


def build_swaps(
    switch: WeightSwitch,
    source: ModelSource,
    weights: ModelWeights,
    files: ActiveFiles,
    file: Path | None,
    wake: Callable[[], None],
    on_swap: Callable[[], None],
    *,
    keeps_copy: bool,
) -> WeightSwaps:
    """Join what swaps need.

    files: of the weights so far; file: where the weights are noted for the next engine; wake: ends a wait of the loop;
    on_swap: called once other weights of a folder serve; keeps_copy: True to copy what is staged (--swap-copy).
    """
    parent = None if file is None else file.parent
    stager = ProcessStager(ServedModel.read(source.directory), wake, keeps_copy=keeps_copy, parent=parent)

    def load(path: str, progress: Progress) -> None:
        try:
            folder = stager.staged_folder(path)
            stamp = stager.stamp_of(open_checkpoint(folder, source.model), path)
        except ConfigError as error:
            raise WeightsError(str(error), is_intact=True) from None
        try:
            weights.swap(folder, files.reload, source.model, progress)
        except WeightsError as error:
            raise WeightsError(str(error).replace(str(folder), path), is_intact=error.is_intact) from error
        files.folder, files.stamp = Path(path), stamp

    def save(path: str, version: str) -> None:
        if _note(file, WeightsFile(path, version, files.stamp, switch.highest)):
            on_swap()

    return WeightSwaps(switch, stager, load, lambda: str(files.folder or ""), save)
