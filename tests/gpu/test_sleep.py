"""Virtual ranges of a GPU, and an engine whose graphs replay after a wake."""

import gc
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tandem.engine_core.memory.cuda_memory import MIN_PIECE, CudaMemory, open_driver
from tandem.engine_core.memory.device_memory import CACHE, AllocatedIn
from tandem.engine_core.memory.sleeping_memory import SleepingMemory
from tandem.protocol.commands import Sleep, WakeUp
from tandem.protocol.params import SamplingParams
from tests.engine_core.runtime.test_recorded_graphs import MODEL
from tests.support.model_folder import write_model
from tests.support.plan_recording import runtime_of
from tests.support.trained_engine import TrainedEngine

pytestmark = pytest.mark.gpu

SIZE = 2**28
ROUNDS = 3
"""Releases of the same memory, each of which frees all of it. No other process may allocate meanwhile."""
PROMPTS = [[5, 9, 14, 3, 4], list(range(3, 40)), [7]]


def free_bytes() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def test_a_captured_graph_replays_over_restored_memory() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    memory = CudaMemory(open_driver(), device, 2**33, torch.cuda.synchronize)
    with AllocatedIn(memory, device, CACHE):
        weight = torch.empty(64, 64, device=device)
        pool = torch.zeros(SIZE, device=device, dtype=torch.uint8)
    x, out = torch.randn(8, 64, device=device), torch.empty(8, 64, device=device)
    values = torch.randn(64, 64, device=device)
    weight.copy_(values)
    torch.matmul(x, weight, out=out)
    expected = out.clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.matmul(x, weight, out=out)
        pool[:64].add_(1)
    addresses, released = (weight.data_ptr(), pool.data_ptr()), []
    for _ in range(ROUNDS):
        before = free_bytes()
        memory.release()
        released.append(free_bytes() - before)
        memory.restore()
        assert (weight.data_ptr(), pool.data_ptr()) == addresses
        assert not weight.any() and not pool.any()
        weight.copy_(values)
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)
        assert int(pool[0]) == 1 and int(pool[64]) == 0
    assert min(released) >= memory.num_bytes, released
    before = free_bytes()
    del graph, weight, pool, memory
    gc.collect()
    assert free_bytes() - before >= SIZE


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_generates_the_same_after_a_wake_and_captures_nothing(tmp_path: Path, level: int) -> None:
    write_model(tmp_path, MODEL)
    engine = TrainedEngine(tmp_path, device="cuda", threads=None, max_len=64)
    params = SamplingParams(24, temperature=0.0, ignore_eos=True)
    runtime = runtime_of(engine.driven)
    graphs, memory = runtime.graphs, engine.driven.engine.control.sleep.memory
    assert graphs is not None and isinstance(memory, SleepingMemory)
    num_bytes = [part.num_bytes for part in memory._memory.values()]
    assert min(num_bytes) >= MIN_PIECE, "weights and KV pool have a range each"
    before, released = engine.driven.generate(PROMPTS, [params] * len(PROMPTS)), []
    for _ in range(ROUNDS):
        free = runtime.device.free_bytes()
        assert engine.call(lambda call: Sleep(call, level)).ok
        released.append(runtime.device.free_bytes() - free)
        assert engine.call(WakeUp).ok
        assert engine.driven.generate(PROMPTS, [params] * len(PROMPTS)) == before
        assert runtime.graphs is graphs
    assert min(released) >= sum(num_bytes), released
