"""Matmul and decode attention shapes of models."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, TypeAlias

from benchmarks.measuring.linear_layers import Name, Shape
from benchmarks.tune.candidates import GROUP, chosen
from benchmarks.tune.w8a8_candidates import w8a8_ruled
from tandem.engine_core.kernels.gpu_traits import FP8_CAPABILITY, GpuTraits
from tandem.engine_core.kernels.linear.quantized_plans import quantizes_activations
from tandem.engine_core.kernels.tiles.table import (
    FEW_ROWS,
    DecodeKey,
    MatmulKey,
    Operation,
    Scaling,
    W8A8GemmKey,
)
from tandem.engine_core.layers.quantized.eight_bit_linear import uses_w8a8
from tandem.engine_core.model_config import ModelConfig
from tandem.engine_core.models.registry import read_config
from tandem.engine_core.quantization.scheme import Activations, EightBitScheme, Int4Scheme, Scheme

SHAPES = Path(__file__).parent.parent / "shapes"
SHORT_NAMES = {"1b": "llama-3.2-1b", "8b": "llama-3.1-8b", "4b": "qwen3-4b"}
EIGHT_BIT_FORMATS: dict[str, EightBitScheme] = {
    "tensor": EightBitScheme("fp8", Activations.STATIC, per_tensor=True),
    "blocks": EightBitScheme("fp8", Activations.TOKEN, block=(128, 128)),
    "int8": EightBitScheme("int8", Activations.TOKEN),
    "outputs": EightBitScheme("fp8", Activations.TOKEN),
}
"""Formats with 8-bit activations."""
BITS = {16: "16 bits", 8: "8 bits", 4: "4 bits"}
"""Formats with 16-bit activations, by the bits of a weight."""
FORMATS: dict[str, Scheme | None] = {
    "16 bits": None,
    "8 bits": EightBitScheme("fp8", Activations.UNQUANTIZED),
    "4 bits": Int4Scheme("gptq", GROUP, False),
    **EIGHT_BIT_FORMATS,
}
TUNING_ORDER: tuple[Name, ...] = ("gate_up", "down", "qkv", "o", "head")
"""Matmuls of a step, the longest first."""
Key: TypeAlias = MatmulKey | W8A8GemmKey


class LayerKey(NamedTuple):
    """A layer to tune at a number of rows."""

    format: str
    """One of FORMATS."""
    rows: int
    hidden: int
    queries: int
    """Elements of a row's queries and attention output."""
    kv: int
    """Elements of a row's keys; the values have the same number."""
    width: int
    vocabulary: int

    @property
    def shapes(self) -> dict[Name, Shape]:
        """Outputs and inputs of a layer's matmuls, and of the head if it has the same format."""
        shapes: dict[Name, Shape] = {
            "qkv": (self.queries + 2 * self.kv, self.hidden),
            "o": (self.hidden, self.queries),
            "gate_up": (2 * self.width, self.hidden),
            "down": (self.hidden, self.width),
        }
        if FORMATS[self.format] is None:
            shapes["head"] = (self.vocabulary, self.hidden)
        return shapes

    @property
    def bits(self) -> int:
        """Bits of a weight."""
        scheme = FORMATS[self.format]
        return 16 if scheme is None else 8 if isinstance(scheme, EightBitScheme) else 4

    def __str__(self) -> str:
        return f"{self.format}, {self.hidden} wide, {self.rows} row{'s' if self.rows > 1 else ''}"


def layer_key(model: ModelConfig, name: str, rows: int) -> LayerKey:
    """Return the layer of a model in a format."""
    queries, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    return LayerKey(name, rows, model.hidden_size, queries, kv, model.intermediate_size, model.vocab_size)


def matmul_keys(layer: LayerKey, gpu: GpuTraits) -> dict[Name, Key]:
    """Return the tile-table keys of a layer's matmuls, in tuning order."""
    return {name: _matmul_key(layer, name, gpu) for name in TUNING_ORDER if name in layer.shapes}


def _matmul_key(layer: LayerKey, name: Name, gpu: GpuTraits) -> Key:
    scheme, rows = FORMATS[layer.format], layer.rows
    outputs, inputs = layer.shapes[name]
    if isinstance(scheme, EightBitScheme) and quantizes_activations(rows, scheme.kind, gpu):
        key = W8A8GemmKey(scheme.kind, _scaling(scheme), outputs, inputs, rows)
        gated = key._replace(outputs=outputs // 2, gated=True)
        # Whether the gate and quantization are fused depends on the shapes and the device.
        rounds = name == "gate_up" and uses_w8a8(layer.hidden, layer.width, scheme)
        if uses_w8a8(outputs, inputs, scheme):
            return gated if rounds and w8a8_ruled(gated, gpu) is not None else key
    plain: Operation = "product"
    normed: Operation = "normed"
    if name == "gate_up":
        plain, normed, outputs = "gated", "normed_gated", outputs // 2
    fused = MatmulKey(normed, layer.bits, outputs, inputs, rows)
    # Whether the norm of one row is fused depends on the shape and the device, of few rows on what is measured.
    if name not in ("o", "down") and (rows == FEW_ROWS or (rows == 1 and chosen(fused, gpu) is not None)):
        return fused
    return MatmulKey(plain, layer.bits, outputs, inputs, rows)


def _scaling(scheme: EightBitScheme) -> Scaling:
    if scheme.block is not None:
        return "block"
    return "tensor" if scheme.per_tensor else "output"


def runs_on(name: str, gpu: GpuTraits) -> bool:
    """Return whether a GPU has W8A8 matmuls of a format."""
    return EIGHT_BIT_FORMATS[name].kind == "int8" or gpu.capability >= FP8_CAPABILITY


def model_folder(name: str) -> Path:
    """Return the folder of a model.

    name: `1b`, `8b` or `4b`, a name in `benchmarks/shapes`, or a path.
    """
    known = SHAPES / SHORT_NAMES.get(name, name)
    return known if known.is_dir() else Path(name)


def decode_keys(model: ModelConfig, batches: Iterable[int], kv_bits: Iterable[int] = (16,)) -> list[DecodeKey]:
    """List the decode attention keys of a model at several row counts."""
    width = 1 << (model.head_dim - 1).bit_length()
    pairs = [1 << (batch * model.kv_heads).bit_length() - 1 for batch in batches]
    return [DecodeKey(width, bits, count) for bits in kv_bits for count in pairs]


def read_models(names: Iterable[str]) -> list[ModelConfig]:
    """Read the configurations of models; see `model_folder`."""
    return [read_config(model_folder(name)) for name in names]
