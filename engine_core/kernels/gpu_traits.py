"""Traits of a GPU that kernels and their choosers depend on.

It is read once at start (`runtime.device.read_gpu_traits`) and handed down from there.
"""

from dataclasses import dataclass

from tandem.engine_core.kernels.tiles.table import NO_TABLE, TileTable

LOWEST_CAPABILITY = (8, 0)
"""Lowest compute capability that the kernels are written for: bfloat16 products and asynchronous copies need it."""
FP8_CAPABILITY = (8, 9)
"""Lowest compute capability that converts and multiplies float8 e4m3."""
BARRIER_BYTES = 256
"""Bytes of shared memory, rounded up, that a program's barriers take beside its buffers."""


@dataclass(frozen=True, slots=True)
class GpuTraits:
    """The properties of one GPU on which launches depend."""

    name: str
    capability: tuple[int, int]
    """Compute capability, major and minor."""
    multiprocessors: int
    """Number of streaming multiprocessors (SMs)."""
    shared_memory: int
    """Most bytes of shared memory that one program can have (CUDA's opt-in limit of a block)."""
    tiles: TileTable = NO_TABLE
    """What was measured on this kind of GPU."""

    @property
    def pdl(self) -> bool:
        """True if kernels can be chained by programmatic dependent launch."""
        return self.capability >= (9, 0)

    def max_stages(self, stage_bytes: int, other_bytes: int = 0, *, warpgroup: bool) -> int:
        """Return the depth of the deepest software pipeline that fits a program.

        stage_bytes: of what one stage loads; other_bytes: of what the program holds beside; warpgroup: the products are
        large enough for the instructions of Hopper and Blackwell that read shared memory. Those need a buffer for each
        stage. Where operands go through registers, the stage in use needs none.
        """
        buffers = (self.shared_memory - other_bytes - BARRIER_BYTES) // stage_bytes
        from_shared = warpgroup and self.capability[0] in (9, 10, 11)
        return max(1, buffers if from_shared else buffers + 1)
