"""Verification of drafts on CUDA: attention of several queries, the kernels of drafts, and an engine's tokens."""

import random

import pytest
import torch

from tandem.engine_core.kernels.attention.paged_decode import paged_decode
from tandem.engine_core.kernels.page_table import PageTable
from tandem.engine_core.kernels.reference import attention
from tandem.engine_core.kernels.sampling.inputs import INT_COLUMNS, SamplingTables
from tandem.engine_core.kernels.speculation import reference
from tandem.engine_core.kernels.speculation.accept import accept
from tandem.engine_core.kernels.speculation.ngram import propose_ngrams
from tandem.engine_core.kernels.speculation.reference import NgramRule
from tandem.engine_core.kernels.speculation.verify_inputs import verify_inputs
from tandem.engine_core.kernels.tiles.plan_types import Tile
from tandem.engine_core.startup.engine import DEFAULT_MODEL
from tandem.protocol.codec import pack_ids
from tandem.protocol.engine_options import EngineOptions
from tandem.protocol.params import SamplingParams
from tests.engine_core.kernels.attention.test_paged_decode import inputs
from tests.engine_core.kernels.attention.test_several_queries import several
from tests.support.engine_driver import CLIENT, DrivenEngine
from tests.support.length_tables import tables_of
from tests.support.plan_recording import runtime_of
from tests.support.verified_steps import kept_positions, largest_difference

pytestmark = pytest.mark.gpu

NAMES = {name: INT_COLUMNS.index(name) for name in INT_COLUMNS}


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(("queries", "heads", "window"), [(2, 4, None), (4, 4, None), (8, 4, 100), (8, 8, None)])
def test_queries_of_a_row_equal_the_oracle(queries: int, heads: int, window: int | None, early: bool) -> None:
    given = several(inputs([20, 448, 1000, 2049], 2 * heads, 2, 128, 16, "cuda"), queries)
    half = given._replace(**{name: getattr(given, name).bfloat16() for name in ("query", "keys", "values")})
    wide = half._replace(**{name: getattr(half, name).float() for name in ("query", "keys", "values")})
    tile = Tile(64, 4, 3)
    early = early and queries * heads <= 16
    for splits in (1, 3):
        found = paged_decode(*half, 0.1, splits, window=window, tile=tile, queries=queries, pdl=True, early=early)
        expected = attention.paged_decode(*wide, 0.1, window)
        torch.testing.assert_close(found.float(), expected, atol=2e-2, rtol=2e-2)


def copy_of(tables: SamplingTables) -> SamplingTables:
    return SamplingTables(**{name: getattr(tables, name).clone() for name in SamplingTables.__slots__})


@pytest.mark.parametrize("drafts", [1, 3, 7])
def test_kernels_of_drafts_equal_their_oracles(drafts: int) -> None:
    """Proposal, inputs and acceptance in turn, over rows of few distinct tokens."""
    generator = torch.Generator("cuda").manual_seed(drafts)

    def integers(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, dtype=torch.int32, device="cuda", generator=generator)

    tables = tables_of(integers(4, 65, 3000))
    tables.ints[1:, NAMES["max_drafts"]], tables.ints[1:, NAMES["prompt_len"]] = 7, 5
    tables.ints[1:, NAMES["prediction_len"]] = integers(600, 64).long()
    again, predictions = copy_of(tables), integers(4, 65, 600)
    rows, rule, queries = torch.arange(64, -1, -1, dtype=torch.int32, device="cuda"), NgramRule(2, 4, 2048), 1 + drafts
    sources = torch.zeros(2, 65, dtype=torch.int32, device="cuda")
    propose_ngrams(tables, predictions, rows, drafts, sources[0], rule, pdl=True)
    reference.propose_ngrams(again, predictions, rows, drafts, sources[1], rule)
    assert torch.equal(tables.tokens, again.tokens) and torch.equal(sources[0], sources[1])
    table = PageTable(integers(2**20, 65, 192), 16, 64)
    samples = torch.zeros(2, 2, 65 * queries, dtype=torch.int32, device="cuda")
    found = verify_inputs(tables, [table], rows, queries, (samples[0, 0], samples[0, 1]), pdl=True)
    expected = reference.verify_inputs(again, [table], rows, queries, (samples[1, 0], samples[1, 1]))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    assert torch.equal(samples[0], samples[1])
    sampled, counts = integers(4, 65 * queries) - 1, torch.zeros(2, 65, dtype=torch.int32, device="cuda")
    accept(tables, rows, queries, sampled, sources[0], counts[0], pdl=True)
    reference.accept(again, rows, queries, sampled, sources[1], counts[1])
    assert torch.equal(counts[0], counts[1]) and torch.equal(tables.lengths, again.lengths)
    assert torch.equal(tables.tokens, again.tokens)


