"""Steps from graphs of a model with windows: pages given up are NaN, and their ids stay in the tables."""

from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from tandem.engine_core.sampling import triton_sampler
from tandem.engine_core.startup import engine as startup_engine
from tandem.protocol.engine_options import EngineOptions
from tandem.protocol.params import SamplingParams
from tests.fakes.recording_gpu import interpreted_parts, oracle_attention, oracle_parts
from tests.support.engine_driver import DrivenEngine
from tests.support.free_pages import poison_free_pages, windows_of
from tests.support.parity import SMALL, VOCAB, greedy_tokens, random_tokens, save_random
from tests.support.plan_recording import runtime_of

WINDOW, TOKENS = 9, 10
LENGTHS = (3, 14, 31, 26)


# The interpreter computes in numpy, which warns of infinities that a GPU takes in its stride.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.timeout(1800)
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is a GPU")
@pytest.mark.parametrize("kernels", ["oracles", pytest.param("interpreted", marks=pytest.mark.slow)])
def test_graphs_give_the_tokens_of_transformers(kernels: str, tmp_path: Path) -> None:
    """Decode and mixed steps, rows before and beyond the window, twice: the second time from the cache."""
    from transformers import Qwen2Config

    heads = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    window = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    reference = save_random(tmp_path, Qwen2Config(**SMALL | heads | window), seed=3)
    options = EngineOptions(
        model=str(tmp_path), device="cuda", dtype="float32", pipeline="off", max_rows=4, max_len=128,
        max_step_tokens=16, prefill_chunk=8, kv_tokens=256, page_size=4, graph_rows="2,4", graph_tokens="8,16",
    )  # fmt: skip
    prompts = [tokens.tolist() for tokens in random_tokens(LENGTHS, VOCAB, seed=4)]
    expected = [greedy_tokens(reference, prompt, TOKENS) for prompt in prompts]
    params = [SamplingParams(TOKENS, temperature=0.0, min_tokens=TOKENS)] * len(prompts)
    with ExitStack() as patched:
        patched.enter_context(patch.object(startup_engine.configuration, "resolve_device", lambda *_: "cuda"))
        patched.enter_context(patch.multiple(triton_sampler, TILE=1024, GROUP=32, CAPACITY=64))
        if kernels == "oracles":
            patched.enter_context(oracle_attention())
        driven = DrivenEngine.build(options, oracle_parts if kernels == "oracles" else interpreted_parts)
        assert windows_of(driven) == [None, WINDOW, WINDOW]
        runtime = runtime_of(driven)
        assert [own.ring > 0 for own in runtime.tables.columns] == [False, True, True]
        poison_free_pages(driven)
        assert driven.generate(prompts, params) == expected
        assert driven.generate(prompts, params) == expected
    assert driven.engine.stats.prefix_hits > 0 and runtime.graphs is not None
