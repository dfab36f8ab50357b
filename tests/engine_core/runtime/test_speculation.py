"""Engines that verify n-gram drafts give the tokens that they give without, on the paths of a CPU and of a GPU."""

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tandem.engine_core.kernels.speculation.reference import NgramRule
from tandem.engine_core.plan import StepPlan
from tandem.engine_core.runtime.speculation import NgramDrafter
from tandem.engine_core.startup import engine as startup_engine
from tandem.engine_core.startup.device import DeviceParts, open_parts
from tandem.engine_core.startup.runtime import MAX_SCAN
from tandem.protocol.codec import pack_floats, pack_ids
from tandem.protocol.engine_options import EngineOptions
from tandem.protocol.params import SamplingParams
from tests.engine_core.runtime.test_recorded_graphs import MODEL
from tests.fakes.recording_gpu import oracle_attention, oracle_parts, without_trial
from tests.support.engine_driver import CLIENT, DrivenEngine
from tests.support.model_folder import write_model
from tests.support.plan_recording import constraining, runtime_of
from tests.support.tiny_llama import END, VOCAB
from tests.support.verified_steps import kept_positions, largest_difference


class Kind(NamedTuple):
    """A device, and how its steps run."""

    device: str
    parts: Callable[[str], DeviceParts]
    kernels: Callable[[], AbstractContextManager[Any]]
    depth: str


