"""Names of other people's making in error messages, and lists of many faults."""

from collections import Counter
from collections.abc import Sequence

MAX_SHOWN = 200
"""Characters of a name that are shown."""
MAX_LISTED = 20
"""Faults that are listed."""


def printable(name: str) -> str:
    """Return a name fit for one line of a message: printable, and cut if it is long."""
    text = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in name[:MAX_SHOWN])
    return text if len(name) <= MAX_SHOWN else f"{text}... ({len(name)} characters)"


def list_faults(faults: Sequence[str], by_kind: bool = False) -> str:
    """Return faults as lines; of many, the first twenty and the number of the rest.

    by_kind: the first word of a fault is its kind. Then a list that is cut has some of each kind, and their numbers.
    """
    if len(faults) <= MAX_LISTED:
        return "\n  ".join(faults)
    kinds: Counter[str] = Counter()
    ranked = []
    for index, fault in enumerate(faults):
        kind = fault.partition(" ")[0] if by_kind else ""
        ranked.append((kinds[kind], index))
        kinds[kind] += 1
    kept = sorted(index for _, index in sorted(ranked)[:MAX_LISTED])
    rest = f"and {len(faults) - MAX_LISTED} more"
    if by_kind:
        rest += f" (in all {', '.join(f'{count} {kind}' for kind, count in kinds.items())})"
    return "\n  ".join([*(faults[index] for index in kept), rest])
