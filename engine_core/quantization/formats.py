"""Readers of `quantization_config`, one per tool.

Each converts the fields of its tool to the schemes of a checkpoint's linear layers. The formats are those of
transformers' `FineGrainedFP8Config`, AutoFP8, AutoGPTQ and GPTQModel, AutoAWQ, compressed-tensors, ModelOpt and
AutoRound.
"""

from itertools import groupby
from operator import itemgetter
from typing import Any

from tandem.engine_core.quantization.fields import Fields, unsupported
from tandem.engine_core.quantization.module_names import ModuleNames
from tandem.engine_core.quantization.quantization import Quantization, Rule, check_schemes, excluding
from tandem.engine_core.quantization.scheme import Activations, EightBitScheme, Int4Scheme, Scheme, W8A16Scheme

PACKED_BITS = 4
_MIXED = "MIXED_PRECISION"
_MODELOPT = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")
_AUTOROUND_PACKINGS = ("auto_round:auto_gptq", "auto_round:gptq", "auto_round:auto_awq", "auto_round:awq")
_FLOAT4_NAMES = {16: " (NVFP4)", 32: " (MXFP4)"}
"""Names of formats of 4-bit floats by their group size."""
_PLAIN_BITS = 16
"""Fewest bits in AutoRound's `extra_config` of a layer that is not quantized."""


def fp8(fields: Fields) -> Quantization:
    """Read `quant_method: fp8`: per-tensor or block scales."""
    names = ModuleNames.below(fields.names("modules_to_not_convert", "ignored_layers", "ignore"))
    return excluding(_fp8_scheme(fields), names)


def gptq(fields: Fields) -> Quantization:
    """Read `quant_method: gptq`: int4, with or without act-order, and GPTQModel's `dynamic`."""
    dynamic: list[tuple[str, Scheme | None]] = []
    for key, overrides in fields.tables("dynamic").items():
        scheme = None if key.startswith("-:") else _gptq_scheme(fields.with_overrides(overrides))
        dynamic.append((key.removeprefix("-:" if scheme is None else "+:"), scheme))
    rules = [
        Rule(ModuleNames.matching(pattern for pattern, _ in group), scheme)
        for scheme, group in groupby(dynamic, key=itemgetter(1))
    ]
    excluded = ModuleNames.below(fields.names("modules_to_not_convert"))
    blocks = fields.get("modules_in_block_to_quantize")
    return Quantization(
        _gptq_scheme(fields),
        (*rules, Rule(excluded, None)),
        None if blocks is None else ModuleNames.below(_flattened(blocks)),
        quantizes_head=fields.flag("lm_head", False),
    )


def awq(fields: Fields) -> Quantization:
    """Read `quant_method: awq`: int4 in the "gemm" layout."""
    names = fields.names("modules_to_not_convert")
    return excluding(_awq_scheme(fields), ModuleNames.containing(names))


def compressed_tensors(fields: Fields) -> Quantization | None:
    """Read `quant_method: compressed-tensors`.

    FP8, INT8 or int4, in groups of layers; or None for a checkpoint of 16-bit weights with KV scales only.
    """
    sparsity = fields.get("sparsity_config")
    if sparsity and not (isinstance(sparsity, dict) and sparsity.get("format", "dense") == "dense"):
        raise fields.error("sparsity_config", 'none, or its format "dense"')
    if not fields.get("config_groups") and fields.get("kv_cache_scheme") is not None:
        return None
    fields.table("config_groups")
    ignored = Rule(ModuleNames.exactly(fields.names("ignore")), None)
    named: list[Rule] = []
    matched: list[Rule] = []
    default: Scheme | None = None
    for group in fields.tables("config_groups").values():
        targets = group.names("targets")
        scheme = _group_scheme(fields, group)
        if "Linear" in targets:
            default = default or scheme
        # Of all groups, names come before regular expressions, and those before the class of modules.
        patterns = [target for target in targets if target.startswith("re:")]
        names = set(targets) - {"Linear", *patterns}
        named.append(Rule(ModuleNames.exactly(sorted(names)), scheme))
        matched.append(Rule(ModuleNames.exactly(patterns), scheme))
    return Quantization(default, (ignored, *named, *matched), quantizes_head=True)


def modelopt(fields: Fields) -> Quantization | None:
    """Read `quant_method: modelopt`.

    FP8, per tensor with static inputs, or per output with dynamic ones, for all linear layers or those listed; or None
    for a checkpoint of 16-bit weights with KV scales only.
    """
    has_kv_scales = any(fields.get(name) is not None for name in ("kv_cache_quant_algo", "kv_cache_scheme"))
    if fields.get("quant_algo") == "NO_QUANT" or (fields.get("quant_algo") is None and has_kv_scales):
        return None
    names = ModuleNames.below(fields.names("exclude_modules", "ignore", "modules_to_not_convert"))
    algorithm = fields.expect("quant_algo", (*_MODELOPT, _MIXED))
    if algorithm != _MIXED:
        return excluding(_modelopt_scheme(algorithm), names, quantizes_head=True)
    layers = fields.tables("quantized_layers")
    if not layers:
        raise fields.error("quantized_layers", "the algorithm of each quantized layer")
    algorithms = {name: str(layer.get("quant_algo")) for name, layer in layers.items()}
    check_schemes(algorithms.items(), _MODELOPT)
    rules = [
        Rule(ModuleNames.below(name for name, used in algorithms.items() if used == algorithm), scheme)
        for algorithm, scheme in ((each, _modelopt_scheme(each)) for each in _MODELOPT)
    ]
    return Quantization(None, (Rule(names, None), *rules))


