"""The whole engine on a real model: the same tokens as a dense model gives, however the work is cut."""

import random
from typing import Any

import pytest
import torch

from tandem.engine_core.contracts import PENDING_TOKEN
from tandem.engine_core.models.decoder import Decoder
from tandem.engine_core.runtime.runtime import TorchRuntime
from tandem.engine_core.runtime.slots import StepSlot
from tandem.engine_core.runtime.staging import MAX_SUPPRESSED
from tandem.protocol.codec import pack_floats, pack_ids
from tandem.protocol.engine_options import EngineOptions
from tandem.protocol.params import MAX_LOGIT_BIAS, SamplingParams
from tests.support.engine_driver import DrivenEngine
from tests.support.grammar_walks import WALKED
from tests.support.plan_recording import table_tensors
from tests.support.thinned import thinned
from tests.support.tiny_llama import END, MAX_LEN, VOCAB, Compared, Shape, TinyEngine, build_runtime


def greedy(max_tokens: int = 8, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens, temperature=0.0, **more)


def prompts(count: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(count)]


EVERYTHING = [
    greedy(12, ignore_eos=True),
    SamplingParams(12, seed=2**63 - 1, ignore_eos=True),
    SamplingParams(12, temperature=0.7, top_k=5, seed=2**32, choice=3),
    SamplingParams(12, temperature=1.3, top_p=0.8, min_p=0.02, seed=9),
    greedy(12, repetition_penalty=1.8),
    greedy(12, presence_penalty=0.7, frequency_penalty=1.1),
    SamplingParams(12, seed=5, repetition_penalty=0.6, frequency_penalty=-0.4, min_tokens=4),
    greedy(12, logit_bias_ids=pack_ids([END, 7, 8]), logit_bias_values=pack_floats([30.0, 2.5, -4.0]), min_tokens=6),
    greedy(
        12,
        logit_bias_ids=pack_ids([50]),
        logit_bias_values=pack_floats([20.0]),
        stop_token_ids=pack_ids([50]),
        min_tokens=3,
    ),
    greedy(10),
    SamplingParams(10, seed=11, temperature=1.5),
]
CONSTRAINED = (9, 10)


def check(
    model: Decoder, asked: list[list[int]], got: list[list[int]], params: list[SamplingParams], constrained: Any
) -> Compared:
    compared = Compared()
    for index, (prompt, tokens) in enumerate(zip(asked, got, strict=True)):
        assert 1 <= len(tokens) <= params[index].max_tokens
        compared.check(model, prompt, tokens, params[index], index in constrained)
    assert compared.close <= compared.tokens / 50, (
        f"{compared.close} of {compared.tokens} tokens were too close to call"
    )
    return compared


@pytest.mark.parametrize(
    ("page_size", "depth", "cut"), thinned([1, 2, 16], [1, 2], [(64, 64), (16, 5), (4, 1)]), ids=str
)
def test_tokens_equal_those_of_a_dense_model(model: Decoder, page_size: int, depth: int, cut: tuple[int, int]) -> None:
    """`cut` is the most tokens of a step, and of one prompt in it."""
    engine = TinyEngine(model, Shape(depth, page_size, 4, *cut))
    asked = prompts(len(EVERYTHING), seed=page_size)
    got = engine.generate(asked, EVERYTHING, CONSTRAINED)
    assert check(model, asked, got, EVERYTHING, CONSTRAINED).tokens > 80
    assert engine.scheduler.memory.usage.in_use == 0
    assert engine.scheduler.audit() == []


@pytest.mark.parametrize("seed", range(3))
def test_tokens_are_the_same_mixed_and_one_by_one(model: Decoder, seed: int) -> None:
    asked = prompts(len(EVERYTHING), seed)
    together = TinyEngine(model, Shape(max_rows=16)).generate(asked, EVERYTHING, CONSTRAINED)
    one_by_one = TinyEngine(model, Shape(max_rows=1))
    for index, prompt in enumerate(asked):
        alone = one_by_one.generate([prompt], [EVERYTHING[index]], (0,) if index in CONSTRAINED else ())
        if alone != [together[index]]:
            compared = Compared()
            compared.check(model, prompt, alone[0], EVERYTHING[index], index in CONSTRAINED)
            assert compared.close, f"seed {seed}, request {index}: {alone[0]}, with others {together[index]}"


