"""Real grammars on CUDA: constrained rows follow them in steps from graphs, next to unconstrained rows."""

import re

import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from tandem.engine_core.startup.engine import DEFAULT_MODEL
from tandem.protocol.engine_options import EngineOptions
from tandem.protocol.errors import FinishReason
from tandem.protocol.events import Finished
from tandem.protocol.params import SamplingParams
from tests.support.engine_driver import DrivenEngine
from tests.support.plan_recording import recorded, runtime_of

pytestmark = pytest.mark.gpu

PATTERNS = ["[0-9]{24}x", "(ab|cd){9}!", "[^a-z]{20}z", "(yes|no)( and (yes|no)){5}"]
"""No model would write these of its own accord."""
PARAMS = [
    SamplingParams(64, temperature=0.0),
    SamplingParams(64, temperature=1.0, seed=5),
    SamplingParams(64, temperature=1.5, top_p=0.9, repetition_penalty=1.2, seed=6),
]


@pytest.mark.parametrize("pipeline", ["on", "off"])
def test_constrained_rows_obey_their_grammars_in_steps_from_graphs(pipeline: str) -> None:
    options = EngineOptions(device="cuda", pipeline=pipeline, max_rows=32, kv_tokens=16384, graph_rows="1,2,4,8,16,32")
    driven = DrivenEngine.build(options)
    tokenizer = Tokenizer.from_file(str(DEFAULT_MODEL / "tokenizer.json"))
    prompt = tokenizer.encode("What does os.path.join do?").ids
    asked = [(pattern, params) for pattern in PATTERNS for params in PARAMS]
    with recorded(runtime_of(driven)) as recording:
        free = [driven.submit(prompt, params) for params in PARAMS]
        bound = [driven.submit(prompt, params, constraint=LLMatcher.grammar_from_regex(p)) for p, params in asked]
        driven.run()
    masked = [graphed for graphed, plan in zip(recording.graphed, recording.plans, strict=True) if plan.needs_mask]
    # Without the pipeline forced tokens are appended at once, so fewer steps are masked.
    assert sum(masked) > max(10, len(masked) // 2), f"{sum(masked)} of {len(masked)} masked steps came from graphs"
    for number, (pattern, params) in zip(bound, asked, strict=True):
        text = tokenizer.decode(driven.tokens(number))
        assert driven.outcome(number) == Finished(number, FinishReason.STOP), text
        assert re.fullmatch(pattern, text), f"{text!r} under {params}"
    assert all(driven.tokens(number) for number in free)
    driven.engine.compiler.close()


def outputs(workers: int) -> list[list[int]]:
    """Return the tokens of constrained rows, some of them advanced by workers once the first wave has begun."""
    options = EngineOptions(device="cuda", pipeline="on", max_rows=32, kv_tokens=16384, grammar_workers=workers)
    driven, found = DrivenEngine.build(options), []
    pinned = [slot.host_masks.is_pinned() for slot in runtime_of(driven).slots]
    assert all(pinned), "masks that are not pinned are copied while the loop waits"
    for _ in range(3):
        asked = [(pattern, params) for pattern in PATTERNS for params in PARAMS]
        found += [driven.submit([7, 8, 9], params, constraint=LLMatcher.grammar_from_regex(p)) for p, params in asked]
        driven.run()
        while driven.engine.compiler.is_busy:
            driven.engine.tick()
    tokens = [driven.tokens(number) for number in found]
    driven.engine.compiler.close()
    return tokens


def test_masks_that_workers_write_give_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.engine_core.constraints.grammars.CROWDED", 4)
    monkeypatch.setattr("tandem.engine_core.constraints.grammars.WORKERS_SHARE", 4)
    assert outputs(2) == outputs(0)
