"""Cores by affinity and cgroup quota."""

import os
from pathlib import Path

import pytest

from tandem.protocol.usable_cores import usable_cores


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V1 = "sys/fs/cgroup/cpu,cpuacct"


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 12),
        ({"proc/self/cgroup": "0::/\n"}, 12),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 12),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "400000 100000\n"}, 4),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"}, 3),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "5000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "9900000 100000\n"}, 12),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "nonsense"}, 12),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "300000 100000",
          "sys/fs/cgroup/a/b/cpu.max": "max 100000"}, 3),
        ({"proc/self/cgroup": "0::/host/path\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
        ({"proc/self/cgroup": "4:memory:/x\n3:cpu,cpuacct:/x\n", f"{V1}/x/cpu.cfs_quota_us": "600000\n",
          f"{V1}/x/cpu.cfs_period_us": "100000\n"}, 6),
        ({"proc/self/cgroup": "3:cpu,cpuacct:/x\n", f"{V1}/x/cpu.cfs_quota_us": "-1\n",
          f"{V1}/x/cpu.cfs_period_us": "100000\n"}, 12),
        ({"proc/self/cgroup": "3:cpu,cpuacct:/docker/x\n", f"{V1}/cpu.cfs_quota_us": "150000\n",
          f"{V1}/cpu.cfs_period_us": "100000\n"}, 2),
        ({"proc/self/cgroup": "3:cpu:/x\n", "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "100000\n",
          "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n"}, 1),
    ],
)  # fmt: skip
def test_cores_are_the_least_of_affinity_and_all_quotas(
    files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)), raising=False)
    assert usable_cores(write(tmp_path, files)) == cores


def test_cores_of_this_machine_are_at_most_those_that_it_has() -> None:
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)
