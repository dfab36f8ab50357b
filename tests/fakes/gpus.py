"""GPUs of each architecture, as `read_gpu_traits` would find them."""

from tandem.engine_core.kernels.gpu_traits import GpuTraits
from tandem.engine_core.kernels.tiles.table_file import load_table

KIB = 1024
SHARED_MEMORY = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""KiB of shared memory that one program can have, by architecture (CUDA C++ Programming Guide, "Compute
Capabilities")."""


def gpu(name: str, architecture: int, multiprocessors: int) -> GpuTraits:
    """Return the traits of a GPU, with its tile table. architecture: like 86 for sm_86."""
    shared_memory = SHARED_MEMORY[architecture] * KIB
    return GpuTraits(name, (architecture // 10, architecture % 10), multiprocessors, shared_memory, load_table(name))


T4 = gpu("Tesla T4", 75, 40)
A100 = gpu("NVIDIA A100-SXM4-80GB", 80, 108)
RTX_3090 = gpu("NVIDIA GeForce RTX 3090", 86, 82)
L4 = gpu("NVIDIA L4", 89, 58)
RTX_4090 = gpu("NVIDIA GeForce RTX 4090", 89, 128)
H20 = gpu("NVIDIA H20", 90, 78)
H200 = gpu("NVIDIA H200", 90, 132)
B200 = gpu("NVIDIA B200", 100, 148)
RTX_5090 = gpu("NVIDIA GeForce RTX 5090", 120, 170)
SUPPORTED = (A100, RTX_3090, L4, RTX_4090, H20, H200, B200, RTX_5090)
