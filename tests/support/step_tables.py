"""Durations of steps as `benchmarks/kernels/bench_step_table.py` measured them on an H200, in milliseconds.

Each was timed once, so single ones are too long: a step takes no longer than any larger one.
"""

from msgspec import Struct

ROWS = (0, 8, 32, 64, 128, 192, 256)
"""Decoding rows of each column of a table of steps with prompts."""


class StepTable(Struct, frozen=True):
    """Durations of the steps of one model."""

    decode: dict[int, float]
    """Milliseconds of steps without prompts by rows."""
    mixed: dict[int, tuple[float, ...]]
    """Milliseconds of steps with prompts by the prompts' positions, for each of `ROWS` or for none."""

    def by_size(self) -> dict[tuple[int, int], float]:
        """Return all steps by (rows, tokens), none longer than a larger one."""
        sizes = {
            (rows, tokens): row[at] for tokens, row in self.mixed.items() for at, rows in enumerate(ROWS[: len(row)])
        }
        smoothed = {
            (rows, tokens): min(ms for (more, larger), ms in sizes.items() if more >= rows and larger >= tokens)
            for rows, tokens in sizes
        }
        return smoothed | {
            (rows, 0): min(ms for more, ms in self.decode.items() if more >= rows) for rows in self.decode
        }


LLAMA_1B = StepTable(
    {
        1: 0.70, 2: 0.84, 4: 0.85, 8: 0.87, 16: 0.88, 24: 0.91, 32: 0.94, 48: 1.00, 64: 1.00, 80: 1.09, 96: 1.09,
        112: 1.11, 128: 1.14, 160: 1.26, 192: 1.42, 224: 1.54, 256: 1.53,
    },
    {
        64: (0.98, 1.09, 1.11, 1.14, 1.40, 1.52, 1.69),
        128: (1.09, 1.22, 1.21, 1.37, 1.48, 1.67, 1.92),
        256: (1.38, 1.40, 1.51, 1.58, 1.85, 2.06, 2.17),
        384: (1.83, 1.84, 1.98, 2.03, 2.16, 2.66, 2.56),
        512: (2.06, 2.20, 2.33, 2.55, 2.48, 3.02, 2.95),
        768: (2.74, 2.82, 3.08, 3.15, 3.14, 3.44, 3.45),
        1024: (3.26, 3.50, 3.80, 3.86, 3.95, 4.15, 4.22),
        1536: (4.77, 4.85, 5.04, 5.20, 5.64, 5.72, 5.75),
        2048: (6.40, 6.91, 7.11, 6.97, 7.27, 7.44, 7.25),
        3072: (9.31,),
        4096: (12.16,),
        6144: (18.01,),
        8192: (25.17,),
    },
)  # fmt: skip
"""Llama 3.2 1B in bfloat16."""
LLAMA_8B = StepTable(
    {
        1: 3.77, 2: 3.99, 4: 4.04, 8: 4.04, 16: 4.10, 24: 4.21, 32: 4.27, 48: 4.68, 64: 4.56, 80: 4.84, 96: 5.02,
        112: 5.17, 128: 5.13, 160: 5.64, 192: 6.37, 224: 7.12, 256: 7.23,
    },
    {
        64: (4.51, 4.82, 5.03, 5.14, 6.29, 6.82, 8.23),
        128: (4.98, 5.29, 5.61, 6.26, 7.05, 8.11, 9.29),
        256: (6.58, 7.11, 8.08, 8.13, 9.21, 15.37, 10.76),
        384: (8.85, 9.24, 10.74, 14.53, 11.02, 13.69, 13.24),
        512: (10.58, 11.96, 13.25, 13.65, 14.31, 17.69, 17.98),
        768: (18.16, 16.23, 17.08, 20.08, 20.16, 21.34, 22.01),
        1024: (21.33, 23.20, 25.45, 24.28, 23.73, 26.61, 28.33),
        1536: (30.43, 30.77, 33.92, 35.83, 35.55, 36.60, 35.80),
        2048: (39.39, 42.76, 46.62, 46.28, 49.66, 51.14, 51.28),
        3072: (63.31,),
        4096: (83.49,),
        6144: (122.52,),
        8192: (172.12,),
    },
)  # fmt: skip
"""Llama 3.1 8B in bfloat16."""
LLAMA_8B_FP8 = StepTable(
    {
        1: 2.24, 2: 2.59, 4: 2.63, 8: 2.65, 16: 2.69, 24: 2.76, 32: 2.79, 48: 3.01, 64: 3.01,
        80: 3.77, 96: 3.77, 112: 3.78, 128: 3.83, 160: 5.43, 192: 5.43, 224: 5.43, 256: 5.43,
    },
    {
        64: (2.97, 3.76, 3.76, 3.79, 5.27, 5.61, 6.83),
        128: (3.63, 5.27, 5.27, 5.27, 5.27, 6.83, 6.83),
        256: (4.83, 6.43, 6.43, 6.43, 6.43, 7.32, 7.32),
        384: (6.17, 7.10, 7.10, 7.10, 7.10, 9.86, 9.86),
        512: (6.73, 9.46, 9.46, 9.46, 9.46, 11.11, 11.11),
        768: (10.35, 11.37, 11.37, 11.37, 11.37, 12.62, 12.62),
        1024: (11.97, 15.08, 15.08, 15.08, 15.08, 16.60, 16.60),
        1536: (18.03, 20.26, 20.26, 20.26, 20.26, 20.26, 21.01),
        2048: (23.98, 24.07, 24.36, 24.74, 25.50, 26.25, 27.01),
        3072: (36.11,),
        4096: (48.72,),
        6144: (73.10,),
        8192: (100.48,),
    },
)  # fmt: skip
"""Llama 3.1 8B with weights quantized online to FP8, commit 76d77a29."""