def test_a_full_context_generates_to_its_last_position(model: Decoder) -> None:
    asked = [[5] * (MAX_LEN - 1), [6], [7, 8]]
    params = [greedy(1), greedy(MAX_LEN - 1, ignore_eos=True), SamplingParams(MAX_LEN - 2, seed=3, ignore_eos=True)]
    got = TinyEngine(model, Shape()).generate(asked, params)
    assert [len(tokens) for tokens in got] == [1, MAX_LEN - 1, MAX_LEN - 2]
    check(model, asked, got, params, ())


@pytest.mark.parametrize("depth", [1, 2])
def test_a_blocking_replay_is_equal_bit_for_bit(model: Decoder, depth: int) -> None:
    shape = Shape(depth, chunk=7)
    engine = TinyEngine(model, shape)
    engine.generate(prompts(len(EVERYTHING), 4), EVERYTHING, CONSTRAINED)
    played = engine.runtime
    assert len(played.plans) == len(played.results) == len(played.masks) > 20
    replay = build_runtime(model, Shape(1, chunk=7))
    for plan, masks in zip(played.plans, played.masks, strict=True):
        replay.launch(0, plan)
        replay.sample(0, masks)
        replay.collect(0)
    assert replay.results == played.results
    for mine, theirs in zip(replay.logits, played.logits, strict=True):
        assert torch.equal(mine, theirs)
    mine_by_name, theirs_by_name = table_tensors(replay), table_tensors(played)
    for name, mine in mine_by_name.items():
        assert torch.equal(mine, theirs_by_name[name]), name


def test_a_row_keeps_nothing_of_its_previous_sequence(model: Decoder) -> None:
    """Biases, suppressed ends, penalties and seeds of one sequence do not reach the next one in its row."""
    engine = TinyEngine(model, Shape(max_rows=1))
    first = SamplingParams(
        6,
        seed=1,
        repetition_penalty=2.0,
        min_tokens=5,
        stop_token_ids=pack_ids([9, 10]),
        logit_bias_ids=pack_ids([12, 13]),
        logit_bias_values=pack_floats([90.0, 80.0]),
    )
    tables = engine.runtime.tables
    engine.generate([[5, 6]], [first])
    row = 1
    bias, suppressed = tables.sampling.bias[0], tables.sampling.suppressed
    assert bias[row][:3].tolist() == [12, 13, -1]
    assert sorted(suppressed[row][:3].tolist()) == [1, 9, 10]
    asked, params = [[5, 6, 7]], [greedy(10, ignore_eos=True)]
    got = engine.generate(asked, params)
    assert bias[row].tolist() == [-1] * MAX_LOGIT_BIAS
    assert suppressed[row].tolist() == [-1] * MAX_SUPPRESSED
    check(model, asked, got, params, ())
    fresh = TinyEngine(model, Shape(max_rows=1)).generate(asked, params)
    assert got == fresh


def test_choices_differ_and_equal_seeds_repeat(model: Decoder) -> None:
    params = [SamplingParams(12, seed=21, choice=choice, ignore_eos=True) for choice in range(4)]
    params.append(SamplingParams(12, seed=22, ignore_eos=True))
    asked = [[5, 6, 7]] * len(params)
    got = TinyEngine(model, Shape(max_rows=5)).generate(asked, params)
    assert len({tuple(tokens) for tokens in got}) == len(params)
    again = TinyEngine(model, Shape(depth=1, max_rows=2)).generate(asked[::-1], params[::-1])
    assert again[::-1] == got


