"""Comparison of pages and nodes with the sequences that hold them."""

from collections import Counter
from collections.abc import Sequence as Items

from tandem.engine_core.kv_cache.page_classes import ABSENT
from tandem.engine_core.kv_cache.pages import CACHE, PageAllocator
from tandem.engine_core.kv_cache.radix import RadixTree
from tandem.engine_core.plan import PADDING_PAGE
from tandem.engine_core.sequence import Sequence


def audit_owners(pages: PageAllocator, tree: RadixTree | None, sequences: Items[Sequence]) -> list[str]:
    """Compare the owner of every page with the sequences and nodes that hold it.

    Return the inconsistencies, one line each. sequences: all that hold pages.
    """
    problems = pages.audit()
    owned = {owner: sorted(held) for owner, held in pages.owned().items()}
    expected = {
        seq.id: sorted(page for table in seq.pages for page in table[len(seq.cache.nodes) :] if page != PADDING_PAGE)
        for seq in sequences
    }
    if tree is not None:
        tables = [table for pages in tree.classes for table in pages.tables]
        expected[CACHE] = sorted(page for table in tables for page in table if page != ABSENT)
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
    for number, pages in enumerate(tree.classes):
        readers = Counter[int]()
        for seq in [seq for seq in sequences if seq.pages]:
            nodes, first = seq.cache.nodes, seq.first_pages[number]
            readers.update(nodes[first:])
            for group in pages.kind.groups:
                mapped, held = seq.pages[group], [PADDING_PAGE] * first + tree.pages(nodes[first:], group)
                if mapped[: len(held)] != held:
                    problems.append(f"{seq} has pages {mapped} of group {group}, its nodes hold {held}")
        for node in {*tree, *readers}:
            if tree.num_readers(node, number) != readers[node]:
                locks = tree.num_readers(node, number)
                problems.append(f"node {node} has {locks} locks of class {number}, {readers[node]} readers")
    return problems
