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
        for params in (GREEDY, FULL):
            _run(runtime, slot, params, config.max_len)
    runtime.synchronize()


def _run(runtime: Runtime, slot: int, params: SamplingParams, max_len: int) -> None:
    """The padding row's page table holds nothing but the padding page. It samples only where it has room for it."""
    length = max(1, min(4, max_len - 2))
    prefill = Row(-1, PADDING_ROW, 0, length, True, tokens=pack_ids([0] * length))
    decode = Row(-1, PADDING_ROW, length, 1, length + 1 < max_len)
    admission = Admission(-1, PADDING_ROW, length, params)
    for plan in (StepPlan.of(0, (prefill,), (admission,)), StepPlan.of(0, (decode,))):
        runtime.launch(slot, plan)
        runtime.sample(slot, None)
        runtime.collect(slot)
