"""A preempted sequence whose grammar forces tokens goes on where it was."""

from random import Random

import pytest
from llguidance import LLMatcher

from tandem.engine_core.constraints import grammars as grammars_module
from tandem.protocol.commands import Abort
from tandem.protocol.engine_options import EngineOptions
from tandem.protocol.events import Finished
from tandem.protocol.params import SamplingParams
from tests.support.engine_driver import CLIENT, DrivenEngine

TEXTS = LLMatcher.grammar_from_regex("([ab]qzj[cd]){30}")
"""Three tokens are forced after each choice."""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_prompts_that_are_aborted_leave_no_old_forced_tokens(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a prompt is computed, short jumps are worth it; it is aborted between tokens and their commit."""
    monkeypatch.setattr(grammars_module, "CROWDED", 4)
    options = EngineOptions(
        device="cpu", max_len=1024, max_rows=32, prefill_chunk=16, pipeline="on", grammar_workers=workers
    )
    driven, random = DrivenEngine.build(options), Random(1)
    engine, ids = driven.engine, []
    try:
        for wave in range(2):  # The workers have the grammar when the second begins.
            ids += [
                driven.submit([7, 8, row], SamplingParams(100, temperature=1.0, seed=row), constraint=TEXTS)
                for row in range(22)
            ]
            for _ in range(40 * wave):
                prompt = driven.submit([random.randrange(10, 400) for _ in range(900)], SamplingParams(5))
                for _ in range(random.randrange(3, 6)):
                    engine.tick()
                driven.mailbox.inbox.append((CLIENT, Abort([prompt])))
                engine.tick()
                for seq in [seq for seq in engine.scheduler.running.values() if seq.constraint][:4]:
                    engine.scheduler.preempt(seq)
            driven.run()
            while engine.compiler.is_busy:
                engine.tick()
    finally:
        if engine.compiler.workers is not None:  # type: ignore[attr-defined]
            engine.compiler.workers.close()  # type: ignore[attr-defined]
    assert all(isinstance(driven.outcome(request_id), Finished) for request_id in ids)
