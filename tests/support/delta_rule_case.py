"""Random weights and inputs of a recurrent layer, run step by step with any implementation."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.engine_core.kernels.delta_rule.state import DeltaRuleShape, DeltaRuleState, TokenRows
from tandem.engine_core.kernels.kernel_set import KernelSet

SMALL = DeltaRuleShape(key_heads=2, value_heads=4, key_dim=16, value_dim=32, conv_width=4)
Work = tuple[int, int, int]
"""Table row, first position, number of positions."""
Drafted = tuple[int, int, int, int]
"""Table row, position of its token that is no draft, number of drafts, number of these that are right."""
STEPS: list[tuple[list[Work], int]] = [
    ([(1, 0, 1), (2, 0, 2), (3, 0, 3), (4, 0, 130)], 1),
    ([(1, 1, 1), (2, 2, 1), (5, 0, 70), (3, 3, 1), (4, 130, 17)], 2),
    ([(2, 3, 1), (3, 4, 1), (4, 147, 1), (1, 2, 40), (5, 70, 5)], 3),
    *(
        ([(row, start + step, 1) for row, start in ((1, 42), (2, 4), (3, 5), (4, 148), (5, 75))], 5)
        for step in range(18)
    ),
]
"""Rows of steps, and how many of them run as single tokens: prompts and chunks, decode rows, both at once, and every
row across a multiple of the ring's size."""


class DeltaRuleCase:
    """Inputs of whole sequences, by table row, and the memory of one implementation."""

    def __init__(
        self,
        kernels: KernelSet,
        lengths: Sequence[int],
        shape: DeltaRuleShape = SMALL,
        *,
        ring: int = 16,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        max_drafts: int = 0,
    ) -> None:
        """Draw inputs. lengths: of the sequences in rows 1, 2 and so on."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*sizes: int, scale: float = 1.0) -> Tensor:
            return (scale * torch.randn(*sizes, generator=generator)).to(device)

        self.kernels, self.shape = kernels, shape
        width = shape.channels + shape.values + 2 * shape.value_heads
        # Slow decays, so that errors of a state stay.
        self.inputs = [normal(length, width).to(dtype) for length in lengths]
        self.conv = normal(shape.channels, 1, shape.conv_width, scale=0.5).to(dtype)
        self.a_log, self.dt_bias = normal(shape.value_heads) - 3, normal(shape.value_heads)
        self.weight = (1 + normal(shape.value_dim, scale=0.2)).to(dtype)
        self.state = DeltaRuleState.allocate(shape, len(lengths) + 1, dtype, torch.device(device), ring, max_drafts)
        for tensor in self.tensors:
            tensor.copy_(normal(*tensor.shape, scale=50))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.state.tensors

    def step(self, work: Sequence[Work], num_single: int = 0, padding: int = 0) -> Tensor:
        """Run one step and return the outputs of all tokens, padding included, [T, values].

        num_single: number of leading entries of one position that run as single tokens; padding: number of padding
        tokens after these, and again at the end.
        """
        parts, rows, positions = [], [], []

        def pad() -> None:
            parts.append(torch.full_like(self.inputs[0][:1], torch.nan).expand(padding, -1))
            rows.extend([0] * padding)
            positions.extend([0] * padding)

        for index, (row, start, length) in enumerate(work):
            if index == num_single:
                pad()
            parts.append(self.inputs[row - 1][start : start + length])
            rows += [row] * length
            positions += range(start, start + length)
        pad()
        x, device = torch.cat(parts), self.conv.device
        tokens = TokenRows(
            torch.tensor(rows, dtype=torch.int32, device=device),
            torch.tensor(positions, dtype=torch.int32, device=device),
            num_single + (padding if num_single else 0) if num_single < len(work) else len(rows),
            len(work) - num_single,
        )
        return self._run(x, tokens)

    def verify(self, work: Sequence[Drafted], queries: int) -> Tensor:
        """Run one step of rows with drafts and return the outputs of all tokens, [rows * queries, values].

        A wrong draft, and all after it, have the inputs of another row, NaN for every other row of the memory.
        """
        parts, rows, positions = [], [], []
        for row, start, drafts, right in work:
            wrong = self.inputs[row % len(self.inputs)][: queries - 1 - right]
            if row % 2 == 0:
                wrong = torch.full_like(wrong, torch.nan)
            own = self.inputs[row - 1][start : start + 1 + right]
            parts += [own, wrong]
            rows += [row] * (1 + drafts) + [0] * (queries - 1 - drafts)
            positions += [start + min(index, drafts) for index in range(queries)]
        device = self.conv.device
        tokens = TokenRows(
            torch.tensor(rows, dtype=torch.int32, device=device),
            torch.tensor(positions, dtype=torch.int32, device=device),
            queries=queries,
        )
        return self._run(torch.cat(parts), tokens)

    def _run(self, x: Tensor, tokens: TokenRows) -> Tensor:
        pieces, shape = self.kernels.find_pieces(tokens), self.shape
        gate = x[:, shape.channels : shape.channels + shape.values]
        gates = x[:, shape.channels + shape.values :]
        qkv = self.kernels.short_conv(x, self.conv, shape, self.state, tokens, pieces)
        mixed = self.kernels.delta_rule(qkv, gates, self.a_log, self.dt_bias, shape, self.state, tokens, pieces)
        return self.kernels.gated_norm(mixed, gate, self.weight, 1e-6, tokens)
