"""The tuner compiles and times plans of every kind on the GPU."""

import math

import pytest
import torch

from benchmarks.tune.__main__ import layer_task
from benchmarks.tune.attention import DecodeTimer
from benchmarks.tune.candidates import decode_candidates
from benchmarks.tune.compiling import Job, compile_one
from benchmarks.tune.layers import LayerTimer
from benchmarks.tune.shapes import FORMATS, LayerKey
from tandem.engine_core.kernels.attention.decode_plans import choose_plan
from tandem.engine_core.kernels.tiles.table import DecodeKey
from tandem.engine_core.runtime.device import read_gpu_traits

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_layers_are_compiled_and_timed(name: str, rows: int) -> None:
    gpu = read_gpu_traits()
    if rows == 1 and "bits" not in name:
        pytest.skip("one row of bytes is that of 8 bits")
    task = layer_task(LayerKey(name, rows, 2048, 2048, 512, 4096, 4096), gpu)
    timer = LayerTimer(gpu)
    with torch.inference_mode():
        for place in (0, -1):
            plans = {key: listed[place] for key, listed in task.candidates.items()}
            for key, plan in plans.items():
                assert plan is None or compile_one(Job(task.key, key, plan), gpu) == ""
            assert 0 < timer(task.key, plans) < math.inf


@pytest.mark.parametrize("kv_bits", [16, 8])
def test_decode_attention_is_compiled_and_timed(kv_bits: int) -> None:
    gpu = read_gpu_traits()
    key = DecodeKey(64, kv_bits, 256)
    today = choose_plan(64, 256, torch.bfloat16, torch.bfloat16, gpu)
    timer = DecodeTimer(gpu)
    with torch.inference_mode():
        for plan in (today, decode_candidates(key, today, today, gpu)[-1]):
            assert compile_one(Job(None, key, plan), gpu) == ""
            assert 0 < timer(key, plan) < math.inf
