"""Dequantization kernels equal plain torch bit by bit."""

import pytest
import torch

from tandem.engine_core.kernels.kernel_set import torch_kernels
from tandem.engine_core.kernels.linear.dequantize import dequantize_eight_bit, dequantize_int4
from tandem.engine_core.kernels.linear.int4_layout import to_kernel_layout
from tandem.engine_core.layers.quantized.eight_bit_linear import EightBitLinear
from tandem.engine_core.layers.quantized.int4_linear import Int4Linear
from tandem.engine_core.quantization.int4 import pack, unpack
from tandem.engine_core.quantization.scheme import Activations, EightBitScheme, Int4Scheme

SCHEMES = {
    "fp8": EightBitScheme("fp8", Activations.TOKEN),
    "fp8 bits": EightBitScheme("fp8", Activations.TOKEN),
    "fp8 blocks": EightBitScheme("fp8", Activations.TOKEN, block=(128, 128)),
    "int8": EightBitScheme("int8", Activations.TOKEN),
}


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize(("outputs", "inputs"), [(5, 2200), (33, 200)])
def test_8_bit_weights_are_dequantized_exactly(name: str, outputs: int, inputs: int, device: str) -> None:
    scheme = SCHEMES[name]
    generator = torch.Generator().manual_seed(outputs)
    dtype = torch.int8 if scheme.kind == "int8" else torch.float8_e4m3fn
    values = (torch.randn(outputs, inputs, generator=generator) * 60).clamp(-127, 127).to(device, dtype)
    shape = (outputs,) if scheme.block is None else (-(-outputs // 16), -(-inputs // 128))
    scales = (2 * torch.rand(shape, generator=generator) - 1).to(device)
    expected = EightBitLinear(values, scales, scheme, None, torch_kernels()).dequantized(torch.float16)
    stored = values.view(torch.uint8) if name == "fp8 bits" else values
    assert torch.equal(dequantize_eight_bit(stored, scales, torch.float16), expected)


@pytest.mark.parametrize(("inputs", "group"), [(2176, 32), (2176, 128), (2080, 32), (2080, 1040), (2072, 8)])
def test_int4_weights_are_dequantized_exactly(inputs: int, group: int, device: str) -> None:
    words = torch.randint(-(2**31), 2**31 - 1, (3, inputs // 8), dtype=torch.int32, device=device)
    scales = 2 * torch.rand(inputs // group, 3, device=device).t() - 1
    zeros = torch.randint(0, 16, (inputs // group, 3), dtype=torch.uint8, device=device).t()
    plain = Int4Linear(words, scales, zeros, Int4Scheme("gptq", group, False), None, torch_kernels())
    expected = plain.dequantized(torch.float16)
    words = pack(to_kernel_layout(unpack(words), group))
    assert torch.equal(dequantize_int4(words, scales, zeros, torch.float16), expected)
