"""Readers of `quantization_config`, one per tool.

Each converts the fields of its tool to a scheme. The formats are those of transformers' `FineGrainedFP8Config`,
AutoFP8, AutoGPTQ and GPTQModel, AutoAWQ, compressed-tensors and ModelOpt.
"""

from tandem.engine_core.quantization.fields import Fields, unsupported
from tandem.engine_core.quantization.scheme import Activations, EightBitScheme, Int4Scheme, Scheme

PACKED_BITS = 4


def fp8(fields: Fields) -> Scheme:
    """Read `quant_method: fp8`: per-tensor or block scales."""
    fields.expect("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    scheme = fields.expect("activation_scheme", ("dynamic", "static"))
    size = fields.get("weight_block_size")
    if size is None:
        activations = Activations.STATIC if scheme == "static" else Activations.TENSOR
        return EightBitScheme("fp8", activations, per_tensor=True)
    if not isinstance(size, list) or size != [128, 128] or scheme == "static":
        raise unsupported(
            f"quantization_config.weight_block_size is {size} with {scheme} activations, supported is [128, 128] with "
            "dynamic ones"
        )
    return EightBitScheme("fp8", Activations.TOKEN, scale_name="weight_scale_inv", block=(128, 128))


def gptq(fields: Fields) -> Scheme:
    """Read `quant_method: gptq`: int4, with or without act-order."""
    _four_bits(fields.number("bits"))
    if fields.flag("lm_head", False):
        raise fields.error("lm_head", "false: the output head must be unquantized")
    if fields.get("dynamic"):
        raise fields.error("dynamic", "none, the same settings for all linear layers")
    named = "checkpoint_format" if fields.get("checkpoint_format") is not None else "format"
    layout = fields.expect(named, ("gptq", "gptq_v2"), "gptq")
    return Int4Scheme(
        "gptq",
        _group(fields.number("group_size")),
        fields.flag("sym", True),
        fields.flag("desc_act", False),
        1 if layout == "gptq" else 0,
    )


def awq(fields: Fields) -> Scheme:
    """Read `quant_method: awq`: int4 in the "gemm" layout."""
    _four_bits(fields.number("bits", fields.get("w_bit")))
    for name in ("version", "format", "checkpoint_format"):
        version = fields.get(name, "gemm")
        if not isinstance(version, str) or version.lower() != "gemm":
            raise fields.error(name, '"gemm"')
    if not fields.flag("zero_point", True):
        raise fields.error("zero_point", "true")
    return Int4Scheme("awq", _group(fields.number("group_size", fields.get("q_group_size"))), False)


def compressed_tensors(fields: Fields) -> Scheme | None:
    """Read `quant_method: compressed-tensors`.

    FP8, INT8 or int4, the same for all linear layers; or None for a checkpoint of 16-bit weights with KV scales only.
    """
    sparsity = fields.get("sparsity_config")
    if sparsity and not (isinstance(sparsity, dict) and sparsity.get("format", "dense") == "dense"):
        raise fields.error("sparsity_config", 'none, or its format "dense"')
    if not fields.get("config_groups") and fields.get("kv_cache_scheme") is not None:
        return None
    groups = fields.table("config_groups")
    names = list(fields.get("config_groups"))
    if len(names) != 1:
        raise unsupported(f"quantization_config has {len(names)} config_groups, supported is one for all linear layers")
    group = groups.table(names[0])
    if group.names("targets") != ["Linear"]:
        raise group.error("targets", '["Linear"]')
    if group.get("output_activations") is not None:
        raise group.error("output_activations", "null")
    weights = group.table("weights")
    inputs = group.table("input_activations") if group.get("input_activations") is not None else None
    kind, bits = weights.expect("type", ("float", "int")), weights.number("num_bits")
    if (kind, bits) == ("int", PACKED_BITS):
        return _packed(fields, weights, inputs)
    if bits != 8:
        raise weights.error("num_bits", "8, or 4 for integers")
    if kind == "int" and fields.get("format") == "pack-quantized":
        raise unsupported("quantization_config packs weights of 8 bits (W8A16), supported is W8A8, or W4A16 if packed")
    fields.expect("format", ("float-quantized", "int-quantized", "naive-quantized"))
    if not weights.flag("symmetric", True):
        raise weights.error("symmetric", "true")
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


def modelopt(fields: Fields) -> Scheme | None:
    """Read `quant_method: modelopt`.

    FP8, per tensor with static inputs, or per output with dynamic ones; or None for a checkpoint of 16-bit weights with
    KV scales only.
    """
    has_kv_scales = any(fields.get(name) is not None for name in ("kv_cache_quant_algo", "kv_cache_scheme"))
    if fields.get("quant_algo") == "NO_QUANT" or (fields.get("quant_algo") is None and has_kv_scales):
        return None
    by_tensor = fields.expect("quant_algo", ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")) == "FP8"
    return EightBitScheme("fp8", Activations.STATIC if by_tensor else Activations.TOKEN, per_tensor=by_tensor)


def _packed(fields: Fields, weights: Fields, inputs: Fields | None) -> Int4Scheme:
    """Read int4 weights of compressed-tensors."""
    fields.expect("format", ("pack-quantized",))
    if inputs is not None:
        raise unsupported("quantization_config quantizes the inputs of four-bit weights, supported is 16 bits for them")
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


def _group(size: int) -> int | None:
    """Return the group size, None for -1, which means all inputs."""
    if size == -1:
        return None
    if size not in (32, 64, 128):
        raise unsupported(f"quantization_config groups {size} inputs, supported is 32, 64, 128 or -1")
    return size


def _four_bits(bits: int) -> None:
    if bits != PACKED_BITS:
        raise unsupported(f"quantization_config has {bits} bits, supported is 4")
