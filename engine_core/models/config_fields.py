"""The reading of a config.json, shared by all families.

A family names the fields that it reads in a struct. Fields in `_NO_OP_VALUES` that it does not read are refused unless
they have no effect. All other fields are ignored.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from tandem.engine_core.attention.base import LayerAttention
from tandem.engine_core.errors import ConfigError
from tandem.engine_core.kernels.activation import Activation
from tandem.engine_core.model_config import ModelConfig
from tandem.engine_core.quantization.quantization import Quantization
from tandem.engine_core.quantization.reading import read_quantization
from tandem.engine_core.quantization.sidecar import as_quantization_config, find_sidecar
from tandem.engine_core.rope_config import (
    FULL,
    MAX_SIZE,
    Base,
    Count,
    Positive,
    RopeConfig,
    RopeReader,
)
from tandem.protocol.text_files import without_bom

logger = logging.getLogger(__name__)
T = TypeVar("T")
MAX_LAYERS = 2**12
Layers = Annotated[int, Meta(gt=0, le=MAX_LAYERS)]

ACTIVATIONS = {"silu": Activation.SILU, "gelu_pytorch_tanh": Activation.GELU_TANH}
"""Supported values of `hidden_act`."""
_NO_OP_VALUES: dict[str, tuple[Any, ...]] = {
    "sliding_window": (),
    "use_sliding_window": (False,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "use_bidirectional_attention": (False,),
    "is_causal": (True,),
    "clip_qkv": (),
    "use_qk_norm": (False,),
    "no_rope_layers": ([],),
    "num_local_experts": (0, 1),
    "num_experts": (0, 1),
    "scoring_func": ("softmax",),
    "n_group": (0, 1),
    "routed_scaling_factor": (1.0,),
    "swiglu_limit": (),
    "embedding_multiplier": (1.0,),
    "residual_multiplier": (1.0,),
    "attention_multiplier": (),
    "logits_scaling": (1.0,),
}
"""Values without effect, other than null, of fields that change the output in some families."""
_QUANTIZATION_FIELDS = ("quantization_config", "compression_config")
_OUTER_FIELDS = ("eos_token_id", "dtype", "torch_dtype", *_QUANTIZATION_FIELDS)
"""Fields of a multimodal config.json that also apply to its text backbone, unless overridden there."""


class ConfigFields(Struct, kw_only=True):
    """The fields of config.json that all families have.

    A family adds its own fields, and overrides defaults that differ in transformers.
    """

    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Layers
    num_attention_heads: Count
    num_key_value_heads: Count | None = None
    default_end: ClassVar[int | None] = None
    """End id of checkpoints of this family that have none in either file."""
    head_dim: Count | None = None
    max_position_embeddings: Count
    original_max_position_embeddings: Count | None = None
    rms_norm_eps: Positive = 1e-6
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"
    rope_theta: Base | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: Positive | None = None
    quantization_config: dict[str, Any] | None = None
    compression_config: dict[str, Any] | None = None
    eos_token_id: int | list[int] | UnsetType | None = UNSET
    dtype: str | None = None
    torch_dtype: str | None = None

    @property
    def hidden_per_head(self) -> int:
        """Size of a head if the heads share the hidden size.

        Raises ConfigError if they cannot.
        """
        if self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {self.num_attention_heads}"
            )
        return self.hidden_size // self.num_attention_heads

    def rope(self, head_dim: int, *, partial: bool = False, longrope_names: tuple[str, ...] = ("su",)) -> RopeConfig:
        """Return the rotary embedding of all layers.

        partial, longrope_names: as in `RopeReader`. Raises ConfigError for malformed fields.
        """
        reader = RopeReader(
            head_dim=head_dim,
            max_positions=self.max_position_embeddings,
            original_positions=self.original_max_position_embeddings,
            partial_rotary_factor=self.partial_rotary_factor,
            partial=partial,
            longrope_names=longrope_names,
        )
        return reader.read(self.rope_theta, self.rope_scaling, self.rope_parameters)


F = TypeVar("F", bound=ConfigFields)


class ConfigSource(Struct, frozen=True, kw_only=True):
    """The configuration files of a model folder, before a family reads them."""

    path: Path
    """The config.json, for error messages."""
    architecture: str
    fields: dict[str, Any]
    """The object in config.json, or the part that describes the text backbone."""
    quantized_by: str = ""
    """The separate file that `quantization_config` was read from, if any."""
    generation_ends: int | list[int] | None = None
    """The `eos_token_id` of generation_config.json."""
    multimodal: bool = False

    @classmethod
    def open(cls, directory: Path) -> "ConfigSource":
        """Read the files of a model folder.

        Raises ConfigError if one is missing or malformed, or if config.json does not name one architecture.
        """
        path = directory / "config.json"
        if not path.is_file():
            raise ConfigError(
                f"{directory} is not a model folder: it has no config.json; give the folder that holds both it and the "
                "safetensors"
            )
        generation = directory / "generation_config.json"
        fields = _decode(path, dict[str, Any])
        ends = _decode(generation, _Generation).eos_token_id if generation.is_file() else None
        quantized_by = _take_sidecar(directory, fields)
        match fields.get("architectures"):
            case [str(architecture)]:
                return cls(
                    path=path,
                    architecture=architecture,
                    fields=fields,
                    quantized_by=quantized_by,
                    generation_ends=ends,
                )
        found = fields.get("architectures")
        raise ConfigError(f"{path}: architectures must name one architecture, found {found}")

    def text_backbone(self) -> "ConfigSource":
        """Return the source of a multimodal checkpoint's text backbone, its `text_config`.

        `tie_word_embeddings` is read from the outer config and true by default, as in transformers.
        """
        text = self.fields.get("text_config")
        if not isinstance(text, dict):
            raise ConfigError(f"text_config must be an object, found {text}")
        outer = {name: self.fields[name] for name in _OUTER_FIELDS if name in self.fields}
        own = text | {"tie_word_embeddings": self.fields.get("tie_word_embeddings", True)}
        return msgspec.structs.replace(self, fields=outer | own, multimodal=True)

    def read(self, kind: type[F]) -> F:
        """Return the fields that a family reads.

        Raises ConfigError that names malformed fields, and fields of `_NO_OP_VALUES` that have an effect and that the
        family does not read.
        """
        try:
            fields = msgspec.convert(self.fields, kind)
        except msgspec.ValidationError as error:
            raise ConfigError(str(error)) from None
        problems = []
        if fields.hidden_act not in ACTIVATIONS:
            named = dict(zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True))["hidden_act"]
            problems.append(f'{named} "{fields.hidden_act}" is not supported, only {", ".join(ACTIVATIONS)}')
        others = {name: value for name, value in self.fields.items() if name not in kind.__struct_fields__}
        if others.get("use_sliding_window") is False:
            others.pop("sliding_window", None)
        for name, neutral in _NO_OP_VALUES.items():
            value = others.get(name)
            if value is not None and value not in neutral:
                problems.append(f"{name} {msgspec.json.encode(value).decode()} is not supported")
        if unknown := sorted(set(others.get("layer_types") or []) - {FULL}):
            problems.append(f"layer_types {', '.join(unknown)} are not supported, only {FULL}")
        if problems:
            raise ConfigError("; ".join(problems))
        return fields

    def resolve(
        self,
        fields: ConfigFields,
        *,
        head_dim: int,
        attention: Sequence[LayerAttention],
        ropes: Sequence[RopeConfig],
        **own: Any,
    ) -> ModelConfig:
        """Build the `ModelConfig` of a model.

        own: further fields of ModelConfig that the family sets. Raises ConfigError for inconsistent numbers.
        """
        heads = fields.num_attention_heads
        kv_heads = fields.num_key_value_heads or heads
        if heads % kv_heads:
            raise ConfigError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
        if heads * head_dim > MAX_SIZE:
            raise ConfigError(f"num_attention_heads {heads} times head_dim {head_dim} is more than {MAX_SIZE}")
        contexts = [rope.context_lengths(fields.max_position_embeddings) for rope in ropes]
        usual, longest = min(usual for usual, _ in contexts), min(longest for _, longest in contexts)
        if max(usual, longest) > MAX_SIZE:
            raise ConfigError(f"the rotary scaling makes {max(usual, longest)} positions, more than {MAX_SIZE}")
        common: dict[str, Any] = {
            "architecture": self.architecture,
            "vocab_size": fields.vocab_size,
            "hidden_size": fields.hidden_size,
            "intermediate_size": fields.intermediate_size,
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "max_positions": usual,
            "longest_context": longest if longest > usual else 0,
            "rms_norm_eps": fields.rms_norm_eps,
            "tie_embeddings": fields.tie_word_embeddings,
            "attention": tuple(without_idle_window(layer, longest) for layer in attention),
            "ropes": tuple(ropes),
            "eos_ids": self._end_ids(fields),
            "dtype": fields.dtype or fields.torch_dtype,
            "activation": ACTIVATIONS[fields.hidden_act],
            "quantization": self._quantization(fields),
            "multimodal": self.multimodal,
        }
        return ModelConfig(**(common | own))

    def _quantization(self, fields: ConfigFields) -> Quantization | None:
        found = fields.compression_config if fields.quantization_config is None else fields.quantization_config
        try:
            return read_quantization(found)
        except ConfigError as error:
            if not self.quantized_by:
                raise
            raise ConfigError(f"{self.quantized_by}, read as quantization_config: {error}") from None

    def _end_ids(self, fields: ConfigFields) -> tuple[int, ...]:
        if self.generation_ends is None and fields.eos_token_id is UNSET:
            default = fields.default_end
            return (default,) if default is not None and default < fields.vocab_size else ()
        ids: list[int] = []
        for field in (self.generation_ends, fields.eos_token_id):
            ids += [field] if isinstance(field, int) else field or []
        for token in ids:
            if not 0 <= token < fields.vocab_size:
                raise ConfigError(f"eos_token_id {token} is outside the vocabulary of {fields.vocab_size}")
        return tuple(dict.fromkeys(ids))


def without_idle_window(layer: LayerAttention, positions: int) -> LayerAttention:
    """Drop a sliding window that is at least as long as the longest sequence.

    positions: of the longest sequence. Attention without a window has more kernels to choose from.
    """
    if layer.window is None or layer.window < positions:
        return layer
    return replace(layer, window=None)


class _Generation(Struct):
    eos_token_id: int | list[int] | None = None


def _take_sidecar(directory: Path, fields: dict[str, Any]) -> str:
    """Add the quantization that a separate file in the folder describes.

    Return the name of the file. It is empty if there is none, or if config.json itself names a quantization.
    """
    text, sidecar = fields.get("text_config"), find_sidecar(directory)
    tables = (fields, text if isinstance(text, dict) else {})
    if sidecar is None or any(table.get(name) for table in tables for name in _QUANTIZATION_FIELDS):
        return ""
    found = as_quantization_config(sidecar.name, _decode(sidecar, dict[str, Any]))
    if found is None:
        return ""
    fields["quantization_config"] = found
    logger.info("config.json names no quantization, but %s does; delete it if the weights are not quantized", sidecar)
    return sidecar.name


def _decode(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(without_bom(path.read_bytes()), type=kind)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path} has arrays or objects that are nested too deeply; download it again") from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise ConfigError(f"{path} is not valid JSON ({error}); correct it or download it again") from None
