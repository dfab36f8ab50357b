"""A whole engine on the CUDA path with its real kernels in Triton's interpreter generates a dense model's tokens."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from msgspec import structs

from tandem.engine_core import graph_sizes
from tandem.engine_core.attention.base import LayerAttention
from tandem.engine_core.sampling import triton_sampler
from tandem.engine_core.startup import engine as startup_engine
from tandem.protocol.engine_options import EngineOptions
from tandem.protocol.params import SamplingParams
from tests.engine_core.models.test_qwen3_5 import save_random as save_hybrid
from tests.engine_core.models.test_qwen3_5_moe import save_random as save_hybrid_moe
from tests.fakes.recording_gpu import interpreted_parts
from tests.support.engine_driver import DrivenEngine
from tests.support.model_folder import write_model
from tests.support.parity import greedy_tokens
from tests.support.plan_recording import constraining, runtime_of
from tests.support.tiny_llama import CONFIG, Compared, random_model

MODEL = structs.replace(CONFIG, attention=(LayerAttention(32**-0.5),), heads=2, kv_heads=1, head_dim=32)
ASKED = [
    SamplingParams(4, temperature=0.0, ignore_eos=True),
    SamplingParams(4, temperature=1.0, seed=3, ignore_eos=True),
    SamplingParams(4, temperature=0.8, top_k=7, top_p=0.9, repetition_penalty=1.3, seed=4, ignore_eos=True),
]
CONSTRAINED = 1


# The interpreter computes in numpy, which warns of infinities that a GPU takes in its stride.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is a GPU")
def test_an_engine_of_interpreted_kernels_gives_the_tokens_of_a_dense_model(tmp_path: Path) -> None:
    write_model(tmp_path, MODEL)
    options = EngineOptions(
        model=str(tmp_path),
        device="cuda",
        dtype="float32",
        pipeline="off",
        max_rows=3,
        max_len=64,
        max_step_tokens=12,
        prefill_chunk=8,
        kv_tokens=256,
        graph_rows="2",
        graph_tokens="8",
    )
    smaller = {"TILE": 1024, "GROUP": 32, "CAPACITY": 64}
    cuda = patch.object(startup_engine.configuration, "resolve_device", lambda *_: "cuda")
    with cuda, patch.multiple(triton_sampler, **smaller):
        driven = DrivenEngine.build(options, interpreted_parts)
    constraining(driven.engine)
    assert runtime_of(driven).graphs is not None
    prompts = [[5, 6, 7], [9] * 11, [3, 4]]
    ids = [
        driven.submit(prompt, params, constraint="parity" if index == CONSTRAINED else None)
        for index, (prompt, params) in enumerate(zip(prompts, ASKED, strict=True))
    ]
    driven.run()
    compared, model = Compared(), random_model(config=MODEL)
    for index, number in enumerate(ids):
        compared.check(model, prompts[index], driven.tokens(number), ASKED[index], index == CONSTRAINED)
    assert compared.tokens == 12


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is a GPU")
def test_a_model_as_its_own_draft_model_is_right_with_interpreted_kernels(tmp_path: Path) -> None:
    """A prompt and what is left of a longer one are graphs of the draft model."""
    write_model(tmp_path, MODEL)
    options = EngineOptions(
        model=str(tmp_path),
        speculate=f"model:{tmp_path}",
        speculate_tokens=1,
        device="cuda",
        dtype="float32",
        pipeline="off",
        max_rows=2,
        max_len=64,
        max_step_tokens=12,
        prefill_chunk=8,
        kv_tokens=256,
        graph_rows="2",
        graph_tokens="8",
    )
    cuda = patch.object(startup_engine.configuration, "resolve_device", lambda *_: "cuda")
    sizes = patch.object(graph_sizes, "DRAFT_PROMPT_TOKENS", (4,))
    with cuda, sizes, patch.multiple(triton_sampler, TILE=1024, GROUP=32, CAPACITY=64):
        driven = DrivenEngine.build(options, interpreted_parts)
    prompts, asked = [[5, 9, 14], [9] * 11], [SamplingParams(5, temperature=0.0, ignore_eos=True)] * 2
    found = driven.generate(prompts, asked)
    compared, model = Compared(), random_model(config=MODEL)
    for prompt, tokens, params in zip(prompts, found, asked, strict=True):
        compared.check(model, prompt, tokens, params, False)
    stats = driven.engine.stats
    assert stats.spec_decode_num_draft_tokens == stats.spec_decode_num_accepted_tokens > 1


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is a GPU")
@pytest.mark.parametrize(
    ("save", "fields"),
    [(save_hybrid, {}), (save_hybrid_moe, {}), (save_hybrid_moe, {"shared_expert_intermediate_size": 40})],
    ids=["dense", "experts", "shared expert among the others"],
)
def test_an_engine_of_interpreted_kernels_gives_the_tokens_of_a_hybrid_model(
    save: Any, fields: dict[str, int], tmp_path: Path
) -> None:
    """Three sequences take turns in two rows, in graphs of decode steps and of prompts beside them."""
    model = save(tmp_path, fields | {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]})
    options = EngineOptions(
        model=str(tmp_path),
        device="cuda",
        dtype="float32",
        pipeline="off",
        max_rows=2,
        max_len=64,
        max_step_tokens=12,
        prefill_chunk=8,
        kv_tokens=256,
        graph_rows="2",
        graph_tokens="8",
    )
    smaller = {"TILE": 1024, "GROUP": 32, "CAPACITY": 64}
    cuda = patch.object(startup_engine.configuration, "resolve_device", lambda *_: "cuda")
    with cuda, patch.multiple(triton_sampler, **smaller):
        driven = DrivenEngine.build(options, interpreted_parts)
    assert runtime_of(driven).graphs is not None
    prompts, params = [[5, 6, 7], [9] * 11, [3]], SamplingParams(5, temperature=0.0, ignore_eos=True)
    found = driven.generate(prompts, [params] * len(prompts))
    assert found == [greedy_tokens(model, prompt, 5) for prompt in prompts]
