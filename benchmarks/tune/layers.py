"""Time layers for the tuner.

Matmuls run in the engine's order and read their plans from a tile table, as in the engine.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeAlias, cast

import torch
from torch import Tensor

from benchmarks.measuring.graph_timing import graph_seconds
from benchmarks.measuring.linear_layers import LinearLayers, Name
from benchmarks.tune.shapes import FORMATS, Key, LayerKey
from tandem.engine_core.kernels.gpu_traits import GpuTraits
from tandem.engine_core.kernels.linear.plans import workspace_size
from tandem.engine_core.kernels.tiles.plan_types import Plan, SplitKPlan, W8A8GemmPlan
from tandem.engine_core.kernels.tiles.table import MatmulKey, TileTable, W8A8GemmKey
from tandem.engine_core.layers.linear_choice import triton_build_context
from tandem.engine_core.layers.quantized.triton_eight_bit_linear import TritonEightBitLinear
from tandem.engine_core.loader.weights import fill_with_noise
from tandem.engine_core.quantization.quantization import Quantization

LayerPlans: TypeAlias = Mapping[Key, Plan | W8A8GemmPlan]
WORKING_SET = 256e6
"""Minimum bytes of weights per replay: several times the L2 cache."""
MIN_LAYERS, MAX_LAYERS = 2, 16
REPLAYS = 9


def table_of(name: str, plans: LayerPlans) -> TileTable:
    """Return a tile table with these plans."""
    return TileTable(
        name,
        products={key: cast("Plan", plan) for key, plan in plans.items() if isinstance(key, MatmulKey)},
        byte_products={
            key: cast("W8A8GemmPlan | None", plan) for key, plan in plans.items() if isinstance(key, W8A8GemmKey)
        },
    )


def take_plans(layers: LinearLayers, plans: LayerPlans, gpu: GpuTraits) -> None:
    """Make the matmuls of layers use these plans, or the rules without one."""
    # The engine caches its choices by the table's name.
    tiles = table_of(f"{gpu.name} with {hash(tuple(plans.items()))}", plans)
    for linear in layers.linears:
        linear.gpu = replace(gpu, tiles=tiles)  # type: ignore[attr-defined]
    workspace = layers.context.method_for(None).workspace  # type: ignore[attr-defined]
    for key, plan in plans.items():
        if isinstance(key, MatmulKey) and isinstance(plan, SplitKPlan):
            needed = workspace_size(key.rows, key.outputs, plan, key.operation == "gated")
            workspace.grow(*needed, layers.context.device)


def build_layers(
    layer: LayerKey, copies: int, gpu: GpuTraits, device: str, dtype: torch.dtype = torch.bfloat16
) -> LinearLayers:
    """Allocate layers without filling their weights."""
    scheme = FORMATS[layer.format]
    quantization = None if scheme is None else Quantization(scheme)
    context = triton_build_context(torch.device(device), dtype, gpu, quantization)
    return LinearLayers.build(layer.shapes, copies, context)


def run_matmul(layer: LayerKey, name: Name, plans: LayerPlans, gpu: GpuTraits, device: str) -> None:
    """Run one matmul of a layer once on uninitialized memory.

    All scales are equal, since the compiled code depends on their values.
    """
    layers = build_layers(layer, 1, gpu, device)
    for linear in layers.linears:
        if isinstance(linear, TritonEightBitLinear):
            linear.scales.fill_(1.0)
            linear.find_wide_scales()
    take_plans(layers, plans, gpu)
    if name == "head":
        assert layers.head is not None
        update, stream = layers.inputs_of(name, layer.rows)
        assert isinstance(update, Tensor)
        layers.head.apply_normed(update, stream, layers.norm)
    else:
        layers.run(name, layers.maps[0], *layers.inputs_of(name, layer.rows))


class LayerTimer:
    """Timer of layers. Caches the weights of the last one."""

    def __init__(self, gpu: GpuTraits, device: str = "cuda") -> None:
        self.gpu = gpu
        self.device = device
        self._kept: tuple[LayerKey, LinearLayers] | None = None

    def __call__(self, layer: LayerKey, plans: LayerPlans) -> float:
        """Return the microseconds of one layer using plans, with a share of the head."""
        layers = self._layers(layer._replace(rows=1))
        take_plans(layers, plans, self.gpu)
        given = layers.inputs_of("qkv", layer.rows)
        return graph_seconds(lambda: layers.step(*given), REPLAYS) * 1e6 / len(layers.maps)

    def _layers(self, layer: LayerKey) -> LinearLayers:
        if self._kept is None or self._kept[0] != layer:
            self._kept = None
            weights = sum(outputs * inputs for name, (outputs, inputs) in layer.shapes.items() if name != "head")
            copies = int(WORKING_SET / (weights * layer.bits / 8)) + 1
            layers = build_layers(layer, max(MIN_LAYERS, min(MAX_LAYERS, copies)), self.gpu, self.device)
            fill_with_noise(layers)
            self._kept = layer, layers
        return self._kept[1]