def auto_round(fields: Fields) -> Quantization:
    """Read `quant_method: auto-round`: int4 in the layout of GPTQ or AWQ, with exceptions in `extra_config`."""
    fields.expect("data_type", ("int",), "int")
    fields.expect("packing_format", _AUTOROUND_PACKINGS, _AUTOROUND_PACKINGS[0])
    if fields.number("act_bits", _PLAIN_BITS) < _PLAIN_BITS:
        raise fields.error("act_bits", "16: activations must be unquantized")
    exact: dict[Scheme | None, list[str]] = {}
    rules: list[Rule] = []
    for key, overrides in fields.tables("extra_config").items():
        merged = fields.with_overrides(overrides)
        bits = merged.number("bits")
        if overrides.get("data_type", "int") != "int" and bits < _PLAIN_BITS:
            raise overrides.error("data_type", '"int"')
        scheme = None if bits >= _PLAIN_BITS else _autoround_scheme(merged)
        if set(key) & set("*+?^$()[]{}|\\"):
            rules.append(Rule(ModuleNames.searching(key), scheme))
        else:
            exact.setdefault(scheme, []).append(key)
    names = [Rule(ModuleNames.exactly(keys), scheme) for scheme, keys in exact.items()]
    blocks = fields.get("block_name_to_quantize", fields.get("to_quant_block_names"))
    found = blocks.split(",") if isinstance(blocks, str) else [] if blocks is None else _flattened(blocks)
    only = ModuleNames.below(name.strip() for name in found) if found else None
    return Quantization(_autoround_scheme(fields), (*names, *rules), only)


