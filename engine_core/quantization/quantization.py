"""Quantization of a checkpoint: the scheme of each of its linear layers.

Which layers are quantized follows from the tensors of the checkpoint, their parameters from its config. Without tensors
the config decides.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.quantization.fields import unsupported
from tandem.engine_core.quantization.module_names import ModuleNames, text_model_name
from tandem.engine_core.quantization.scheme import ONLINE_FP8, EightBitScheme, Scheme

HEAD = "lm_head"
PACKED = ("qweight", "weight_packed")
"""Last components of the names of tensors that only quantized layers have."""
_SCALES = ("weight_scale", "weight_scale_inv")
"""Last components of the names of scales of weights that are not packed."""
STRAY = (*_SCALES, "weight_zero_point")
"""Last components of the names of tensors that are not read if the weight is in 16 bits: some tools save those of
routers."""
_PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")
_DTYPE_NAMES = {"F8_E4M3": "FP8", "I8": "INT8"}
"""Usual names of the dtypes of quantized weights that are not packed."""

StoredDtypes = Mapping[str, str | None]
"""Dtype of each tensor of a checkpoint in the words of safetensors, by name in the checkpoint; None: unknown."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The scheme of some linear layers, an exception from the others."""

    names: ModuleNames
    scheme: Scheme | None
    """None: they are not quantized."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """Schemes of the linear layers of a checkpoint, by module name."""

    default: Scheme | None
    """Scheme of the linear layers that no rule names; None: they are not quantized."""
    rules: tuple[Rule, ...] = ()
    """Exceptions; of several for one layer the first holds."""
    only: ModuleNames | None = None
    """The layers that the config limits quantization to; None: no limit."""
    quantizes_head: bool = False
    """True if `default` is the scheme of the output head too."""
    stored: Mapping[str, Mapping[str, str | None]] | None = field(default=None, repr=False)
    """Tensors of each module, and their dtypes, by the last component of their names; None: no tensors are known."""
    stored_as: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Name in the checkpoint of each module, by that in the text model."""
    stored_plain: set[str] = field(default_factory=set, repr=False, compare=False)
    """Layers that the config calls quantized and that `scheme_for` found stored in 16 bits."""
    unmatched: tuple[str, ...] | None = None
    """Entries of the config that no module is in, see `unmatched_entries`; None: unknown."""
    stray: set[str] = field(default_factory=set, repr=False, compare=False)
    """Scales and zero points that `scheme_for` found for weights in 16 bits; they are not read."""

    def __str__(self) -> str:
        schemes = (self.default, *(rule.scheme for rule in self.rules))
        return ", ".join(dict.fromkeys(str(scheme) for scheme in schemes if scheme is not None))

    def with_stored(self, tensors: StoredDtypes) -> "Quantization":
        """Return the quantization of a checkpoint with these tensors.

        Those that are quantized while loading are stored in 16 bits, and decide nothing.
        """
        if isinstance(self.default, EightBitScheme) and self.default.from_floats:
            return self
        stored: dict[str, dict[str, str | None]] = {}
        stored_as: dict[str, str] = {}
        for name, dtype in tensors.items():
            module, _, last = text_model_name(name).rpartition(".")
            stored.setdefault(module, {})[last] = dtype
            stored_as[module] = name.rpartition(".")[0]
        return replace(self, stored=stored, stored_as=stored_as, stored_plain=set(), stray=set())

    def unmatched_entries(self, tensors: Iterable[str]) -> list[str]:
        """Return the entries of rules that no module with one of these tensors is in.

        tensors: names in the checkpoint, of any modality.
        """
        modules = {name.rpartition(".")[0] for name in tensors}
        names = {text_model_name(name): name for name in modules}
        found = dict.fromkeys(entry for rule in self.rules for entry in rule.names.unmatched(names))
        # Classes of modules start with a capital letter.
        return [entry for entry in found if not entry[:1].isupper()]

    def scheme_for(self, name: str) -> Scheme | None:
        """Return the scheme of a linear layer, None if it is not quantized.

        name: of the module in the text model, such as "model.layers.3.mlp.down_proj". Raises ConfigError if the
        tensors of the layer contradict the config.
        """
        scheme, entry = self._configured(name)
        if self.stored is None or not self._has_weight(name):
            return scheme
        tensors = self.stored[name]
        if not _is_quantized(tensors, is_expected=scheme is not None):
            if scheme is not None:
                self.stored_plain.add(name)
            self.stray.update(f"{name}.{last}" for last in STRAY if last in tensors)
            return None
        if scheme is None and entry is None and name == HEAD:
            scheme = self.default
        if scheme is None:
            excluded = (
                f'excludes it (entry "{entry}"); remove the entry'
                if entry
                else "does not quantize it; correct quantization_config"
            )
            raise ConfigError(
                f"{name} is quantized (it has {_stored_text(tensors)}), but quantization_config {excluded}, or serve "
                "another quantization of the model"
            )
        if not stored_names(scheme) & tensors.keys():
            expected = " or ".join(sorted(stored_names(scheme)))
            raise unsupported(
                f"{name} is {scheme} in quantization_config, but the checkpoint has {_stored_text(tensors)} instead of "
                f"{expected}"
            )
        return scheme

    def part_schemes(self, name: str, parts: Collection[str]) -> list[Scheme | None]:
        """Return the scheme of each part of a fused projection.

        name: of the fused module, such as "model.layers.3.self_attn.qkv_proj", which a checkpoint may hold instead of
        the parts; parts: last components of the parts' names, such as "q_proj".
        """
        if self._has_weight(name):
            return [self.scheme_for(name)] * len(parts)
        prefix = name[: name.rfind(".") + 1]
        if self.stored is None:
            whole = self._rule_for(name)
            if whole is not None:
                return [whole[0].scheme] * len(parts)
        return [self.scheme_for(prefix + part) for part in parts]

    def _has_weight(self, name: str) -> bool:
        """Return whether the checkpoint is known to have a weight of a layer, beyond scales of keys and values."""
        return self.stored is not None and any(last in self.stored.get(name, ()) for last in ("weight", *PACKED))

    def _configured(self, name: str) -> tuple[Scheme | None, str | None]:
        """Return the scheme that the config gives a layer, and the entry that names it."""
        if (found := self._rule_for(name)) is not None:
            rule, entry = found
            return rule.scheme, entry
        if name == HEAD:
            return (self.default if self.quantizes_head else None), None
        if self.only is not None and self.only.find(name, self.stored_as.get(name)) is None:
            return None, None
        return self.default, None

    def _rule_for(self, name: str) -> tuple[Rule, str] | None:
        """Return the rule for a layer, and the entry of the config that names it."""
        stored_as = self.stored_as.get(name)
        for rule in self.rules:
            if (entry := rule.names.find(name, stored_as)) is not None:
                return rule, entry
        return None


