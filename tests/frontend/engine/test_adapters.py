"""Adapters that a frontend knows: the newest list of the newest engine."""

from tandem.frontend.engine.adapters import KnownAdapters
from tandem.protocol.events import AdapterFacts, AdapterList


def listed(changes: int, *names: str) -> AdapterList:
    return AdapterList(changes, [AdapterFacts(name, f"/{name}", 1) for name in names])


def test_an_older_list_of_an_engine_changes_nothing() -> None:
    known = KnownAdapters()
    known.observe(1, listed(1, "a"))
    known.observe(1, listed(3, "a", "b"))
    known.observe(1, listed(2, "a", "c"))
    assert "b" in known and "c" not in known
    assert [facts.name for facts in known.all] == ["a", "b"]


def test_another_engine_counts_from_anew() -> None:
    known = KnownAdapters()
    known.observe(1, listed(9, "a"))
    known.observe(2, listed(0, "b"))
    assert "a" not in known and "b" in known
    known.observe(3, None)
    assert known.all == []
