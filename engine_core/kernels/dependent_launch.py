"""Programmatic dependent launch (PDL) of kernels.

A kernel may start while its predecessor still runs. It reads its predecessor's output only after waiting for it, and
lets its own successor start only after that wait, or when it ends. So when a kernel starts, every kernel before its
immediate predecessor has finished, and their outputs may be read before the wait; the early loads of `paged_decode` and
of recurrent states rely on this.

Two exceptions:

- `paged_prefill` launched next to `paged_decode` waits only at its end. Its successor may start while both still run,
  and once it has waited for `paged_prefill` it has waited for both. That successor reads the output of both
  after its wait, as a matmul or the gate of gated attention does; it is never `paged_decode`.
- A GEMV that adds updates of adapters reads its inputs before it waits: the launch before it, which multiplies them by
  A, has waited for them (see `kernels.lora.low_rank_update`). It lets its successor start before its own wait, too.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

import triton
import triton.language as tl


@triton.jit
def wait_for_previous(PDL: tl.constexpr, DELAY_NEXT: tl.constexpr = False):
    """Wait for the preceding kernel, then let the next one start.

    With DELAY_NEXT the next one starts when this one ends. No-op for a kernel that was launched without PDL.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        if not DELAY_NEXT:
            tl.extra.cuda.gdc_launch_dependents()
