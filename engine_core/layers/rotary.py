"""Rotary position embedding tables: cosines and sines of every position.

A table is computed once, for positions up to `--max-len`, because keys stay rotated in the KV cache. Two scalings
depend on the context length, which is `--max-len` here, as in vLLM; transformers uses the current length of a sequence:

- "dynamic": the base grows with the length beyond `max_position_embeddings`. Up to there both agree. With a larger
  --max-len every sequence uses the angles of one of --max-len positions in transformers.
- "longrope": above `original_max_position_embeddings` the long factors apply, else the short ones. With a --max-len up
  to there, both agree; with a larger one every sequence uses the long factors, even short ones, whereas
  transformers would recompute all keys of a sequence when it grows past that length.
"""

import math

import torch
from torch import Tensor

from tandem.engine_core.rope_config import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    QueryScaling,
    RopeConfig,
    YarnScaling,
)

SLICE = 1 << 16
"""Positions computed at once on the host: a table of a million positions takes 1 GiB, and intermediates more."""


class RotaryTable:
    """Cosines and sines of every position, in float32 as in transformers.

    They are looked up once per step for all layers that share them.
    """

    def __init__(self, table: Tensor) -> None:
        """Store the table, [positions, 2, rotary_dim] float32.

        It holds cosines, then sines with the first half negated (see `rope`).
        """
        self.table = table

    @classmethod
    def build(cls, config: RopeConfig, positions: int, device: torch.device) -> "RotaryTable":
        """Compute the table of positions 0 to `positions - 1`.

        positions: also the context length, which two scalings depend on (see the module docstring).
        """
        turning, scale = frequencies(config, positions), attention_factor(config)
        table = torch.empty(positions, 2, 2 * len(turning), device=device)
        if device.type == "meta":
            return cls(table)
        for first in range(0, positions, SLICE):
            part = table[first : first + SLICE]
            angles = torch.outer(torch.arange(first, first + len(part), dtype=torch.float32), turning)
            cos, sin = angles.cos() * scale, angles.sin() * scale
            part.copy_(torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1))
        return cls(table)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Look up cosines and signed sines, each [T, 1, rotary_dim] float32.

        positions: [T] int64.
        """
        rows = self.table.index_select(0, positions)
        return rows[:, :1], rows[:, 1:]


def query_scale_table(
    scaling: QueryScaling | None, positions: int, device: torch.device, dtype: torch.dtype
) -> Tensor | None:
    """Return the factors of queries at positions 0 to `positions - 1`, [positions, 1, 1]; None if all are 1."""
    if scaling is None or positions <= scaling.original_positions:
        return None
    contexts = torch.arange(positions, device=device) // scaling.original_positions
    return (1 + scaling.beta * torch.log1p(contexts.float())).to(dtype).view(-1, 1, 1)


def attention_factor(config: RopeConfig) -> float:
    """Return the factor of cosines and sines.

    It is squared in the QK dot products.
    """
    scaling = config.scaling
    return scaling.attention_factor if isinstance(scaling, YarnScaling | LongRopeScaling) else 1.0


def frequencies(config: RopeConfig, positions: int) -> Tensor:
    """Return the frequency of each pair of a head, [rotary_dim / 2] float32.

    A frequency is the rotation angle per position, in radians. positions: context length.
    """
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim
    base = 1.0 / config.theta**exponents
    match config.scaling:
        case LinearScaling(factor):
            return base / factor
        case DynamicScaling(factor, original):
            growth = factor * max(positions, original) / original - (factor - 1)
            theta: float = config.theta * growth ** (config.rotary_dim / (config.rotary_dim - 2))
            return 1.0 / theta**exponents
        case Llama3Scaling() as llama3:
            return _llama3(base, llama3)
        case YarnScaling() as yarn:
            return _yarn(base, yarn, config)
        case LongRopeScaling() as longrope:
            long = positions > longrope.original_positions
            return base / torch.tensor(longrope.long_factor if long else longrope.short_factor)
        case ProportionalScaling(factor, turning):
            return torch.where(torch.arange(len(base)) < turning, base / factor, 0.0)
        case None:
            return base


def _llama3(base: Tensor, scaling: Llama3Scaling) -> Tensor:
    turns = scaling.original_positions / (2 * math.pi / base)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    blend = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
    return (1 - blend) * base / scaling.factor + blend * base


def _yarn(base: Tensor, scaling: YarnScaling, config: RopeConfig) -> Tensor:
    def pair_of(turns: float) -> float:
        # Fractional index of the pair with this number of rotations within the original context.
        wavelength = scaling.original_positions / (turns * 2 * math.pi)
        return config.rotary_dim * math.log(wavelength) / (2 * math.log(config.theta))

    first, last = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.rotary_dim - 1)
    # A ramp of zero width is a step.
    width = last - first or 0.001
    slow = ((torch.arange(len(base), dtype=torch.float32) - first) / width).clamp(0, 1)
    return base / scaling.factor * slow + base * (1 - slow)
