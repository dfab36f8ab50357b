"""Hybrid models say with drafts what they say without, whatever is rejected, cached or interrupted."""

import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from msgspec import structs

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.startup import engine as startup_engine
from tandem.engine_core.startup.device import DeviceParts, open_parts
from tandem.engine_core.startup.preflight import preflight
from tandem.protocol.codec import pack_ids
from tandem.protocol.commands import Abort
from tandem.protocol.engine_options import EngineOptions
from tandem.protocol.params import SamplingParams
from tests.engine_core.models.test_qwen3_5 import save_random
from tests.engine_core.models.test_qwen3_5_moe import save_random as save_mixture
from tests.engine_core.test_recurrent_cache import Asked, Pair, prompt
from tests.fakes.known_drafter import KnownDrafter
from tests.fakes.recording_gpu import oracle_attention, oracle_parts, without_trial
from tests.support.engine_driver import CLIENT, DrivenEngine
from tests.support.model_folder import write_model
from tests.support.parity import VOCAB
from tests.support.plan_recording import runtime_of
from tests.support.tiny_llama import CONFIG

LAYERS = {"num_hidden_layers": 3, "layer_types": ["linear_attention"] * 2 + ["full_attention"]}
KINDS: dict[str, dict[str, Any]] = {
    "cpu": {"device": "cpu"},
    "cpu, two steps in flight": {"device": "cpu", "pipeline": "on"},
    "graphs": {"device": "cuda", "graph_rows": "3", "graph_tokens": "64", "max_step_tokens": 64},
}
DEEP = ("cpu, two steps in flight", "graphs")
PARTS: dict[str, Callable[[str], DeviceParts]] = {"cpu": open_parts, "cuda": oracle_parts}
Guess = Callable[[list[int]], list[int]]


def right(following: list[int]) -> list[int]:
    return following


def wrong(following: list[int]) -> list[int]:
    return [(token + 1) % VOCAB for token in following]


def any_kind(seed: int) -> Guess:
    """Drafts that are right, right up to one of them, missing, or any tokens."""
    rng = random.Random(seed)

    def guess(following: list[int]) -> list[int]:
        cut = rng.randint(0, len(following))
        rest = [following[cut:], wrong(following[cut:]), [], [rng.randrange(VOCAB) for _ in following[cut:]]]
        return following[:cut] + rng.choice(rest)

    return guess


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hybrid")
    save_random(path, LAYERS | {"max_position_embeddings": 2304})
    return path


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixture")
    save_mixture(path, LAYERS | {"max_position_embeddings": 2304}, seed=6)
    return path


@contextmanager
def engine(folder: Path, kind: str = "cpu", **fields: Any) -> Iterator[DrivenEngine]:
    """Build an engine, whose operations are the oracles while it is used."""
    usual: dict[str, Any] = {"max_len": 160, "max_rows": 3, "kv_tokens": 1024} | KINDS[kind]
    asked = EngineOptions(model=str(folder), dtype="float32", **(usual | fields))
    cuda = patch.object(startup_engine.configuration, "resolve_device", lambda *_: asked.device)
    with cuda, oracle_attention(), without_trial():
        yield DrivenEngine.build(asked, PARTS[asked.device])


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(tokens, temperature=0.0, ignore_eos=True)


def know(driven: DrivenEngine, guess: Guess, texts: list[list[int]] | None = None) -> KnownDrafter:
    """Have an engine draft from texts."""
    runtime = runtime_of(driven)
    assert runtime.speculator is not None
    drafter = runtime.speculator.drafter = KnownDrafter(runtime.tables.sampling, guess)
    drafter.texts += texts or []
    return drafter


def answers(folder: Path, prompts: list[list[int]], tokens: int, **fields: Any) -> list[list[int]]:
    with engine(folder, **fields) as driven:
        return driven.generate(prompts, [greedy(tokens)] * len(prompts))


def accepted(driven: DrivenEngine) -> int:
    return driven.engine.stats.spec_decode_num_accepted_tokens


def drafted(driven: DrivenEngine) -> int:
    return driven.engine.stats.spec_decode_num_draft_tokens


PROMPTS = [prompt(length, seed=length) for length in (1, 2, 3, 4, 8, 15, 16, 17, 33, 64, 70, 5)]


