"""Layers that a mixed checkpoint leaves in 16 bits, for `benchmarks.bench_mixed`."""

from pathlib import Path
from typing import Any

import torch

from benchmarks.bench_mixed import Part, excluded_layers
from tandem.engine_core.layers.linear import LinearWeights
from tandem.engine_core.layers.linear_choice import torch_build_context
from tandem.engine_core.loader.weights import fill_with_noise
from tandem.engine_core.models.registry import build_model, read_config
from tandem.engine_core.quantization.quantization import Quantization
from tests.engine_core.models.test_llama import save_random
from tests.support.quantized_checkpoint import LAYOUTS, set_quantization


def test_parts_of_fused_projections_are_found(tmp_path: Path) -> None:
    """Three layers each have a whole o_proj, and the v_proj of a fused projection, in 16 bits."""
    save_random(tmp_path, {"hidden_size": 64, "intermediate_size": 96})
    (tmp_path / "model.safetensors").unlink()
    cpu, models = torch.device("cpu"), []
    for exclude in ([], ["v_proj", "o_proj"]):
        set_quantization(tmp_path, LAYOUTS["fp8_block"].config | {"modules_to_not_convert": exclude})
        config = read_config(tmp_path)
        models.append(build_model(config, torch_build_context(cpu, torch.float32, config.quantization)))

    def part(fused: Any, outputs: int, inputs: int) -> LinearWeights:
        linear = torch_build_context(cpu, torch.float32, Quantization(fused.scheme)).linear("part", outputs, inputs)
        fill_with_noise(Part(linear))
        return linear

    found = excluded_layers(*models, part)
    x = torch.randn(2, 64)
    shapes = [(one.apply(x).shape, other.apply(x).shape, inputs) for one, other, inputs in found]
    assert shapes == [((2, size), (2, size), 64) for _ in range(3) for size in (32, 64)]
