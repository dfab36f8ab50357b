"""Engines that verify the drafts of a model, on the paths of a CPU and of a GPU."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from msgspec import structs

from tandem.engine_core import graph_sizes
from tandem.engine_core.attention.base import Span
from tandem.engine_core.plan import StepPlan
from tandem.engine_core.runtime.graphs import MAX_PROMPTS
from tandem.engine_core.runtime.model_drafter import ModelDrafter
from tandem.protocol.params import SamplingParams
from tests.engine_core.runtime.test_recorded_graphs import MODEL
from tests.engine_core.runtime.test_speculation import KINDS, build, generate
from tests.support.engine_driver import DrivenEngine
from tests.support.model_folder import write_model
from tests.support.plan_recording import runtime_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_model(path, MODEL)
    return path


def acceptance_of(driven: DrivenEngine) -> tuple[int, int]:
    """Return the drafts that were verified and those that were accepted."""
    stats = driven.engine.stats
    return stats.spec_decode_num_draft_tokens, stats.spec_decode_num_accepted_tokens


@pytest.mark.parametrize(
    ("kind", "tokens"), [*(("cpu", tokens) for tokens in range(1, 8)), *((kind, 4) for kind in list(KINDS)[1:])]
)
def test_the_target_as_its_own_draft_model_is_always_right(kind: str, tokens: int, folder: Path) -> None:
    """Whatever the phases without drafts, the chunks of prompts and the hits were before.

    The keys and values that it has not computed are NaN, and it has no drafts of them.
    """
    prompts = [[5, 9, 14], list(range(3, 30)), [5, 9, 14, 7, 8]]
    with KINDS[kind].kernels():
        plain = build(folder, KINDS[kind])
        driven = build(folder, KINDS[kind], speculate=f"model:{folder}", speculate_tokens=tokens)
        draft = runtime_of(driven).kv.draft
        assert draft is not None
        draft.pool.fill_(torch.nan)
        for temperature in (0.0, 1.0):
            before = acceptance_of(driven)[1]
            params = SamplingParams(24, temperature=temperature, seed=5, ignore_eos=True)
            assert driven.generate(prompts, [params] * 3) == plain.generate(prompts, [params] * 3)
            drafted, accepted = acceptance_of(driven)
            assert drafted == accepted > before + 30
    assert driven.engine.scheduler.audit() == []


@pytest.mark.parametrize(("tokens", "total"), [(2, 9), (5, 25), (7, 17), (7, 33)])
def test_a_page_that_lacks_its_last_position_is_made_up_for(tokens: int, total: int, folder: Path) -> None:
    """A row has fewer drafts before its end, and the last one that it accepts was no input of the draft model."""
    prompt, params = [5, 9, 14], SamplingParams(total - 3, temperature=0.0, ignore_eos=True)
    driven = build(folder, KINDS["cpu"], speculate=f"model:{folder}", speculate_tokens=tokens)
    draft, tree = runtime_of(driven).kv.draft, driven.engine.scheduler.memory.tree
    assert draft is not None and tree is not None
    draft.pool.fill_(torch.nan)
    [output] = driven.generate([prompt], [params])
    before = acceptance_of(driven)[0]
    driven.generate([[*prompt, *output, 7, 8]], [SamplingParams(12, temperature=0.0, ignore_eos=True)])
    assert driven.engine.scheduler.memory.num_hit_tokens == total - 1
    drafted, accepted = acceptance_of(driven)
    assert drafted == accepted > before + 6


def test_a_cache_hit_of_pages_that_the_draft_model_lacks_is_made_up_for(folder: Path) -> None:
    """Those of a request without drafts; then the pages have both."""
    params = SamplingParams(20, temperature=0.0, ignore_eos=True)
    prompt = list(range(3, 30))
    driven = build(folder, KINDS["cpu"], speculate=f"model:{folder}", speculate_tokens=3)
    driven.submit(prompt, params, speculation=False)
    driven.run()
    assert acceptance_of(driven) == (0, 0)
    tree = driven.engine.scheduler.memory.tree
    assert tree is not None and not any(tree.has_draft_kv)
    assert driven.generate([prompt], [params]) == [driven.tokens(1)]
    drafted, accepted = acceptance_of(driven)
    assert drafted == accepted > 10 and driven.engine.scheduler.memory.num_hit_tokens > 0
    assert sum(tree.has_draft_kv) == len(prompt) // 8, "pages of the prompt, which were computed once"


@pytest.mark.parametrize("largest", [16, 32])
def test_known_tokens_run_as_graphs_up_to_the_largest(largest: int, folder: Path) -> None:
    """Rows of one token and of several, chunks and positions that decode steps left out; larger ones run without."""
    params = SamplingParams(24, temperature=0.0, ignore_eos=True)
    prompts, sizes = [[5], [6, 10], [*range(3, 30)], [7, 8, 9]], list[tuple[bool, int]]()
    compute = ModelDrafter.compute

    def noted(model: ModelDrafter, slot: int, spans: Sequence[Span], *given: Any) -> None:
        sizes.append((given[-1] is not None, sum(span.length for span in spans)))
        compute(model, slot, spans, *given)

    with KINDS["graphs"].kernels(), patch.object(graph_sizes, "DRAFT_PROMPT_TOKENS", (8, largest)):
        plain = build(folder, KINDS["graphs"]).generate(prompts, [params] * 4)
        driven = build(folder, KINDS["graphs"], speculate=f"model:{folder}", speculate_tokens=3)
        policy, calls = driven.engine.scheduler.planner.drafts, iter(range(1000))
        choose = policy.choose
        policy.choose = lambda *given: choose(*given) if next(calls) % 12 > 9 else 0  # type: ignore[method-assign]
        with patch.object(ModelDrafter, "compute", noted):
            assert driven.generate(prompts, [params] * 4) == plain
    drafted, accepted = acceptance_of(driven)
    assert drafted == accepted > 10
    assert len(sizes) > 2 and all(is_graph == (tokens <= largest) for is_graph, tokens in sizes)
    graphs = runtime_of(driven).graphs
    assert graphs is not None and [sorted(of_slot) for of_slot in graphs.draft_prompts] == [[8, largest]] * 2


def test_a_graph_holds_the_tokens_of_a_limited_number_of_rows(folder: Path) -> None:
    with KINDS["graphs"].kernels():
        graphs = runtime_of(build(folder, KINDS["graphs"], speculate=f"model:{folder}")).graphs
    assert graphs is not None
    assert graphs.draft_prompt(0, MAX_PROMPTS, 16) is graphs.draft_prompt(0, 1, 1) is graphs.draft_prompts[0][16]
    assert graphs.draft_prompt(0, 1, 17) is graphs.draft_prompt(1, MAX_PROMPTS + 1, 16) is None


def test_known_tokens_are_computed_by_the_launch_of_their_step(folder: Path) -> None:
    """Once the results are here, the next step of the slot overwrites the inputs (I6)."""
    params = SamplingParams(30, temperature=0.0, ignore_eos=True)
    driven = build(folder, KINDS["cpu, two steps in flight"], speculate=f"model:{folder}", speculate_tokens=3)
    runtime, launching, places = runtime_of(driven), list[int](), list[bool]()
    launch, compute = runtime.launch, ModelDrafter.compute

    def noted(model: ModelDrafter, slot: int, *given: Any) -> None:
        places.append(launching == [slot])
        compute(model, slot, *given)

    def launched(slot: int, plan: StepPlan) -> None:
        launching.append(slot)
        launch(slot, plan)
        launching.clear()

    with patch.object(ModelDrafter, "compute", noted), patch.object(runtime, "launch", launched):
        driven.generate([[5, 9, 14], list(range(3, 40))], [params] * 2)
    assert places and all(places)


def test_pages_that_are_hit_again_and_again_keep_their_drafts_right(folder: Path) -> None:
    """Pages must not be published before their keys and values are written (vllm#41838), also with a small pool."""
    params = SamplingParams(20, temperature=0.0, ignore_eos=True)
    prompts = [list(range(3, 30)), [*range(3, 25), 9, 9], [5, 9, 14]]
    kind = KINDS["cpu, two steps in flight"]
    driven = build(folder, kind, speculate=f"model:{folder}", speculate_tokens=3, kv_tokens=160)
    plain = build(folder, kind).generate(prompts, [params] * 3)
    for _ in range(5):
        assert driven.generate(prompts, [params] * 3) == plain
    drafted, accepted = acceptance_of(driven)
    assert drafted == accepted > 150
    assert driven.engine.scheduler.memory.num_hit_tokens > 100


def test_a_draft_model_keeps_its_keys_in_the_dtype_of_the_target(folder: Path) -> None:
    """Its scales are calibrated like those of the target (vllm#24505): as its own drafter it stays right."""
    params = SamplingParams(24, temperature=0.0, ignore_eos=True)
    prompts = [[5, 9, 14], list(range(3, 30)), [5, 9, 14, 7, 8]]
    kind = KINDS["cpu, two steps in flight"]
    plain = build(folder, kind, kv_dtype="fp8").generate(prompts, [params] * 3)
    driven = build(folder, kind, kv_dtype="fp8", speculate=f"model:{folder}", speculate_tokens=3)
    assert driven.generate(prompts, [params] * 3) == plain
    drafted, accepted = acceptance_of(driven)
    assert drafted == accepted > 30


def test_phases_without_drafts_are_made_up_for(folder: Path) -> None:
    params = SamplingParams(40, temperature=0.0, ignore_eos=True)
    driven = build(folder, KINDS["cpu, two steps in flight"], speculate=f"model:{folder}", speculate_tokens=3)
    policy, calls = driven.engine.scheduler.planner.drafts, iter(range(1000))
    choose = policy.choose
    policy.choose = lambda *given: choose(*given) if next(calls) % 12 > 9 else 0  # type: ignore[method-assign]
    plain = build(folder, KINDS["cpu"]).generate([[5, 9, 14], [6, 7]], [params] * 2)
    assert driven.generate([[5, 9, 14], [6, 7]], [params] * 2) == plain
    drafted, accepted = acceptance_of(driven)
    assert drafted == accepted > 10


def test_preempted_sequences_and_turns_of_a_session_draft_again(folder: Path) -> None:
    params = SamplingParams(40, temperature=0.0, ignore_eos=True)
    prompts = [[5, 9, 14], [6, 10, 15], [7, 11, 16]]
    plain = build(folder, KINDS["cpu"]).generate(prompts, [params] * 3)
    driven = build(folder, KINDS["cpu"], speculate=f"model:{folder}", speculate_tokens=3, kv_tokens=80)
    assert driven.generate(prompts, [params] * 3) == plain
    assert driven.engine.scheduler.preemptions > 0
    drafted, accepted = acceptance_of(driven)
    assert drafted == accepted > 30
    assert driven.engine.scheduler.audit() == []
    driven = build(folder, KINDS["cpu"], speculate=f"model:{folder}", speculate_tokens=3)
    driven.submit(prompts[0], params, session="talk")
    driven.run()
    first = driven.tokens(1)
    driven.submit([*prompts[0], *first, 4, 4], SamplingParams(12, temperature=0.0, ignore_eos=True), session="talk")
    driven.run()
    assert driven.engine.scheduler.memory.num_hit_tokens >= 40
    drafted, accepted = acceptance_of(driven)
    assert drafted == accepted


@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        *(("cpu", 0), ("cpu, two steps in flight", 1), ("graphs", 0)),
        *(pytest.param(kind, seed, marks=pytest.mark.slow) for kind in KINDS for seed in range(2, 4)),
    ],
)
def test_tokens_equal_those_without_drafts(kind: str, seed: int, folder: Path, tmp_path: Path) -> None:
    """With another model as the drafter, for random parameters, grammars and log-probabilities."""
    write_model(tmp_path, structs.replace(MODEL, attention=MODEL.attention[:1]))
    found = generate(folder, KINDS[kind], seed, speculate=f"model:{tmp_path}", speculate_tokens=3)
    assert found.tokens == generate(folder, KINDS[kind], seed).tokens
    assert any(plan.num_drafts for plan in found.plans)


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_model_that_dies_of_nan_costs_acceptance_alone(kind: str, folder: Path) -> None:
    params = SamplingParams(24, temperature=0.7, seed=3, ignore_eos=True)
    prompts = [[5, 9, 14], [6, 10, 15, 16, 17, 18, 19]]
    with KINDS[kind].kernels():
        plain = build(folder, KINDS[kind]).generate(prompts, [params] * 2)
        driven = build(folder, KINDS[kind], trial=True, speculate=f"model:{folder}", speculate_tokens=3)
        speculator = runtime_of(driven).speculator
        assert speculator is not None and speculator.model is not None
        [embedding] = [slot.target for slot in speculator.model.model.weight_slots() if "embed_tokens" in slot.name]
        embedding[1:] = torch.nan
        assert driven.generate(prompts, [params] * 2) == plain
    assert acceptance_of(driven)[1] == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("acceptance", "least", "most"), [(1e-6, 0.0, 0.0), (0.6, 0.4, 0.8), (1.0, 1.0, 1.0)])
def test_benchmarks_choose_the_acceptance(
    kind: str, acceptance: float, least: float, most: float, folder: Path
) -> None:
    """Whatever the models have in common."""
    options = {"speculate_tokens": 1, "developer": "on", "synthetic_acceptance": acceptance}
    params = SamplingParams(40, temperature=1.0, seed=5, ignore_eos=True)
    with KINDS[kind].kernels():
        driven = build(folder, KINDS[kind], speculate=f"model:{folder}", **options)
        driven.generate([[number, 3] for number in range(4)], [params] * 4)
    drafted, accepted = acceptance_of(driven)
    assert drafted > 40 and least <= accepted / drafted <= most