def run_arriving(driven: DrivenEngine, prompts: list[list[int]], tokens: int, seed: int) -> list[list[int]]:
    """Submit prompts while others are computed, verified and decoded; one in four wants no drafts."""
    rng, ids = random.Random(seed), []
    for index, tokens_of in enumerate(prompts):
        ids.append(driven.submit(tokens_of, greedy(tokens), speculation=index % 4 != 3))
        for _ in range(rng.randint(0, 6)):
            driven.engine.tick()
            assert driven.engine.scheduler.audit() == []
    driven.run()
    assert driven.engine.scheduler.audit() == []
    return [driven.tokens(number) for number in ids]


@pytest.mark.parametrize(
    ("kind", "drafts"), [("cpu", 4), ("cpu, two steps in flight", 7), ("graphs", 6), ("graphs", 7)]
)
def test_prompts_and_rows_with_and_without_drafts_take_turns(kind: str, drafts: int, folder: Path) -> None:
    """Prompts of 1 + k tokens, shorter than the convolution and longer than a chunk; rows are used again."""
    expected = answers(folder, PROMPTS, 30)
    with engine(folder, kind, speculate="ngram", speculate_tokens=drafts) as driven:
        know(driven, any_kind(drafts), [[*one, *other] for one, other in zip(PROMPTS, expected, strict=True)])
        assert run_arriving(driven, PROMPTS, 30, seed=drafts) == expected
    assert 10 < accepted(driven) < drafted(driven)


@pytest.mark.parametrize("kind", DEEP)
def test_ngrams_give_the_tokens_without_drafts(kind: str, mixture: Path) -> None:
    """A hybrid with experts, whose prompts repeat, and a prediction of the answer."""
    prompts = [prompt(length, seed=length) * 3 for length in (2, 5, 9, 20)]
    expected = answers(mixture, prompts, 40)
    with engine(mixture, kind, speculate="ngram", speculate_tokens=5) as driven:
        ids = [
            driven.submit(one, greedy(40), prediction=pack_ids(other) if index % 2 else b"")
            for index, (one, other) in enumerate(zip(prompts, expected, strict=True))
        ]
        driven.run()
    assert [driven.tokens(number) for number in ids] == expected
    assert accepted(driven) > 20
    assert driven.engine.scheduler.audit() == []


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small")
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    save_random(path, layers | {"max_position_embeddings": 2304})
    return path


@pytest.fixture(scope="module")
def long_answer(small: Path) -> list[int]:
    (found,) = answers(small, [prompt(20)], 2001, max_len=2100, kv_tokens=2304)
    return found


@pytest.mark.parametrize(("guess", "tokens"), [(right, 2001), (wrong, 1001)])
def test_a_thousand_steps_of_accepted_and_of_rejected_drafts(
    guess: Guess, tokens: int, small: Path, long_answer: list[int]
) -> None:
    sizes: dict[str, Any] = {"max_len": 2100, "kv_tokens": 2304}
    with engine(small, speculate="ngram", speculate_tokens=1, **sizes) as driven:
        know(driven, guess, [[*prompt(20), *long_answer]])
        assert driven.generate([prompt(20)], [greedy(tokens)]) == [long_answer[:tokens]]
    steps = driven.engine.stats.spec_decode_num_drafts
    assert steps >= 999
    assert accepted(driven) == (steps if guess is right else 0)


@pytest.mark.parametrize("kind", DEEP)
def test_the_length_limit_may_fall_inside_a_run(kind: str, folder: Path) -> None:
    """A step in flight after the last token computes nothing: the next turn continues from the state at the end."""
    expected = answers(folder, [prompt(20)], 31)[0]
    lengths = [9, 12, 13, 14, 15, 20, 27, 28, 29, 30]
    turns = [[*prompt(20), *expected[:tokens], 7, 8] for tokens in lengths]
    continued = answers(folder, turns, 4, prefix_cache="off")
    with engine(folder, kind, speculate="ngram", speculate_tokens=7) as driven:
        know(driven, right, [[*prompt(20), *expected]])
        memory = driven.engine.scheduler.memory
        for tokens, turn, answer in zip(lengths, turns, continued, strict=True):
            memory.reset_prefix_cache()
            assert driven.generate([prompt(20)], [greedy(tokens)]) == [expected[:tokens]]
            before = memory.num_hit_tokens
            assert driven.generate([turn], [greedy(4)]) == [answer]
            assert memory.num_hit_tokens - before == (20 + tokens - 2) // 16 * 16, tokens
    assert driven.engine.scheduler.audit() == []


