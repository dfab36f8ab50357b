"""Parse the rotary position embedding (RoPE) settings of config.json.

Supports both layouts: `rope_theta` with `rope_scaling`, and `rope_parameters`, which includes the base.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from tandem.engine_core.errors import ConfigError

T = TypeVar("T")
MAX_SIZE, MAX_REAL = 2**24, 1e15
"""Upper bounds of integers and floats in config.json, above the values of any known model.

Larger values overflow in powers, or make tables that take hours to compute.
"""
Count = Annotated[int, Meta(gt=0, le=MAX_SIZE)]
Positive = Annotated[float, Meta(ge=1 / MAX_REAL, le=MAX_REAL)]
Base = Annotated[float, Meta(gt=1, le=MAX_REAL)]

DEFAULT_THETA = 10000.0
"""Default base."""

FULL, SLIDING = "full_attention", "sliding_attention"
"""Values of `layer_types`: full attention, and attention with a sliding window.

In Gemma 3 they have different rotary embeddings.
"""


class LinearScaling(Struct, frozen=True):
    """Position interpolation (Chen et al., 2023).

    Divides all frequencies by the factor.
    """

    factor: float


class DynamicScaling(Struct, frozen=True):
    """Dynamic NTK-aware scaling (bloc97 and emozilla, 2023).

    The base grows with the context length beyond the original one.
    """

    factor: float
    original_positions: int


class Llama3Scaling(Struct, frozen=True):
    """Scaling of Llama 3.1.

    Divides low frequencies by the factor, keeps high ones, and interpolates in between. The limits are numbers of
    rotations within the original context.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


class YarnScaling(Struct, frozen=True):
    """YaRN (Peng et al., 2023).

    Divides low frequencies by the factor, keeps high ones, with a linear ramp over the pairs in between. Multiplies
    cosines and sines by the attention factor.
    """

    factor: float
    original_positions: int
    attention_factor: float
    beta_fast: float = 32.0
    """Rotations within the original context above which a frequency is kept."""
    beta_slow: float = 1.0
    """Rotations within the original context below which a frequency is divided by the factor."""
    truncate: bool = True
    """True to round the ends of the ramp outwards to whole pairs."""


class LongRopeScaling(Struct, frozen=True):
    """LongRoPE (Ding et al., 2024).

    Divides each frequency by its own factor. Multiplies cosines and sines by the attention factor.
    """

    short_factor: tuple[float, ...]
    """Divisors for contexts up to `original_positions`, one per pair."""
    long_factor: tuple[float, ...]
    """Divisors for longer contexts, one per pair."""
    original_positions: int
    attention_factor: float


class ProportionalScaling(Struct, frozen=True):
    """Scaling of a head that rotates only its fastest pairs.

    Divides their frequencies by the factor.
    """

    factor: float
    turning_pairs: int


Scaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongRopeScaling | ProportionalScaling


class RopeConfig(Struct, frozen=True):
    """Rotary position embedding of one layer type."""

    rotary_dim: int
    """Number of rotated elements at the start of each head; the rest passes unchanged."""
    theta: float = 10000.0
    """Base: pair i of n rotates by theta^(-i/n) radians per position, before scaling."""
    scaling: Scaling | None = None

    def context_lengths(self, stated: int) -> tuple[int, int]:
        """Return the default and the maximum context length, in tokens.

        With YaRN both are the factor times the original length. "linear" and "dynamic" extend the stated length by the
        factor, but in some checkpoints it is already included, so the extension requires --max-len.

        stated: `max_position_embeddings`.
        """
        match self.scaling:
            case YarnScaling(factor, original):
                stretched = max(stated, int(factor * original))
                return stretched, stretched
            case LinearScaling(factor) | DynamicScaling(factor):
                return stated, max(stated, int(factor * stated))
        return stated, stated


class QueryScaling(Struct, frozen=True):
    """Scaling of queries by their position p, as in Llama 4: 1 + beta * log(1 + floor(p / original_positions))."""

    beta: float
    original_positions: Count
    """Positions of the original context, whose queries are unscaled."""


class _Type(Struct):
    """The fields `rope_type` and, in older configs, `type`."""

    rope_type: str | None = None
    type: str | None = None


