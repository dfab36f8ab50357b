"""Results that reach the host late: each copy begins only when the device has sampled the step after its own.

The device itself waits, so that it is late on a machine that other processes keep busy too.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
import triton
import triton.language as tl

from tandem.engine_core.contracts import MaskedRows
from tandem.engine_core.runtime.runtime import TorchRuntime
from tests.support.plan_recording import Recording

ROUNDS = 1 << 22
"""Looks at the number of sampled steps, some 2 s, after which a copy is held no longer: a test fails, but ends."""
SLEEP_CYCLES = 40_000_000
"""Some 20 ms of the device's clock: long beside any step here."""


# Every launch runs the same code, whatever the numbers are: to load more of it could wait for what is held.
@triton.jit(do_not_specialize=["step", "wanted", "rounds"])
def _hold_kernel(num_sampled_ptr, found_ptr, step, wanted, rounds):
    """Wait until as many steps were sampled as are wanted, and store how many were."""
    found = tl.atomic_add(num_sampled_ptr, 0)
    while (found < wanted) & (rounds > 0):
        found = tl.atomic_add(num_sampled_ptr, 0)
        rounds -= 1
    tl.store(found_ptr + step, found)


class LateCopies:
    """Holds the copies of a recording's results on their stream while it is played in two slots.

    A step with masks cannot be waited for: they come by the same stream, behind what is held. Before such a step, and
    after the last one, a copy is 20 ms late instead, and so are the masks.
    """

    def __init__(self, runtime: TorchRuntime, recording: Recording, rounds: int = ROUNDS) -> None:
        """rounds: looks at the number of sampled steps before a copy is no longer held."""
        device, steps = runtime.device.torch_device, len(recording.plans)
        self._runtime = runtime
        self._recording = recording
        self._rounds = rounds
        self._num_sampled = torch.zeros((), dtype=torch.int32, device=device)
        """Number of steps that the device has sampled."""
        self._found = torch.zeros(steps, dtype=torch.int32, device=device)
        """That number when each held copy began."""
        self._step = 0
        self._uploads_masks = False
        """True if the next copy of the step is that of its masks."""

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Hold the copies of the steps that are launched meanwhile, which are those of the recording."""
        device = self._runtime.device
        copy, sample = device.copy, self._runtime.sample
        # What is launched for the first time may wait for all streams, so that is done before anything is held.
        self._hold(0, wanted=0)
        self._num_sampled.fill_(0)
        torch.cuda._sleep(1)
        self._runtime.synchronize()

        @contextmanager
        def late() -> Iterator[None]:
            with copy():
                if self._is_held(self._step) and not self._uploads_masks:
                    self._hold(self._step, wanted=self._step + 2)
                else:
                    torch.cuda._sleep(SLEEP_CYCLES)
                self._uploads_masks = False
                yield

        def on_sample(slot: int, masks: MaskedRows | None) -> None:
            self._uploads_masks = masks is not None and bool(self._num_samples(self._step))
            sample(slot, masks)
            self._step += 1
            self._num_sampled.fill_(self._step)

        with patch.object(self._runtime, "sample", on_sample), patch.object(device, "copy", late):
            yield

    def were_late(self) -> list[bool]:
        """Tell for each copy that was held, before a step that samples, whether that had sampled before it began."""
        found = self._found.tolist()
        held = [step for step in range(len(found) - 1) if self._is_held(step) and self._num_samples(step + 1)]
        return [found[step] >= step + 2 for step in held]

    def _is_held(self, step: int) -> bool:
        masks = self._recording.masks
        return step + 1 < len(masks) and masks[step + 1] is None

    def _num_samples(self, step: int) -> int:
        return sum(row.samples for row in self._recording.plans[step].rows)

    def _hold(self, step: int, wanted: int) -> None:
        _hold_kernel[(1,)](self._num_sampled, self._found, step, wanted, self._rounds, num_warps=1)
