"""Network namespace that acts as another host."""

import os
import subprocess
import sys
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from tests.fakes.scripted_engine import Script
from tests.support.remote_engine import SeparateServing
from tests.support.tcp_proxy import free_ports

_GET = "import sys, urllib.request as u; sys.stdout.write(u.urlopen(sys.argv[1], timeout=5).read().decode())"


class Cable:
    """Pair of virtual network devices, one of them in a separate namespace.

    Requires root and iproute2. Addresses are in the benchmarking range of RFC 2544.
    """

    HERE, THERE = "198.18.87.1", "198.18.87.2"

    def __init__(self) -> None:
        self.namespace = f"tandem-{os.getpid()}"
        self._device = f"tandem{os.getpid()}"

    def __enter__(self) -> "Cable":
        there = f"{self._device}x"[-15:]
        with ExitStack() as stack:
            _ip("netns", "add", self.namespace)
            stack.callback(_ip, "netns", "del", self.namespace)
            _ip("link", "add", self._device, "type", "veth", "peer", "name", there, "netns", self.namespace)
            _ip("addr", "add", f"{self.HERE}/30", "dev", self._device)
            _ip("link", "set", self._device, "up")
            _ip("-n", self.namespace, "addr", "add", f"{self.THERE}/30", "dev", there)
            for device in ("lo", there):
                _ip("-n", self.namespace, "link", "set", device, "up")
            stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        _ip("netns", "del", self.namespace)  # and the devices with it

    def pull(self) -> None:
        """Drop all packets silently."""
        _ip("link", "set", self._device, "down")

    def plug(self) -> None:
        """Pass packets again."""
        _ip("link", "set", self._device, "up")


class DistantServing(SeparateServing):
    """Engine in the namespace and a frontend outside."""

    def __init__(self, log: Path, cable: Cable, script: Script) -> None:
        address = ("--endpoint", f"tcp://{cable.THERE}:{free_ports(2)}", "--insecure-tcp")
        limits = ("--max-concurrent", "8192", "--max-queued-tokens", "1000000")
        super().__init__(log, script, (*address, *limits), (*address, *limits))
        self._inside = ("ip", "netns", "exec", cable.namespace)

    def _run(self, *command: str) -> AbstractContextManager["subprocess.Popen[bytes]"]:
        return self._start(*(self._inside if command[0] == "engine" else ()), str(self.tandem), *command)

    def get(self, path: str, port: int | None = None) -> tuple[int, str]:
        """Request a path, from within the namespace for the engine's ops port."""
        if port != self.ops_port:
            return super().get(path, port)
        url = f"http://127.0.0.1:{port}{path}"
        asked = subprocess.run([*self._inside, sys.executable, "-c", _GET, url], capture_output=True, text=True)
        return (200, asked.stdout) if asked.returncode == 0 else (0, "")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
