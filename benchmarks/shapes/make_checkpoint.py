"""Make a model folder with random weights in a published shape.

    python -m benchmarks.shapes.make_checkpoint benchmarks/shapes/llama-3.1-8b OUT [--shard-gib 5]

Adds to the folder of `make_folder` safetensors with the tensor names and shapes of published checkpoints, and an index
if there are several files. Norms are ones; all other tensors repeat a block of normal noise, so that files are written
at the speed of the disk.
"""

import argparse
import json
import math
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.shapes.make_folder import make_folder
from tandem.engine_core.layers.kv_scales import KEY_NAMES, VALUE_NAMES
from tandem.engine_core.layers.linear_choice import torch_build_context
from tandem.engine_core.loader.slots import WeightSlot
from tandem.engine_core.model_config import ModelConfig
from tandem.engine_core.models.registry import build_model, read_config

BLOCK_BYTES = 2**25
GIB = 2**30
THREADS = 8
STORED = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
"""Safetensors names of config.json dtypes."""
DEVIATION = 0.02


class Region(NamedTuple):
    """Bytes per write."""

    path: Path
    start: int
    nbytes: int
    ones: bool


def published_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a published checkpoint's tensors, by name.

    Projections are split, tied tensors appear once, and KV scales are left out.
    """
    model = build_model(config, torch_build_context(torch.device("meta"), torch.bfloat16), max_positions=1)
    kept: dict[int, list[WeightSlot]] = {}
    shapes = {}
    for slot in model.weight_slots():
        if slot.name.endswith((*KEY_NAMES, *VALUE_NAMES)):
            continue
        others = kept.setdefault(id(slot.parameter), [])
        if all(slot.start >= other.start + other.length or slot.start + slot.length <= other.start for other in others):
            others.append(slot)
            shapes[slot.name] = slot.accepted_shapes[0]
    return shapes


def write_checkpoint(shape: Path, out: Path, shard_bytes: int = 5 * GIB) -> int:
    """Write the folder of a shape with weights; return the bytes of its safetensors."""
    make_folder(shape, out)
    config = read_config(shape)
    dtype = config.dtype or "bfloat16"
    itemsize = getattr(torch, dtype).itemsize
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    filled = 0
    for name, sizes in published_shapes(config).items():
        nbytes = math.prod(sizes) * itemsize
        if filled and filled + nbytes > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = sizes
        filled += nbytes
    regions: list[Region] = []
    weight_map = {}
    for number, tensors in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        regions += _write_header(out / file, tensors, STORED[dtype], itemsize)
        weight_map |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    _write_noise(regions, getattr(torch, dtype))
    return sum(path.stat().st_size for path in out.glob("*.safetensors"))


def _write_header(path: Path, tensors: dict[str, tuple[int, ...]], dtype: str, itemsize: int) -> list[Region]:
    """Write the header of a file, and return the regions of its tensors."""
    header, end = {}, 0
    for name, shape in tensors.items():
        start, end = end, end + math.prod(shape) * itemsize
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    regions = []
    for name, entry in header.items():
        start, end = (8 + len(text) + offset for offset in entry["data_offsets"])
        for offset in range(start, end, BLOCK_BYTES):
            regions.append(Region(path, offset, min(BLOCK_BYTES, end - offset), "norm" in name))
    return regions


def _write_noise(regions: list[Region], dtype: torch.dtype) -> None:
    count = BLOCK_BYTES // dtype.itemsize
    noise = torch.randn(count, generator=torch.Generator().manual_seed(0)).mul_(DEVIATION).to(dtype)
    blocks = [memoryview(tensor.view(torch.uint8).numpy()) for tensor in (noise, torch.ones(count, dtype=dtype))]

    def write(region: Region) -> None:
        descriptor = os.open(region.path, os.O_WRONLY)
        try:
            done = 0
            while done < region.nbytes:
                done += os.pwrite(descriptor, blocks[region.ones][done : region.nbytes], region.start + done)
        finally:
            os.close(descriptor)

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(write, regions))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shard-gib", type=float, default=5.0, help="largest size of a file (default: 5)")
    arguments = parser.parse_args()
    print(f"{write_checkpoint(arguments.shape, arguments.out, int(arguments.shard_gib * GIB)) / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