def excluding(scheme: Scheme | None, names: ModuleNames, quantizes_head: bool = False) -> Quantization:
    """Return the quantization of all linear layers but some."""
    return Quantization(scheme, (Rule(names, None),), quantizes_head=quantizes_head)


def check_schemes(layers: Iterable[tuple[str, str]], supported: Collection[str]) -> None:
    """Raise ConfigError that names the first of some layers with an unsupported algorithm.

    layers: names and algorithms.
    """
    for name, algorithm in layers:
        if algorithm not in supported:
            known = " or ".join(f'"{each}"' for each in supported)
            raise unsupported(f'quantization_config gives {name} the algorithm "{algorithm}", supported: {known}')


def stored_names(scheme: Scheme) -> set[str]:
    """Return the last components of the names of the tensor with the weights of a scheme."""
    if isinstance(scheme, EightBitScheme) or scheme.packing is None:
        return {"weight"}
    return {"weight_packed" if scheme.packing == "compressed-tensors" else "qweight"}


FP8_AT_LOAD = Quantization(
    ONLINE_FP8,
    (Rule(ModuleNames.containing(("linear_attn.in_proj_a", "linear_attn.in_proj_b")), None),),
    unmatched=(),  # They come from no config, and most models have no such layer.
)
"""Quantization of `--quantize fp8`. The few outputs that gate a recurrent state stay in 16 bits, as in published FP8
checkpoints."""


def _is_quantized(tensors: Mapping[str, str | None], is_expected: bool) -> bool:
    """Return whether the tensors of a layer are those of a quantized one.

    is_expected: whether the config quantizes it. A stray scale of a 16-bit weight changes nothing.
    """
    if any(name in tensors for name in PACKED):
        return True
    dtype = tensors.get("weight")
    if dtype is not None:
        return dtype not in _PLAIN_DTYPES
    return is_expected and any(name in tensors for name in _SCALES)


def _stored_text(tensors: Mapping[str, str | None]) -> str:
    """Name the weight of a layer with its dtype, and its scales, for errors."""
    found = []
    for last in ("weight", *PACKED, *_SCALES):
        if last in tensors:
            dtype = tensors[last] if last == "weight" else None
            found.append(last if dtype is None else f"{last} in {_DTYPE_NAMES.get(dtype, dtype)}")
    return " and ".join(found)
