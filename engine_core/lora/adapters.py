"""The adapters of an engine: their names, and the slots of the device that they take turns in.

The bookkeeping runs on the loop's thread and knows neither files nor device.
"""

from collections.abc import Callable
from typing import NamedTuple

from msgspec import Struct

from tandem.engine_core.adapter import Adapter
from tandem.engine_core.contracts import AdapterLoader, LoadResult
from tandem.engine_core.errors import RequestError
from tandem.protocol.errors import ErrorCode
from tandem.protocol.events import AdapterFacts, AdapterList

MAX_WAIT_SECONDS = 0.5
"""Wait of an adapter for a slot after which another one takes no further rows until its slot is free."""
MAX_ADAPTERS = 1024
"""Most names at a time."""


class Reading(Struct):
    """An adapter that is being read."""

    adapter: Adapter
    client: bytes
    call: int


class CallResult(NamedTuple):
    """Answer to a call of a frontend."""

    client: bytes
    call: int
    problem: str = ""
    """Reason of a failure; empty: it succeeded."""


class Adapters:
    """Adapters by name, with a cache of slots: the least recently used one without rows makes room for another.

    Life of an adapter: `load` -> read -> served under its name -> placed in a slot when a waiting sequence needs it ->
    `unload` or replaced -> dropped once no sequence uses it any more.
    """

    def __init__(
        self, max_slots: int, loader: AdapterLoader, save: Callable[[AdapterList, int], None], next_version: int = 1
    ) -> None:
        """Start without adapters.

        save: stores the adapters and the number of the next version, whenever they change.
        """
        self.max_slots = max_slots
        self.loader = loader
        self.save = save
        self.names: dict[str, Adapter] = {}
        """Adapters that new requests may use."""
        self.changes = 0
        """Number of changes of `names`."""
        self._next_version = next_version
        self._retired: dict[Adapter, tuple[bytes, int] | None] = {}
        """Adapters that are dropped once no sequence uses them, with the call that waits for it."""
        self._reading: dict[int, Reading] = {}
        self._placing: dict[int, Adapter] = {}
        """Adapters that are being copied into slots, by version."""
        self._free = list(range(max_slots, 0, -1))
        self._residents: list[Adapter] = []
        """Adapters in slots."""
        self._wanted: dict[Adapter, float] = {}
        """Adapters that waiting sequences need, with the time since when, in seconds."""
        self._uses = 0
        self._now = 0.0
        self._answers: list[CallResult] = []

    @property
    def is_busy(self) -> bool:
        """True while the loader has work."""
        return bool(self._reading or self._placing)

    @property
    def num_open(self) -> dict[str, int]:
        """Number of sequences without an outcome, by the name of their adapter."""
        found = {adapter.name: adapter.num_open for adapter in self.names.values()}
        for adapter in self._retired:
            found[adapter.name] = found.get(adapter.name, 0) + adapter.num_open
        return found

    @property
    def num_rows(self) -> dict[str, int]:
        """Number of sequences that hold a row, by the name of their adapter, of those that have any."""
        found: dict[str, int] = {}
        for adapter in self._residents:
            if adapter.num_rows:
                found[adapter.name] = found.get(adapter.name, 0) + adapter.num_rows
        return found

    @property
    def listed(self) -> AdapterList:
        """The adapters that requests may use, for frontends."""
        found = [AdapterFacts(a.name, a.path, a.version, a.root, a.weight_version) for a in self.names.values()]
        return AdapterList(self.changes, found)

    def add(self, name: str, path: str, version: int, root: str = "", weight_version: str = "") -> Adapter:
        """Add an adapter that was read. version: at least the next one; weight_version: as in `Adapter`."""
        self._next_version = max(self._next_version, version + 1)
        adapter = self.names[name] = Adapter(name, path, version, root, weight_version)
        self.changes += 1
        return adapter

    # Commands of frontends.

    def load(
        self,
        client: bytes,
        call: int,
        name: str,
        path: str,
        replaces: bool,
        root: str = "",
        weight_version: str = "",
    ) -> str:
        """Start loading an adapter; the answer comes once it is there.

        replaces: True if the name may be loaded already; root: as in `LoadAdapter`; weight_version: as in `Adapter`.
        Return the reason if it cannot be.
        """
        if name in self.names and not replaces:
            return f"the adapter {name!r} is loaded already; give load_inplace to replace it"
        if any(reading.adapter.name == name for reading in self._reading.values()):
            return f"the adapter {name!r} is being loaded already"
        if name not in self.names and len(self.names) + len(self._reading) >= MAX_ADAPTERS:
            return f"{MAX_ADAPTERS} adapters are loaded, the most that this engine takes"
        version = self._next_version
        self._next_version += 1
        self._reading[version] = Reading(Adapter(name, path, version, root, weight_version), client, call)
        self.loader.read(version, path, root)
        return ""

    def unload(self, client: bytes, call: int, name: str) -> str:
        """Remove an adapter; the answer comes once no sequence uses it. Return the reason if there is none."""
        adapter = self.names.pop(name, None)
        if adapter is None:
            return f"the adapter {name!r} is not loaded"
        self._changed()
        self._retire(adapter, (client, call))
        return ""

    def take_answers(self) -> list[CallResult]:
        """Return the answers to calls since the last time."""
        answers, self._answers = self._answers, []
        return answers

    # Sequences.

    def find(self, name: str) -> Adapter:
        """Return the adapter of a new request. Raises RequestError if there is none of the name."""
        adapter = self.names.get(name)
        if adapter is None:
            raise RequestError(ErrorCode.MODEL_NOT_FOUND, f"the adapter {name[:100]!r} is not loaded")
        return adapter

    def defers(self, adapter: Adapter) -> bool:
        """Return whether a waiting sequence has to wait for the adapter, which then gets a slot as soon as possible."""
        if adapter.slot and not adapter.is_draining and adapter.version not in self._placing:
            return False
        if not adapter.slot and adapter not in self._wanted:
            self._wanted[adapter] = self._now
            self._assign()
        return True

    def acquire(self, adapter: Adapter) -> Callable[[], None]:
        """Keep a resident adapter in its slot; return the call that ends this."""
        assert adapter.slot, f"a row for {adapter}, which is in no slot"
        adapter.num_rows += 1
        self._use(adapter)

        def release() -> None:
            adapter.num_rows -= 1
            assert adapter.num_rows >= 0, f"released too often: {adapter}"
            self._use(adapter)
            if not adapter.num_rows and adapter.is_draining:
                self._vacate(adapter)
            self._drop_unused(adapter)

        return release

    def open(self, adapter: Adapter) -> None:
        """Count an accepted sequence."""
        adapter.num_open += 1

    def close(self, adapter: Adapter) -> None:
        """Count the outcome of a sequence."""
        adapter.num_open -= 1
        assert adapter.num_open >= 0, f"closed too often: {adapter}"
        self._drop_unused(adapter)

    # Once per tick.

    def advance(self, now: float) -> dict[Adapter, str]:
        """Take the results of the loader, and start to place adapters that sequences wait for.

        now: seconds. Return the adapters that could not be placed, with the reason: their waiting sequences must end.
        """
        self._now = now
        failed: dict[Adapter, str] = {}
        if self.is_busy:
            for result in self.loader.take_results():
                if result.slot:
                    self._on_placed(result, failed)
                else:
                    self._on_read(result)
        if self._wanted:
            self._assign()
        return failed

    def _on_read(self, result: LoadResult) -> None:
        reading = self._reading.pop(result.version)
        if not result.problem:
            adapter = reading.adapter
            replaced = self.names.get(adapter.name)
            self.names[adapter.name] = adapter
            self._changed()
            if replaced is not None:
                self._retire(replaced, None)
        self._answers.append(CallResult(reading.client, reading.call, result.problem))

    def _on_placed(self, result: LoadResult, failed: dict[Adapter, str]) -> None:
        adapter = self._placing.pop(result.version)
        if result.problem:
            failed[adapter] = result.problem
            self._vacate(adapter)
        self._drop_unused(adapter)

    def _assign(self) -> None:
        """Give slots to the adapters that sequences wait for, the longest waiting first."""
        late = 0
        for adapter, since in list(self._wanted.items()):
            if not adapter.num_open:
                del self._wanted[adapter]  # The sequences that waited for it have ended.
            elif self._free or self._evict(self._now - since >= MAX_WAIT_SECONDS):
                del self._wanted[adapter]
                adapter.slot = self._free.pop()
                self._residents.append(adapter)
                self._use(adapter)
                self._placing[adapter.version] = adapter
                self.loader.place(adapter.version, adapter.path, adapter.slot)
            elif self._now - since >= MAX_WAIT_SECONDS:
                late += 1
        draining = sum(1 for adapter in self._residents if adapter.is_draining)
        settled = [a for a in self._residents if not a.is_draining and a.version not in self._placing]
        for adapter in sorted(settled, key=lambda adapter: (adapter.num_rows, adapter.last_use))[
            : max(0, late - draining)
        ]:
            adapter.is_draining = True

    def _evict(self, is_late: bool) -> bool:
        """Free the slot of the least recently used adapter without rows; return whether there was one.

        An adapter that sequences wait for was placed for them, so it goes only if another is late.
        """
        idle = [
            adapter
            for adapter in self._residents
            if not adapter.num_rows and adapter.version not in self._placing and (is_late or not adapter.num_open)
        ]
        if not idle:
            return False
        self._vacate(min(idle, key=lambda adapter: adapter.last_use))
        return True

    def _vacate(self, adapter: Adapter) -> None:
        self._residents.remove(adapter)
        self._free.append(adapter.slot)
        adapter.slot, adapter.is_draining = 0, False

    def _use(self, adapter: Adapter) -> None:
        self._uses += 1
        adapter.last_use = self._uses

    def _retire(self, adapter: Adapter, call: tuple[bytes, int] | None) -> None:
        adapter.is_retired = True
        self._retired[adapter] = call
        self._drop_unused(adapter)

    def _drop_unused(self, adapter: Adapter) -> None:
        """Drop a retired adapter that no sequence uses, and no copy."""
        if not adapter.is_retired or adapter.num_open or adapter.num_rows or adapter.version in self._placing:
            return
        call = self._retired.pop(adapter, None)
        self._wanted.pop(adapter, None)
        if adapter.slot:
            self._vacate(adapter)
        self.loader.drop(adapter.version)
        if call is not None:
            self._answers.append(CallResult(*call))

    def _changed(self) -> None:
        self.changes += 1
        self.save(self.listed, self._next_version)
