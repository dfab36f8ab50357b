"""A layer that is timed is the engine's: its products are looked up by the keys that are tuned, and computed alike."""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from importlib.util import find_spec
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from benchmarks.measuring.linear_layers import LinearLayers, Name
from benchmarks.tune import layers as tuned_layers
from benchmarks.tune.__main__ import layer_task
from benchmarks.tune.layers import LayerPlans, LayerTimer, build_layers, table_of, take_plans
from benchmarks.tune.shapes import EIGHT_BIT_FORMATS, FORMATS, Key, LayerKey, matmul_keys
from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.gpu_traits import GpuTraits
from tandem.engine_core.kernels.quantized_activation import QuantizedActivation
from tandem.engine_core.kernels.reference.quantized_activation import quantize, quantized_gate, quantized_matmul
from tandem.engine_core.kernels.tiles.plan_types import GemvPlan
from tandem.engine_core.kernels.tiles.table import NO_TABLE, MatmulKey, TileTable, W8A8GemmKey
from tandem.engine_core.loader.weights import fill_with_noise
from tests.fakes.gpus import L4

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and find_spec("triton") is not None:
    from tests.support.interpreter import adapt_interpreter

    adapt_interpreter()

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")

SMALL = replace(L4, multiprocessors=8, tiles=NO_TABLE)
"""A GPU so small that products of the small layer are divided; interpreted kernels are not chained."""
CASES = [(name, rows) for name in FORMATS for rows in ((16, 64) if name in EIGHT_BIT_FORMATS else (1, 16))]


def small_layer(name: str, rows: int, width: int = 1024) -> LayerKey:
    return LayerKey(name, rows, hidden=256, queries=128, kv=64, width=width, vocabulary=256)


def filled(layer: LayerKey, gpu: GpuTraits = SMALL) -> LinearLayers:
    layers = build_layers(layer, 1, gpu, DEVICE, torch.float16)
    fill_with_noise(layers)
    return layers


class Asked(dict):  # type: ignore[type-arg]
    """Entries of a table that note which keys they are asked for."""

    def __init__(self, entries: Mapping[Any, Any], keys: set[Any]) -> None:
        super().__init__(entries)
        self.keys_asked = keys

    def get(self, key: Any, default: Any = None) -> Any:
        self.keys_asked.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.keys_asked.add(key)
        return super().__contains__(key)


