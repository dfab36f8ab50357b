"""What the tuner times is the work of the engine, whichever plan does it."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from benchmarks.tune.attention import layers, run
from benchmarks.tune.byte_products import Operands, byte_candidates
from benchmarks.tune.candidates import decode_candidates, product_candidates
from benchmarks.tune.products import Product, make_weight, space_of
from tandem.engine_core.kernels.attention.paged_decode import choose_plan
from tandem.engine_core.kernels.tiles.plan_types import GemvPlan, Plan
from tandem.engine_core.kernels.tiles.table import (
    NO_TABLE,
    ByteKind,
    ByteProductKey,
    DecodeKey,
    Operation,
    ProductKey,
    Scaling,
)
from tests.fakes.gpus import H200

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and find_spec("triton") is not None:
    from tests.support.interpreter import adapt_interpreter

    adapt_interpreter()


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("operation", ["product", "gated", "normed", "normed_gated"])
def test_a_chosen_plan_computes_what_the_rule_does(operation: Operation, bits: int) -> None:
    """Both run through Triton's interpreter where there is no GPU."""
    for rows in (1,) if "normed" in operation else (1, 16):
        key = ProductKey(operation, bits, 16, 128, rows)
        torch.manual_seed(0)
        product, weight = Product(key, DEVICE, False, torch.float32), make_weight(key, DEVICE, torch.float32)
        plans: list[Plan] = [plan for plan in product_candidates(key, H200) if plan is not None]
        if not plans:
            plans = [GemvPlan(4, 128)]
        first, last = (product.run(plan, weight, space_of(key, plan, DEVICE)) for plan in (plans[0], plans[-1]))
        assert first.shape == (rows, 16)
        assert torch.isfinite(first).all()
        torch.testing.assert_close(last, first, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "scaling"), [("fp8", "tensor"), ("fp8", "block"), ("int8", "output")])
def test_bytes_are_multiplied_alike_by_all_plans(kind: ByteKind, scaling: Scaling) -> None:
    torch.manual_seed(0)
    key, gpu = ByteProductKey(kind, scaling, 64, 256, 64), replace(H200, capability=(8, 0), multiprocessors=8)
    operands = Operands.random(key, 2, gpu, DEVICE)
    plans = [plan for plan in byte_candidates(key, gpu) if plan is not None]
    assert len(plans) > 3
    first, last = (operands.run(plan) for plan in (plans[0], plans[-1]))
    assert [y.shape for y in first] == [(64, 64)] * 2
    assert torch.isfinite(first[0]).all()
    torch.testing.assert_close(last, first, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("kv_bits", [16, 8])
def test_decode_by_any_plan_attends_alike(kv_bits: int) -> None:
    torch.manual_seed(0)
    key, bare = DecodeKey(32, kv_bits, 4), replace(H200, capability=(8, 0), tiles=NO_TABLE)
    (given, *_) = layers(key, 40, DEVICE, torch.float32)
    today = choose_plan(32, 4, torch.bfloat16, torch.bfloat16, bare)
    plans = decode_candidates(key, today, today)
    first, last = (run(given, plan, bare) for plan in (plans[0], plans[-1]))
    torch.testing.assert_close(last, first, rtol=1e-4, atol=1e-4)
