"""A quantized format is a linear method: tensors, slots and matmul, independent of models and loader."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Self

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.kernels.lora.adapter_tokens import AdapterTokens
from tandem.engine_core.kernels.quantized_activation import ActivationFormat, QuantizedActivation
from tandem.engine_core.layers.build_context import BuildContext, LinearMethod
from tandem.engine_core.layers.linear import LinearWeights, Norm, projection_slots
from tandem.engine_core.layers.linear_choice import torch_build_context
from tandem.engine_core.loader.checkpoint import Checkpoint
from tandem.engine_core.loader.slots import WeightSlot
from tandem.engine_core.loader.weights import fill_with_noise, load_weights
from tandem.engine_core.models.registry import Model, build_model, read_config
from tandem.engine_core.quantization.quantization import Quantization
from tandem.engine_core.quantization.scheme import Activations, EightBitScheme, Scheme
from tests.engine_core.models.test_llama import BASE, save_random
from tests.support.paged_model import PagedRun, load
from tests.support.parity import random_tokens


class Int8Linear:
    """Weights in int8 with a float32 scale per output."""

    def __init__(self, weight: Tensor, scale: Tensor, context: BuildContext) -> None:
        self.weight = weight
        self.scale = scale
        self.context = context

    def adapted(self, adapters: AdapterTokens | None) -> Self:
        return self

    def apply(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        product = functional.linear(x, self.weight.to(x.dtype) * self.scale[:, None])
        return product if out is None else out.copy_(product)

    def apply_normed(
        self, x: Tensor, residual: Tensor | None, norm: Norm, activation: Activation | None = None
    ) -> tuple[Tensor, Tensor]:
        normed, stream = norm(x, residual)
        product = self.apply(normed)
        return (product if activation is None else self.context.kernels.gated_activation(product, activation)), stream

    def input_format(self, rows: int) -> ActivationFormat | None:
        return None

    def apply_quantized(self, x: QuantizedActivation) -> Tensor:
        raise AssertionError("the inputs have no format of their own")

    def reorder_producer(self, source: LinearWeights) -> None:
        pass

    @property
    def gated_order(self) -> Tensor | None:
        return None

    def slots(self, prefix: str, name: str, parts: Mapping[str, int] | None = None) -> list[WeightSlot]:
        weights = projection_slots(self.weight, prefix, name, parts, "weight", dtypes=("I8",))
        return weights + projection_slots(self.scale, prefix, name, parts, "weight_scale", dtypes=("F32",))

    def embedding_table(self) -> Tensor:
        raise ConfigError("int8 weights cannot serve as an embedding")


class Int8Method:
    def build(self, outputs: int, inputs: int, bias: bool, context: BuildContext) -> LinearWeights:
        assert not bias
        return Int8Linear(torch.empty(outputs, inputs, dtype=torch.int8), torch.empty(outputs), context)


def quantize(directory: Path) -> None:
    """Store the projections of a checkpoint as int8, and the dequantized weights in `plain`."""
    quantized: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        if "_proj" not in name:
            quantized[name] = plain[name] = tensor
            continue
        scale = tensor.abs().amax(1) / 127
        quantized[name] = (tensor / scale[:, None]).round().to(torch.int8)
        quantized[f"{name}_scale"] = scale
        plain[name] = quantized[name].float() * scale[:, None]
    (directory / "plain").mkdir()
    for path in directory.glob("*.json"):
        (directory / "plain" / path.name).write_bytes(path.read_bytes())
    save_file(plain, directory / "plain" / "model.safetensors")
    save_file(quantized, directory / "model.safetensors")


def load_int8(directory: Path) -> Model:
    plain = torch_build_context(torch.device("cpu"), torch.float32)
    quantization = Quantization(EightBitScheme("int8", Activations.UNQUANTIZED))

    def method_for(scheme: Scheme | None) -> LinearMethod:
        return plain.method_for(None) if scheme is None else Int8Method()

    context = replace(plain, quantization=quantization, method_for=method_for)
    checkpoint = Checkpoint.open(directory)
    model = build_model(read_config(directory), context, checkpoint=checkpoint)
    load_weights(model, checkpoint)
    return model


@pytest.mark.parametrize("tied", [False, True])
def test_a_quantized_model_equals_its_dequantized_weights(tied: bool, tmp_path: Path) -> None:
    save_random(tmp_path, {"tie_word_embeddings": tied})
    quantize(tmp_path)
    tokens = random_tokens((19,), BASE["vocab_size"], seed=1)
    found = PagedRun(load_int8(tmp_path), tokens, 4, seed=1).step([(0, 0, 19)])
    expected = PagedRun(load(tmp_path / "plain"), tokens, 4, seed=1).step([(0, 0, 19)])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_noise_fills_integers_with_any_of_their_values() -> None:
    linear = Int8Method().build(40, 30, False, torch_build_context(torch.device("cpu"), torch.float32))

    class Slotted:
        def weight_slots(self) -> list[WeightSlot]:
            return linear.slots("", "map")

    fill_with_noise(Slotted())
    weight, scale = (slot.target for slot in linear.slots("", "map"))
    assert weight.dtype == torch.int8
    assert len(weight.unique()) > 100
    assert 0 < scale.abs().max() < 0.1


def test_weights_that_are_not_quantized_are_served_as_they_are(tmp_path: Path) -> None:
    save_random(tmp_path, {})
    tokens = random_tokens((19,), BASE["vocab_size"], seed=1)
    found = PagedRun(load_int8(tmp_path), tokens, 4, seed=1).step([(0, 0, 19)])
    expected = PagedRun(load(tmp_path), tokens, 4, seed=1).step([(0, 0, 19)])
    assert torch.equal(found, expected)
