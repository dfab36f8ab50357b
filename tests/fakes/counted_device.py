"""A device whose memory is a number, and allocations that hold some of it while they live."""

from tandem.engine_core.runtime.device import CpuDevice

TOTAL = 1_000_000


class CountedDevice(CpuDevice):
    """CPU device whose allocator keeps freed memory until `release_unused`.

    Its driver allocates memory for graphs in pieces, outside the allocator, and may keep the memory of dropped graphs.
    """

    def __init__(self, piece: int = 1, driver_keeps: bool = False) -> None:
        super().__init__()
        self.in_use = 0
        self.unused = 0
        self.piece = piece
        self.driver_keeps = driver_keeps
        self.graphs = 0
        """Bytes of the graphs that live."""
        self._pieces = 0

    def total_bytes(self) -> int:
        return TOTAL

    def free_bytes(self) -> int:
        pieces = -(-self.graphs // self.piece)
        self._pieces = max(pieces, self._pieces) if self.driver_keeps else pieces
        return TOTAL - self.held_bytes() - self._pieces * self.piece

    def held_bytes(self) -> int:
        return self.in_use + self.unused

    def release_unused(self) -> None:
        self.unused = 0

    def take(self, count: int) -> "Held":
        return Held(self, count)

    def take_graph(self, count: int) -> "HeldGraph":
        return HeldGraph(self, count)


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


class HeldGraph:
    """Graph of `count` bytes of a device, which the allocator does not hold."""

    def __init__(self, device: CountedDevice, count: int) -> None:
        self.device = device
        self.count = count
        device.graphs += count

    def __del__(self) -> None:
        self.device.graphs -= self.count
