"""Layers as the tuner times them.

Their products run one after the other, as in the engine. Their plans are in a tile table, from which the engine's code
takes them.
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
from tandem.engine_core.kernels.tiles.table import ProductKey, TileTable, W8A8GemmKey
from tandem.engine_core.layers.linear_choice import triton_build_context
from tandem.engine_core.layers.quantized.triton_eight_bit_linear import TritonEightBitLinear
from tandem.engine_core.loader.weights import fill_with_noise

LayerPlans: TypeAlias = Mapping[Key, Plan | W8A8GemmPlan]
WORKING_SET = 256e6
"""Bytes of weights that one replay reads at least: several times what the second-level cache holds."""
FEWEST_LAYERS, MOST_LAYERS = 2, 16
REPLAYS = 9


def table_of(name: str, plans: LayerPlans) -> TileTable:
    """Return a table of plans."""
    return TileTable(
        name,
        products={key: cast("Plan", plan) for key, plan in plans.items() if isinstance(key, ProductKey)},
        byte_products={
            key: cast("W8A8GemmPlan | None", plan) for key, plan in plans.items() if isinstance(key, W8A8GemmKey)
        },
    )


def take_plans(layers: LinearLayers, plans: LayerPlans, gpu: GpuTraits) -> None:
    """Let the products of layers run by plans, or by the rules if they have none."""
    # The engine's choices are cached by the name of a table.
    tiles = table_of(f"{gpu.name} with {hash(tuple(plans.items()))}", plans)
    for linear in layers.linears:
        linear.gpu = replace(gpu, tiles=tiles)  # type: ignore[attr-defined]
    workspace = layers.context.linear_method.workspace  # type: ignore[attr-defined]
    for key, plan in plans.items():
        if isinstance(key, ProductKey) and isinstance(plan, SplitKPlan):
            needed = workspace_size(key.rows, key.outputs, plan, key.operation == "gated")
            workspace.grow(*needed, layers.context.device)


def build_layers(
    layer: LayerKey, copies: int, gpu: GpuTraits, device: str, dtype: torch.dtype = torch.bfloat16
) -> LinearLayers:
    """Allocate the maps of some layers, with weights that are not filled."""
    context = triton_build_context(torch.device(device), dtype, gpu, FORMATS[layer.format])
    return LinearLayers.build(layer.shapes, copies, context)


def run_product(layer: LayerKey, name: Name, plans: LayerPlans, gpu: GpuTraits, device: str) -> None:
    """Run one product of a layer once, over memory as it is.

    Its code depends on what is found in scales, of which all are equal.
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
    """Timer of layers, which keeps the weights of the last one."""

    def __init__(self, gpu: GpuTraits, device: str = "cuda") -> None:
        self.gpu = gpu
        self.device = device
        self._kept: tuple[LayerKey, LinearLayers] | None = None

    def __call__(self, layer: LayerKey, plans: LayerPlans) -> float:
        """Return the microseconds of one layer by plans, and a share of the head's."""
        layers = self._layers(layer._replace(rows=1))
        take_plans(layers, plans, self.gpu)
        given = layers.inputs_of("qkv", layer.rows)
        return graph_seconds(lambda: layers.step(*given), REPLAYS) * 1e6 / len(layers.maps)

    def _layers(self, layer: LayerKey) -> LinearLayers:
        if self._kept is None or self._kept[0] != layer:
            self._kept = None
            weights = sum(outputs * inputs for name, (outputs, inputs) in layer.shapes.items() if name != "head")
            copies = int(WORKING_SET / (weights * layer.bits / 8)) + 1
            layers = build_layers(layer, max(FEWEST_LAYERS, min(MOST_LAYERS, copies)), self.gpu, self.device)
            fill_with_noise(layers)
            self._kept = layer, layers
        return self._kept[1]
