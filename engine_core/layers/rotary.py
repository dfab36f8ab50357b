"""The table of rotary position embedding: cosines and sines of every position."""

import math

import torch
from torch import Tensor

from tandem.engine_core.model_config import RopeConfig


class RotaryTable:
    """Cosines and sines of every position, in float32 as in transformers.

    They are looked up once a step for all layers that share them.
    """

    def __init__(self, table: Tensor) -> None:
        """Keep the table, [positions, 2, head_dim] float32.

        It holds cosines, then sines with the first half negated (see `rope`).
        """
        self.table = table

    @classmethod
    def build(cls, config: RopeConfig, head_dim: int, positions: int, device: torch.device) -> "RotaryTable":
        """Compute the table of positions 0 to `positions - 1`."""
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies(config, head_dim))
        cos, sin = angles.cos(), angles.sin()
        table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)
        return cls(table.to(device))

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Look up cosines and signed sines, each [T, 1, head_dim] float32.

        positions: [T] int64.
        """
        rows = self.table.index_select(0, positions)
        return rows[:, :1], rows[:, 1:]


def frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """Return the frequency of each pair of a head, [head_dim / 2] float32.

    A frequency is the angle, in radians, by which a pair turns in one position. "linear" divides all frequencies by the
    factor (Chen et al., 2023). "llama3" (Llama 3.1) divides the slow ones by the factor, keeps the fast ones and blends
    in between; slow and fast are measured by the wavelength relative to the original context.
    """
    base = 1.0 / config.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if config.kind == "linear":
        return base / config.factor
    if config.kind == "llama3":
        turns = config.original_max_positions / (2 * math.pi / base)
        span = config.high_freq_factor - config.low_freq_factor
        blend = ((turns - config.low_freq_factor) / span).clamp(0, 1)
        return (1 - blend) * base / config.factor + blend * base
    return base
