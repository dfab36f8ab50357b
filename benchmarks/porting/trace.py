"""Read times by operation and by kernel from a Chrome trace of torch.profiler."""

import bisect
import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct

from benchmarks.porting.scopes import PREFIX, STEP

OTHER = "other"
"""Operation of everything in a step outside scopes: the loop, copies, tables."""
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


class Total(Struct):
    """Total time and number of events of a name."""

    microseconds: float = 0.0
    count: int = 0

    def add(self, microseconds: float, count: int = 1) -> None:
        self.microseconds += microseconds
        self.count += count


Totals = dict[str, Total]


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Return the complete events of a trace, possibly gzipped."""
    data = path.read_bytes()
    events = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def operations(events: Iterable[dict[str, Any]]) -> Totals:
    """Return the time of each operation.

    If the trace has kernels, their time counts for the innermost scope that launched them; otherwise CPU time counts,
    excluding nested scopes.
    """
    events = list(events)
    scopes = [event for event in events if event.get("cat") == "user_annotation" and event["name"].startswith(PREFIX)]
    device = [event for event in events if event.get("cat") in _DEVICE]
    totals: Totals = defaultdict(Total)
    if not device:
        for event, own in self_times(scopes):
            totals[_operation(event)].add(own)
        return _sorted(totals)
    launches = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    finder = _Innermost(scopes)
    for event in device:
        launch = launches.get(event.get("args", {}).get("correlation"))
        scope = None if launch is None else finder.find(launch["tid"], launch["ts"])
        totals[OTHER if scope is None else _operation(scope)].add(event["dur"])
    return _sorted(totals)


def kernels(events: Iterable[dict[str, Any]]) -> Totals:
    """Return the time of each kernel.

    Without a GPU, return the time of each torch operator, excluding nested operators.
    """
    events = list(events)
    totals: Totals = defaultdict(Total)
    device = [event for event in events if event.get("cat") in _DEVICE]
    for event in device:
        totals[event["name"]].add(event["dur"])
    if not device:
        for event, own in self_times(event for event in events if event.get("cat") == "cpu_op"):
            totals[event["name"]].add(own)
    return _sorted(totals)


def self_times(events: Iterable[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], float]]:
    """Yield each event with its self time in microseconds, excluding nested events."""
    open_events: dict[Any, list[tuple[dict[str, Any], list[float]]]] = defaultdict(list)
    found = []
    for event in sorted(events, key=lambda one: (one["ts"], -one["dur"])):
        stack = open_events[event["tid"]]
        while stack and stack[-1][0]["ts"] + stack[-1][0]["dur"] <= event["ts"]:
            stack.pop()
        own = [event["dur"]]
        if stack:
            stack[-1][1][0] -= event["dur"]
        stack.append((event, own))
        found.append((event, own))
    for event, own in found:
        yield event, max(0.0, own[0])


class _Innermost:
    """Lookup of the innermost scope at a time on a thread."""

    def __init__(self, scopes: Iterable[dict[str, Any]]) -> None:
        self._scopes: dict[Any, list[dict[str, Any]]] = defaultdict(list)
        for scope in sorted(scopes, key=lambda one: (one["ts"], -one["dur"])):
            self._scopes[scope["tid"]].append(scope)
        self._starts = {tid: [scope["ts"] for scope in scopes] for tid, scopes in self._scopes.items()}

    def find(self, tid: Any, when: float) -> dict[str, Any] | None:
        """Return the innermost open scope, None outside all."""
        scopes = self._scopes.get(tid, [])
        # Scopes nest, so the last one opened before `when` is the innermost.
        for scope in reversed(scopes[: bisect.bisect_right(self._starts.get(tid, []), when)]):
            if when <= scope["ts"] + scope["dur"]:
                return scope
            if scope["name"] == PREFIX + STEP:
                return None
        return None


def _operation(scope: dict[str, Any]) -> str:
    name: str = scope["name"].removeprefix(PREFIX)
    return OTHER if name == STEP else name


def _sorted(totals: Totals) -> Totals:
    return dict(sorted(totals.items(), key=lambda item: -item[1].microseconds))