class _Fields(_Type, forbid_unknown_fields=True):
    """The fields of `rope_scaling` or `rope_parameters`.

    `rope_parameters` may have an entry with these fields for each layer type.
    """

    rope_theta: Base | None = None
    partial_rotary_factor: Positive | None = None
    original_max_position_embeddings: Count | None = None
    factor: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    attention_factor: Positive | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None
    short_factor: list[Positive] | None = None
    long_factor: list[Positive] | None = None
    finetuned: bool | None = None
    """In YaRN checkpoints; without effect."""


class _Kind(Struct, frozen=True):
    """Fields of a rope_type in addition to `COMMON`."""

    needed: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings", "finetuned"}
"""Fields allowed for every rope_type, even if it does not use them."""
KINDS = {
    "default": _Kind(),
    "linear": _Kind(("factor",)),
    "dynamic": _Kind(("factor",)),
    "llama3": _Kind(("factor", "low_freq_factor", "high_freq_factor")),
    "yarn": _Kind((), ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")),
    "longrope": _Kind(("short_factor", "long_factor"), ("factor", "attention_factor")),
    "proportional": _Kind((), ("factor",)),
}


class RopeReader(Struct, frozen=True, kw_only=True):
    """Reader of rotary fields, with other facts of the model."""

    head_dim: int
    max_positions: int
    """`max_position_embeddings`."""
    original_positions: int | None = None
    """`original_max_position_embeddings` of the top level, which takes precedence over the rotary fields."""
    partial_rotary_factor: float | None = None
    """`partial_rotary_factor` of the top level; the rotary fields take precedence."""
    partial: bool = False
    """True if the family supports partial rotation."""
    longrope_names: tuple[str, ...] = ("su",)
    """Former names of the rope_type "longrope"."""

    def read(
        self,
        rope_theta: float | None = None,
        rope_scaling: Mapping[str, Any] | None = None,
        rope_parameters: Mapping[str, Any] | None = None,
    ) -> RopeConfig:
        """Read the rotary fields of a model with the same embedding in all layers.

        The arguments are the fields of config.json. Raises ConfigError if they are malformed, or if a field would be
        ignored.
        """
        name, fields = ("rope_scaling", rope_scaling) if rope_scaling else ("rope_parameters", rope_parameters)
        return self._resolve(name, fields or {}, rope_theta or DEFAULT_THETA)

    def read_by_layer_type(
        self,
        rope_theta: float | None = None,
        rope_local_base_freq: float | None = None,
        rope_scaling: Mapping[str, Any] | None = None,
        rope_parameters: Mapping[str, Any] | None = None,
    ) -> tuple[RopeConfig, RopeConfig]:
        """Read the rotary fields of a model with different embeddings by layer type.

        Returns the settings of full attention and of sliding attention. In the older layout `rope_theta` and
        `rope_scaling` belong to full attention, and `rope_local_base_freq` is the base of sliding attention; in the
        newer one `rope_parameters` has an entry for each. The default bases are Gemma 3's, 1e6 and 10000.

        Raises ConfigError like `read`, and if `rope_parameters` has no entries by layer type.
        """
        nested = rope_parameters or {}
        if unknown := sorted(nested.keys() - {FULL, SLIDING}):
            raise ConfigError(
                f"rope_parameters: {', '.join(unknown)} cannot be combined with layer types; this model needs one "
                f"entry for {FULL} and one for {SLIDING}"
            )
        parts: list[Mapping[str, Any]] = []
        for layer_type in (FULL, SLIDING):
            part = nested.get(layer_type) or {}
            if not isinstance(part, Mapping):
                raise ConfigError(f"rope_parameters: {layer_type} must be an object, found {part!r}")
            parts.append(part)
        full, sliding = parts
        return (
            self._resolve(f"rope_parameters.{FULL}", {**full, **(rope_scaling or {})}, rope_theta or 1e6),
            self._resolve(f"rope_parameters.{SLIDING}", sliding, rope_local_base_freq or 10000.0),
        )

    def _resolve(self, name: str, raw: Mapping[str, Any], theta: float) -> RopeConfig:
        # Check the type first: an unsupported type may have unknown fields.
        given = _convert(name, raw, _Type)
        given_kind = given.rope_type or given.type or "default"
        kind = "longrope" if given_kind in self.longrope_names else given_kind
        if kind not in KINDS:
            raise ConfigError(f'{name}: rope_type "{given_kind}" is not supported; supported: {", ".join(KINDS)}')
        fields = _convert(name, raw, _Fields)
        _check_names(name, kind, fields)
        try:
            share = self._share(kind, fields)
            dim = self.head_dim if kind == "proportional" else self._rotary_dim(share)
            return RopeConfig(dim, fields.rope_theta or theta, self._scaling(kind, fields, dim, share))
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None

    def _share(self, kind: str, fields: _Fields) -> float:
        share = fields.partial_rotary_factor or self.partial_rotary_factor or 1.0
        if share > 1:
            raise ConfigError(f"partial_rotary_factor {share} is above 1, a whole head")
        if share < 1 and not self.partial and kind != "proportional":
            raise ConfigError(f"partial_rotary_factor {share} is not supported for this architecture, only 1")
        return share

    def _rotary_dim(self, share: float) -> int:
        dim = int(self.head_dim * share)
        if dim < 2 or dim % 2:
            raise ConfigError(
                f"{dim} of {self.head_dim} elements of a head would turn (partial_rotary_factor {share}); rotary "
                "embedding needs pairs"
            )
        return dim

    def _scaling(self, kind: str, fields: _Fields, dim: int, share: float) -> Scaling | None:
        factor = fields.factor or 1.0
        original = self.original_positions or fields.original_max_position_embeddings or self.max_positions
        match kind:
            case "linear":
                return LinearScaling(factor)
            case "dynamic":
                if dim < 4:
                    raise ConfigError(f'rope_type "dynamic" needs at least 4 rotated elements of a head, found {dim}')
                return DynamicScaling(factor, self.max_positions)
            case "proportional":
                return ProportionalScaling(factor, int(share * dim // 2))
            case "llama3":
                return _llama3(fields, original)
            case "yarn":
                return _yarn(fields, original, self.max_positions / original)
            case "longrope":
                return _longrope(fields, original, self.max_positions / original, dim // 2)
        return None


def _convert(name: str, raw: Mapping[str, Any], kind: type[T]) -> T:
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name}: {error}") from None


def _check_names(name: str, kind: str, fields: _Fields) -> None:
    """Raise ConfigError if a field of the kind is missing, or if one would be ignored."""
    given = {field for field, value in msgspec.structs.asdict(fields).items() if value is not None}
    known = KINDS[kind]
    if missing := [field for field in known.needed if field not in given]:
        raise ConfigError(f'{name}: {", ".join(missing)} is missing; rope_type "{kind}" needs it')
    if stray := sorted(given - COMMON - {*known.needed, *known.optional}):
        raise ConfigError(f'{name}: {", ".join(stray)} has no meaning for rope_type "{kind}"; remove it')


def _llama3(fields: _Fields, original: int) -> Llama3Scaling:
    factor, low, high = fields.factor, fields.low_freq_factor, fields.high_freq_factor
    assert factor is not None and low is not None and high is not None, fields
    if low >= high:
        raise ConfigError(f"low_freq_factor {low} is not below high_freq_factor {high}")
    return Llama3Scaling(factor, low, high, original)


def _yarn(fields: _Fields, original: int, extension: float) -> YarnScaling:
    """Resolve YaRN's fields.

    extension: ratio of `max_position_embeddings` to the original one.
    """
    factor = fields.factor or extension
    fast, slow = fields.beta_fast or 32.0, fields.beta_slow or 1.0
    if fast < slow:
        raise ConfigError(f"beta_fast {fast} is below beta_slow {slow}")
    attention_factor = fields.attention_factor
    if attention_factor is None:
        attention_factor = _yarn_scale(factor, 1.0)
        if fields.mscale and fields.mscale_all_dim:
            attention_factor = _yarn_scale(factor, fields.mscale) / _yarn_scale(factor, fields.mscale_all_dim)
    truncate = True if fields.truncate is None else fields.truncate
    return YarnScaling(factor, original, attention_factor, fast, slow, truncate)


def _yarn_scale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _longrope(fields: _Fields, original: int, extension: float, pairs: int) -> LongRopeScaling:
    """Resolve LongRoPE's fields.

    extension: as in `_yarn`; pairs: number of rotated pairs per head.
    """
    short, long = fields.short_factor or [], fields.long_factor or []
    for name, factors in (("short_factor", short), ("long_factor", long)):
        if len(factors) != pairs:
            raise ConfigError(f"{name} has {len(factors)} numbers, but {pairs} pairs of each head turn")
    factor, attention_factor = fields.factor or extension, fields.attention_factor
    if attention_factor is None:
        if original < 2:
            raise ConfigError(f"original_max_position_embeddings {original} is too small to derive an attention_factor")
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return LongRopeScaling(tuple(short), tuple(long), original, attention_factor)
