"""Formatting of untrusted names and long lists of faults for error messages."""

from collections import Counter
from collections.abc import Sequence

MAX_SHOWN = 200
"""Maximum length of a name in a message."""
MAX_LISTED = 20
"""Maximum number of faults in a message by default."""


def printable(name: str) -> str:
    """Escape unprintable characters of a name, and truncate it to MAX_SHOWN characters."""
    text = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in name[:MAX_SHOWN])
    return text if len(name) <= MAX_SHOWN else f"{text}... ({len(name)} characters)"


def list_faults(faults: Sequence[str], by_kind: bool = False, limit: int = MAX_LISTED) -> str:
    """Return faults as lines, at most `limit` of them and the number of the rest.

    by_kind: the first word of a fault is its kind; a truncated list contains faults of each kind and the count per
    kind.
    """
    if len(faults) <= limit:
        return "\n  ".join(faults)
    kinds: Counter[str] = Counter()
    ranked = []
    for index, fault in enumerate(faults):
        kind = fault.partition(" ")[0] if by_kind else ""
        ranked.append((kinds[kind], index))
        kinds[kind] += 1
    kept = sorted(index for _, index in sorted(ranked)[:limit])
    rest = f"and {len(faults) - limit} more"
    if by_kind:
        rest += f" (in all {', '.join(f'{count} {kind}' for kind, count in kinds.items())})"
    return "\n  ".join([*(faults[index] for index in kept), rest])
