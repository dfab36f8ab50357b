"""Log-probabilities of a whole engine against transformers, however the work is cut."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.engine_core.runtime.runtime import TorchRuntime
from tandem.engine_core.sampling.scorer import PROMPT_SLICE, token_ranks
from tandem.protocol.codec import pack_floats, pack_ids, read_logprobs, unpack_ids
from tandem.protocol.engine_options import EngineOptions
from tandem.protocol.params import SamplingParams
from tests.engine_core.models.test_llama import BASE, save_random
from tests.support.engine_driver import CLIENT, DrivenEngine

TOLERANCE = 1e-4
"""Largest difference of any log-probability, float32. Measured: at most 1e-5 over these models."""
VOCAB = BASE["vocab_size"]
LONG = 600


@pytest.fixture(scope="module", autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_random(directory, {"max_position_embeddings": 1024}, seed=5)
    return directory


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def build(folder: Path, **options: Any) -> DrivenEngine:
    defaults: dict[str, Any] = {"device": "cpu", "max_rows": 4, "threads": 1, "max_len": 700, "kv_tokens": 4000}
    return DrivenEngine.build(EngineOptions(model=str(folder), **defaults | options))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(length)]


Found = dict[int, tuple[float, list[int], list[float]]]


def found(engine: DrivenEngine, request_id: int) -> Found:
    """By position; no position twice, and each request's in order."""
    lines: Found = {}
    for part in engine.mailbox.logprobs[CLIENT, request_id]:
        for offset, line in enumerate(read_logprobs(part)):
            assert not lines or part.start + offset > max(lines)
            lines[part.start + offset] = line
    return lines


def dense(reference: Any, tokens: list[int]) -> Tensor:
    """Log-softmax before each token, [T - 1, vocab] float64: entry i is about token i + 1."""
    with torch.no_grad():
        logits: Tensor = reference(torch.tensor([tokens[:-1]])).logits[0]
    return logits.double().log_softmax(-1)


def check(lines: Found, expected: Tensor, tokens: list[int], top: int) -> float:
    """Asserts each line; returns the largest error."""
    worst = 0.0
    for position, (own, ids, values) in lines.items():
        row = expected[position - 1]
        best = row.topk(top)
        assert len(ids) == len(values) == top
        assert values == sorted(values, reverse=True)
        wanted = [row[tokens[position]], *best.values]
        worst = max([worst, *[abs(a - b.item()) for a, b in zip([own, *values], wanted, strict=True)]])
        for token, value in zip(ids, best.values, strict=True):
            assert abs(row[token] - value) < TOLERANCE, f"position {position}: {ids}, expected {best.indices}"
    assert worst < TOLERANCE
    return worst


PARAMS = [
    SamplingParams(9, temperature=0.0, ignore_eos=True),
    SamplingParams(9, temperature=1.4, top_k=4, seed=3, ignore_eos=True),
    SamplingParams(
        9,
        temperature=0.0,
        repetition_penalty=1.7,
        frequency_penalty=0.5,
        logit_bias_ids=pack_ids([7]),
        logit_bias_values=pack_floats([4.0]),
        ignore_eos=True,
    ),
]
"""The model's own numbers are reported, whatever is done to them before a token is drawn."""


@pytest.mark.parametrize("pipeline", ["on", "off"])
def test_logprobs_equal_those_of_transformers(folder: Path, reference: Any, pipeline: str) -> None:
    engine = build(folder, pipeline=pipeline, prefill_chunk=16, max_step_tokens=40)
    prompts = [prompt_of(length, length) for length in (1, 5, 33)]
    tops = {}
    for prompt, params, top in zip(prompts * 3, PARAMS * 3, [0, 1, 20, 3, None, 0, 20, 5, 2], strict=True):
        request = engine.submit(prompt, params, logprobs=top, prompt_logprobs=top)
        tops[request] = prompt, top
    engine.run()
    errors = []
    for request, (prompt, top) in tops.items():
        lines, tokens = found(engine, request), prompt + engine.tokens(request)
        if top is None:
            assert not lines
            continue
        assert list(lines) == list(range(1, len(tokens)))
        errors.append(check(lines, dense(reference, tokens), tokens, top))
    print(f"max abs error {max(errors):.2g} over {len(errors)} requests")


