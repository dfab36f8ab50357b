"""Durations of steps that verify drafts, as they are measured at the start."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tandem.engine_core.attention.base import Span
from tandem.engine_core.runtime.model_drafter import ModelDrafter
from tandem.engine_core.runtime.runtime import TorchRuntime
from tandem.engine_core.scheduler.draft_costs import DraftCosts
from tandem.engine_core.startup import draft_timing
from tandem.engine_core.startup import engine as startup_engine
from tandem.protocol.params import SamplingParams
from tests.engine_core.runtime.test_recorded_graphs import MODEL
from tests.engine_core.runtime.test_speculation import KINDS, build
from tests.support.model_folder import write_model


@pytest.mark.parametrize("drafter", ["ngram", "model"])
def test_more_rows_than_a_step_has_room_for_with_drafts(drafter: str, tmp_path: Path) -> None:
    """64 rows of 7 drafts have 512 positions; the costs of more rows are extrapolated."""
    write_model(tmp_path, MODEL)
    found, measure = list[DraftCosts | None](), draft_timing.measure_draft_costs

    def kept(*given: Any) -> DraftCosts | None:
        found.append(measure(*given))
        return found[-1]

    speculate = "ngram" if drafter == "ngram" else f"model:{tmp_path}"
    sizes = {"max_rows": 65, "max_step_tokens": 80, "kv_tokens": 1040}
    with patch.object(startup_engine, "measure_draft_costs", kept):
        driven = build(tmp_path, KINDS["cpu"], speculate=speculate, **sizes)
    [costs] = found
    assert costs is not None and all(costs.milliseconds(rows, 7, 30) > 0 for rows in (1, 64, 65))
    params = SamplingParams(9, temperature=0.0, ignore_eos=True)
    assert [len(tokens) for tokens in driven.generate([[5, 6, 7]] * 65, [params] * 65)] == [9] * 65


@pytest.mark.parametrize("kind", ["cpu", "graphs"])
def test_the_prompts_of_a_draft_model_take_a_time_of_their_own_and_one_by_position(kind: str, tmp_path: Path) -> None:
    write_model(tmp_path, MODEL)
    found, elapsed = list[DraftCosts | None](), [0.0]
    measure = draft_timing.measure_draft_costs

    def timed(_runtime: TorchRuntime, call: Callable[[], None]) -> float:
        elapsed[0] = 5.0
        call()
        return elapsed[0]

    def compute(_drafter: ModelDrafter, _slot: int, spans: Sequence[Span], *_given: object) -> None:
        elapsed[0] += 2.0 + 0.01 * sum(span.length for span in spans)

    def kept(*given: Any) -> DraftCosts | None:
        with patch.object(draft_timing, "milliseconds", timed), patch.object(ModelDrafter, "compute", compute):
            found.append(measure(*given))
        return found[-1]

    with KINDS[kind].kernels(), patch.object(startup_engine, "measure_draft_costs", kept):
        build(tmp_path, KINDS[kind], speculate=f"model:{tmp_path}")
    [costs] = found
    assert costs is not None
    assert (costs.token_ms, costs.span_ms) == (pytest.approx(0.01), pytest.approx(2.0))
    assert costs.catch_up_ms(0) == 0.0 and costs.catch_up_ms(100) == pytest.approx(3.0)
    assert [costs.catch_up_positions(room) for room in (1.0, 2.0, 2.5)] == [0, 0, pytest.approx(50, abs=1)]
    assert costs.milliseconds(1, 0, 30) == costs.milliseconds(1, 1, 30) == 5.0
