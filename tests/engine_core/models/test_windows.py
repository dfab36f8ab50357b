"""Sliding windows in a whole engine: chunks, decode, prefix-cache hits and preemption give transformers' tokens.

Free pages are full of NaN, those that a window has passed among them.
"""

from pathlib import Path
from typing import Any

import pytest

from tandem.protocol.engine_options import EngineOptions
from tandem.protocol.params import SamplingParams
from tests.support.engine_driver import DrivenEngine
from tests.support.free_pages import poison_free_pages, windows_of
from tests.support.parity import SMALL, VOCAB, greedy_tokens, random_tokens, save_random

WINDOW = 9
"""More than two pages, and fewer positions than any prompt has."""
TOKENS = 24
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "all_layers": ("MistralConfig", {"sliding_window": WINDOW}),
    "upper_layers": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}),
    "all_layers_and_half_of_each_head": ("Phi3Config", {"sliding_window": WINDOW, "partial_rotary_factor": 0.5}),
    "every_other_layer_and_soft_caps": (
        "Gemma2Config",
        {"sliding_window": WINDOW, "head_dim": 16, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0},
    ),
    "every_layer_but_the_last_and_two_tables": (
        "Gemma3TextConfig",
        {
            "sliding_window": WINDOW,
            "head_dim": 20,
            "num_key_value_heads": 1,
            "layer_types": [*["sliding_attention"] * 2, "full_attention"],
        },
    ),
}
IN_EVERY_RUN = ("all_layers", "upper_layers", "every_other_layer_and_soft_caps")
"""The rest is left to `-m slow`."""


@pytest.mark.parametrize(
    "name", [name if name in IN_EVERY_RUN else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_windows_hold_in_chunks_decode_cache_hits_and_preemption(name: str, tmp_path: Path) -> None:
    import transformers

    kind, fields = MODELS[name]
    norms = (-0.5, 0.5) if kind.startswith("Gemma") else (0.5, 1.5)  # Gemma stores the factors less 1
    reference = save_random(tmp_path, getattr(transformers, kind)(**SMALL | fields), seed=3, norms=norms)
    shared, *others = (sequence.tolist() for sequence in random_tokens((29, 12, 17, 31), VOCAB, seed=4))
    prompts = [shared, *(shared[: 29 - 4 * index] + other for index, other in enumerate(others)), *others]
    expected = [greedy_tokens(reference, prompt, TOKENS) for prompt in prompts]
    # Too few pages for all rows, but enough for prompts to stay cached.
    kv_tokens = 120 if name == "upper_layers" else 72
    options = EngineOptions(
        model=str(tmp_path), device="cpu", dtype="float32", max_rows=4, max_len=88, max_step_tokens=32,
        prefill_chunk=8, kv_tokens=kv_tokens, page_size=4,
    )  # fmt: skip
    driven = DrivenEngine.build(options)
    poison_free_pages(driven)
    params = [SamplingParams(TOKENS, temperature=0.0, min_tokens=TOKENS)] * len(prompts)
    assert driven.generate(prompts, params) == expected
    assert driven.generate(prompts, params) == expected
    stats = driven.engine.stats
    assert stats.prefix_hits > 0, stats
    # Without a layer that keeps all positions a sequence soon gives up as many pages as it takes.
    assert (stats.preemptions > 0) == (None in windows_of(driven)), stats
