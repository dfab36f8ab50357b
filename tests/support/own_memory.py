"""Memory that a process has for itself."""

import re
from pathlib import Path


def own_bytes() -> int:
    """Return the bytes of this process's own memory, swapped or not.

    Those of files, such as libraries, are left out: the system drops them and reads them again when it likes.
    """
    status = Path("/proc/self/status").read_text()
    return 1024 * sum(int(size) for size in re.findall(r"^(?:RssAnon|VmSwap):\s+(\d+) kB$", status, re.MULTILINE))
