"""The sampling kernels on a GPU against their oracles, at the sizes of real vocabularies and in every dtype."""

import pytest
import torch

from tandem.engine_core.kernels.reference.sampling import logprob_records
from tandem.engine_core.kernels.sampling.logprobs import TritonScorer
from tandem.engine_core.sampling.sampler import Mode
from tests.support.sampling_case import (
    REPETITION,
    TEMPERATURE,
    Case,
    ask_everything,
    check_draw,
    check_full,
    make_case,
    run,
    truncations,
)

pytestmark = pytest.mark.gpu

VOCABS = [128256, 50257, 999]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
LOGITS = [*((VOCABS[0], dtype) for dtype in DTYPES), (50257, torch.bfloat16), (999, torch.float32)]
"""Every dtype, every vocabulary, and lines that begin at addresses of little alignment in 16 and in 32 bits."""


def case_of(batch: int, vocab: int, dtype: torch.dtype, seed: int = 0, scale: float = 3.0) -> Case:
    case = make_case(batch, vocab, seed, max_len=3000, scale=scale)
    case.logits = case.logits.to(dtype)
    return case


@pytest.mark.parametrize(("vocab", "dtype"), LOGITS)
def test_greedy_and_untruncated_kernels_equal_the_oracle(vocab: int, dtype: torch.dtype) -> None:
    case = case_of(67, vocab, dtype)
    case.logits[3] = torch.nan
    case.floats[::7, TEMPERATURE] = 0
    case.rows[5], case.positions[5] = 0, 0
    case = case.to("cuda")
    sampler = case.sampler()
    best = case.logits.nan_to_num(nan=-torch.inf).argmax(-1)
    best[3], best[5] = -1, 0
    assert torch.equal(run(sampler, case, Mode.GREEDY).long(), best)
    case.logits[3] = 0
    case.logits[5] = 0
    check_draw(case, Mode.UNTRUNCATED, run(sampler, case, Mode.UNTRUNCATED))
    again = run(sampler, case, Mode.UNTRUNCATED)
    assert torch.equal(again, run(sampler, case, Mode.FULL))


@pytest.mark.parametrize(("vocab", "dtype"), LOGITS)
@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0, 10.0])
def test_truncation_kernels_equal_the_oracle(vocab: int, dtype: torch.dtype, scale: float) -> None:
    case = case_of(48, vocab, dtype, 1, scale)
    truncations(case, [0, 50, 0, 0, 1, 900, 0, 5000, 200000], [0.9, 0.99, 1.0, 0.3, 0.999, 0.0], [0.0, 0.0, 0.03])
    check_full(case.to("cuda"))


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("masked", [False, True])
def test_full_sampling_equals_the_oracle(vocab: int, masked: bool) -> None:
    case = case_of(48, vocab, torch.bfloat16, 2)
    ask_everything(case)
    truncations(case, [0, 40, 0], [0.9, 0.95, 1.0], [0.0, 0.01])
    if masked:
        generator = torch.Generator().manual_seed(3)
        case.allowed = torch.randint(-(2**31), 2**31, (48, -(-vocab // 32)), generator=generator).int()
    check_full(case.to("cuda"))


@pytest.mark.parametrize("batch", [1, 24])
def test_penalties_of_histories_of_128k_equal_the_oracle(batch: int) -> None:
    case = make_case(batch, 128256, 7, max_len=131072)
    ask_everything(case)
    case.floats[:, REPETITION] = 1.1
    case.positions[0] = 131070
    truncations(case, [0, 40, 0], [0.9, 0.95, 1.0], [0.0])
    check_full(case.to("cuda"))


def test_sampling_among_thousands_of_equal_logits_equals_the_oracle() -> None:
    case = case_of(12, 128256, torch.float32, 4)
    case.logits[:3] = 0.25
    case.logits[3:6] = case.logits[3:6].round()
    case.logits[6:9, ::2] = -torch.inf
    truncations(case, [0, 3000, 0, 0], [0.7, 0.95, 0.2], [0.0])
    check_full(case.to("cuda"))


def test_a_graph_replays_like_eager_calls_whatever_the_rows_ask_for() -> None:
    case = case_of(16, 128256, torch.bfloat16, 5)
    case = case.to("cuda")
    sampler, sampled = case.sampler(), torch.zeros(16, dtype=torch.int32, device="cuda")
    batch = case.batch(sampled)
    sampler.launch(Mode.FULL, batch)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sampler.launch(Mode.FULL, batch)
    for seed in range(3):
        other = case_of(16, 128256, torch.bfloat16, 10 + seed)
        ask_everything(other, seed)
        truncations(other, [0, 20 * seed, 0], [0.9, 0.8], [0.0, 0.02])
        for name in ("tokens", "ints", "floats", "bias", "suppressed", "lengths", "rows", "positions", "logits"):
            getattr(case, name).copy_(getattr(other, name))
        expected = run(sampler, case, Mode.FULL)
        for _ in range(5):
            graph.replay()
            assert torch.equal(sampled, expected)


def test_one_row_is_the_same_in_every_batch() -> None:
    case = case_of(64, 128256, torch.bfloat16, 6, 1.0)
    ask_everything(case)
    truncations(case, [0, 0, 30], [0.9, 0.97], [0.0])
    case = case.to("cuda")
    tokens, sampler = case.tokens.clone(), case.sampler()
    together = run(sampler, case, Mode.FULL)
    for index in range(0, 64, 5):
        one = slice(index, index + 1)
        parts = (case.rows[one], case.positions[one], case.logits[one])
        case.tokens.copy_(tokens)
        alone = Case(case.tokens, case.ints, case.floats, case.bias, case.suppressed, case.lengths, *parts)
        assert run(sampler, alone, Mode.FULL).item() == together[index]


@pytest.mark.parametrize("dtype", DTYPES)
def test_logprob_kernels_equal_the_oracle(dtype: torch.dtype) -> None:
    generator = torch.Generator(device="cuda").manual_seed(1)
    logits = (torch.randn(40, 128256, device="cuda", generator=generator) * 5).to(dtype)
    chosen = torch.randint(0, 128256, (40,), device="cuda", generator=generator, dtype=torch.int32)
    kernels = TritonScorer(128256, 40, 20, logits.device)
    for top in (0, 1, 16, 20):
        found = torch.zeros(40, 1 + 2 * top, device="cuda", dtype=torch.int32)
        kernels.run(logits, chosen, top, found)
        expected = logprob_records(logits, chosen, top)
        assert torch.equal(found[:, 1 + top :], expected[:, 1 + top :])
        values, wanted = (lines[:, : 1 + top].contiguous().view(torch.float32) for lines in (found, expected))
        torch.testing.assert_close(values, wanted, atol=2e-5, rtol=0)
