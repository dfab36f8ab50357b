"""One version of an adapter, as the scheduler and its sequences see it."""


class Adapter:
    """State of an adapter. Used on the loop's thread only.

    A name that is loaded again gets a new version, with an `Adapter` of its own: sequences keep the one that they began
    with.
    """

    __slots__ = (
        "is_draining",
        "is_retired",
        "last_use",
        "name",
        "num_open",
        "num_rows",
        "path",
        "root",
        "slot",
        "version",
        "weight_version",
    )

    name: str
    path: str
    """Folder of its files."""
    root: str
    """Folder that these have to be in, with all links followed; "": any."""
    version: int
    """Number of this version, at least 1 and never reused."""
    weight_version: str
    """Name of the version of the base model's weights when it was loaded; "" if they cannot change."""
    slot: int
    """Slot of the device's memory that holds its weights, from 1 on; 0: none does."""
    num_rows: int
    """Number of sequences that hold a row and with it the slot; a step in flight may still compute them."""
    num_open: int
    """Number of sequences without an outcome."""
    is_draining: bool
    """True if it takes no further rows until its slot is free, which another adapter has waited for."""
    is_retired: bool
    """True if it was unloaded or replaced: only the sequences that it has still use it."""
    last_use: int
    """Number of the last use of its slot, ascending over all adapters."""

    def __init__(self, name: str, path: str, version: int, root: str = "", weight_version: str = "") -> None:
        self.name = name
        self.path = path
        self.root = root
        self.version = version
        self.weight_version = weight_version
        self.slot = self.num_rows = self.num_open = self.last_use = 0
        self.is_draining = self.is_retired = False

    def __repr__(self) -> str:
        return (
            f"Adapter({self.name!r}, version {self.version}, slot {self.slot}, {self.num_rows} rows, "
            f"{self.num_open} open)"
        )


def cache_namespace(weights: int, adapter: int, salt: str) -> bytes:
    """Return the namespace of the prefix cache for versions of weights and adapter and a salt.

    weights: `WeightVersion.number`; adapter: `Adapter.version`, 0 for the base. No two triples give the same one.
    """
    if not weights and not adapter and not salt.startswith("\1"):
        return salt.encode()
    return f"\1{weights}.{adapter}\0{salt}".encode()
