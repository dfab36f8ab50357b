"""Number of CPU cores that this process may use."""

import math
import os
from contextlib import suppress
from pathlib import Path


def usable_cores(root: Path = Path("/")) -> int:
    """Return the number of cores by affinity and by the cgroup's quota, at least 1.

    A quota of 2.5 cores counts as 3. `root` holds `proc` and `sys`.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [cores, *(math.ceil(quota) for quota in _quotas(root))]
    return max(1, min(quotas))


def _quotas(root: Path) -> list[float]:
    """Return the CPU quotas of this process's cgroup and of those around it.

    They are in cores; the cgroups are of version 2 or 1.
    """
    found: list[float] = []
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            names = controllers.split(",")
            if controllers and "cpu" not in names:
                continue
            base = root / "sys/fs/cgroup" / (controllers and ("cpu" if len(names) == 1 else controllers))
            group = base / path.lstrip("/")
            # In a container the path may be the host's; the mount then shows the container's own group.
            for level in (group, *group.parents):
                found += _quota(level)
                if level == base:
                    break
    return found


def _quota(group: Path) -> list[float]:
    """Return the quota of one cgroup in a list that is empty if it has none."""
    with suppress(OSError, ValueError):
        if (group / "cpu.max").exists():  # version 2: "max 100000" or "250000 100000"
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text()  # version 1: -1 for none
            period = (group / "cpu.cfs_period_us").read_text()
        if quota != "max" and int(quota) > 0:
            return [int(quota) / int(period)]
    return []
