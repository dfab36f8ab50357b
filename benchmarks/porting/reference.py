"""Run a model folder in transformers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem.engine_core.models.config_fields import ConfigSource


def load_reference(folder: Path, device: str, dtype: str) -> Any:
    """Load the language model of a folder, with eager attention.

    Uses the architecture in config.json, since AutoModelForCausalLM lacks some multimodal ones.
    """
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    model_class = getattr(transformers, ConfigSource.open(folder).architecture)
    model: Any = model_class.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="eager")
    return model.to(device).eval()


@torch.inference_mode()
def reference_logits(model: Any, ids: Sequence[int]) -> Tensor:
    """Return the logits after every token, [T, vocab] in float32 on the host."""
    logits: Tensor = model(torch.tensor([list(ids)], device=model.device)).logits[0]
    return logits.float().cpu()


@torch.inference_mode()
def reference_tokens(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """Return `count` greedy tokens after a prompt, using `generate`."""
    ids = torch.tensor([list(prompt)], device=model.device)
    whole = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        repetition_penalty=1.0,
    )
    tokens: list[int] = whole[0, len(prompt) :].tolist()
    return tokens