@pytest.mark.parametrize("kind", DEEP)
def test_a_row_whose_request_was_aborted_begins_again(kind: str, folder: Path) -> None:
    """Between the proposal of its drafts and their verification, and in any other moment."""
    one, other = prompt(20), prompt(50, seed=5)
    expected = answers(folder, [one, other], 30)
    sizes: dict[str, Any] = {"max_rows": 2} | ({"graph_rows": "2"} if kind == "graphs" else {})
    with engine(folder, kind, speculate="ngram", speculate_tokens=5, **sizes) as driven:
        know(driven, any_kind(3), [[*one, *expected[0]], [*other, *expected[1]]])
        for ticks in range(2, 14, 2):
            number = driven.submit(one, greedy(30))
            for _ in range(ticks):
                driven.engine.tick()
            driven.mailbox.inbox.append((CLIENT, Abort([number])))
            assert driven.generate([other], [greedy(30)]) == expected[1:], ticks
            assert driven.tokens(number) == expected[0][: len(driven.tokens(number))]
        assert driven.engine.scheduler.audit() == []
    assert accepted(driven) > 50


def test_windows_and_states_at_once(folder: Path) -> None:
    """With a window in its layer of attention a hybrid has both; then its prefixes are not cached."""
    read = startup_engine.read_config

    def windowed(directory: Path) -> Any:
        found = read(directory)
        return structs.replace(found, attention=tuple([replace(layer, window=20) for layer in found.attention]))

    prompts = PROMPTS[5:]
    plain = answers(folder, prompts, 30)
    with patch.object(startup_engine, "read_config", windowed):
        expected = answers(folder, prompts, 30, prefix_cache="off")
        assert expected != plain
        for kind in DEEP:
            sizes: dict[str, Any] = {"max_len": 320, "max_step_tokens": 16} | (
                {"graph_tokens": "16"} if kind == "graphs" else {}
            )
            with engine(folder, kind, speculate="ngram", speculate_tokens=7, prefix_cache="off", **sizes) as driven:
                know(driven, any_kind(1), [[*one, *found] for one, found in zip(prompts, expected, strict=True)])
                assert run_arriving(driven, prompts, 30, seed=1) == expected
                assert accepted(driven) > 20 and runtime_of(driven).page_tables[0].ring


class DraftedPair(Pair):
    """A pair whose first engine verifies drafts of the answers that the second gives."""

    def __init__(self, folder: Path, guess: Guess, drafts: int = 7, **fields: Any) -> None:
        super().__init__(folder, speculate="ngram", speculate_tokens=drafts, **fields)
        self.drafter = know(self.cached, guess)

    def ask(self, *prompts: Any, tokens: int = 6, **wanted: Any) -> list[Asked]:
        self.drafter.texts = [[*one, *self.expected(one, tokens)] for one in prompts]
        return super().ask(*prompts, tokens=tokens, **wanted)


@pytest.mark.parametrize("guess", [right, wrong])
def test_turns_continue_from_the_end_of_the_one_before(guess: Guess, folder: Path) -> None:
    pair = DraftedPair(folder, guess)
    tokens, before = prompt(50), 0
    for turn in range(6):
        (found,) = pair.ask(tokens, session="talk", tokens=25)
        assert found.cached == before
        before = (len(tokens) + 25 - 2) // 16 * 16
        tokens = [*tokens, *found.tokens, *prompt(21, seed=turn)]


