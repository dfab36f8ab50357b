"""GPU properties that kernels and launch plans depend on.

Read once at startup (`runtime.device.read_gpu_traits`) and passed down from there.
"""

from dataclasses import dataclass

from tandem.engine_core.kernels.tiles.table import NO_TABLE, TileTable

LOWEST_CAPABILITY = (8, 0)
"""Lowest supported compute capability: the kernels need bfloat16 matmuls and asynchronous copies."""
FP8_CAPABILITY = (8, 9)
"""Lowest compute capability with float8 e4m3 conversions and matmuls."""
BARRIER_BYTES = 256
"""Upper bound on the shared memory of a program's barriers, in bytes, in addition to its buffers."""


@dataclass(frozen=True, slots=True)
class GpuTraits:
    """Properties of one GPU that launches depend on."""

    name: str
    capability: tuple[int, int]
    """Compute capability, major and minor."""
    multiprocessors: int
    """Number of streaming multiprocessors (SMs)."""
    shared_memory: int
    """Maximum shared memory per program in bytes (CUDA's opt-in limit per block)."""
    tiles: TileTable = NO_TABLE
    """Tile table measured on this type of GPU."""

    @property
    def pdl(self) -> bool:
        """True if kernels can use programmatic dependent launch (PDL)."""
        return self.capability >= (9, 0)

    def max_stages(self, stage_bytes: int, other_bytes: int = 0, *, warpgroup: bool) -> int:
        """Return the maximum number of software pipeline stages that fit in shared memory.

        stage_bytes: loaded by one stage; other_bytes: other shared memory of the program; warpgroup: the matmuls are
        large enough for Hopper's and Blackwell's warpgroup instructions, which read shared memory and so need a buffer
        for every stage. Otherwise operands pass through registers, and the stage in use needs no buffer.
        """
        buffers = (self.shared_memory - other_bytes - BARRIER_BYTES) // stage_bytes
        from_shared = warpgroup and self.capability[0] in (9, 10, 11)
        return max(1, buffers if from_shared else buffers + 1)
