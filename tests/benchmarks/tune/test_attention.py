"""Decode attention that the tuner times is the engine's, whichever plan does it."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from benchmarks.tune.attention import layers, run
from benchmarks.tune.candidates import decode_candidates
from tandem.engine_core.kernels.attention.decode_plans import choose_plan
from tandem.engine_core.kernels.tiles.table import NO_TABLE, DecodeKey
from tests.fakes.gpus import H200

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and find_spec("triton") is not None:
    from tests.support.interpreter import adapt_interpreter

    adapt_interpreter()


@pytest.mark.parametrize("kv_bits", [16, 8])
def test_decode_by_any_plan_attends_alike(kv_bits: int) -> None:
    torch.manual_seed(0)
    key, bare = DecodeKey(32, kv_bits, 4), replace(H200, capability=(8, 0), tiles=NO_TABLE)
    (given, *_) = layers(key, 40, DEVICE, torch.float32)
    today = choose_plan(32, 4, torch.bfloat16, torch.bfloat16, bare)
    plans = decode_candidates(key, today, today, H200)
    plain, early = (next(plan for plan in plans[::-1] if plan.early is each) for each in (False, True))
    first, *others = (run(given, plan, bare) for plan in (plans[0], plain, early))
    for found in others:
        torch.testing.assert_close(found, first, rtol=1e-4, atol=1e-4)
