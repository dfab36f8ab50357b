"""Replacement of a running model's weights, in the storage that captured graphs read."""

import logging
from collections.abc import Callable
from pathlib import Path

import torch

from tandem.engine_core.errors import WeightsError
from tandem.engine_core.kv_cache.storage import KVLayout
from tandem.engine_core.loader.slots import WeightSlot
from tandem.engine_core.loader.transfer import Progress
from tandem.engine_core.loader.weights import finish, load_weights
from tandem.engine_core.model_config import ModelConfig
from tandem.engine_core.models.registry import Model, open_checkpoint
from tandem.engine_core.startup.kv_calibration import calibrate_kv_scales

logger = logging.getLogger(__name__)


class ModelWeights:
    """The weights of a model that has been built and filled."""

    def __init__(self, model: Model, layout: KVLayout, dtype: torch.dtype, max_len: int) -> None:
        """Keep the model. layout: of the KV pool; dtype: of the model; max_len: maximum positions of a sequence."""
        self.model = model
        self.layout = layout
        self.dtype = dtype
        self.max_len = max_len

    def slots(self) -> list[WeightSlot]:
        """Return the slots of a new filling.

        Some are of temporary tensors, so `finish` needs the same list. KV scales are unknown until they are filled.
        """
        self.model.kv_scales.values.zero_()
        return self.model.weight_slots()

    def finish(self, slots: list[WeightSlot]) -> None:
        """Run the callbacks of filled slots, and calibrate KV scales that were not filled. Raises ConfigError."""
        with torch.inference_mode():
            finish(slots)
        calibrate_kv_scales(self.model, self.layout, self.dtype, self.max_len)

    def load(self, directory: Path, config: ModelConfig, progress: Progress | None = None) -> None:
        """Replace the weights by those of a checkpoint.

        config: of the checkpoint; progress: as in `load_weights`. Raises ConfigError; then some weights may be others.
        """
        checkpoint = open_checkpoint(directory, config)
        with torch.inference_mode():
            self.model.kv_scales.values.zero_()
        load_weights(self.model, checkpoint, progress)
        calibrate_kv_scales(self.model, self.layout, self.dtype, self.max_len)

    def swap(
        self, directory: Path, reload: Callable[[], None], config: ModelConfig, progress: Progress | None = None
    ) -> None:
        """Replace the weights by those of a checkpoint, or load those before again if that fails.

        reload: loads those before, raises ConfigError if they are in no folder; progress: as in `load_weights`. Raises
        WeightsError.
        """
        try:
            self.load(directory, config, progress)
        except Exception as error:  # Layers may raise anything on a bad checkpoint; the engine continues.
            logger.exception("%s could not be loaded", directory)
            raise WeightsError(f"{directory} could not be loaded: {error}", is_intact=_succeeds(reload)) from error


def _succeeds(reload: Callable[[], None]) -> bool:
    try:
        reload()
    except Exception:
        logger.exception("the weights before could not be loaded again either")
        return False
    return True
