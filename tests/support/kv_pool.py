"""A KV pool of the real parts, in one line."""

from tandem.engine_core.kv_cache.manager import KVManager
from tandem.engine_core.kv_cache.pages import PageAllocator
from tandem.engine_core.kv_cache.radix import RadixTree
from tandem.engine_core.kv_cache.sessions import Sessions


def kv_memory(pages: int, page_size: int = 4, cache: bool = True, sessions: int = 4, ttl: float = 60.0) -> KVManager:
    """pages: the reserved page 0 among them."""
    tree = RadixTree(pages, page_size) if cache else None
    return KVManager(PageAllocator(pages), page_size, tree, Sessions(tree, sessions, ttl))