def _fp8_scheme(fields: Fields) -> Scheme:
    fields.expect("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    scheme = fields.expect("activation_scheme", ("dynamic", "static"))
    size = fields.get("weight_block_size")
    if size is None:
        activations = Activations.STATIC if scheme == "static" else Activations.TENSOR
        return EightBitScheme("fp8", activations, per_tensor=True)
    if not isinstance(size, list) or size != [128, 128] or scheme == "static":
        raise unsupported(
            f"quantization_config.weight_block_size is {size} with {scheme} activations, supported: [128, 128] with "
            "dynamic ones"
        )
    return EightBitScheme("fp8", Activations.TOKEN, scale_name="weight_scale_inv", block=(128, 128))


def _gptq_scheme(fields: Fields) -> Scheme:
    named = "checkpoint_format" if fields.get("checkpoint_format") is not None else "format"
    layout = fields.expect(named, ("gptq", "gptq_v2"), "gptq")
    return _gptq_packed(fields, fields.flag("desc_act", False), 1 if layout == "gptq" else 0)


def _gptq_packed(fields: Fields, ordered: bool, zero_offset: int) -> Scheme:
    """Read the scheme of weights in GPTQ's layout, of 4 or 8 bits."""
    bits = fields.number("bits")
    # Without the field the zero points of 4 bits are not checked.
    symmetric = fields.flag("sym", bits != PACKED_BITS)
    if bits not in (PACKED_BITS, 8):
        raise unsupported(f"quantization_config has {bits} bits, supported: 4 or 8")
    group = _group(fields.number("group_size"))
    if bits == PACKED_BITS:
        return Int4Scheme("gptq", group, symmetric, ordered, zero_offset)
    if not symmetric:
        raise unsupported("8-bit GPTQ needs sym: true, quantization_config has sym: false")
    return W8A16Scheme("int8", "gptq", group, ordered, zero_offset)


def _awq_scheme(fields: Fields) -> Scheme:
    bits = fields.number("bits", fields.get("w_bit"))
    if bits != PACKED_BITS:
        raise unsupported(f"quantization_config has {bits} bits, supported: 4")
    for name in ("version", "format", "checkpoint_format"):
        version = fields.get(name, "gemm")
        if not isinstance(version, str) or version.lower() != "gemm":
            raise fields.error(name, '"gemm"')
    if not fields.flag("zero_point", True):
        raise fields.error("zero_point", "true")
    return Int4Scheme("awq", _group(fields.number("group_size", fields.get("q_group_size"))), False)


def _autoround_scheme(fields: Fields) -> Scheme:
    if "awq" not in fields.get("packing_format", ""):
        return _gptq_packed(fields, False, 1)
    if fields.number("bits") != PACKED_BITS:
        raise unsupported(f"quantization_config has {fields.number('bits')} bits, supported: 4 packed as AWQ")
    return Int4Scheme("awq", _group(fields.number("group_size")), False)


def _modelopt_scheme(algorithm: str) -> Scheme:
    by_tensor = algorithm == "FP8"
    return EightBitScheme("fp8", Activations.STATIC if by_tensor else Activations.TOKEN, per_tensor=by_tensor)


def _group_scheme(fields: Fields, group: Fields) -> Scheme:
    """Read the scheme of a config group of compressed-tensors.

    fields: of all groups, which name the format of those that do not.
    """
    if group.get("output_activations") is not None:
        raise group.error("output_activations", "null")
    layout = group if group.get("format") is not None else fields
    weights = group.table("weights")
    inputs = group.table("input_activations") if group.get("input_activations") is not None else None
    kind, bits = weights.expect("type", ("float", "int")), weights.number("num_bits")
    if (kind, bits) == ("int", PACKED_BITS):
        return _packed(layout, weights, inputs)
    if (kind, bits) == ("float", 4):
        size = weights.get("group_size")
        groups = f" in groups of {size}{_FLOAT4_NAMES.get(size, '')}" if isinstance(size, int) else ""
        raise unsupported(
            f"{group.where} has 4-bit floats{groups}, supported: FP8 and INT8, and INT4 in groups or per channel"
        )
    if bits != 8:
        raise weights.error("num_bits", "8, or 4 for integers")
    if not weights.flag("symmetric", True):
        raise weights.error("symmetric", "true")
    packed = kind == "int" and layout.get("format") == "pack-quantized"
    if packed and inputs is not None:
        raise unsupported("quantization_config quantizes the inputs of packed weights, supported: 16 bits for them")
    if packed or (inputs is None and weights.get("strategy") == "group"):
        return _weights_only(kind, packed, layout, weights)
    layout.expect("format", ("float-quantized", "int-quantized", "naive-quantized"))
    strategy = weights.expect("strategy", ("tensor", "channel", "block") if kind == "float" else ("tensor", "channel"))
    block = weights.get("block_structure")
    if strategy == "block" and block != [128, 128]:
        raise weights.error("block_structure", "[128, 128]")
    return EightBitScheme(
        "fp8" if kind == "float" else "int8",
        _activations(inputs, kind, bits),
        per_tensor=strategy == "tensor",
        block=(128, 128) if strategy == "block" else None,
    )


def _weights_only(kind: str, packed: bool, layout: Fields, weights: Fields) -> W8A16Scheme:
    """Read 8-bit weights of compressed-tensors with 16-bit activations, in groups or packed."""
    if not packed:
        layout.expect("format", ("float-quantized", "int-quantized", "naive-quantized"))
    strategy = weights.expect("strategy", ("group", "channel"))
    group = _group(weights.number("group_size")) if strategy == "group" else None
    ordered = weights.get("actorder") not in (None, False, "weight", "static")
    return W8A16Scheme("fp8" if kind == "float" else "int8", "compressed-tensors" if packed else None, group, ordered)


def _packed(layout: Fields, weights: Fields, inputs: Fields | None) -> Int4Scheme:
    """Read int4 weights of compressed-tensors."""
    layout.expect("format", ("pack-quantized",))
    if inputs is not None:
        raise unsupported("quantization_config quantizes the inputs of four-bit weights, supported: 16 bits for them")
    strategy = weights.expect("strategy", ("group", "channel"))
    ordered = weights.get("actorder") not in (None, False, "weight", "static")
    group = _group(weights.number("group_size")) if strategy == "group" else None
    return Int4Scheme("compressed-tensors", group, weights.flag("symmetric", True), ordered)


def _activations(inputs: Fields | None, kind: str, bits: int) -> Activations:
    if inputs is None:
        return Activations.UNQUANTIZED
    inputs.expect("type", (kind,))
    inputs.expect("num_bits", (bits,))
    if not inputs.flag("symmetric", True):
        raise inputs.error("symmetric", "true")
    strategy = inputs.expect("strategy", ("tensor", "token", "group"))
    if not inputs.flag("dynamic", False):
        if strategy != "tensor":
            raise inputs.error("strategy", '"tensor" for scales that the checkpoint holds')
        return Activations.STATIC
    return Activations.TENSOR if strategy == "tensor" else Activations.TOKEN


def _flattened(names: Any) -> list[str]:
    """Return the names in nested lists. Raises ConfigError for anything else."""
    found: list[str] = []
    rest = [names]
    while rest:
        item = rest.pop()
        if isinstance(item, list):
            rest += reversed(item)
        elif isinstance(item, str):
            found.append(item)
        else:
            raise unsupported("quantization_config must list blocks by their names")
    return found


def _group(size: int) -> int | None:
    """Return the group size, None for -1, which means all inputs."""
    if size == -1:
        return None
    if size not in (32, 64, 128):
        raise unsupported(f"quantization_config groups {size} inputs, supported: 32, 64, 128 or -1")
    return size