def test_a_reused_slot_keeps_nothing_of_its_previous_step(model: Decoder) -> None:
    """What a step leaves in its slot (more rows, masks, another prompt) does not reach the next one."""
    engine = TinyEngine(model, Shape(max_rows=4, step_tokens=64))
    sizes = [4, 1, 3, 1, 2]
    for turn, size in enumerate(sizes):
        asked = prompts(size, seed=turn, longest=30 // size)
        constrained = (0,) if turn % 2 else ()
        params = [greedy(5), *[SamplingParams(5, seed=turn, top_k=3)] * (size - 1)]
        check(model, asked, engine.generate(asked, params, constrained), params, constrained)


def test_masks_of_all_rows_after_those_of_some(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every row has a mask, the indices that graphs read are not copied again."""
    engine, everyone = TinyEngine(model, Shape(max_rows=4, step_tokens=64)), (0, 1, 2, 3)
    real = TorchRuntime._sample

    def sample(self: TorchRuntime, s: StepSlot, logits: torch.Tensor, allowed: torch.Tensor | None) -> None:
        if allowed is not None and s.packed is not None:
            index = s.packed.read("mask_index").tolist()
            assert s.masked[: len(index)].tolist() == index
        real(self, s, logits, allowed)

    monkeypatch.setattr(TorchRuntime, "_sample", sample)
    for turn, constrained in enumerate([everyone, (1,), everyone, (0, 1), everyone]):
        params = [greedy(5)] * 4
        asked = prompts(4, seed=turn, longest=8)
        check(model, asked, engine.generate(asked, params, constrained), params, constrained)


def test_tokens_are_pending_until_they_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a worker would accept those that the slot's last step left."""
    pending, real = [], TorchRuntime._sample

    def sample(self: TorchRuntime, s: StepSlot, logits: torch.Tensor, allowed: torch.Tensor | None) -> None:
        pending.append(allowed is None or bool((s.results_view[: len(logits)] == PENDING_TOKEN).all()))
        real(self, s, logits, allowed)

    driven = DrivenEngine.build(EngineOptions(device="cpu", max_len=256, max_rows=4, pipeline="on"))
    monkeypatch.setattr(TorchRuntime, "_sample", sample)
    driven.submit([7, 8, 9], SamplingParams(6), constraint=WALKED["words"])
    driven.run()
    assert len(pending) > 2 and all(pending)


class TestNothingWaits:
    """I7: the launch path copies out of the slot's own buffers and asks the device for nothing."""

    def test_copies_come_from_the_slots_buffers(self, model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = TinyEngine(model, Shape())
        runtime = engine.runtime
        copies: list[tuple[int, int, bool]] = []
        real = torch.Tensor.copy_

        def copy(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            copies.append((self.data_ptr(), source.data_ptr(), non_blocking))
            return real(self, source, non_blocking)

        def refuse(*_args: Any, **_kwargs: Any) -> Any:
            raise AssertionError("the launch path waits for the device, or copies from pageable memory")

        launch, sample = runtime.launch, runtime.sample

        def guarded(call: Any) -> Any:
            def run(*args: Any) -> None:
                with monkeypatch.context() as patch:
                    patch.setattr(torch.Tensor, "copy_", copy)
                    for name in ("item", "tolist", "cpu", "__bool__", "__int__", "__float__", "__index__"):
                        patch.setattr(torch.Tensor, name, refuse)
                    for name in ("tensor", "as_tensor", "from_numpy", "frombuffer"):
                        patch.setattr(torch, name, refuse)
                    call(*args)

            return run

        monkeypatch.setattr(runtime, "launch", guarded(launch))
        monkeypatch.setattr(runtime, "sample", guarded(sample))
        engine.generate(prompts(len(EVERYTHING)), EVERYTHING, CONSTRAINED)
        engine.generate(prompts(1), EVERYTHING[:1], [0])
        allowed = set()
        for slot in runtime.slots:
            for target, source in (
                (slot.device_memory, slot.host_memory),
                (slot.device_masks[1:], slot.host_masks),
                (slot.allowed, slot.host_masks),
                (slot.results, slot.sampled),
            ):
                allowed.add((target.data_ptr(), source.data_ptr(), True))
        assert set(copies) == allowed
