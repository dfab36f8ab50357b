"""The facts of a model, from the configuration of a Hugging Face folder.

They are read from `config.json` and `generation_config.json`.
Whatever this engine does not support is refused by name: a field that would change the output is never ignored.
"""

from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.rope_config import Base, Count, Positive, RopeConfig, RopeReader

T = TypeVar("T")

QWEN3 = "Qwen3ForCausalLM"
QWEN3_HEAD_DIM = 128
"""Head size of a Qwen 3 config that names none; a Llama's follows from its hidden_size."""
ACTIVATIONS = {"silu": Activation.SILU, "gelu_pytorch_tanh": Activation.GELU_TANH}
"""Supported values of `hidden_act`."""


class ModelConfig(Struct, frozen=True):
    """The facts of a decoder-only model."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float
    tie_embeddings: bool
    attention_bias: bool
    """True if the projections of attention, including the output's, have biases."""
    mlp_bias: bool
    rope: RopeConfig
    eos_ids: tuple[int, ...]
    """Ids that end a sequence: those of generation_config.json, then those that only config.json has. May be empty."""
    dtype: str | None
    """The checkpoint's own dtype as its config names it, such as "bfloat16"."""
    qk_norm: bool = False
    """True if each query and key head is normalised before the rotary embedding."""
    activation: Activation = Activation.SILU
    """Activation of the gate in the feed-forward networks."""
    quantization: dict[str, Any] | None = None
    """The `quantization_config` (or `compression_config`) as in the file; None: the checkpoint is not quantized."""

    @classmethod
    def read(cls, directory: Path) -> "ModelConfig":
        """Read the configuration of a model folder.

        Raises ConfigError if a file is missing or malformed, or asks for something that this engine does not support.
        """
        path = directory / "config.json"
        if not path.is_file():
            raise ConfigError(f"{directory} is not a model folder: it has no config.json")
        generation = directory / "generation_config.json"
        raw = _decode(path, _RawConfig)
        end_ids = _decode(generation, _RawGeneration).eos_token_id if generation.is_file() else None
        try:
            return _resolve(raw, end_ids)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None


class _RawGeneration(Struct):
    eos_token_id: int | list[int] | None = None


class _RawConfig(Struct, kw_only=True):
    """The fields of config.json that are read.

    The defaults are those of transformers' LlamaConfig. Its Qwen3Config differs from them in sizes only, which
    published folders state; see also `QWEN3_HEAD_DIM`.
    """

    architectures: list[str] | None = None
    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    max_position_embeddings: Count = 2048
    original_max_position_embeddings: Count | None = None
    rms_norm_eps: Positive = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    rope_theta: Base | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: Positive | None = None
    sliding_window: int | None = None
    use_sliding_window: bool | None = None
    layer_types: list[str] | None = None
    quantization_config: dict[str, Any] | None = None
    compression_config: dict[str, Any] | None = None
    eos_token_id: int | list[int] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None


def _decode(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path}: {error}") from None


def _resolve(raw: _RawConfig, generation_ends: int | list[int] | None) -> ModelConfig:
    _refuse_unsupported(raw)
    heads = raw.num_attention_heads
    kv_heads = raw.num_key_value_heads or heads
    if heads % kv_heads:
        raise ConfigError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    architecture = (raw.architectures or [""])[0]
    head_dim = raw.head_dim or _default_head_dim(raw, architecture)
    if head_dim % 2:
        raise ConfigError(f"head_dim {head_dim} is odd; rotary embedding needs pairs")
    return ModelConfig(
        architecture=architecture,
        vocab_size=raw.vocab_size,
        hidden_size=raw.hidden_size,
        intermediate_size=raw.intermediate_size,
        layers=raw.num_hidden_layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=raw.max_position_embeddings,
        rms_norm_eps=raw.rms_norm_eps,
        tie_embeddings=raw.tie_word_embeddings,
        attention_bias=raw.attention_bias,
        mlp_bias=raw.mlp_bias,
        rope=_rope(raw, head_dim),
        eos_ids=_end_ids(raw, generation_ends),
        dtype=raw.dtype or raw.torch_dtype,
        qk_norm=architecture == QWEN3,
        activation=ACTIVATIONS[raw.hidden_act],
        quantization=raw.quantization_config if raw.quantization_config is not None else raw.compression_config,
    )


def _default_head_dim(raw: _RawConfig, architecture: str) -> int:
    if architecture == QWEN3:
        return QWEN3_HEAD_DIM
    heads = raw.num_attention_heads
    if raw.hidden_size % heads:
        raise ConfigError(f"hidden_size {raw.hidden_size} is not a multiple of num_attention_heads {heads}")
    return raw.hidden_size // heads


def _refuse_unsupported(raw: _RawConfig) -> None:
    problems = []
    if len(raw.architectures or []) != 1:
        problems.append(f"architectures must name one architecture, found {raw.architectures}")
    if raw.hidden_act not in ACTIVATIONS:
        problems.append(f'hidden_act "{raw.hidden_act}" is not supported, only {", ".join(ACTIVATIONS)}')
    if raw.use_sliding_window:
        problems.append("use_sliding_window true is not supported")
    elif raw.sliding_window is not None and raw.use_sliding_window is None:
        problems.append(f"sliding_window {raw.sliding_window} is not supported")
    if unknown := sorted(set(raw.layer_types or []) - {"full_attention"}):
        problems.append(f"layer_types {', '.join(unknown)} are not supported, only full_attention")
    if problems:
        raise ConfigError("; ".join(problems))


def _end_ids(raw: _RawConfig, generation_ends: int | list[int] | None) -> tuple[int, ...]:
    ids: list[int] = []
    for field in (generation_ends, raw.eos_token_id):
        ids += [field] if isinstance(field, int) else field or []
    for token in ids:
        if not 0 <= token < raw.vocab_size:
            raise ConfigError(f"eos_token_id {token} is outside the vocabulary of {raw.vocab_size}")
    return tuple(dict.fromkeys(ids))


def _rope(raw: _RawConfig, head_dim: int) -> RopeConfig:
    reader = RopeReader(
        head_dim=head_dim,
        max_positions=raw.max_position_embeddings,
        original_positions=raw.original_max_position_embeddings,
        partial_rotary_factor=raw.partial_rotary_factor,
    )
    return reader.read(raw.rope_theta, raw.rope_scaling, raw.rope_parameters)
