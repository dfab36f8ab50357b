"""Checks of the scales, zero points and groups of a checkpoint before a swap: what loading would refuse of them."""

from collections.abc import Iterable

import torch
from torch import Tensor

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.layers.kv_scales import KEY_NAMES, VALUE_NAMES
from tandem.engine_core.layers.linear_choice import torch_build_context
from tandem.engine_core.loader.checkpoint import Checkpoint, read_stored
from tandem.engine_core.loader.fit import check_fit
from tandem.engine_core.loader.slots import WeightSlot
from tandem.engine_core.model_config import ModelConfig
from tandem.engine_core.models.registry import build_model

KV_SCALES = tuple(f".self_attn.{name}" for name in (*KEY_NAMES, *VALUE_NAMES))
"""Suffixes of the names of KV scales."""
_SCALES = ("scale", "scales", "scale_inv", "scale_2", "global_scale", "scale_weight")
"""Last parts of the names of scales."""
_OTHERS = ("qzeros", "weight_zero_point", "g_idx")
"""The same of zero points and of the groups of inputs."""


def check_values(base: Checkpoint, found: Checkpoint, config: ModelConfig) -> None:
    """Check that the tensors of a checkpoint fit its model, and the values of those beside its weights.

    They are passed through the transforms of their slots, as by loading. A scale of 0 is refused where that of the base
    is another number. config: of the checkpoint. Raises ConfigError with the name of a tensor and its values.
    """
    context = torch_build_context(torch.device("meta"), torch.float32, config.quantization)
    slots = build_model(config, context, checkpoint=found).weight_slots()
    check_fit(found, slots)
    by_name: dict[str, list[WeightSlot]] = {}
    for slot in slots:
        by_name.setdefault(slot.name, []).append(slot)
    for name, tensor in found.tensors.items():
        last = name.rpartition(".")[2]
        if not last.endswith((*_SCALES, *_OTHERS)):
            continue
        stored = read_stored(tensor)
        own = by_name.get(name, ())
        if last.endswith(_SCALES):
            _check_scales(name, stored.float(), base, is_read=bool(own))
        _check_transforms(own, stored)


def _check_scales(name: str, scales: Tensor, base: Checkpoint, *, is_read: bool) -> None:
    """Check the scales of a tensor. is_read: False if loading leaves it out."""
    wrong = ~scales.isfinite()
    if wrong.any():
        raise _refusal(name, wrong, scales, "not finite")
    if not is_read:
        return
    if name.endswith(KV_SCALES):  # 0 stands for none.
        if (scales < 0).any():
            raise _refusal(name, scales < 0, scales, "negative")
        return
    zero = scales == 0
    if not zero.any() or (other := base.tensors.get(name)) is None or other.shape != tuple(scales.shape):
        return
    lost = zero & (read_stored(other).float() != 0)
    if lost.any():
        raise _refusal(name, lost, scales, f"zero, but not in {base.directory}")


def _refusal(name: str, wrong: Tensor, scales: Tensor, what: str) -> ConfigError:
    example = scales[wrong].flatten()[0].item()
    return ConfigError(f"{name}: {int(wrong.sum())} of {wrong.numel()} scales are {what}, such as {example:g}")


def _check_transforms(slots: Iterable[WeightSlot], stored: Tensor) -> None:
    for slot in slots:
        part = stored
        if slot.source is not None:
            part = stored.narrow(slot.source.dim, slot.source.start, slot.source.stop - slot.source.start)
        if slot.transform is not None:
            slot.transform(part)
