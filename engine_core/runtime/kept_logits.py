"""Logits of a step that are returned to the host."""

import itertools

import torch
from torch import Tensor

from tandem.engine_core.plan import StepPlan
from tandem.engine_core.runtime.device import Device


class KeptLogits:
    """Copies of the logits that rows with `ScheduledSequence.logits` want, until the step is collected."""

    def __init__(self, plan: StepPlan) -> None:
        """Find the wanted positions of a step, among its scored positions and among its samples."""
        self._scored: list[range] = []
        self._samples: list[int | None] = []
        self._counts: list[int] = []
        num_scored, num_samples = 0, plan.num_steady
        for row in plan.other_rows:
            if row.logits:
                self._scored.append(range(num_scored, num_scored + row.num_scored))
                self._samples.append(num_samples if row.samples else None)
                self._counts.append(row.num_logits)
            num_scored += row.num_scored
            num_samples += row.samples
        self._parts: list[list[Tensor]] = [[] for _ in self._counts]
        self._host: Tensor | None = None

    def clear(self) -> None:
        """Drop what a failed launch has kept."""
        for parts in self._parts:
            parts.clear()

    def add_scored(self, first: int, logits: Tensor) -> None:
        """Keep what is wanted of a slice of scored positions, from index `first` on. logits: [n, V]."""
        for parts, wanted in zip(self._parts, self._scored, strict=True):
            start, end = max(wanted.start - first, 0), min(wanted.stop - first, len(logits))
            if start < end:
                parts.append(logits[start:end].to(torch.float32, copy=True))

    def add_samples(self, logits: Tensor) -> None:
        """Keep what is wanted of the positions that are sampled from. logits: [S, V]."""
        for parts, index in zip(self._parts, self._samples, strict=True):
            if index is not None:
                parts.append(logits[index : index + 1].to(torch.float32, copy=True))

    def copy_to_host(self, device: Device) -> None:
        """Enqueue the copy to the host on the current stream."""
        parts = [part for parts in self._parts for part in parts]
        if not parts:
            return
        self._host = device.host_buffer(sum(self._counts), parts[0].shape[1], dtype=torch.float32)
        first = 0
        for part in parts:
            self._host[first : first + len(part)].copy_(part, non_blocking=True)
            first += len(part)

    def take(self) -> list[bytes]:
        """Return the logits of each row that wants them, float32 [n, V], once the copy has ended."""
        if self._host is None:
            return [b""] * len(self._counts)
        words, ends = self._host.numpy(), itertools.accumulate(self._counts)
        return [words[end - count : end].tobytes() for count, end in zip(self._counts, ends, strict=True)]
