"""A checkpoint that gives NaN for one token, served over HTTP."""

import json
import shutil
from pathlib import Path

import openai
import pytest
import torch
from openai.types import Completion
from safetensors.torch import load_file, save_file

import tandem.engine_core.default_model as default_model
from tests.support.serving import GUARD_SECONDS, Serving

POISON = 4000
"""Token whose embedding is NaN."""


def write_poisoned(folder: Path) -> None:
    """Write the default model with an embedding of its own, in which one token is NaN."""
    source = Path(next(iter(default_model.__path__)))
    shutil.copytree(source, folder)
    weights = load_file(source / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(weights, folder / "model.safetensors")
    config = json.loads((source / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))


def stream_into(chunks: list[Completion], client: openai.OpenAI, bias: dict[str, int]) -> None:
    """Stream a completion that samples the biased token; its error may come before the first chunk or after it."""
    stream = client.completions.create(
        model="model", prompt=[5, 6, 7], max_tokens=8, logit_bias=bias, temperature=0, stream=True
    )
    chunks.extend(stream)


@pytest.mark.slow
def test_nan_of_the_model_is_an_error_over_http_and_leaves_others_alone(tmp_path: Path) -> None:
    write_poisoned(tmp_path / "model")
    with Serving(tmp_path / "log", "--model", str(tmp_path / "model")) as serving:
        client = openai.OpenAI(base_url=serving.url + "/v1", api_key="none", timeout=GUARD_SECONDS, max_retries=0)
        with client:
            sound = client.completions.create(model="model", prompt=[5, 6, 7], max_tokens=8, temperature=0)
            with pytest.raises(openai.InternalServerError) as refused:
                client.completions.create(model="model", prompt=[5, 6, POISON], max_tokens=8)
            assert (refused.value.status_code, refused.value.code) == (500, "model_failed")
            assert "--dtype" in refused.value.message
            chunks: list[Completion] = []
            with pytest.raises(openai.APIError) as broken:
                stream_into(chunks, client, {str(POISON): 100})
            assert broken.value.code == "model_failed"
            assert all(chunk.choices[0].finish_reason is None for chunk in chunks)
            again = client.completions.create(model="model", prompt=[5, 6, 7], max_tokens=8, temperature=0)
            assert again.choices[0].text == sound.choices[0].text
        assert serving.fresh_engine_metric('tandem_request_failed_total{code="model_failed"}') == 2
