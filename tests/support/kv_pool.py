"""A KV pool of the real parts, and what tests do to one from outside."""

from tandem.engine_core.kv_cache.manager import MAX_NODES_PER_PAGE, KVManager
from tandem.engine_core.kv_cache.page_classes import page_classes
from tandem.engine_core.kv_cache.pages import CACHE, PageAllocator
from tandem.engine_core.kv_cache.radix import RadixTree
from tandem.engine_core.kv_cache.sessions import Sessions
from tandem.engine_core.kv_cache.state_slots import StateSlots
from tandem.engine_core.kv_cache.states import StateCache

STRANGER = 10_000
"""Owner of pages that no sequence of a test has."""


def kv_memory(
    pages: int,
    page_size: int = 4,
    cache: bool = True,
    sessions: int = 4,
    ttl: float = 60.0,
    windows: tuple[int | None, ...] = (None,),
    max_lead: int = 0,
    state_slots: int | None = None,
    interval: int = 16,
    grid: int = 64,
) -> KVManager:
    """Build a pool. pages: the reserved page 0 included; windows: of each KV group; max_lead: as in `KVManager`.

    state_slots: number of checkpoints of a model with recurrent layers; interval, grid: as in `StateCache`.
    """
    tree = RadixTree(page_size, page_classes(windows, page_size), MAX_NODES_PER_PAGE * pages) if cache else None
    states = None
    if tree is not None and state_slots is not None:
        states = StateCache(StateSlots(state_slots), tree, interval, grid)
    return KVManager(PageAllocator(pages), page_size, tree, Sessions(tree, sessions, ttl), windows, max_lead, states)


def occupy(memory: KVManager, count: int) -> list[int]:
    """Give pages to the stranger, evicting what must go."""
    assert memory._make_free(count), f"{count} pages are not available: {memory.usage}"
    pages = memory.pages.allocate(STRANGER, count)
    assert pages is not None
    return pages


def vacate(memory: KVManager, pages: list[int] | None = None) -> None:
    """Free these pages of the stranger, all of them by default."""
    memory.pages.release(STRANGER, memory.pages.owned()[STRANGER] if pages is None else pages)


def evict_unused(memory: KVManager) -> None:
    """Evict everything from the prefix cache that neither a sequence nor a session holds."""
    assert memory.tree is not None
    memory.pages.release(CACHE, memory.tree.evict(memory.pages.total))


def drop_page(memory: KVManager, node: int) -> None:
    """Take the page of a node that stays in the tree."""
    assert memory.tree is not None
    memory.pages.release(CACHE, memory.tree.drop(node))


def end_sessions(memory: KVManager) -> None:
    """End every session, which frees its pages unless its turn is in progress."""
    for session in memory.sessions.known:
        memory.sessions.end(session.name)