KINDS = {
    "cpu": Kind("cpu", open_parts, nullcontext, "off"),
    "cpu, two steps in flight": Kind("cpu", open_parts, nullcontext, "on"),
    "graphs": Kind("cuda", oracle_parts, oracle_attention, "on"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_model(path, MODEL)
    return path


def build(folder: Path, kind: Kind, *, trial: bool = False, **options: Any) -> DrivenEngine:
    """Build an engine. trial: measure its steps and graphs first, as on a GPU."""
    sizes: dict[str, Any] = {"max_rows": 6, "max_len": 64, "max_step_tokens": 32, "kv_tokens": 512, "page_size": 8}
    if kind.device == "cuda":
        sizes |= {"graph_rows": "2,6", "graph_tokens": "24"}
    asked = EngineOptions(
        model=str(folder), device=kind.device, dtype="float32", pipeline=kind.depth, **sizes | options
    )
    cuda = patch.object(startup_engine.configuration, "resolve_device", lambda *_: kind.device)
    with cuda, nullcontext() if trial else without_trial():
        driven = DrivenEngine.build(asked, kind.parts)
    constraining(driven.engine)
    return driven


def requests(rng: random.Random, count: int) -> Iterator[tuple[list[int], SamplingParams, dict[str, Any]]]:
    """Prompts that repeat, and parameters of every kind."""
    for _ in range(count):
        phrase = [rng.randrange(2, VOCAB) for _ in range(rng.randint(1, 6))]
        prompt = (phrase * 8)[: rng.randint(1, 30)]
        max_tokens = rng.randint(1, 30)
        biased = rng.sample(range(VOCAB), 3)
        params = SamplingParams(
            max_tokens,
            temperature=rng.choice([0.0, 0.0, 0.3, 1.0]),
            top_k=rng.choice([0, 0, 5]),
            top_p=rng.choice([1.0, 0.8]),
            min_p=rng.choice([0.0, 0.05]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
            presence_penalty=rng.choice([0.0, 0.5]),
            frequency_penalty=rng.choice([0.0, 0.0, 0.5]),
            seed=rng.randrange(2**40),
            min_tokens=rng.choice([0, rng.randint(0, max_tokens)]),
            ignore_eos=rng.random() < 0.3,
            logit_bias_ids=pack_ids([END, *biased]),
            logit_bias_values=pack_floats([3.0, *[rng.choice([0.0, 4.0]) for _ in biased]]),
        )
        wanted: dict[str, Any] = {"speculation": rng.random() < 0.9}
        if rng.random() < 0.1:
            wanted["constraint"] = "parity"
        elif rng.random() < 0.1:
            wanted["logprobs"] = 2
        yield prompt, params, wanted


class Output(NamedTuple):
    """Tokens of random requests, and how they came about."""

    tokens: list[list[int]]
    logprobs: list[NDArray[np.float32]]
    """Records of each request, [tokens or 0, 1 + 2 * 2]."""
    accepted: int
    """Number of accepted drafts."""
    plans: list[StepPlan]


def generate(folder: Path, kind: Kind, seed: int, **options: Any) -> Output:
    """Return the output of random requests that arrive one after the other."""
    ids, rng = [], random.Random(seed)
    with kind.kernels():
        driven = build(folder, kind, **options)
        plans, launch = list[StepPlan](), driven.engine.scheduler.on_launch
        driven.engine.scheduler.on_launch = lambda plan: (plans.append(plan), launch(plan))[1]  # type: ignore[method-assign]
        for prompt, params, wanted in requests(random.Random(seed), 12):
            ids.append(driven.submit(prompt, params, **wanted))
            for _ in range(rng.randint(0, 4)):
                driven.engine.tick()
        driven.run()
    assert driven.engine.scheduler.audit() == []
    records = [b"".join([part.lines for part in driven.mailbox.logprobs[CLIENT, number]]) for number in ids]
    logprobs = [np.frombuffer(lines, np.float32).reshape(-1, 5) for lines in records]
    accepted = driven.engine.stats.spec_decode_num_accepted_tokens
    return Output([driven.tokens(number) for number in ids], logprobs, accepted, plans)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Callable[[str, int], Output]:
    """Output of random requests without drafts, by kind and seed."""
    return cache(lambda kind, seed: generate(folder, KINDS[kind], seed))


CASES = [
    *((kind, tokens, range(3)) for kind in ("cpu", "cpu, two steps in flight") for tokens in ("auto", 4)),
    ("cpu, two steps in flight", 7, range(3, 6)),
    ("graphs", 4, range(2, 4)),
    pytest.param("graphs", "auto", range(4), marks=pytest.mark.slow),
    pytest.param("graphs", 7, range(4), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("kind", "tokens", "seeds"), CASES)
def test_tokens_equal_those_without_drafts(
    kind: str, tokens: int | str, seeds: range, folder: Path, plain: Callable[[str, int], Output]
) -> None:
    """Likewise their log-probabilities; rows with grammars, log-probabilities and drafts share steps."""
    accepted, plans = 0, list[StepPlan]()
    for seed in seeds:
        found, expected = (
            generate(folder, KINDS[kind], seed, speculate="ngram", speculate_tokens=tokens),
            plain(kind, seed),
        )
        assert found.tokens == expected.tokens, f"seed {seed}"
        for own, other in zip(found.logprobs, expected.logprobs, strict=True):
            np.testing.assert_allclose(own[:, :3], other[:, :3], atol=1e-4)
            assert own[:, 3:].tobytes() == other[:, 3:].tobytes()
        accepted += found.accepted
        plans += found.plans
    assert accepted > 10
    verified = [plan for plan in plans if plan.num_drafts]
    assert any(plan.needs_mask for plan in verified) and any(plan.logprobs >= 0 for plan in verified)


def test_a_text_that_repeats_takes_fewer_steps(folder: Path) -> None:
    """With a large bias the model says the same token again and again."""
    bias = {"logit_bias_ids": pack_ids([7]), "logit_bias_values": pack_floats([100.0])}
    params = SamplingParams(48, temperature=0.0, ignore_eos=True, **bias)
    steps = []
    for options in ({}, {"speculate": "ngram", "speculate_tokens": 7}):
        driven = build(folder, KINDS["cpu"], **options)
        assert driven.generate([[5, 7, 7, 7]], [params]) == [[7] * 48]
        steps.append(driven.engine.stats.steps_launched)
    assert steps[0] == 48 and steps[1] <= 8


@pytest.mark.parametrize("kind", ["cpu, two steps in flight", "graphs"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_prediction_of_the_answer_is_accepted(kind: str, temperature: float, folder: Path) -> None:
    """For as long as it is the answer; the row's next sequence, and one beside it, have none."""
    params = SamplingParams(24, temperature=temperature, seed=5, ignore_eos=True)
    prompts = [[5, 9, 14], [6, 10, 15], [7, 11, 16]]
    with KINDS[kind].kernels():
        plain = build(folder, KINDS[kind]).generate(prompts, [params] * 3)
        options: dict[str, Any] = {"max_rows": 2, "graph_rows": "2"} if kind == "graphs" else {"max_rows": 2}
        driven = build(folder, KINDS[kind], trial=True, speculate="ngram", speculate_tokens=3, **options)
        wrong = [*plain[0][:11], *[(token + 1) % VOCAB for token in plain[0][11:]]]
        for prompt, prediction in zip(prompts, (wrong, [], plain[2]), strict=True):
            driven.submit(prompt, params, prediction=pack_ids(prediction))
        driven.run()
    assert [driven.tokens(number) for number in (1, 2, 3)] == plain
    found = [[row for row in driven.mailbox.drafts[CLIENT, number] if row[2]] for number in (1, 2, 3)]
    accepted = [sum(right for _, right, _ in drafts) for drafts in found]
    assert not found[1] and 8 <= accepted[0] <= 10 and accepted[2] >= 16
    assert all(right <= drafted <= 3 for drafts in found for drafted, right, _ in drafts)
    assert sum(drafted for drafted, _, _ in found[0]) > accepted[0]


def test_matches_have_the_lengths_of_the_options(folder: Path) -> None:
    options: dict[str, Any] = {"speculate_min_match": 3, "speculate_max_match": 5}
    speculator = runtime_of(build(folder, KINDS["cpu"], speculate="ngram", **options)).speculator
    assert speculator is not None and isinstance(speculator.drafter, NgramDrafter)
    assert speculator.drafter.rule == NgramRule(3, 5, MAX_SCAN)


def test_a_prediction_survives_a_preemption(folder: Path) -> None:
    params = SamplingParams(40, temperature=0.0, ignore_eos=True)
    prompts = [[5, 9, 14], [6, 10, 15], [7, 11, 16]]
    plain = build(folder, KINDS["cpu"]).generate(prompts, [params] * 3)
    driven = build(folder, KINDS["cpu"], speculate="ngram", speculate_tokens=3, kv_tokens=80)
    for prompt, prediction in zip(prompts, plain, strict=True):
        driven.submit(prompt, params, prediction=pack_ids(prediction))
    driven.run()
    assert driven.engine.scheduler.preemptions > 0
    assert [driven.tokens(number) for number in (1, 2, 3)] == plain
    for number in (1, 2, 3):
        drafts = driven.mailbox.drafts[CLIENT, number]
        assert sum(right for _, right, is_predicted in drafts if is_predicted) >= 24


@pytest.mark.parametrize(
    ("options", "most"), [({}, 0), ({"speculate": "ngram"}, 7), ({"speculate": "ngram", "speculate_tokens": 4}, 4)]
)
def test_accepted_drafts_have_a_count_for_each_position_from_the_start(
    options: dict[str, Any], most: int, folder: Path
) -> None:
    stats = build(folder, KINDS["cpu"], **options).engine.stats
    assert stats.spec_decode_num_accepted_tokens_per_pos == {str(index): 0 for index in range(most)}


def test_committed_tokens_are_what_the_sampler_draws_from_the_logits_of_their_step(folder: Path) -> None:
    """These logits equal those of single tokens up to rounding: the texts are equal, so each is forced on the other."""
    prompts = [[number + 3, 4, 5, 6, 7] * 4 for number in range(3)]
    params = [SamplingParams(40, temperature=0.6, top_p=0.9, repetition_penalty=0.9, seed=n) for n in range(3)]
    found, positions = [], []
    for options in ({}, {"speculate": "ngram", "speculate_tokens": 5}):
        driven = build(folder, KINDS["cpu, two steps in flight"], **options)
        with kept_positions(runtime_of(driven)) as kept:
            found.append(driven.generate(prompts, params))
        positions.append(kept)
    assert found[0] == found[1] and positions[1].verified > 30
    assert largest_difference(*positions) < 1e-4


@pytest.mark.parametrize("kind", ["cpu", "cpu, two steps in flight"])
def test_a_wrong_draft_without_usable_logits_ends_no_sequence(kind: str, folder: Path) -> None:
    """Neither its own nor those of the same step, which the padding of page 0 would reach."""
    unusable = VOCAB - 1
    bias = {"logit_bias_ids": pack_ids([unusable]), "logit_bias_values": pack_floats([-100.0])}
    params = SamplingParams(24, temperature=0.0, ignore_eos=True, **bias)
    prompts = [[5, 9, 14], [6, 10, 15, 16, 17, 18, 19]]
    tokens = []
    for options in ({}, {"speculate": "ngram", "speculate_tokens": 3}):
        driven = build(folder, KINDS[kind], **options)
        model = runtime_of(driven).model
        [embedding] = [slot.target for slot in model.weight_slots() if "embed_tokens" in slot.name]
        embedding[unusable] = torch.nan
        for prompt in prompts:
            wrong = [unusable if index % 3 else token for index, token in enumerate(tokens[0][0])] if tokens else []
            driven.submit(prompt, params, prediction=pack_ids(wrong))
        driven.run()
        tokens.append([driven.tokens(number) for number in (1, 2)])
    assert any(drafted > right for drafted, right, _ in driven.mailbox.drafts[CLIENT, 1])
    assert tokens[0] == tokens[1] and [len(own) for own in tokens[0]] == [24, 24]
