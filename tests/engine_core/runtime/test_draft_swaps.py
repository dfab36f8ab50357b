"""Engines whose weights change while a draft model stays: right tokens, fewer accepted drafts."""

from pathlib import Path

import pytest
from safetensors.torch import save_file

from tandem.engine_core.contracts import RunningMode
from tandem.engine_core.model_config import ModelConfig
from tandem.engine_core.models.registry import read_config
from tandem.engine_core.startup.model_weights import ModelWeights
from tandem.protocol.params import SamplingParams
from tests.engine_core.runtime.test_draft_model import acceptance_of
from tests.engine_core.runtime.test_recorded_graphs import MODEL
from tests.engine_core.runtime.test_speculation import KINDS, build
from tests.fakes.weight_change import FakeWeightChange
from tests.support.engine_driver import DrivenEngine
from tests.support.model_folder import FUSED, write_model
from tests.support.plan_recording import runtime_of
from tests.support.tiny_llama import random_model

PROMPTS = [[5, 9, 14], list(range(3, 30)), [5, 9, 14, 7, 8]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of two models of one shape."""
    first, second = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second")
    for folder in (first, second):
        write_model(folder, MODEL)
    slots = random_model(seed=1, config=MODEL).weight_slots()
    plain = [slot for slot in slots if not slot.is_optional and not any(fused in slot.name for fused in FUSED)]
    save_file({slot.name: slot.target.contiguous().clone() for slot in plain}, second / "model.safetensors")
    return first, second


def swap(driven: DrivenEngine, folder: Path, mode: RunningMode) -> None:
    """Let the engine load another checkpoint as soon as the mode allows it."""
    runtime, config = runtime_of(driven), read_config(folder)
    assert isinstance(config, ModelConfig)
    weights = ModelWeights(runtime.model, runtime.kv.layout, next(iter(runtime.kv.keys)).dtype, 64)

    def load() -> str:
        weights.load(folder, config)
        return "second"

    driven.engine.control.begin_change(FakeWeightChange(mode, load))


@pytest.mark.parametrize("kind", ["cpu, two steps in flight", pytest.param("graphs", marks=pytest.mark.slow)])
def test_the_draft_model_of_before_drafts_for_the_weights_of_a_swap(kind: str, folders: tuple[Path, Path]) -> None:
    """The prefix cache is empty then, also of what the draft model had computed."""
    first, second = folders
    params = [SamplingParams(24, temperature=temperature, seed=5, ignore_eos=True) for temperature in (0.0, 1.0, 0.0)]
    with KINDS[kind].kernels():
        expected = build(second, KINDS[kind]).generate(PROMPTS, params)
        driven = build(first, KINDS[kind], speculate=f"model:{first}", speculate_tokens=3)
        assert driven.generate(PROMPTS, params) == build(first, KINDS[kind]).generate(PROMPTS, params)
        drafted, accepted = acceptance_of(driven)
        assert drafted == accepted > 30
        swap(driven, second, "wait")
        assert driven.generate(PROMPTS, params) == expected
        again = driven.generate(PROMPTS, params)
    assert again == expected, "with hits of pages that were filled after the swap"
    drafted, accepted = (
        after - before for after, before in zip(acceptance_of(driven), (drafted, accepted), strict=True)
    )
    assert drafted > 60 and accepted < 0.5 * drafted
    assert driven.engine.scheduler.audit() == []


@pytest.mark.parametrize("mode", ["restart", "keep"])
def test_sequences_that_run_through_a_swap_draft_again(mode: RunningMode, folders: tuple[Path, Path]) -> None:
    """Back and forth: the draft model is right again with the weights of before."""
    first, second = folders
    params = SamplingParams(30, temperature=0.0, ignore_eos=True)
    driven = build(first, KINDS["cpu, two steps in flight"], speculate=f"model:{first}", speculate_tokens=3)
    ids = [driven.submit(prompt, params) for prompt in PROMPTS]
    while len(driven.tokens(ids[0])) < 10:
        driven.engine.tick()
    swap(driven, second, mode)
    while driven.engine.control.weights.change is not None:
        driven.engine.tick()
    changed = len(driven.tokens(ids[0]))
    while len(driven.tokens(ids[0])) < changed + 4:
        driven.engine.tick()
    swap(driven, first, mode)
    driven.run()
    assert all(len(driven.tokens(number)) == 30 for number in ids)
    assert driven.engine.scheduler.audit() == []
    before = acceptance_of(driven)
    plain = build(first, KINDS["cpu"]).generate(PROMPTS, [params] * 3)
    assert driven.generate(PROMPTS, [params] * 3) == plain
    drafted, accepted = (after - first for after, first in zip(acceptance_of(driven), before, strict=True))
    assert drafted == accepted > 30, "no page of other weights is found"


def test_an_adaptive_number_of_drafts_falls_to_none(folders: tuple[Path, Path]) -> None:
    first, second = folders
    params = SamplingParams(36, temperature=0.0, ignore_eos=True)
    driven = build(first, KINDS["cpu"], speculate=f"model:{first}")
    policy, sizes = driven.engine.scheduler.planner.drafts, list[int]()
    choose = policy.choose
    policy.choose = lambda *given: (sizes.append(choose(*given)), sizes[-1])[1]  # type: ignore[method-assign]
    for _ in range(3):
        driven.generate(PROMPTS, [params] * 3)
    assert min(sizes[-10:]) > 0
    swap(driven, second, "wait")
    for _ in range(6):
        driven.generate(PROMPTS, [params] * 3)
    assert sum(sizes[-100:]) <= 5, "but for probes"
