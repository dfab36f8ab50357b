"""Tables of tokens whose rows have some of them, for the kernels that read no sampling parameters."""

import torch
from torch import Tensor

from tandem.engine_core.kernels.sampling.inputs import FLOAT_COLUMNS, INT_COLUMNS, SamplingTables


def tables_of(tokens: Tensor, seed: int = 0) -> SamplingTables:
    """Return tables over a token table, [R, max_len] int32.

    Rows have random lengths of at least 1; about a quarter of them have reached their limit.
    """
    rows, max_len = tokens.shape
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, max_len, (rows,), generator=generator)
    at_limit = torch.rand(rows, generator=generator) < 0.25
    ints = torch.zeros(rows, len(INT_COLUMNS), dtype=torch.int64)
    ints[:, INT_COLUMNS.index("total_len")] = torch.where(at_limit, lengths, max_len)
    lengths[0], ints[0] = 1, 0
    none = torch.zeros(rows, 1, dtype=torch.int32, device=tokens.device)
    floats = torch.zeros(rows, len(FLOAT_COLUMNS), device=tokens.device)
    return SamplingTables(
        tokens, ints.to(tokens.device), floats, torch.stack([none, none]), none, lengths.int().to(tokens.device)
    )
