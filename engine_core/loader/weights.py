"""The filling of a model from a checkpoint."""

import torch

from tandem.engine_core.loader.checkpoint import Checkpoint
from tandem.engine_core.loader.fit import check_fit
from tandem.engine_core.loader.slots import Loadable, WeightSlot
from tandem.engine_core.loader.transfer import Progress, transfer


def fill_with_noise(model: Loadable, scale: float = 0.02) -> None:
    """Fill every weight from a fixed seed.

    Norms get ones, integers any of their values, and the rest normal noise of deviation `scale`.
    """
    with torch.inference_mode():
        for slot in sorted(model.weight_slots(), key=lambda item: item.name):
            generator = torch.Generator(slot.target.device).manual_seed(0)
            if "norm" in slot.name:
                slot.target.fill_(1.0)
            elif slot.target.is_floating_point():
                slot.target.normal_(0.0, scale, generator=generator)
            else:
                slot.target.random_(generator=generator)


def load_weights(
    model: Loadable,
    checkpoint: Checkpoint,
    progress: Progress | None = None,
    threads: int | None = None,
) -> None:
    """Copy the tensors of a checkpoint into a model's parameters.

    Tensors are cast to the parameters' dtypes. They are read in pieces by several threads, so that the host holds only
    the pieces (see `transfer`). The parameters keep their storage, which captured graphs may hold.

    progress: called with the bytes that are read, and of all that will be; threads: those that read, None for as many
    as suit the device.

    Raises ConfigError if the tensors do not fit the model (see `check_fit`), which then is unchanged, or if a file
    cannot be read.
    """
    with torch.inference_mode():
        slots = model.weight_slots()
        check_fit(checkpoint, slots)
        transfer(_needed(checkpoint, slots), checkpoint, progress, threads)


def _needed(checkpoint: Checkpoint, slots: list[WeightSlot]) -> list[WeightSlot]:
    """Return the slots whose tensors are there, without those that repeat a tied one."""
    present = [slot for slot in slots if slot.name in checkpoint.tensors]
    names = {slot.name for slot in present}
    return [slot for slot in present if slot.tied_to is None or slot.tied_to not in names]
