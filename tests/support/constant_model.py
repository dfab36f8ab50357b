"""Checkpoints of the default model's shape, each of which answers with one token only."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

MODEL = Path(__file__).parents[2] / "engine_core" / "default_model"


def write_constant_model(folder: Path, token: int) -> Path:
    """Write a checkpoint that always gives the highest logit to one token; return its folder.

    All layers add nothing, and the head sees one component of the embeddings, which is the largest for the token.
    """
    folder.mkdir(parents=True)
    for file in MODEL.iterdir():
        if file.suffix == ".json":
            shutil.copy(file, folder)
    tensors = load_file(MODEL / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    embeddings, norm = tensors["model.embed_tokens.weight"], tensors["model.norm.weight"]
    embeddings[:, 0] = 1.0
    embeddings[token, 0] = 2.0
    norm.copy_(torch.nn.functional.one_hot(torch.tensor(0), len(norm)))
    save_file(tensors, folder / "model.safetensors")
    return folder
