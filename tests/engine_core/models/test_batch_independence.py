"""A request's tokens do not depend on what it shares its batches with."""

from pathlib import Path

import torch

from tests.engine_core.models.test_llama import BASE, save_random
from tests.support.paged_model import PagedRun, chunked, load
from tests.support.parity import random_tokens

LENGTHS = (48, 3, 70, 25, 33, 61, 17, 50)
PREFILL = (20, 1, 61, 3, 33, 7, 16, 2)
GAP = 1e-3
ERROR = 5e-5
"""Bound of what the batch may change in a logit. Measured: 1.3e-5."""


def test_rows_have_the_same_tokens_alone_and_batched(tmp_path: Path) -> None:
    save_random(tmp_path, {"hidden_size": 128, "intermediate_size": 256}, seed=5)
    model = load(tmp_path)
    tokens = random_tokens(LENGTHS, BASE["vocab_size"], seed=6)
    batched = PagedRun(model, tokens, 8, seed=1).run(chunked(LENGTHS, PREFILL, 11))
    excluded = positions = 0
    error = 0.0
    for row, sequence in enumerate(tokens):
        single = PagedRun(model, [sequence], 8, seed=2)
        one_by_one = [[(0, position, 1)] for position in range(len(sequence))]
        for schedule in ([[(0, 0, len(sequence))]], one_by_one):
            logits = single.run(schedule)[0]
            error = max(error, (logits - batched[row]).abs().max().item())
            top = logits.topk(2).values
            clear = top[:, 0] - top[:, 1] > GAP
            assert torch.equal(logits.argmax(-1)[clear], batched[row].argmax(-1)[clear])
            excluded += int((~clear).sum())
            positions += len(clear)
    print(f"excluded {excluded} of {positions} positions; largest logit error {error:.1e}")
    assert error < ERROR
    assert excluded < positions / 100


def test_nan_in_one_row_does_not_reach_another(tmp_path: Path) -> None:
    save_random(tmp_path, {})
    model = load(tmp_path)
    tokens = random_tokens((20, 40), BASE["vocab_size"], seed=7)
    run = PagedRun(model, tokens, 4, seed=3)
    expected = run.step([(0, 0, 20)])
    run.step([(0, 0, 19), (1, 0, 39)])
    for pool in (*run.storage.keys, *run.storage.values):
        run.page_table.view_pages(pool)[run.pages[1, :10].long()] = torch.nan
    both = run.step([(0, 19, 1), (1, 39, 1)])
    assert both[1].isnan().all()
    torch.testing.assert_close(both[0], expected[19], atol=1e-5, rtol=0)
