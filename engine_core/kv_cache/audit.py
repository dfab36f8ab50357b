"""Comparison of pages and nodes with the sequences that hold them."""

from collections.abc import Sequence as Items

from tandem.engine_core.kv_cache.pages import CACHE, PageAllocator
from tandem.engine_core.kv_cache.radix import RadixTree
from tandem.engine_core.sequence import Sequence


def audit_owners(pages: PageAllocator, tree: RadixTree | None, sequences: Items[Sequence]) -> list[str]:
    """Compare the owner of every page with the sequences and nodes that hold it.

    Return the inconsistencies, one line each. sequences: all that hold pages.
    """
    problems = pages.audit()
    owned = {owner: sorted(held) for owner, held in pages.owned().items()}
    expected = {
        seq.id: sorted(page for table in seq.pages for page in table[len(seq.cache.nodes) :]) for seq in sequences
    }
    if tree is not None:
        cached = [page for group in range(tree.num_groups) for page in tree.pages(list(tree), group) if page >= 0]
        expected[CACHE] = sorted(cached)
    if {owner: held for owner, held in expected.items() if held} != owned:
        problems.append(f"pages belong to {owned}, expected {expected}")
    return problems


def audit_readers(tree: RadixTree | None, sequences: Items[Sequence]) -> list[str]:
    """Compare the locks of every node with its readers.

    Also compare the readers' page tables with the pages of their nodes. Return the inconsistencies, one line each.
    """
    if tree is None:
        return [f"{seq} holds nodes without a prefix cache" for seq in sequences if seq.cache.nodes]
    problems = tree.audit()
    readers: dict[int, int] = {}
    for seq in sequences:
        nodes = seq.cache.nodes
        for group, table in enumerate(seq.pages):
            mapped, held = table[: len(nodes)], tree.pages(nodes, group)
            if held != mapped:
                problems.append(f"{seq} has pages {mapped} of group {group}, its nodes hold {held}")
        for node in nodes:
            readers[node] = readers.get(node, 0) + 1
    for node in {*tree, *readers}:
        if tree.num_readers(node) != readers.get(node, 0):
            problems.append(f"node {node} has {tree.num_readers(node)} locks, {readers.get(node, 0)} readers")
    return problems