def test_stops_inside_a_run_leave_the_state_of_known_tokens(folder: Path) -> None:
    """Tokens after a stop may be in the base: then the checkpoint of the prompt serves the next turn."""
    pair, kept = DraftedPair(folder, any_kind(5)), []
    tokens = prompt(20)
    answer = pair.expected(tokens, 60)
    for stop in [
        stop for stop in range(2, 50) if answer.index(answer[stop]) == stop and stop % 16 in (0, 9, 11, 12, 13)
    ]:
        pair.clear()
        pair.drafter.texts = [[*tokens, *answer]]
        params = SamplingParams(60, temperature=0.0, stop_token_ids=pack_ids([answer[stop]]), ignore_eos=True)
        number = pair.cached.submit(tokens, params)
        pair.cached.run()
        assert pair.cached.tokens(number) == answer[: stop + 1]
        (again,) = pair.ask([*tokens, *answer[: stop + 1], 7, 8])
        # A row has computed one token less than it has at least, and the base may cover all but the last of these.
        assert again.cached in {16, *[known // 16 * 16 for known in range(19 + stop, 22 + stop)]}, stop
        kept.append(again.cached > 16)
    assert True in kept and False in kept


@pytest.mark.parametrize("every", [3, 5])
def test_preempted_sequences_continue_from_accepted_tokens(every: int, folder: Path) -> None:
    pair = DraftedPair(folder, any_kind(every), drafts=5, max_step_tokens=32)
    pair.ask(prompt(100, seed=1), prompt(90, seed=2), tokens=60, preempt=every)
    assert pair.cached.engine.stats.preemptions > 4
    assert accepted(pair.cached) > 20


SCHEDULES: dict[str, dict[str, Any]] = {
    "blocking": {"pipeline": "off"},
    "small steps": {"max_step_tokens": 7},
    "chunks of 65": {"max_step_tokens": 68, "prefill_chunk": 65},
    "small pages": {"page_size": 4},
    "few pages": {"kv_tokens": 600},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_tokens_are_equal_with_and_without_the_cache(name: str, folder: Path) -> None:
    pair = DraftedPair(folder, any_kind(2), drafts=3, **SCHEDULES[name])
    system, other = prompt(90), prompt(45, seed=1)
    users = [prompt(length, seed=length) for length in (3, 33, 70)]
    for _ in range(2):
        pair.ask(*[[*system, *user] for user in users], other, tokens=14)
        pair.ask([*system, *users[0], *pair.expected([*system, *users[0]], 14), *users[1]], other, tokens=8)
    assert pair.cached.engine.scheduler.memory.num_hit_tokens > 0
    assert accepted(pair.cached) > 10


def test_experts_are_equal_with_and_without_the_cache(mixture: Path) -> None:
    pair = DraftedPair(mixture, any_kind(4), max_step_tokens=40)
    system = prompt(90)
    for _ in range(2):
        pair.ask(*[[*system, *prompt(length, seed=length)] for length in (3, 33, 70)], tokens=9)
    pair.ask([*system, *prompt(3, seed=3), *pair.expected([*system, *prompt(3, seed=3)], 9)], tokens=9, preempt=5)
    assert pair.cached.engine.scheduler.memory.num_hit_tokens > 0 < accepted(pair.cached)


@pytest.mark.parametrize("kind", DEEP)
def test_a_draft_model_drafts_for_a_hybrid(kind: str, folder: Path, tmp_path: Path) -> None:
    """Not the other way round: a draft model may have no recurrent layers."""
    write_model(tmp_path, structs.replace(CONFIG, vocab_size=VOCAB, max_positions=2304))
    tokenizers = [path / "tokenizer.json" for path in (folder, tmp_path)]
    assert not tokenizers[0].exists()
    tokenizers[1].unlink()
    prompts = [prompt(length, seed=length) for length in (3, 20, 40, 90)]
    expected = answers(folder, prompts, 30)
    with engine(folder, kind, speculate=f"model:{tmp_path}", speculate_tokens=3) as driven:
        assert driven.generate(prompts, [greedy(30)] * 4) == expected
        turns = [[*one, *found, 5] for one, found in zip(prompts[:3], expected, strict=False)]
        assert driven.generate(turns, [greedy(8)] * 3) == answers(folder, turns, 8)
    assert driven.engine.scheduler.memory.num_hit_tokens > 0 < drafted(driven)
    assert driven.engine.scheduler.audit() == []
    with pytest.raises(ConfigError, match="recurrent layers"), engine(tmp_path, speculate=f"model:{folder}"):
        pass


def test_the_preflight_check_prints_the_memory_of_drafts() -> None:
    """For 7 rows of the 9B and one of padding; in a row a draft takes 0.75 MiB."""
    shape = {"model": "benchmarks/shapes/qwen3.5-9b", "load_format": "dummy", "dtype": "bfloat16"}
    asked = EngineOptions(**shape, device="cpu", max_rows=7, speculate="ngram", speculate_tokens=3)
    found = preflight(asked, [], lambda: 2**40, lambda: 2**40).choices["recurrent state"]
    every, row, drafts = [float(number) for number in re.findall(r"(\d+\.\d) MiB", found)]
    assert every == pytest.approx(8 * row, abs=0.5)
    assert (row, drafts) == pytest.approx((66.5, 2.25), abs=0.06)


def test_the_ring_is_larger_only_with_drafts(folder: Path) -> None:
    sizes = []
    for fields in ({}, {"speculate": "ngram", "speculate_tokens": 3}, {"speculate": "ngram"}):
        with engine(folder, **fields) as driven:
            layer = runtime_of(driven).kv.recurrent[0]
            sizes.append((layer.num_updates, layer.columns.shape[1], layer.ring))
    assert sizes == [(16, 19, 16), (19, 22, 16), (23, 26, 16)]
