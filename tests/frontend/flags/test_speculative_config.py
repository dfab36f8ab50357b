"""vLLM's `--speculative-config` on the command line."""

import json
from typing import Any

import pytest

from tandem.frontend.cli.main import build_parser
from tandem.frontend.flags.speculative_config import speculative_arguments
from tandem.protocol.engine_options import engine_options


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {}),
        ({"num_speculative_tokens": 3}, {"speculate_tokens": 3}),
        ({"prompt_lookup_max": 5}, {"speculate_min_match": 5, "speculate_max_match": 5}),
        ({"prompt_lookup_min": 2}, {"speculate_min_match": 2, "speculate_max_match": 2}),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 4}, {"speculate_min_match": 2, "speculate_max_match": 4}),
    ],
)
def test_keys_of_vllm_are_flags_of_ours(given: dict[str, int], expected: dict[str, int]) -> None:
    found = speculative_arguments(json.dumps({"method": "ngram", **given}))
    assert found == {"speculate": "ngram", **expected}


@pytest.mark.parametrize("method", [{"method": "draft_model"}, {"method": None}, {}])
@pytest.mark.parametrize("size", [{"draft_tensor_parallel_size": 1}, {}])
def test_a_draft_model_is_named(method: dict[str, Any], size: dict[str, int]) -> None:
    given = {**method, "model": "me/small", "num_speculative_tokens": 4, **size}
    assert speculative_arguments(json.dumps(given)) == {"speculate": "model:me/small", "speculate_tokens": 4}


@pytest.mark.parametrize("model", ["ngram", "[ngram]"])
def test_without_a_method_the_model_may_be_the_method(model: str) -> None:
    found = speculative_arguments(json.dumps({"model": model, "prompt_lookup_max": 4}))
    assert found == {"speculate": "ngram", "speculate_min_match": 4, "speculate_max_match": 4}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"method": "eagle3", "model": "x"}, "'eagle3'"),
        ({"num_speculative_tokens": 3}, "method None"),
        ({"model": "x", "prompt_lookup_max": 3}, "prompt_lookup_max"),
        ({"model": None}, "model None"),
        ({"model": ["ngram"]}, r"model \['ngram'\]"),
        ({"model": "x", "draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size 2: must be 1"),
        ({"method": "ngram", "draft_tensor_parallel_size": True}, "draft_tensor_parallel_size True"),
        ({"method": ["ngram"]}, r"method \['ngram'\]"),
        ({"method": "draft_model"}, "model None"),
        ({"method": "draft_model", "model": 3}, "model 3"),
        ({"method": "draft_model", "model": "x", "prompt_lookup_max": 3}, "prompt_lookup_max"),
        ({"method": "draft_model", "model": "x", "num_speculative_tokens": 9}, "num_speculative_tokens 9"),
        ({"method": "ngram", "model": "x", "quantization": "fp8"}, "model, quantization"),
        ({"method": "ngram", "num_speculative_tokens": 8}, "num_speculative_tokens 8"),
        ({"method": "ngram", "num_speculative_tokens": True}, "num_speculative_tokens True"),
        ({"method": "ngram", "prompt_lookup_min": 0}, "prompt_lookup_min 0"),
        ({"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 2}, "prompt_lookup_min 4"),
        ([], "object"),
    ],
)
def test_anything_else_is_rejected_by_name(given: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        speculative_arguments(json.dumps(given))


def test_a_server_takes_the_flag_and_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    config = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3}'
    for words in (["--speculative-config", config], ["-sc", config], [f"--speculative_config={config}"]):
        options = engine_options(build_parser().parse_args(["serve", *words]))
        assert (options.speculate, options.speculate_tokens, options.speculate_max_match) == ("ngram", 5, 3)
    for wrong in ('{"method": "mtp"}', "{", "[" * 100_000):
        with pytest.raises(SystemExit):
            build_parser().parse_args(["serve", "--speculative-config", wrong])
        assert "--speculative-config: " in capsys.readouterr().err
