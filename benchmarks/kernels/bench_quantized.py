"""Linear layers of a step on a GPU in each quantized format, beside 16 bits.

    python -m benchmarks.kernels.bench_quantized --model 8b --rows 1 64 256 [--out FILE]

A figure is the time of all products of 16 layers with their norms and SwiGLU, without attention and head, in a CUDA
graph: what the engine runs. The weights are far more than the cache holds. The ceiling is the time to read the weights
once at the bandwidth of a large read.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels.bench_linear import CEILING, LAYERS, MODELS, Shape, graph_time
from benchmarks.measuring.linear_layers import PRODUCTS, LinearLayers, Name
from tandem.engine_core.layers.linear_choice import triton_build_context
from tandem.engine_core.loader.weights import fill_with_noise
from tandem.engine_core.quantization.scheme import Activations, EightBitScheme, Int4Scheme, Scheme
from tandem.engine_core.runtime.device import read_gpu_traits

SCHEMES: dict[str, Scheme | None] = {
    "16 bits": None,
    "fp8 per output": EightBitScheme("fp8", Activations.TOKEN),
    "fp8 per tensor": EightBitScheme("fp8", Activations.STATIC, per_tensor=True),
    "fp8 in blocks": EightBitScheme("fp8", Activations.TOKEN, block=(128, 128)),
    "int8": EightBitScheme("int8", Activations.TOKEN),
    "four bits": Int4Scheme("gptq", 128, False),
}


def build_layers(model: str, scheme: Scheme | None) -> LinearLayers:
    """Build the linear maps of some layers in one format."""
    context = triton_build_context(torch.device("cuda"), torch.bfloat16, read_gpu_traits(), scheme)
    shapes: dict[Name, Shape] = {name: MODELS[model][name] for name in PRODUCTS}
    return LinearLayers.build(shapes, LAYERS, context)


def time(layers: LinearLayers, rows: int) -> float:
    """Return the time of a step in microseconds."""
    given = layers.inputs_of("qkv", rows)
    return graph_time(lambda: layers.step(*given))


def measure(model: str, row_counts: list[int]) -> list[dict[str, Any]]:
    """Time every format, one line for each number of rows."""
    records: list[dict[str, Any]] = []
    usual: dict[int, float] = {}
    for name, scheme in SCHEMES.items():
        layers = build_layers(model, scheme)
        fill_with_noise(layers)
        floor = layers.stored_bytes / CEILING / 1e3
        for rows in row_counts:
            us = time(layers, rows)
            usual.setdefault(rows, us)
            records.append({"format": name, "rows": rows, "us": us, "floor_us": floor, "ratio": us / usual[rows]})
            print(
                f"{model} {name:16} M={rows:<5} {us:9.0f} us  {us / usual[rows]:5.2f} of 16 bits  "
                f"{us / floor:5.2f} x reading",
                flush=True,
            )
    return records


def main() -> None:
    """Parse arguments, print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8b", choices=MODELS)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 128, 256, 2048, 8192])
    parser.add_argument("--out", type=Path, help="where to write JSON")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    with torch.inference_mode():
        records = measure(arguments.model, arguments.rows)
    if arguments.out:
        arguments.out.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
