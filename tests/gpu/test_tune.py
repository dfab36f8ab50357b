"""The tuner compiles and times plans of every kind on the GPU."""

import math

import pytest
import torch

from benchmarks.tune.attention import DecodeTimer
from benchmarks.tune.byte_products import ByteTimer, byte_candidates
from benchmarks.tune.candidates import decode_candidates, product_candidates
from benchmarks.tune.compiling import compile_one
from benchmarks.tune.products import ProductTimer
from tandem.engine_core.kernels.attention.paged_decode import choose_plan
from tandem.engine_core.kernels.tiles.table import ByteKind, ByteProductKey, DecodeKey, Operation, ProductKey, Scaling
from tandem.engine_core.runtime.device import read_gpu_traits

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("operation", "bits", "rows"),
    [
        ("normed", 16, 1), ("normed_gated", 8, 1), ("product", 4, 1),
        ("product", 16, 16), ("gated", 8, 16), ("gated", 4, 16),
    ],
)  # fmt: skip
def test_products_are_compiled_and_timed(operation: Operation, bits: int, rows: int) -> None:
    gpu = read_gpu_traits()
    key = ProductKey(operation, bits, 1024, 2048, rows)
    plans = product_candidates(key, gpu)
    timer = ProductTimer(gpu.pdl)
    with torch.inference_mode():
        for plan in (plans[0], plans[-1]):
            assert compile_one(key, plan, gpu) == ""
            assert 0 < timer(key, plan) < math.inf


@pytest.mark.parametrize(("kind", "scaling"), [("fp8", "tensor"), ("fp8", "block"), ("int8", "output")])
def test_products_of_bytes_are_compiled_and_timed(kind: ByteKind, scaling: Scaling) -> None:
    gpu = read_gpu_traits()
    key = ByteProductKey(kind, scaling, 1024, 2048, 128)
    timer, plans = ByteTimer(gpu), byte_candidates(key, gpu)
    with torch.inference_mode():
        for plan in (plans[0], plans[-1]):
            assert compile_one(key, plan, gpu) == ""
            assert 0 < timer(key, plan) < math.inf


@pytest.mark.parametrize("kv_bits", [16, 8])
def test_decode_attention_is_compiled_and_timed(kv_bits: int) -> None:
    gpu = read_gpu_traits()
    key = DecodeKey(64, kv_bits, 256)
    today = choose_plan(64, 256, torch.bfloat16, torch.bfloat16, gpu)
    timer = DecodeTimer(gpu)
    with torch.inference_mode():
        for plan in (today, decode_candidates(key, today, today)[-1]):
            assert compile_one(key, plan, gpu) == ""
            assert 0 < timer(key, plan) < math.inf
