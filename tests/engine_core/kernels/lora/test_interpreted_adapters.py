"""An engine on the CUDA path with its real kernels in Triton's interpreter computes adapters as a CPU does."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from tandem.engine_core.sampling import triton_sampler
from tandem.engine_core.startup import engine as startup_engine
from tests.engine_core.kernels.test_interpreted_engine import MODEL
from tests.fakes.recording_gpu import interpreted_parts
from tests.support.engine_driver import DrivenEngine
from tests.support.lora_engine import LoraEngine
from tests.support.lora_folder import write_adapter
from tests.support.model_folder import write_model
from tests.support.plan_recording import runtime_of


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is a GPU")
def test_an_engine_of_interpreted_kernels_computes_adapters_as_a_cpu_does(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    write_model(model, MODEL)
    adapters = {name: write_adapter(tmp_path / name, model, rank=3 + seed, seed=seed) for seed, name in enumerate("ab")}
    sizes = {"max_rows": 3, "max_len": 64, "max_step_tokens": 12, "prefill_chunk": 8, "kv_tokens": 256}
    gpu = {"device": "cuda", "dtype": "float32", "pipeline": "off", "graph_rows": "2", "graph_tokens": "off"}
    cuda = patch.object(startup_engine.configuration, "resolve_device", lambda *_: "cuda")
    with cuda, patch.multiple(triton_sampler, TILE=1024, GROUP=32, CAPACITY=64):
        engine = LoraEngine.start(model, adapters, interpreted_parts, max_lora_rank=8, **sizes, **gpu)
    graphs = runtime_of(engine).graphs
    assert graphs is not None and graphs.decode[0][2].adapted is not None
    asked = [([5, 6, 7], "a"), ([9] * 11, "b"), ([3, 4], "")]
    cpu = LoraEngine.start(model, adapters, max_lora_rank=8, **sizes)
    expected, found = ([driven.ask(*each, count=3) for each in asked] for driven in (cpu, engine))
    for driven in (cpu, engine):
        DrivenEngine.run(driven)
    assert [engine.tokens(one) for one in found] == [cpu.tokens(one) for one in expected]
