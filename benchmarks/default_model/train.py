"""Training of the default model, a Llama of 5.5 million parameters.

    python -m benchmarks.default_model.train --out DIR

The model describes functions of the standard library, in text, in JSON and as tool arguments. Everything
random has one seed and the work is counted in steps, not in minutes. The batches are the same on every run; the last
bits of the weights may not be, because the attention's backward pass on a GPU may sum in any order.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.default_model.batches import IGNORED, stream
from benchmarks.default_model.corpus import load
from benchmarks.default_model.questions import Questioner
from benchmarks.default_model.tokenizer import (
    BEGIN_ID,
    CONTEXT,
    END_ID,
    PAD_ID,
    VOCABULARY,
    save_tokenizer,
    train_tokenizer,
)

SEED = 20240601
MAX_BYTES = 12_000_000
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": CONTEXT,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": BEGIN_ID,
    "eos_token_id": END_ID,
    "pad_token_id": PAD_ID,
}


def new_model(device: torch.device) -> LlamaForCausalLM:
    """Create the untrained model in float32."""
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    torch.nn.Module.to(model, device)
    model.train()
    return model


def new_optimizer(model: LlamaForCausalLM, rate: float) -> torch.optim.AdamW:
    """Create the AdamW optimizer, without weight decay of the norms."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    norms = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.02}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=True)


def rate_at(step: int, steps: int, peak: float) -> float:
    """Return the learning rate of a step.

    It warms up linearly over the first steps, then follows a cosine to zero.
    """
    warm = min(300, steps // 10 + 1)
    if step < warm:
        return peak * (step + 1) / warm
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def train(model: LlamaForCausalLM, tokenizer_file: Path, arguments: argparse.Namespace) -> float:
    """Run all steps and return the mean loss of the last hundred."""
    device = next(model.parameters()).device
    optimizer = new_optimizer(model, arguments.rate)
    losses: list[torch.Tensor] = []
    started = time.monotonic()
    batches = stream(tokenizer_file, SEED, arguments.steps, arguments.rows, arguments.processes)
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, arguments.steps, arguments.rate)
        # More than half of the tokens are questions and padding, which need no logits.
        learnt = np.flatnonzero(batch.targets != IGNORED)
        tokens = torch.from_numpy(batch.tokens).to(device, non_blocking=True)
        indices = torch.from_numpy(learnt).to(device, non_blocking=True)
        targets = torch.from_numpy(batch.targets.ravel()[learnt]).to(device, non_blocking=True)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            hidden = model.model(tokens, use_cache=False).last_hidden_state.flatten(0, 1)
            logits = model.lm_head(hidden[indices])
        loss = torch.nn.functional.cross_entropy(logits.float(), targets)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        if step % 200 == 0 or step == arguments.steps - 1:
            mean = torch.stack(losses[-100:]).mean().item()
            print(f"step {step} loss {mean:.4f} after {time.monotonic() - started:.0f} s", flush=True)
    return torch.stack(losses[-100:]).mean().item()


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """Write the weights and both configurations.

    Weights are in bfloat16 under their Hugging Face names, the tied head once.
    """
    weights = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "rope_theta": 10000.0,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        **SHAPE,
    }
    generation = {"bos_token_id": BEGIN_ID, "eos_token_id": END_ID, "pad_token_id": PAD_ID, "do_sample": False}
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    size = (folder / "model.safetensors").stat().st_size
    if size > MAX_BYTES:
        raise ValueError(f"model.safetensors has {size} bytes, {MAX_BYTES} allowed; make SHAPE smaller")


def parse_arguments() -> argparse.Namespace:
    """Parse the flags, whose defaults are those of the checkpoint that is shipped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--rows", type=int, default=512, help="samples in a batch")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="that make batches")
    return parser.parse_args()


def main() -> None:
    """Train the tokenizer and the model, and write both with a record of the run."""
    arguments = parse_arguments()
    arguments.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Otherwise every allocation is filled, which takes time and does not change results.
    torch.utils.deterministic.fill_uninitialized_memory = False
    random.seed(SEED)
    torch.manual_seed(SEED)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    started = time.monotonic()
    questioner = Questioner(load())
    save_tokenizer(train_tokenizer(questioner, SEED), arguments.out)
    model = new_model(device)
    loss = train(model, arguments.out / "tokenizer.json", arguments)
    save(model, arguments.out)
    record = {
        "seed": SEED,
        "functions": len(questioner.rows),
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": arguments.steps,
        "rows": arguments.rows,
        "rate": arguments.rate,
        "final_loss": round(loss, 5),
        "seconds": round(time.monotonic() - started),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
    }
    (arguments.out / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
