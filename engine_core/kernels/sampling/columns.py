"""Columns of the parameter tables, as constants for kernels.

A column that only one kernel reads is defined next to that kernel.
"""

import triton.language as tl

from tandem.engine_core.kernels.sampling.inputs import FLOAT_COLUMNS, INT_COLUMNS

NUM_INTS = tl.constexpr(len(INT_COLUMNS))
NUM_FLOATS = tl.constexpr(len(FLOAT_COLUMNS))
TEMPERATURE = tl.constexpr(FLOAT_COLUMNS.index("temperature"))
TOP_P = tl.constexpr(FLOAT_COLUMNS.index("top_p"))
TOP_K = tl.constexpr(INT_COLUMNS.index("top_k"))
TOTAL_LEN = tl.constexpr(INT_COLUMNS.index("total_len"))
