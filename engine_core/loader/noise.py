"""Random weights of a model's shape: speed can be measured without a checkpoint."""

import torch

from tandem.engine_core.loader.slots import Loadable


def fill_with_noise(model: Loadable, scale: float = 0.02) -> None:
    """Fills every weight from a fixed seed: norms with ones, the rest with normal noise of deviation `scale`."""
    with torch.inference_mode():
        for name, slot in sorted(model.weight_slots().items()):
            generator = torch.Generator(slot.target.device).manual_seed(0)
            if "norm" in name:
                slot.target.fill_(1.0)
            else:
                slot.target.normal_(0.0, scale, generator=generator)
