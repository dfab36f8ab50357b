"""Memory for a forward pass that runs beside those of graphs."""

import torch
from torch import Tensor

from tandem.engine_core.runtime.captured import SamplePlaces


def places_like(logits: Tensor) -> SamplePlaces:
    """Allocate places for as many samples, so that those of the graphs keep what they hold."""
    rows, positions = torch.zeros(2, len(logits), dtype=torch.int32, device=logits.device)
    return SamplePlaces(rows, positions, torch.empty_like(logits))
