"""The assembly of external updates of the weights."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from msgspec import structs

from tandem.engine_core.control import Control
from tandem.engine_core.model_config import ModelConfig
from tandem.engine_core.models.text_backbone import text_name
from tandem.engine_core.scheduler.weight_switch import WeightSwitch
from tandem.engine_core.startup.model_weights import ModelWeights
from tandem.engine_core.weight_updates.external_updates import ExternalUpdates
from tandem.engine_core.weight_updates.group import GroupInfo, TransferGroup
from tandem.engine_core.weight_updates.hosts import AllowedHosts, allowed_address, parse_hosts
from tandem.protocol.engine_options import EngineOptions

logger = logging.getLogger(__name__)


def transfer_backend(options: EngineOptions, device: str) -> str:
    """Return the backend by which trainers send weights, "" if they may not. device: "cpu" or "cuda"."""
    if not options.enable_weight_updates:
        return ""
    return "nccl" if device == "cuda" else "gloo"


def build_updates(
    options: EngineOptions,
    switch: WeightSwitch,
    weights: ModelWeights,
    config: ModelConfig,
    device: torch.device,
    wake: Callable[[], None],
    on_change: Callable[[], None],
) -> ExternalUpdates:
    """Build the external updates of a model. Raises ConfigError for --weight-update-hosts that are none."""
    join = partial(_join, device=device, allowed=parse_hosts(options.weight_update_hosts))
    rename = partial(text_name, multimodal=config.multimodal)
    return ExternalUpdates(switch, weights, rename, join, device, options.update_timeout, wake, on_change)


def _join(info: GroupInfo, seconds: float, device: torch.device, allowed: AllowedHosts) -> TransferGroup:
    """Join the group of a trainer. The libraries are imported here: an engine without updates needs none of them."""
    if info.address:
        info = structs.replace(info, address=allowed_address(info.address, info.port, allowed))
    if device.type == "cuda":
        from tandem.engine_core.weight_updates.nccl_group import NcclGroup

        return NcclGroup.join(info, seconds, device, allowed)
    from tandem.engine_core.weight_updates.gloo_group import GlooGroup

    return GlooGroup.join(info, seconds)


class UpdatedMark:
    """File that exists while the weights in memory are not, or were not, those on disk."""

    def __init__(self, file: Path | None) -> None:
        """file: None for an engine that is not restarted."""
        self._file = file

    @property
    def is_set(self) -> bool:
        """True if an engine before this one had other weights."""
        return self._file is not None and self._file.exists()

    def set(self) -> None:
        """Note that the weights are other ones now."""
        if self._file is not None:
            self._file.touch()

    def clear(self) -> None:
        """Note that the weights on disk are those to serve."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)


def guard_restart(control: Control, mark: UpdatedMark) -> None:
    """Start paused if the engine before had other weights than those on disk, and clear the mark at a resume."""
    if mark.is_set:
        logger.warning("paused: the weights that a trainer sent are lost, those on disk are loaded; update or resume")
        control.pause.mode = "keep"

    def clear() -> None:
        # A resume with weights of this engine's own says nothing about those on disk.
        if not control.weights.version.number and control.weights.is_complete:
            mark.clear()

    control.on_resume = clear
