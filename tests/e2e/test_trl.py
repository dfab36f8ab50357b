"""TRL's own client of weight updates, unmodified, against a server on a CPU.

It needs TRL, which the tests' environment lacks: install `trl==1.16.0 accelerate datasets aiohttp requests` there. A
stub stands for vLLM, which TRL imports.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.scripted_engine import DEFAULT_MODEL
from tests.support.serving import Serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # of the libraries that TRL imports
    pytest.mark.skipif(find_spec("trl") is None, reason="needs trl==1.16.0 accelerate datasets aiohttp requests"),
]

STUB = Path(__file__).parents[1] / "fakes" / "vllm_package"
UPDATES, TEMPERATURE, MAX_GAP = 50, 1.3, 0.02


def perturb(model: Any, generator: torch.Generator) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * parameter.std() * torch.randn(parameter.shape, generator=generator)


def gap(serving: Serving, model: Any, prompt: list[int], seed: int) -> float:
    """Return the largest difference of log-probabilities of the tokens of a rollout, requested as TRL does."""
    body = {
        **{"prompt": prompt, "max_tokens": 24, "temperature": TEMPERATURE, "top_p": 1.0, "top_k": 0, "n": 1},
        **{"repetition_penalty": 1.0, "return_token_ids": True, "logprobs": 0, "seed": seed},
    }
    status, found = serving.post("/v1/completions", body)
    assert status == 200, found
    (choice,) = found["choices"]
    ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].float()
    own = (logits / TEMPERATURE).log_softmax(-1).gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1)
    # The end token has no text, so the server does not report it.
    count = len(logprobs)
    assert count >= len(ids) - 1
    return float((own[:count] - torch.tensor(logprobs)).abs().max()) if count else 0.0


def test_trl_updates_a_server_fifty_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(STUB))
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from accelerate import PartialState
    from transformers import AutoModelForCausalLM
    from trl.experimental.async_grpo.vllm_client import VLLMClient
    from trl.experimental.async_grpo.weight_transfer import WeightTransferClient

    PartialState(cpu=True)  # TRL's loggers need it; its trainer makes one.
    model = AutoModelForCausalLM.from_pretrained(DEFAULT_MODEL, dtype=torch.float32)
    info: dict[str, Any] = {"names": [], "dtype_names": [], "shapes": []}
    for name, parameter in model.named_parameters():
        info["names"].append(name)
        info["dtype_names"].append(str(parameter.dtype).split(".")[-1])
        info["shapes"].append(list(parameter.shape))
    flags = ("--enable-weight-updates", "--logprobs-mode", "processed_logprobs", "--dtype", "float32")
    generator, gaps = torch.Generator().manual_seed(1), []
    with Serving(tmp_path / "log", *flags) as serving:
        client = VLLMClient(serving.url)
        assert client.get_dtype() == "torch.float32" and client.get_world_size() == 1
        assert client.get_max_model_len() > 0 and client.get_server_info()["lora_config"] is None
        transfer = WeightTransferClient(client, info)
        transfer.init_weight_transfer()
        prompt = list(range(100, 140))
        for number in range(UPDATES):
            perturb(model, generator)
            transfer.pause()
            transfer.send_weights(iter(model.named_parameters()))
            transfer.resume()
            gaps.append(gap(serving, model, prompt, number))
    print(f"{len(gaps)} updates, largest gap {max(gaps):.2g}")
    assert len(gaps) == UPDATES and max(gaps) <= MAX_GAP
