"""Codes that a layer of the tuner launches, beside those that were compiled for its plans."""

from dataclasses import replace
from typing import Any

from benchmarks.measuring.offline_compiler import compiling_only
from benchmarks.tune.__main__ import layer_task
from benchmarks.tune.layers import build_layers, run_matmul, take_plans
from benchmarks.tune.shapes import LayerKey, matmul_keys
from tandem.engine_core.kernels.tiles.table import NO_TABLE
from tandem.engine_core.loader.weights import fill_with_noise
from tests.fakes.gpus import H200


def codes_of_a_layer(layer: LayerKey) -> tuple[set[str], set[str]]:
    """Return the codes compiled for one plan of each product, and those that the layer launches with all of them.

    Triton's interpreter must be off in the process.
    """
    gpu = replace(H200, tiles=NO_TABLE)
    names = {key: name for name, key in matmul_keys(layer, gpu).items()}
    found: dict[Any, Any] = {}
    for key, listed in layer_task(layer, gpu).candidates.items():
        found[key] = [plan for plan in listed if plan is not None][-1]
    with compiling_only(90) as compiled:
        for key, plan in found.items():
            run_matmul(layer, names[key], {key: plan}, gpu, "cpu")
    layers = build_layers(layer, 2, gpu, "cpu")
    fill_with_noise(layers)
    take_plans(layers, found, gpu)
    with compiling_only(90) as launched:
        layers.step(*layers.inputs_of("qkv", layer.rows))
    return {code.hash for code in compiled}, {code.hash for code in launched}
