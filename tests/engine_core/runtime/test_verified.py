"""Verified tokens of a whole engine against transformers: log-probabilities, logits, cached prefixes, what stays."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.porting.tiny import save_tiny
from tandem.engine_core.runtime.runtime import TorchRuntime
from tandem.protocol.commands import MAX_VERIFIED
from tandem.protocol.params import SamplingParams
from tests.engine_core.models.test_llama import save_random
from tests.engine_core.runtime.test_logprobs import build, check, dense, found, prompt_of
from tests.support.engine_driver import CLIENT, DrivenEngine

ONE = SamplingParams(1, temperature=0.0, ignore_eos=True)
LONGEST = 400
LOGITS_TOLERANCE = 5e-4
"""Largest difference of any logit, float32. Measured: at most 2e-4 with recurrent layers, 1e-5 with others."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_random(directory, {"max_position_embeddings": 1024}, seed=5)
    return directory


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def verified(engine: DrivenEngine, tokens: list[int], count: int, **wanted: Any) -> int:
    return engine.submit(tokens, ONE, prompt_logprobs=2, num_verified=count, logits=True, **wanted)


def logits_of(engine: DrivenEngine, request: int, rows: int) -> Tensor:
    parts = [part.rows for part in engine.mailbox.logits[CLIENT, request]]
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.float32).view(rows, -1)


def check_verified(engine: DrivenEngine, request: int, reference: Any, tokens: list[int], count: int) -> None:
    lines = found(engine, request)
    assert list(lines) == list(range(len(tokens) - count, len(tokens)))
    check(lines, dense(reference, tokens), tokens, 2)
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits[0, len(tokens) - count - 1 :]
    error = (logits_of(engine, request, count + 1) - expected).abs().max().item()
    print(f"max abs error of logits {error:.2g}")
    assert error < LOGITS_TOLERANCE


def cached_tokens(engine: DrivenEngine) -> int:
    return engine.engine.scheduler.memory.usage.cached * engine.engine.stats.page_size


def check_idle(engine: DrivenEngine) -> None:
    scheduler = engine.engine.scheduler
    assert scheduler.audit() == []
    assert scheduler.memory.usage.in_use == 0
    assert scheduler.rows.free == scheduler.rows.total


@pytest.mark.parametrize(("chunk", "step"), [(512, 512), (16, 40), (7, 9)])
@pytest.mark.parametrize("prefix", ["none", "prompt", "both"])
def test_verified_tokens_equal_those_of_a_plain_forward_pass(
    folder: Path, reference: Any, chunk: int, step: int, prefix: str
) -> None:
    engine = build(folder, prefill_chunk=chunk, max_step_tokens=step, page_size=16)
    requests = []
    for prompt_len, count in [(1, 1), (1, MAX_VERIFIED), (15, 2), (16, 1), (17, 15), (100, 33), (64, MAX_VERIFIED)]:
        tokens = prompt_of(prompt_len + count, seed=prompt_len)
        if prefix != "none":
            engine.submit(tokens if prefix == "both" else tokens[:prompt_len], ONE)
            engine.run()
        requests.append((verified(engine, tokens, count), tokens, count))
    engine.run()
    for request, tokens, count in requests:
        check_verified(engine, request, reference, tokens, count)
        pages = (len(tokens) - count - 1) // 16 if prefix != "none" else 0
        assert engine.mailbox.cached[CLIENT, request] == 16 * pages, "the token before the first verified is computed"
    check_idle(engine)


@pytest.mark.parametrize(("prompt_len", "kept"), [(1, 0), (15, 0), (16, 16), (33, 32), (64, 64)])
def test_only_the_kv_of_the_prompt_is_kept(folder: Path, prompt_len: int, kept: int) -> None:
    engine = build(folder, page_size=16)
    lengths: list[int] = []
    memory = engine.engine.scheduler.memory
    release: Callable[..., None] = memory.release
    memory.release = lambda seq: (lengths.append(seq.num_scheduled_tokens), release(seq))  # type: ignore[assignment, method-assign, misc]
    verified(engine, prompt_of(prompt_len + MAX_VERIFIED), MAX_VERIFIED)
    engine.run()
    assert lengths == [prompt_len]
    assert cached_tokens(engine) == kept
    check_idle(engine)


