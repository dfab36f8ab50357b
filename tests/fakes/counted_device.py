"""A device whose memory is a number, and allocations that hold some of it while they live."""

from tandem.engine_core.runtime.device import CpuDevice

TOTAL = 1_000_000


class CountedDevice(CpuDevice):
    """CPU device whose allocator keeps freed memory until `release_unused`."""

    def __init__(self) -> None:
        super().__init__()
        self.in_use = 0
        self.unused = 0

    def total_bytes(self) -> int:
        return TOTAL

    def free_bytes(self) -> int:
        return TOTAL - self.held_bytes()

    def held_bytes(self) -> int:
        return self.in_use + self.unused

    def release_unused(self) -> None:
        self.unused = 0

    def take(self, count: int) -> "Held":
        return Held(self, count)


class Held:
    """Allocation of `count` bytes of a device."""

    def __init__(self, device: CountedDevice, count: int) -> None:
        self.device = device
        self.count = count
        reused = min(count, device.unused)
        device.unused -= reused
        device.in_use += count

    def __del__(self) -> None:
        self.device.in_use -= self.count
        self.device.unused += self.count
