"""Engines on CUDA that give up the pages of windows: freed pages are full of NaN, which no step may read."""

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tandem.engine_core.kv_cache.groups import partition
from tandem.engine_core.startup import engine as assembly
from tandem.protocol.engine_options import Dtype, EngineOptions
from tandem.protocol.params import SamplingParams
from tests.support.engine_driver import DrivenEngine
from tests.support.free_pages import poison_free_pages, windows_of
from tests.support.parity import SMALL, VOCAB, random_tokens, save_random

pytestmark = pytest.mark.gpu

WINDOW, TOKENS = 100, 40
LAYERS = ["sliding_attention"] * 5 + ["full_attention"] + ["sliding_attention"] * 2
LENGTHS = (30, 99, 100, 101, 117, 390, 800, 1500)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Gemma3TextConfig

    folder = tmp_path_factory.mktemp("gemma3")
    fields = {"sliding_window": WINDOW, "layer_types": LAYERS, "num_hidden_layers": len(LAYERS)}
    sizes = {"head_dim": 128, "hidden_size": 256, "max_position_embeddings": 8192}
    save_random(folder, Gemma3TextConfig(**SMALL | sizes | fields), seed=5, norms=(-0.5, 0.5))
    return folder


def run(directory: Path, dtype: Dtype, graphs: bool) -> tuple[DrivenEngine, list[list[int]]]:
    """Serve all prompts twice, the second time from the cache, and return the answers."""
    options = EngineOptions(
        model=str(directory), device="cuda", dtype=dtype, max_rows=8, max_len=4096, max_step_tokens=512,
        kv_tokens=16_384, graph_rows="1,4,8" if graphs else "off", graph_tokens="64,512" if graphs else "off",
    )  # fmt: skip
    driven = DrivenEngine.build(options)
    poison_free_pages(driven)
    prompts = [tokens.tolist() for tokens in random_tokens(LENGTHS, VOCAB, seed=7)]
    params = [SamplingParams(TOKENS, temperature=0.0, min_tokens=TOKENS)] * len(prompts)
    return driven, [*driven.generate(prompts, params), *driven.generate(prompts, params)]


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_no_step_reads_a_page_that_was_given_up(
    directory: Path, dtype: Dtype, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, where all steps run on Triton, the tokens equal those of an engine that keeps all positions."""
    driven, answers = run(directory, dtype, graphs)
    assert windows_of(driven) == [None, *[WINDOW] * 7]
    assert all(len(answer) == TOKENS for answer in answers), "NaN in the logits would end a request"
    assert driven.engine.stats.prefix_hits > 0
    if dtype == "float32":
        monkeypatch.setattr(assembly, "partition", lambda windows, *heads: partition([None] * len(windows), *heads))
        keeping, expected = run(directory, dtype, graphs)
        assert windows_of(keeping) == [None]
        assert answers == expected
