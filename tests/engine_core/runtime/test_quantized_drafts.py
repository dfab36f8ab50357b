"""Engines with quantized weights, keys and values, whose n-gram drafts change no token."""

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tandem.protocol.codec import pack_ids
from tandem.protocol.params import SamplingParams
from tests.engine_core.models import test_qwen3_5_quantized
from tests.engine_core.runtime.test_recorded_graphs import MODEL
from tests.engine_core.runtime.test_speculation import KINDS, build
from tests.support.model_folder import write_model
from tests.support.quantized_checkpoint import LAYOUTS, quantize_checkpoint

PROMPTS = [[5, 9, 14, 7] * 4, list(range(3, 30)), [6, 7] * 5]
TOKENS = 24
CASES: list[tuple[str, dict[str, Any]]] = [
    ("fp8_block", {}),
    ("fp8_channel", {"kv_dtype": "fp8"}),
    ("gptq_act_order", {}),
    ("awq", {"kv_dtype": "fp8"}),
    ("int8", {}),
    ("", {"quantize": "fp8", "kv_dtype": "fp8"}),
]


@pytest.mark.parametrize(("layout", "fields"), CASES)
def test_tokens_equal_those_without_drafts(layout: str, fields: dict[str, Any], tmp_path: Path) -> None:
    write_model(tmp_path, structs.replace(MODEL, intermediate_size=64))
    if layout:
        quantize_checkpoint(tmp_path, LAYOUTS[layout])
    check(tmp_path, fields)


@pytest.mark.parametrize("name", ["fp8 blocks", "w4a16"])
def test_tokens_of_quantized_hybrids_equal_those_without_drafts(name: str, tmp_path: Path) -> None:
    test_qwen3_5_quantized.write(tmp_path, *test_qwen3_5_quantized.CASES[name], seed=1)
    check(tmp_path, {"kv_dtype": "fp8", "page_size": 16})


def check(folder: Path, fields: dict[str, Any]) -> None:
    """Compare tokens with predictions of the answers, and with predictions of which every fifth token is wrong."""
    params = [SamplingParams(TOKENS, temperature=temperature, seed=5, ignore_eos=True) for temperature in (0, 1, 0)]
    kind = KINDS["cpu, two steps in flight"]
    expected = build(folder, kind, **fields).generate(PROMPTS, params)
    wrong = [[token ^ (index % 5 == 4) for index, token in enumerate(tokens)] for tokens in expected]
    driven = build(folder, kind, speculate="ngram", speculate_tokens=3, **fields)
    for texts in (expected, wrong):
        asked = zip(PROMPTS, params, texts, strict=True)
        ids = [driven.submit(prompt, own, prediction=pack_ids(text)) for prompt, own, text in asked]
        driven.run()
        assert [driven.tokens(number) for number in ids] == expected
    assert driven.engine.scheduler.audit() == []
    stats = driven.engine.stats
    assert 30 < stats.spec_decode_num_accepted_tokens < stats.spec_decode_num_draft_tokens