def test_an_engine_gives_the_tokens_that_it_gives_without_drafts() -> None:
    """In float32, up to the first that rounding decides, which is at most one in 1,000; every other request predicts
    its answer.
    """
    rng = random.Random(3)
    prompts = [([rng.randrange(100, 2000) for _ in range(rng.randint(5, 60))] * 4)[:120] for _ in range(32)]
    params = [
        SamplingParams(60, temperature=[0.0, 0.7][n % 2], top_p=[1.0, 0.9][n // 2 % 2], seed=n, min_tokens=n)
        for n in range(32)
    ]
    found: list[list[list[int]]] = []
    for options in ({}, {"speculate": "ngram", "speculate_tokens": 7}):
        engine = DrivenEngine.build(
            EngineOptions(
                device="cuda",
                dtype="float32",
                max_rows=16,
                kv_tokens=8192,
                graph_rows="1,8,16",
                graph_tokens="64,512",
                **options,
            )
        )
        ids = [
            engine.submit(prompts[n], params[n], prediction=pack_ids(found[0][n]) if found and n % 2 else b"")
            for n in range(32)
        ]
        engine.run()
        found.append([engine.tokens(number) for number in ids])
    assert engine.engine.stats.spec_decode_num_accepted_tokens > 50
    drafts = [engine.mailbox.drafts[CLIENT, number] for number in ids]
    predicted = [sum(right for _, right, is_predicted in own if is_predicted) for own in drafts]
    assert not any(predicted[::2]) and sum(predicted[1::2]) > sum(map(len, found[1][1::2])) / 2
    compared = differing = 0
    for one, other in zip(*found, strict=True):
        first = next((index for index, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
        compared += len(one) if first is None else first + 1
        differing += first is not None
    assert differing <= max(1, compared // 1000), f"{differing} of {compared}"


def test_a_model_as_its_own_draft_model_is_right() -> None:
    """After prompts of all sizes of graphs and one without, several in a step, and phases of plain steps."""
    rng = random.Random(4)
    lengths = [3, 16, 50, 64, 100, 128, 200, 256, 400, 512, 700]
    prompts = [[rng.randrange(100, 2000) for _ in range(length)] for length in lengths]
    params = [SamplingParams(60, temperature=[0.0, 0.7][n % 2], seed=n, ignore_eos=True) for n in range(len(lengths))]
    engine = DrivenEngine.build(
        EngineOptions(
            device="cuda",
            dtype="float32",
            max_rows=16,
            kv_tokens=8192,
            graph_rows="1,8,16",
            graph_tokens="64,512",
            speculate=f"model:{DEFAULT_MODEL}",
            speculate_tokens=3,
        )
    )
    policy, calls = engine.engine.scheduler.planner.drafts, iter(range(10_000))
    choose = policy.choose
    policy.choose = lambda *given: choose(*given) if next(calls) % 16 > 5 else 0  # type: ignore[method-assign]
    for count in (1, 2, len(prompts)):
        engine.generate(prompts[:count], params[:count])
    stats = engine.engine.stats
    drafted, accepted = stats.spec_decode_num_draft_tokens, stats.spec_decode_num_accepted_tokens
    assert accepted >= 0.98 * drafted > 300, "rounding decides few"


def test_committed_tokens_are_what_the_sampler_draws_from_the_logits_of_their_step() -> None:
    """Bit for bit; in float32 these logits differ from those of single tokens by less than 0.01."""
    prompts = [[number + 300, 4, 5, 6, 7] * 8 for number in range(4)]
    params = [SamplingParams(60, temperature=0.6, top_p=0.9, repetition_penalty=0.9, seed=n) for n in range(4)]
    positions = []
    for options in ({}, {"speculate": "ngram", "speculate_tokens": 5}):
        engine = DrivenEngine.build(
            EngineOptions(
                device="cuda",
                dtype="float32",
                max_rows=4,
                kv_tokens=4096,
                graph_rows="4",
                graph_tokens="64",
                **options,
            )
        )
        with kept_positions(runtime_of(engine)) as kept:
            tokens = engine.generate(prompts, params)
        positions.append((tokens, kept))
    (plain, of_plain), (drafted, of_drafts) = positions
    assert of_drafts.verified > 50
    for number, (one, other) in enumerate(zip(plain, drafted, strict=True)):
        # Behind a token that rounding decides the texts differ, and so do their logits.
        first = next((index for index, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
        if first is not None:
            last = len(prompts[number]) + first - 1
            seq_ids = sorted({seq_id for seq_id, _ in of_plain.logits})
            for kept in (of_plain, of_drafts):
                for key in [key for key in kept.logits if key[0] == seq_ids[number] and key[1] > last]:
                    del kept.logits[key]
    assert largest_difference(of_drafts, of_plain) < 0.01