def test_more_requests_than_rows_share_a_prompt_and_are_all_right(folder: Path, reference: Any) -> None:
    engine = build(folder, page_size=16, max_rows=2)
    prompt, requests = prompt_of(70), []
    for number in range(9):
        tokens = prompt + prompt_of(1 + 7 * number, seed=100 + number)
        requests.append((verified(engine, tokens, 1 + 7 * number), tokens, 1 + 7 * number))
    engine.run()
    for request, tokens, count in requests:
        check_verified(engine, request, reference, tokens, count)
    assert [engine.mailbox.cached[CLIENT, request] for request, _, _ in requests[1:]] == [64] * 8
    assert cached_tokens(engine) == 64
    check_idle(engine)


def test_next_turn_of_a_session_continues_from_the_prompt(folder: Path, reference: Any) -> None:
    engine = build(folder, page_size=16)
    tokens = prompt_of(100)
    first = verified(engine, tokens, 50, session="talk")
    engine.run()
    [session] = engine.engine.scheduler.memory.sessions.known
    assert len(session.nodes) == 50 // 16
    second = verified(engine, tokens, 10, session="talk")
    engine.run()
    assert engine.mailbox.cached[CLIENT, second] == 48
    for request, count in ((first, 50), (second, 10)):
        check_verified(engine, request, reference, tokens, count)


def test_decoding_rows_are_the_same_beside_verified_tokens(folder: Path) -> None:
    params = SamplingParams(30, temperature=1.0, seed=3, ignore_eos=True)
    outputs = []
    for with_others in (False, True):
        engine = build(folder, page_size=16)
        request = engine.submit(prompt_of(20), params)
        for _ in range(5):
            engine.engine.tick()
        for number in range(3 if with_others else 0):
            verified(engine, prompt_of(40, seed=number), 20)
        engine.run()
        outputs.append(engine.tokens(request))
    assert outputs[0] == outputs[1]


def test_a_launch_that_is_repeated_for_memory_keeps_each_logit_once(
    folder: Path, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(folder, page_size=16)
    runtime, failed = engine.engine.runtime, []
    assert isinstance(runtime, TorchRuntime)
    score = runtime._score_prompts

    def failing_once(*args: Any) -> None:
        score(*args)
        if not failed:
            failed.append(True)
            raise torch.OutOfMemoryError

    monkeypatch.setattr(runtime, "_score_prompts", failing_once)
    tokens = prompt_of(30)
    request = verified(engine, tokens, 9)
    engine.run()
    assert failed
    check_verified(engine, request, reference, tokens, 9)


@pytest.mark.parametrize("length", [LONGEST])
def test_a_prompt_with_log_probabilities_is_scored_beside_verified_tokens(
    folder: Path, reference: Any, length: int
) -> None:
    """Both are scored in the same slices, but only verified tokens return logits."""
    engine = build(folder, page_size=16, prefill_chunk=512, max_step_tokens=1024)
    scored, tokens = prompt_of(length), prompt_of(length, seed=4)
    first = engine.submit(scored, ONE, prompt_logprobs=1)
    second = verified(engine, tokens, MAX_VERIFIED)
    engine.run()
    check(found(engine, first), dense(reference, scored), scored, 1)
    check_verified(engine, second, reference, tokens, MAX_VERIFIED)
    assert not engine.mailbox.logits[CLIENT, first]


@pytest.mark.parametrize("architecture", ["Gemma3ForCausalLM", "Qwen3_5ForCausalLM"])
def test_verified_tokens_of_models_with_windows_and_recurrent_layers(architecture: str, tmp_path: Path) -> None:
    """Windows and states pass the end of the prompt; later requests must not begin with what they left there."""
    from transformers import AutoModelForCausalLM

    save_tiny(architecture, tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    engine = build(tmp_path, page_size=16, prefill_chunk=32, max_step_tokens=64, max_len=256, kv_tokens=6000)
    base, requests, cached = prompt_of(110), [], 0
    for turn, (prompt_len, count) in enumerate([(100, 40), (100, MAX_VERIFIED), (17, 5), (110, 20), (100, 40)]):
        tokens = base[:prompt_len] + prompt_of(count, seed=turn)
        request = verified(engine, tokens, count, session="talk" if turn % 2 else "")
        engine.run()
        requests.append((request, tokens, count))
        cached += engine.mailbox.cached[CLIENT, request]
        if turn == 2:
            engine.submit(base, SamplingParams(20, temperature=0.0, ignore_eos=True))
            engine.run()
    for request, tokens, count in requests:
        check_verified(engine, request, reference, tokens, count)
    assert cached > 100
    assert engine.engine.scheduler.audit() == []
