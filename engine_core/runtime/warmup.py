"""Runs each path of the runtime once on the padding row, so that no request pays for a first time."""

from engine_core.config import EngineConfig
from engine_core.contracts import Runtime
from engine_core.plan import Admission, Row, StepPlan
from engine_core.scheduler.admission import PADDING_ROW
from protocol.codec import pack_ids
from protocol.params import SamplingParams

GREEDY = SamplingParams(2, temperature=0.0)
FULL = SamplingParams(2, top_k=5, top_p=0.9, min_p=0.01, repetition_penalty=1.1)


def warm_up(runtime: Runtime, config: EngineConfig) -> None:
    """One prefill and one decode step in every slot, greedy and with everything on. Leaves nothing in flight."""
    for slot in range(config.depth):
        _run(runtime, slot, GREEDY, config.max_len, logprobs=-1)
        _run(runtime, slot, FULL, config.max_len, logprobs=1)
    runtime.synchronize()


def _run(runtime: Runtime, slot: int, params: SamplingParams, max_len: int, logprobs: int) -> None:
    """The padding row's page table holds nothing but the padding page. It samples only where it has room for it."""
    length = max(1, min(4, max_len - 2))
    targets = pack_ids([0] * (length - 1)) if logprobs >= 0 else b""
    prefill = Row(-1, PADDING_ROW, 0, length, True, tokens=pack_ids([0] * length), targets=targets)
    decode = Row(-1, PADDING_ROW, length, 1, length + 1 < max_len)
    masked = Row(-1, PADDING_ROW, length, 1, length + 1 < max_len, constrained=True)
    admission = Admission(-1, PADDING_ROW, length, params)
    for rows, admitted in (((prefill,), (admission,)), ((decode,), ()), ((masked,), ())):
        plan = StepPlan.of(0, rows, admitted, logprobs)
        runtime.launch(slot, plan)
        runtime.sample(slot, [] if plan.needs_mask else None)
        runtime.collect(slot)