@pytest.mark.parametrize(("chunk", "step"), [(256, 256), (256, 512), (100, 128), (LONG, LONG)])
def test_logprobs_of_a_long_prompt_in_chunks_equal_those_of_transformers(
    folder: Path, reference: Any, chunk: int, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(folder, prefill_chunk=chunk, max_step_tokens=step)
    runtime = engine.engine.runtime
    assert isinstance(runtime, TorchRuntime)
    sizes: list[int] = []
    logits = runtime.model.logits

    def counted(hidden: Tensor) -> Tensor:
        sizes.append(len(hidden))
        return logits(hidden)

    monkeypatch.setattr(runtime.model, "logits", counted)
    prompt = prompt_of(LONG)
    request = engine.submit(prompt, SamplingParams(1, temperature=0.0), prompt_logprobs=5)
    beside = engine.submit(prompt_of(30, 1), SamplingParams(20, temperature=0.0, ignore_eos=True))
    engine.run()
    lines = found(engine, request)
    assert list(lines) == list(range(1, LONG))
    print(f"max abs error {check(lines, dense(reference, prompt), prompt, 5):.2g}")
    assert max(sizes) <= PROMPT_SLICE, "the logits of more than one slice at once"
    assert not found(engine, beside)


def test_prompt_and_output_logprobs_are_requested_apart(folder: Path) -> None:
    engine = build(folder)
    params = SamplingParams(4, temperature=0.0, ignore_eos=True)
    prompt = prompt_of(6)
    outputs = engine.submit(prompt, params, logprobs=2)
    prompts = engine.submit(prompt, params, prompt_logprobs=4)
    both = engine.submit(prompt, params, logprobs=1, prompt_logprobs=3)
    engine.run()
    assert {position: len(ids) for position, (_, ids, _) in found(engine, outputs).items()} == dict.fromkeys(
        range(6, 10), 2
    )
    assert {position: len(ids) for position, (_, ids, _) in found(engine, prompts).items()} == dict.fromkeys(
        range(1, 6), 4
    )
    assert [len(ids) for _, ids, _ in found(engine, both).values()] == [3] * 5 + [1] * 4


def test_logprobs_are_equal_alone_or_batched(folder: Path) -> None:
    prompts = [prompt_of(length, length) for length in (3, 40, 17, 2)]
    params = SamplingParams(12, temperature=0.0, ignore_eos=True)
    together, alone = build(folder), build(folder, max_rows=1)
    requests = [together.submit(prompt, params, logprobs=4, prompt_logprobs=4) for prompt in prompts]
    together.run()
    for request, prompt in zip(requests, prompts, strict=True):
        single = alone.submit(prompt, params, logprobs=4, prompt_logprobs=4)
        alone.run()
        assert alone.tokens(single) == together.tokens(request)
        mine, theirs = found(alone, single), found(together, request)
        assert list(mine) == list(theirs)
        for position, (own, ids, values) in mine.items():
            other, other_ids, other_values = theirs[position]
            assert ids == other_ids
            assert [own, *values] == pytest.approx([other, *other_values], abs=TOLERANCE)


def test_logprobs_with_two_steps_in_flight_have_the_same_bits(folder: Path) -> None:
    """One request alone makes the same steps at either depth."""
    lines = []
    for pipeline in ("on", "off"):
        engine = build(folder, pipeline=pipeline, prefill_chunk=7)
        request = engine.submit(prompt_of(20), PARAMS[1], logprobs=20, prompt_logprobs=20)
        engine.run()
        lines.append(found(engine, request))
    assert lines[0] == lines[1]
    assert len(lines[0]) == 28


def test_end_token_comes_with_its_own_logprob(folder: Path) -> None:
    """The token that ended a sequence is reported; what a step computed past the end is not."""
    engine = build(folder, pipeline="on")
    prompt = prompt_of(5)
    free = engine.submit(prompt, SamplingParams(8, temperature=0.0, ignore_eos=True))
    engine.run()
    stop = engine.tokens(free)[3]
    first = engine.tokens(free).index(stop)
    request = engine.submit(prompt, SamplingParams(8, temperature=0.0, stop_token_ids=pack_ids([stop])), logprobs=1)
    engine.run()
    assert engine.tokens(request) == engine.tokens(free)[: first + 1]
    assert list(found(engine, request)) == list(range(5, 5 + first + 1))


PROCESSED = [
    SamplingParams(9, temperature=0.0, ignore_eos=True),
    SamplingParams(9, temperature=1.4, seed=3, ignore_eos=True),
    SamplingParams(9, temperature=0.6, top_k=4, seed=4, ignore_eos=True),
    SamplingParams(9, temperature=0.8, top_p=0.5, frequency_penalty=0.5, seed=5, ignore_eos=True),
]


@pytest.mark.parametrize("speculate", ["off", "ngram"])
@pytest.mark.parametrize("pipeline", ["on", "off"])
def test_processed_logprobs_are_those_of_the_distributions_drawn_from(
    folder: Path, reference: Any, pipeline: str, speculate: str
) -> None:
    """Prompts keep the model's own; a draw has a probability above 0 and top-k tokens sum up to 1."""
    engine = build(folder, pipeline=pipeline, prefill_chunk=16, speculate=speculate, logprobs_mode="processed_logprobs")
    prompts = [prompt_of(length, length) * 2 for length in (1, 5, 33, 8)]
    requests = [
        engine.submit(prompt, params, logprobs=20, prompt_logprobs=20)
        for prompt, params in zip(prompts, PROCESSED, strict=True)
    ]
    engine.run()
    for request, prompt, params in zip(requests, prompts, PROCESSED, strict=True):
        lines, tokens = found(engine, request), prompt + engine.tokens(request)
        assert list(lines) == list(range(1, len(tokens)))
        own = dense(reference, tokens)
        check({position: line for position, line in lines.items() if position < len(prompt)}, own, tokens, 20)
        for position in range(len(prompt), len(tokens)):
            chosen, _, values = lines[position]
            row = own[position - 1].clone()
            for token in set(tokens[len(prompt) : position]):
                row[token] -= params.frequency_penalty * tokens[len(prompt) : position].count(token)
            row = (row / (params.temperature or 1.0)).log_softmax(-1)
            kept = params.top_k or len(row)
            if params.top_p < 1:
                kept = int((row.sort(descending=True).values.exp().cumsum(0) < params.top_p).sum()) + 1
            mass = row.topk(kept).values.logsumexp(0)
            assert chosen == pytest.approx(float(row[tokens[position]] - mass), abs=TOLERANCE)
            expected = [float(value - mass) for value in row.topk(min(kept, 20)).values]
            assert values[: len(expected)] == pytest.approx(expected, abs=TOLERANCE)
            assert all(value == float("-inf") for value in values[len(expected) :])


@pytest.mark.parametrize("top", [0, 20])
def test_prompt_tokens_have_their_rank_in_the_whole_vocabulary(folder: Path, reference: Any, top: int) -> None:
    engine, prompts = build(folder, max_step_tokens=400), [prompt_of(LONG, 1), prompt_of(40, 2)]
    params = SamplingParams(3, temperature=0.0, ignore_eos=True)
    requests = [engine.submit(prompt, params, prompt_logprobs=top, logprobs=1) for prompt in prompts]
    engine.run()
    for request, prompt in zip(requests, prompts, strict=True):
        parts = engine.mailbox.logprobs[CLIENT, request]
        ranks = [rank for part in parts if part.start < len(prompt) for rank in unpack_ids(part.ranks)]
        expected = dense(reference, prompt)
        own = expected.gather(1, torch.tensor(prompt[1:])[:, None])
        least, most = (expected > own + TOLERANCE).sum(1) + 1, (expected >= own - TOLERANCE).sum(1)
        found = torch.tensor(ranks)
        assert bool(((least <= found) & (found <= most)).all())
        assert all(not part.ranks for part in parts if part.start >= len(prompt))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_count_the_tokens_that_are_more_probable(dtype: torch.dtype) -> None:
    logits = torch.randint(-4, 4, (150, 37), generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[3], logits[4, 5], logits[5, :7] = torch.nan, torch.nan, torch.inf
    chosen = torch.arange(150, dtype=torch.int32) % 37
    chosen[4] = 5
    rows = logits.nan_to_num(nan=-torch.inf, posinf=torch.inf).tolist()
    expected = []
    for row, token in zip(rows, chosen.tolist(), strict=True):
        order = sorted(range(37), key=lambda other: (-row[other], other))
        expected.append(order.index(token) + 1)
    found = token_ranks(logits, chosen).tolist()
    # A row without numbers has no ranks; its request ends.
    assert found[:3] + found[4:] == expected[:3] + expected[4:]
