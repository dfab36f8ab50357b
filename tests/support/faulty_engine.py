"""Run the engine core's process with a switch for faults: `python -m tests.support.faulty_engine FLAGS`.

While the file that TANDEM_TEST_FAULT names exists, its text is the fault to come; the file is removed at once, so that
the next engine is sound.
"""

import os
import runpy
from pathlib import Path

import torch
import triton
import triton.language as tl

from tandem.engine_core.plan import StepPlan
from tandem.engine_core.runtime.runtime import TorchRuntime
from tandem.engine_core.startup import runtime as build_runtime

VARIABLE = "TANDEM_TEST_FAULT"
ROWS, POSITION = 4, 150
"""Rows and position of the fault: it comes in the first step of that many rows that have all passed the position."""


@triton.jit
def trap(out) -> None:  # type: ignore[no-untyped-def]
    value = tl.load(out)
    tl.store(out, tl.inline_asm_elementwise("trap; mov.b32 $0, $1;", "=r,r", [value], tl.int32, is_pure=False, pack=1))


def trapping_kernel() -> None:
    """Fail on the device, some time after the launch has returned."""
    trap[(1,)](torch.zeros(1, dtype=torch.int32, device="cuda"))


def device_assertion() -> None:
    """Use an index outside a kernel's table, which prints a message of its own on stderr."""
    torch.zeros(8, device="cuda")[torch.full((4,), 1000, device="cuda")]


def allocation_that_cannot_fit() -> None:
    torch.empty(2**46, dtype=torch.uint8, device="cuda" if torch.cuda.is_available() else "cpu")


FAULTS = {"trap": trapping_kernel, "assertion": device_assertion, "allocation": allocation_that_cannot_fit}


class FaultyRuntime(TorchRuntime):
    """Inject the fault that the file names between two steps, before the second is launched."""

    def launch(self, slot: int, plan: StepPlan) -> None:
        self.maybe_fail(plan)
        super().launch(slot, plan)

    @staticmethod
    def maybe_fail(plan: StepPlan) -> None:
        if len(plan.rows) < ROWS or min(row.start for row in plan.rows) < POSITION:
            return
        switch = Path(os.environ[VARIABLE])
        if switch.exists():
            fault = switch.read_text()
            switch.unlink()
            FAULTS[fault]()


if __name__ == "__main__":
    build_runtime.TorchRuntime = FaultyRuntime  # type: ignore[misc]
    runpy.run_module("tandem.engine_core", run_name="__main__", alter_sys=True)
