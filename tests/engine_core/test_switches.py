"""Every switch of cache and scheduler on a real model: greedy tokens stay the same where the model is certain."""

import random
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from tandem.engine_core.models.decoder import Decoder
from tandem.engine_core.plan import StepPlan
from tandem.engine_core.runtime.runtime import TorchRuntime
from tandem.engine_core.scheduler.policy import POLICIES
from tandem.engine_core.startup.engine import DEFAULT_MODEL
from tandem.protocol.engine_options import EngineOptions
from tandem.protocol.params import SamplingParams
from tests.support.engine_driver import DrivenEngine
from tests.support.tiny_llama import MAX_LEN, VOCAB, Compared, Shape, TinyEngine, random_model

WHOLE: dict[str, Any] = {"chunk": 0, "step_tokens": MAX_LEN + 4}
SHAPES: dict[str, Shape] = {
    "plain": Shape(cache=False),
    "cache": Shape(),
    "cache, blocking": Shape(depth=1),
    "small chunks": Shape(chunk=3, step_tokens=8),
    "whole prompts": Shape(**WHOLE),
    "pages of one": Shape(page_size=1, chunk=7),
    "pages of sixteen": Shape(page_size=16, chunk=7),
    "one page a sequence": Shape(page_size=MAX_LEN, cache=False),
    "static batches": Shape(static=True, cache=False, **WHOLE),
    "static batches of one page each": Shape(static=True, cache=False, page_size=MAX_LEN, depth=1, **WHOLE),
    "short of pages": Shape(pages=22),
    "short of pages, no cache": Shape(pages=22, cache=False, depth=1, chunk=9),
    **{policy: Shape(policy=policy, step_tokens=10, chunk=6) for policy in POLICIES},
}
GREEDY = SamplingParams(14, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def model() -> Decoder:
    return random_model()


def prompts() -> list[list[int]]:
    """Return chats behind two system prompts, some of them twice, and a few with no shared prefix."""
    rng = random.Random(5)
    systems = [[rng.randrange(3, VOCAB) for _ in range(20)] for _ in range(2)]
    chats = [systems[number % 2] + [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 12))] for number in range(8)]
    return [*chats, chats[0], chats[3], [rng.randrange(3, VOCAB) for _ in range(9)], systems[0]]


@pytest.fixture(scope="module")
def checked() -> dict[tuple[int, ...], Compared]:
    """Answers that were compared with the dense model, each with its prompt."""
    return {}


@pytest.mark.parametrize("name", SHAPES)
def test_same_tokens_as_a_dense_model(model: Decoder, checked: dict[tuple[int, ...], Compared], name: str) -> None:
    engine = TinyEngine(model, SHAPES[name])
    compared = Compared()
    for _ in range(2):
        asked = prompts()
        for prompt, tokens in zip(asked, engine.generate(asked, [GREEDY] * len(asked)), strict=True):
            assert len(tokens) == GREEDY.max_tokens
            key = (*prompt, *tokens)
            if key not in checked:
                checked[key] = Compared()
                checked[key].check(model, prompt, tokens, GREEDY, False)
            compared.tokens += checked[key].tokens
            compared.close += checked[key].close
    assert compared.close <= compared.tokens / 50, f"{compared.close} of {compared.tokens} were too close to call"
    scheduler = engine.scheduler
    assert scheduler.audit() == []
    assert bool(scheduler.memory.num_hit_tokens) == SHAPES[name].cache
    assert (scheduler.preemptions > 0) == ("short" in name)
    assert scheduler.memory.usage.in_use == 0


def test_sampled_tokens_do_not_change_with_a_preemption(model: Decoder) -> None:
    """Random numbers go by position, so computing a sequence again changes nothing that was or will be drawn."""
    asked = prompts()
    params = [
        SamplingParams(14, seed=number, temperature=0.8, top_k=9, repetition_penalty=1.2, min_tokens=3, ignore_eos=True)
        for number in range(len(asked))
    ]
    roomy, tight = TinyEngine(model, Shape(depth=1)), TinyEngine(model, Shape(depth=1, pages=22))
    first, again = roomy.generate(asked, params), tight.generate(asked, params)
    assert tight.scheduler.preemptions > 0
    assert roomy.scheduler.preemptions == 0
    compared = Compared()
    for index, prompt in enumerate(asked):
        if first[index] != again[index]:
            compared.check(model, prompt, again[index], params[index], False)
    assert compared.close <= 2, f"{compared.close} of {compared.tokens} were too close to call"


DEFAULT: dict[str, dict[str, Any]] = {
    "cache off": {"prefix_cache": "off"},
    "two steps, chunks": {"pipeline": "on", "prefill_chunk": 16, "max_prefill_chunks_per_step": 1, "page_size": 1},
    "static, contiguous": {"batching": "static", "page_size": "max", "max_len": 256},
    "few pages, priority": {"kv_tokens": 112, "max_len": 112, "max_rows": 6, "policy": "priority"},
}


def gaps_of(driven: DrivenEngine) -> dict[tuple[int, int], float]:
    """Gap between the two largest logits, by sequence and sampled position; filled while the engine runs."""
    runtime = driven.engine.runtime
    assert isinstance(runtime, TorchRuntime)
    launch, gaps = runtime.launch, {}

    def on_launch(slot: int, plan: StepPlan) -> None:
        launch(slot, plan)
        logits = runtime.slots[slot].logits
        assert logits is not None
        sampled = [row for row in plan.rows if row.samples]
        if sampled:
            best = logits.float().topk(2).values
            for row, gap in zip(sampled, (best[:, 0] - best[:, 1]).tolist(), strict=True):
                gaps[row.seq_id, row.end] = gap

    runtime.launch = on_launch  # type: ignore[method-assign]
    return gaps


def test_default_model_answers_the_same_under_every_switch() -> None:
    """Check that where two answers part, the gap is within what batching may change; the rest is not compared."""
    threads = torch.get_num_threads()
    tokenizer = Tokenizer.from_file(str(DEFAULT_MODEL / "tokenizer.json"))
    system = "You know the standard library of Python. Answer in one sentence. " * 2
    questions = ("What does textwrap.dedent do?", "What does os.path.join do?", "How do I sort a list?")
    asked = [tokenizer.encode(system + question).ids for question in (*questions, questions[0])]
    params = [SamplingParams(24, temperature=0.0)] * len(asked)
    usual = DrivenEngine.build(EngineOptions(threads=1))
    gaps = gaps_of(usual)
    expected = usual.generate(asked, params)
    assert usual.engine.stats.prefix_hits > 0
    compared = excluded = 0
    for name, options in DEFAULT.items():
        driven = DrivenEngine.build(EngineOptions(threads=1, **options))
        for index, (mine, theirs) in enumerate(zip(driven.generate(asked, params), expected, strict=True)):
            equal = next((at for at, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), len(theirs))
            compared += equal
            if equal < len(theirs):
                excluded += len(theirs) - equal
                assert gaps[index + 1, len(asked[index]) + equal] <= 1e-3, f"{name}: {mine}, not {theirs}"
        assert driven.engine.scheduler.audit() == [], name
        assert bool(driven.engine.stats.pages_evicted) == ("few pages" in name), name
    assert compared > 9 * excluded, f"{excluded} tokens were not compared, {compared} were"
    torch.set_num_threads(threads)
