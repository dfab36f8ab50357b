"""Rows with adapters have the features of others: each equals the same request to the merged model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tandem.engine_core.scheduler.step_costs import AttentionShare, StepCosts
from tandem.protocol.codec import read_logprobs
from tests.engine_core.lora.test_lora_engine import PROMPT
from tests.support.engine_driver import CLIENT, DrivenEngine
from tests.support.lora_engine import LoraEngine
from tests.support.lora_folder import merge, write_adapter
from tests.support.model_folder import write_model
from tests.support.plan_recording import constraining, runtime_of

LONG = [3 + index % 50 for index in range(40)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("features") / "model"
    folder.mkdir()
    write_model(folder)
    return folder


@pytest.fixture(scope="module")
def adapters(model: Path) -> dict[str, Path]:
    ranks = {"a": 17, "b": 33, "c": 64}
    return {name: write_adapter(model.parent / name, model, rank=rank, seed=rank) for name, rank in ranks.items()}


@pytest.fixture(scope="module")
def merged(model: Path, adapters: dict[str, Path]) -> dict[str, Path]:
    return {"": model} | {name: merge(model, path, model.parent / f"merged {name}") for name, path in adapters.items()}


@pytest.fixture(autouse=True)
def _threads() -> object:
    before = torch.get_num_threads()
    yield None
    torch.set_num_threads(before)


def both(
    model: Path, adapters: dict[str, Path], merged: dict[str, Path], **options: Any
) -> tuple[LoraEngine, dict[str, LoraEngine]]:
    """Return an engine with the adapters, and one for each merged model."""
    engine = LoraEngine.start(model, adapters, max_lora_rank=64, **options)
    return engine, {name: LoraEngine.start(path, enable_lora=False, **options) for name, path in merged.items()}


def test_ranks_above_a_block_of_the_kernels_in_one_batch(
    model: Path, adapters: dict[str, Path], merged: dict[str, Path]
) -> None:
    engine, references = both(model, adapters, merged)
    found = engine.answers(*[(PROMPT, name) for name in references])
    expected = []
    for reference in references.values():
        request_id = reference.ask(PROMPT)
        DrivenEngine.run(reference)
        expected.append(reference.tokens(request_id))
    assert found == expected and len({str(tokens) for tokens in found}) == 4


def test_constrained_rows_with_adapters(model: Path, adapters: dict[str, Path], merged: dict[str, Path]) -> None:
    """The grammars of three rows, one of which has forced tokens, and a row without one."""
    engine, references = both(model, adapters, merged)
    grammars = ("parity", "runs", None)
    for driven in (engine, *references.values()):
        constraining(driven.engine)
    ids = {name: [engine.ask(PROMPT, name, constraint=grammar) for grammar in grammars] for name in references}
    engine.run()
    for name, reference in references.items():
        own = [reference.ask(PROMPT, constraint=grammar) for grammar in grammars]
        DrivenEngine.run(reference)
        expected = [reference.tokens(request_id) for request_id in own]
        assert [engine.tokens(request_id) for request_id in ids[name]] == expected, name
        assert expected[0] != expected[2] != expected[1]


def logprobs_of(driven: LoraEngine, request_id: int) -> list[float]:
    """Return the log-probabilities of all tokens of a request, those of its prompt first."""
    parts = sorted(driven.mailbox.logprobs[CLIENT, request_id], key=lambda part: part.start)
    return [logprob for part in parts for logprob, _, _ in read_logprobs(part)]


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_log_probabilities_of_prompts_and_outputs(
    kv_dtype: str, model: Path, adapters: dict[str, Path], merged: dict[str, Path]
) -> None:
    """In chunks, with the scales of an FP8 cache that the base has."""
    engine, references = both(model, adapters, merged, max_step_tokens=16, prefill_chunk=11, kv_dtype=kv_dtype)
    ids = {name: engine.ask(LONG, name, logprobs=0, prompt_logprobs=0) for name in references}
    engine.run()
    found = {name: logprobs_of(engine, request_id) for name, request_id in ids.items()}
    prompt = slice(0, len(LONG) - 1)
    for name, reference in references.items():
        runtime_of(reference).model.kv_scales.values.copy_(runtime_of(engine).model.kv_scales.values)
        own = reference.ask(LONG, logprobs=0, prompt_logprobs=0)
        DrivenEngine.run(reference)
        expected = logprobs_of(reference, own)
        assert len(found[name]) == len(expected) == len(LONG) - 1 + 8
        np.testing.assert_allclose(found[name][prompt], expected[prompt], atol=1e-3)
    differences = np.abs(np.array(found["a"][prompt]) - found["b"][prompt])
    assert differences.mean() > 0.1


def test_two_runs_give_the_same_bits(model: Path, adapters: dict[str, Path]) -> None:
    """Rows of all adapters in one batch, in two engines, compared by their log-probabilities."""
    found = []
    for _ in range(2):
        engine = LoraEngine.start(model, adapters, max_lora_rank=64, max_step_tokens=16)
        # Which rows share a step depends neither on measured durations nor on how fast adapters are read.
        engine.engine.scheduler.planner.costs = StepCosts({}, AttentionShare())
        for name in adapters:
            engine.ask(LONG[:5], name)
            engine.run()
        ids = [engine.ask(LONG[: 9 + index], name, logprobs=3) for index, name in enumerate(["", *adapters] * 2)]
        engine.run()
        parts = [engine.mailbox.logprobs[CLIENT, request_id] for request_id in ids]
        found.append([(engine.tokens(one), [part.lines for part in own]) for one, own in zip(ids, parts, strict=True)])
    assert found[0] == found[1]
