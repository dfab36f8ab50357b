"""Linear layers of a step in each quantized format, compared with 16 bits.

Each figure is the time of all linear layers of 16 layers with their norms and SwiGLU, as the engine runs them, without
attention and head. The weights exceed the L2 cache. The lower bound is the time to read the weights once.
"""

from functools import partial

import torch

from benchmarks.kernels.suite import LAYERS, READ_GB_PER_S, Model, Options, Record
from benchmarks.measuring.graph_timing import graph_microseconds
from benchmarks.measuring.linear_layers import LINEAR_NAMES, LinearLayers, Name, Shape
from tandem.engine_core.layers.linear_choice import triton_build_context
from tandem.engine_core.loader.weights import fill_with_noise
from tandem.engine_core.quantization.quantization import Quantization
from tandem.engine_core.quantization.scheme import Activations, EightBitScheme, Int4Scheme, Scheme
from tandem.engine_core.runtime.device import read_gpu_traits

ROWS = (1, 8, 64, 128, 256, 2048, 8192)
SCHEMES: dict[str, Scheme | None] = {
    "bf16": None,
    "fp8 per channel": EightBitScheme("fp8", Activations.TOKEN),
    "fp8 per tensor": EightBitScheme("fp8", Activations.STATIC, per_tensor=True),
    "fp8 in blocks": EightBitScheme("fp8", Activations.TOKEN, block=(128, 128)),
    "int8": EightBitScheme("int8", Activations.TOKEN),
    "int4": Int4Scheme("gptq", 128, False),
}


def build_layers(model: Model, scheme: Scheme | None) -> LinearLayers:
    """Build the linear layers of a model in one format."""
    quantization = None if scheme is None else Quantization(scheme)
    context = triton_build_context(torch.device("cuda"), torch.bfloat16, read_gpu_traits(), quantization)
    shapes: dict[Name, Shape] = {name: model.linears[name] for name in LINEAR_NAMES}
    return LinearLayers.build(shapes, LAYERS, context)


def measure(options: Options) -> list[Record]:
    """Time every format at every row count."""
    records: list[Record] = []
    bf16: dict[int, float] = {}
    for name, scheme in SCHEMES.items():
        layers = build_layers(options.model, scheme)
        fill_with_noise(layers)
        bound = layers.stored_bytes / READ_GB_PER_S / 1e3
        for rows in options.rows or ROWS:
            update, residual = layers.inputs_of("qkv", rows)
            us = graph_microseconds([partial(layers.step, update, residual)])
            bf16.setdefault(rows, us)
            records.append({"format": name, "rows": rows, "us": us, "bound_us": bound, "of_bf16": us / bf16[rows]})
            print(
                f"{name:16} M={rows:<5} {us:9.0f} us  {us / bf16[rows]:5.2f} of bf16  {us / bound:5.2f} of the bound",
                flush=True,
            )
    return records
