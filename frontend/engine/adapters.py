"""The adapters that an engine serves, as a frontend knows them."""

from collections.abc import Iterator

from tandem.protocol.events import AdapterFacts, AdapterList


class KnownAdapters:
    """Adapters by name, from the heartbeats of the engine and from its answers to calls."""

    def __init__(self) -> None:
        self._facts: dict[str, AdapterFacts] = {}
        self._epoch = self._changes = -1

    def __contains__(self, name: object) -> bool:
        return name in self._facts

    def __iter__(self) -> Iterator[str]:
        return iter(self._facts)

    @property
    def all(self) -> list[AdapterFacts]:
        """The adapters, in the order in which they were loaded."""
        return list(self._facts.values())

    def observe(self, epoch: int, listed: AdapterList | None) -> bool:
        """Replace the adapters by those of an engine, unless newer ones are known; return whether they were replaced.

        epoch: of the engine; listed: None if it takes no adapters.
        """
        changes = -1 if listed is None else listed.changes
        if epoch == self._epoch and changes <= self._changes:
            return False
        self._epoch, self._changes = epoch, changes
        self._facts = {facts.name: facts for facts in ([] if listed is None else listed.adapters)}
        return True
