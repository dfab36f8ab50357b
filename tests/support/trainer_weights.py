"""Weights of a trainer for a model folder: other values for each seed."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.shapes.make_checkpoint import DEVIATION, published_shapes
from tandem.engine_core.models.registry import read_config
from tests.fakes.scripted_engine import DEFAULT_MODEL
from tests.support.trained_engine import described


def noisy_weights(seed: int, folder: Path = DEFAULT_MODEL) -> dict[str, Tensor]:
    """Return the tensors of a folder, each with noise of three times its deviation; seed 0: without."""
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    if seed:
        for name, tensor in tensors.items():
            noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std() * 3
            tensors[name] = (tensor.float() + noise).to(tensor.dtype)
    return tensors


def has_weights(folder: Path) -> bool:
    return (folder / "model.safetensors").exists()


def weights_of(folder: Path, seed: int, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of a checkpoint for a folder, on a device.

    With weights in the folder these are `noisy_weights`, else normal noise in the shapes of its config.json.
    """
    if has_weights(folder):
        for name, tensor in noisy_weights(seed, folder).items():
            yield name, tensor.to(device)
        return
    generator = torch.Generator(device).manual_seed(seed)
    config = read_config(folder)
    dtype = getattr(torch, config.dtype or "bfloat16")
    for name, shape in published_shapes(config).items():
        tensor = torch.ones(shape, dtype=dtype, device=device)
        yield name, tensor if "norm" in name else tensor.normal_(0, DEVIATION, generator=generator)


def update_info(folder: Path) -> dict[str, Any]:
    """Return names, dtypes and shapes of `weights_of`, as /update_weights takes them."""
    if has_weights(folder):
        names, dtypes, shapes = described(noisy_weights(0, folder))
    else:
        config = read_config(folder)
        found = published_shapes(config)
        names, shapes = list(found), [list(shape) for shape in found.values()]
        dtypes = [config.dtype or "bfloat16"] * len(found)
    return {"names": names, "dtype_names": dtypes, "shapes": shapes}


def num_bytes(info: dict[str, Any]) -> int:
    """Return the bytes of all tensors of an `update_info`."""
    kinds = (getattr(torch, kind) for kind in info["dtype_names"])
    return sum(math.prod(shape) * kind.itemsize for shape, kind in zip(info["shapes"], kinds, strict=True))