@pytest.mark.parametrize(("name", "rows", "multiprocessors"), [(*case, 8) for case in CASES] + [("4 bits", 1, 40)])
def test_the_engine_asks_for_the_keys_that_are_tuned(
    name: str, rows: int, multiprocessors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is computed where kernels would be interpreted."""
    if DEVICE == "cpu":
        monkeypatch.setattr(interpreter.GridExecutor, "__call__", lambda *_, **__: None)
    layer, gpu = small_layer(name, rows), replace(SMALL, multiprocessors=multiprocessors)
    keys: set[Key] = set()
    table = TileTable(f"asked {name} {rows} {multiprocessors}", Asked({}, keys), {}, Asked({}, keys))
    layers = filled(layer, gpu)
    plans = {key: rule for key, (rule, *_) in layer_task(layer, gpu).candidates.items()}
    take_plans(layers, plans, gpu)
    for linear in layers.linears:
        linear.gpu = replace(gpu, tiles=table)  # type: ignore[attr-defined]
    layers.step(*layers.inputs_of("qkv", rows))
    expected = set(matmul_keys(layer, gpu).values())
    assert keys == expected


def without_launch(plan: Any) -> Any:
    """A plan with the numbers that change no result made equal."""
    if plan is None:
        return None
    names = {field.name for field in fields(plan)}
    return replace(plan, **{name: 1 for name in ("warps", "stages") if name in names})


def computed(layers: LinearLayers, layer: LayerKey, name: Name, plans: LayerPlans) -> Tensor:
    take_plans(layers, plans, SMALL)
    torch.manual_seed(1)
    given = layers.inputs_of(name, layer.rows)
    if name == "head":
        assert layers.head is not None
        return layers.head.apply_normed(*given, layers.norm)[0]
    product = layers.run(name, layers.maps[0], *given)[0]
    return product.dequantize() if isinstance(product, QuantizedActivation) else product


def expected(layers: LinearLayers, layer: LayerKey, name: Name) -> Tensor:
    """The product in float32, over weights that are made into numbers; rounded where it is in the engine."""
    torch.manual_seed(1)
    x, stream = layers.inputs_of(name, layer.rows)
    linear = cast("Any", layers.head if name == "head" else layers.maps[0][name])
    to = linear.input_format(layer.rows)
    blocks = 16 if to is not None and linear.scales.ndim == 2 else None
    if isinstance(x, QuantizedActivation):
        return quantized_matmul(x, linear.values, linear.scales, None, blocks)
    if name == "o":
        x = x.reshape(-1)[: layer.rows * layer.queries].view(layer.rows, layer.queries)
    if name in ("qkv", "gate_up", "head"):
        x = (x.float() + stream.float()).half().float()
        x = (x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-5)).half()
    if to is not None:
        y = quantized_matmul(quantize(x, to), linear.values, linear.scales, None, blocks)
        rounded = cast("Any", layers.maps[0]["down"]).input_format(layer.rows)
        return quantized_gate(y, Activation.SILU, rounded).dequantize() if name == "gate_up" else y
    weight = linear.weight if layer.bits == 16 or name == "head" else linear.dequantized(torch.float32)
    y = x.float() @ weight.float().t()
    if name != "gate_up":
        return y
    gate, up = y.half().chunk(2, 1)
    return torch.nn.functional.silu(gate.float()).half() * up


def check(layer: LayerKey, share: slice) -> int:
    """Compare what some plans of each product compute with the oracle; return how many there were."""
    layers, count = filled(layer), 0
    names = {key: name for name, key in matmul_keys(layer, SMALL).items()}
    for key, listed in layer_task(layer, SMALL).candidates.items():
        wanted = expected(layers, layer, names[key]).float()
        unique = {without_launch(plan): plan for plan in listed if plan is not None or isinstance(key, MatmulKey)}
        for plan in list(unique.values())[share]:
            found = computed(layers, layer, names[key], {key: plan}).float()
            worst = (found - wanted).abs().max() / wanted.abs().max()
            # A last bit may move a number that is rounded to the next of few.
            rounded = names[key] == "gate_up" and isinstance(key, W8A8GemmKey)
            assert worst < (0.07 if rounded else 4e-3), f"{key} {plan}: {worst}"
            count += 1
    return count


@pytest.mark.parametrize(("name", "rows"), [("4 bits", 1), ("16 bits", 16), ("blocks", 16)])
def test_the_last_plan_of_each_product_computes_it(name: str, rows: int) -> None:
    assert check(small_layer(name, rows, width=512), slice(-1, None)) >= 2


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rows"), CASES)
def test_every_plan_computes_its_product(name: str, rows: int) -> None:
    assert check(small_layer(name, rows), slice(None)) >= 6


def test_plans_are_taken_as_they_are() -> None:
    """The engine launches the plan of the table, with a workspace that suffices for it."""
    layer = small_layer("4 bits", 16)
    layers = filled(layer)
    for key, listed in layer_task(layer, SMALL).candidates.items():
        for plan in listed:
            take_plans(layers, {key: plan}, SMALL)
            gpu = layers.linears[0].gpu  # type: ignore[attr-defined]
            assert gpu.tiles.products == {key: plan}
            assert all(linear.gpu is not SMALL for linear in layers.linears)  # type: ignore[attr-defined]


def test_a_timer_keeps_the_weights_of_a_layer_for_any_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A made-up graph takes 32 us, whatever is in it."""
    if DEVICE == "cpu":
        monkeypatch.setattr(interpreter.GridExecutor, "__call__", lambda *_, **__: None)
    seen: list[object] = []

    def graph_seconds(work: Callable[[], object], _replays: int) -> float:
        seen.append(work())
        return 32e-6

    monkeypatch.setattr(tuned_layers, "graph_seconds", graph_seconds)
    timer = LayerTimer(SMALL, DEVICE)
    kept = []
    for name, rows in (("4 bits", 1), ("4 bits", 16), ("blocks", 16)):
        task = layer_task(small_layer(name, rows), SMALL)
        us = timer(task.key, {key: plans[0] for key, plans in task.candidates.items()})
        assert us == pytest.approx(2.0), "of sixteen layers, for they are small"
        kept.append(timer._kept)
    assert [result.shape for result in cast("list[Tensor]", seen)] == [(1, 256), (16, 256), (16, 256)]
    assert kept[0] is kept[1]
    assert kept[1] is not kept[2]


def test_tables_hold_each_kind_of_product() -> None:
    one, other = MatmulKey("gated", 4, 512, 256, 1), W8A8GemmKey("int8", "output", 512, 256, 16)
    table = table_of("some", {one: GemvPlan(8, 512, 1, 1), other: None})
    assert (dict(table.products), dict(table.byte_products)) == ({one: GemvPlan(8, 512, 1, 1)}, {other: None})
