"""Products and decode attention of given models, which are tuned."""

from collections.abc import Iterable
from pathlib import Path

from benchmarks.tune.byte_products import FORMATS
from tandem.engine_core.kernels.tiles.table import (
    BUCKETS,
    BYTE_BUCKETS,
    ByteProductKey,
    DecodeKey,
    Operation,
    ProductKey,
)
from tandem.engine_core.model_config import ModelConfig
from tandem.engine_core.models.registry import read_config

SHAPES = Path(__file__).parent.parent / "shapes"
SHORT_NAMES = {"1b": "llama-3.2-1b", "8b": "llama-3.1-8b", "4b": "qwen3-4b"}


def model_folder(name: str) -> Path:
    """Return the folder of a model.

    name: `1b`, `8b` or `4b`, a name in `benchmarks/shapes`, or a path.
    """
    known = SHAPES / SHORT_NAMES.get(name, name)
    return known if known.is_dir() else Path(name)


def product_keys(model: ModelConfig, rows: Iterable[int], bits: Iterable[int]) -> list[ProductKey]:
    """List the products of a model's step, in tuning order."""
    hidden, width = model.hidden_size, model.intermediate_size
    query, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    found: list[ProductKey] = []
    for weight_bits in bits:
        for count in rows:
            assert count in BUCKETS, f"rows {count} are not one of {BUCKETS}"
            before: tuple[Operation, Operation] = ("normed", "normed_gated") if count == 1 else ("product", "gated")
            if weight_bits == 4:
                # Whether the norm is fused depends on the device alone.
                before = before[0], "gated"
            shapes: list[tuple[Operation, int, int]] = [
                (before[1], width, hidden),
                ("product", hidden, width),
                (before[0], query + 2 * kv, hidden),
                ("product", hidden, query),
            ]
            if weight_bits == 16:
                shapes.append((before[0], model.vocab_size, hidden))
            found += [ProductKey(what, weight_bits, outputs, inputs, count) for what, outputs, inputs in shapes]
    return found


def byte_keys(model: ModelConfig, rows: Iterable[int], formats: Iterable[str]) -> list[ByteProductKey]:
    """List the products of bytes with bytes of a model, in tuning order."""
    hidden, width = model.hidden_size, model.intermediate_size
    query, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    found: list[ByteProductKey] = []
    for count in rows:
        assert count in BYTE_BUCKETS, f"rows {count} are not one of {BYTE_BUCKETS}"
        for name in formats:
            shapes = ((2 * width, hidden), (hidden, width), (query + 2 * kv, hidden), (hidden, query))
            found += [ByteProductKey(*FORMATS[name], outputs, inputs, count) for outputs, inputs in shapes]
    return found


def decode_keys(model: ModelConfig, batches: Iterable[int], kv_bits: Iterable[int] = (16,)) -> list[DecodeKey]:
    """List the decode attention of a model for numbers of rows."""
    width = 1 << (model.head_dim - 1).bit_length()
    pairs = [1 << (batch * model.kv_heads).bit_length() - 1 for batch in batches]
    return [DecodeKey(width, bits, count) for bits in kv_bits for count in pairs]


def read_models(names: Iterable[str]) -> list[ModelConfig]:
    """Read the configurations of models; see `model_folder`."""
    return [read_config(model_folder(name)) for name in names]
