"""Which modules the rules of a config name: every tool's way, with any prefix of the text model."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.quantization.module_names import ModuleNames, spellings, text_model_name
from tandem.engine_core.quantization.name_pattern import NamePattern
from tandem.engine_core.quantization.quantization import Quantization
from tandem.engine_core.quantization.reading import read_quantization
from tandem.engine_core.quantization.scheme import EightBitScheme, Int4Scheme, Scheme

LAYER = "model.layers.3."
CONFIGS: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8"},
    "auto-round": {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 128, "symmetric": True},
            }
        },
    },
}


def read(method: str, **fields: Any) -> Quantization:
    found = read_quantization(CONFIGS[method] | fields)
    assert found is not None
    return found


def is_quantized(found: Quantization, name: str) -> bool:
    return found.scheme_for(name) is not None


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("model.language_model.layers.3.mlp.down_proj", "model.layers.3.mlp.down_proj"),
        ("language_model.model.layers.3.mlp.down_proj.weight", "model.layers.3.mlp.down_proj.weight"),
        ("language_model.lm_head", "lm_head"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("model.layers.3.mlp.down_proj", "model.layers.3.mlp.down_proj"),
        ("lm_head", "lm_head"),
    ],
)
def test_prefixes_are_those_of_the_text_model(name: str, own: str) -> None:
    assert text_model_name(name) == own
    assert name in spellings(own)


@pytest.mark.parametrize(
    ("names", "inside", "outside"),
    [
        (ModuleNames.exactly(["a.b"]), ["a.b"], ["a.b.c", "x.a.b"]),
        (ModuleNames.exactly(["language_model.model.x.linear"]), ["model.x"], ["model.x.linear"]),
        (ModuleNames.exactly([r"re:.*layers\.3\.mlp"]), [f"{LAYER}mlp.up_proj"], [f"{LAYER}self_attn.q_proj"]),
        (ModuleNames.exactly(["re:lm_head"]), ["lm_head"], ["model.layers.0.mlp.up_proj"]),
        (ModuleNames.below(["mlp.gate"]), [f"{LAYER}mlp.gate", f"{LAYER}mlp.gate.x"], [f"{LAYER}mlp.gate_proj"]),
        (ModuleNames.below(["model.layers.3"]), [f"{LAYER}mlp.up_proj"], ["model.layers.30.mlp.up_proj"]),
        (ModuleNames.below(["*gate"]), [f"{LAYER}mlp.gate", f"{LAYER}mlp.gate.x"], [f"{LAYER}mlp.gate_proj"]),
        (ModuleNames.below(["model.layers.3.*"]), [f"{LAYER}mlp.up_proj"], ["model.layers.30.mlp.up_proj"]),
        (ModuleNames.containing(["mlp.gate"]), [f"{LAYER}mlp.gate", f"{LAYER}mlp.gate_proj"], [f"{LAYER}mlp.up_proj"]),
        (ModuleNames.containing(["mlp.gate."]), [f"{LAYER}mlp.gate"], [f"{LAYER}mlp.gate_proj"]),
        (ModuleNames.matching([r"model\.layers\.3"]), [f"{LAYER}mlp.up_proj"], ["model.layers.2.mlp.up_proj"]),
        (ModuleNames.matching([r"language_model\.model\.layers\.3"]), [f"{LAYER}mlp.up_proj"], ["lm_head"]),
    ],
)
def test_entries_name_modules_as_their_tools_do(names: ModuleNames, inside: list[str], outside: list[str]) -> None:
    assert all(names.find(name) is not None for name in inside)
    assert all(names.find(name) is None for name in outside)


IN_PROJ = [f"{LAYER}linear_attn.in_proj_{part}" for part in ("a", "b", "ba")]
QKV = f"{LAYER}linear_attn.in_proj_qkv"


@pytest.mark.parametrize(
    ("method", "fields"),
    [
        ("fp8", {"modules_to_not_convert": ["in_proj_a", "in_proj_b", "in_proj_ba", "model.language_model.embed"]}),
        (
            "fp8",
            {"ignored_layers": [f"model.language_model.layers.3.linear_attn.in_proj_{x}" for x in ("a", "b", "ba")]},
        ),
        ("gptq", {"dynamic": {r"-:.*in_proj_ba?$": {}, r"-:model\.language_model\..*in_proj_a$": {}}}),
        ("awq", {"modules_to_not_convert": ["in_proj_a", "in_proj_b"]}),
        ("modelopt", {"exclude_modules": ["*in_proj_a", "*linear_attn.in_proj_b*"]}),
        ("compressed-tensors", {"ignore": [r"re:.*linear_attn\.in_proj_[ab]a?$", f"{LAYER}linear_attn"]}),
        ("auto-round", {"extra_config": {r".*in_proj_(a|b|ba)": {"bits": 16}}}),
    ],
)
def test_small_projections_of_linear_attention_stay_in_sixteen_bits(method: str, fields: dict[str, Any]) -> None:
    """An entry for the parent module of compressed-tensors says nothing of the layers in it."""
    found = read(method, **fields)
    assert not any(is_quantized(found, name) for name in IN_PROJ)
    assert is_quantized(found, QKV)


@pytest.mark.parametrize(
    ("method", "fields"),
    [
        ("fp8", {"modules_to_not_convert": ["mlp.gate", "mlp.shared_expert_gate"]}),
        ("gptq", {"dynamic": {r"-:.*mlp\.gate$": {}, r"-:.*shared_expert_gate": {}}}),
        ("awq", {"modules_to_not_convert": ["mlp.gate.", "shared_expert_gate"]}),
        ("modelopt", {"ignore": ["*.mlp.gate", "*.mlp.shared_expert_gate"]}),
        ("compressed-tensors", {"ignore": [r"re:.*mlp\.gate$", "re:.*shared_expert_gate$"]}),
        (
            "auto-round",
            {"extra_config": {f"{LAYER}mlp.gate": {"bits": 16}, f"{LAYER}mlp.shared_expert_gate": {"bits": 16}}},
        ),
    ],
)
def test_routers_stay_in_sixteen_bits_and_gates_of_experts_do_not(method: str, fields: dict[str, Any]) -> None:
    found = read(method, **fields)
    assert not is_quantized(found, f"{LAYER}mlp.gate")
    assert not is_quantized(found, f"{LAYER}mlp.shared_expert_gate")
    assert is_quantized(found, f"{LAYER}mlp.experts.7.gate_proj")
    assert is_quantized(found, f"{LAYER}mlp.gate_proj")


@pytest.mark.parametrize("dtype", [None, "BF16"])
def test_a_router_with_a_stray_scale_is_not_quantized(dtype: str | None) -> None:
    """Known by its dtype, and by the config if only the names of the tensors are known."""
    names = {f"{LAYER}mlp.gate.weight": dtype, f"{LAYER}mlp.gate.weight_scale": dtype}
    ignored = read("fp8", ignored_layers=["mlp.gate"]).with_stored(names)
    assert not is_quantized(ignored, f"{LAYER}mlp.gate")
    if dtype is not None:
        assert not is_quantized(read("fp8").with_stored(names), f"{LAYER}mlp.gate")


def test_rules_may_name_modules_of_multi_token_prediction() -> None:
    for entries in (["mtp.fc", "mtp.layers.0.mlp.gate"], ["re:^mtp.*"], ["mtp*"]):
        found = read("modelopt", ignore=entries) if entries == ["mtp*"] else read("compressed-tensors", ignore=entries)
        assert is_quantized(found, f"{LAYER}mlp.down_proj")
        assert not is_quantized(found, "mtp.fc")


def test_layers_without_values_of_their_own_have_a_projection_of_queries_and_keys() -> None:
    """Gemma 4's full layers take the keys for values, and have no `v_proj`; other layers may differ in their bits."""
    extra = {f"model.language_model.layers.3.self_attn.{part}": {"bits": 16} for part in ("q_proj", "k_proj")}
    found = read("auto-round", extra_config=extra)
    assert found.part_schemes(f"{LAYER}self_attn.qk_proj", ("q_proj", "k_proj")) == [None, None]
    stored = found.with_stored({f"{LAYER}self_attn.{part}_proj.weight": "BF16" for part in "qk"})
    assert stored.part_schemes(f"{LAYER}self_attn.qk_proj", ("q_proj", "k_proj")) == [None, None]


def test_tails_of_groups_that_autoround_leaves_out_are_plain_by_their_tensors() -> None:
    stored = {f"{LAYER}mlp.down_proj.weight": None, f"{LAYER}mlp.up_proj.qweight": None}
    found = read("auto-round").with_stored(stored)
    assert not is_quantized(found, f"{LAYER}mlp.down_proj")
    assert is_quantized(found, f"{LAYER}mlp.up_proj")
    assert found.stored_plain == {f"{LAYER}mlp.down_proj"}


def test_of_several_rules_the_first_holds() -> None:
    dynamic = {r"-:.*\.up_proj": {}, r".*\.3\..*": {"group_size": 32}, r"+:.*\.mlp\..*": {"group_size": 64}}
    found = read("gptq", dynamic=dynamic)

    def group(name: str) -> Scheme | int | None:
        scheme = found.scheme_for(name)
        return scheme.group if isinstance(scheme, Int4Scheme) else scheme

    assert group(f"{LAYER}mlp.up_proj") is None
    assert (group(f"{LAYER}mlp.down_proj"), group("model.layers.2.mlp.down_proj")) == (32, 64)
    assert group("model.layers.2.self_attn.o_proj") == 128


def test_the_head_is_quantized_if_the_config_or_the_tensors_say_so() -> None:
    assert not is_quantized(read("fp8"), "lm_head")
    assert is_quantized(read("gptq", lm_head=True), "lm_head")
    assert is_quantized(read("compressed-tensors"), "lm_head")
    assert not is_quantized(read("compressed-tensors", ignore=["lm_head"]), "lm_head")
    stored = {"lm_head.weight": "F8_E4M3", "lm_head.weight_scale_inv": "F32"}
    assert isinstance(read("fp8").with_stored(stored).scheme_for("lm_head"), EightBitScheme)
    with pytest.raises(ConfigError, match=r"lm_head .*weight_scale_inv.* \"lm_head\""):
        read("fp8", modules_to_not_convert=["lm_head"]).with_stored(stored).scheme_for("lm_head")


def test_a_fused_module_of_the_checkpoint_decides_for_its_parts() -> None:
    parts = ("q_proj", "k_proj", "v_proj")
    name = f"{LAYER}self_attn.qkv_proj"
    found = read("compressed-tensors", ignore=[name])
    assert found.part_schemes(name, parts) == [None] * 3
    stored = found.with_stored({f"{name}.weight": "BF16"})
    assert stored.part_schemes(name, parts) == [None] * 3
    packed = read("compressed-tensors").with_stored({f"{name}.weight_packed": "I32"})
    assert len(set(packed.part_schemes(name, parts))) == 1 and packed.part_schemes(name, parts)[0] is not None


def test_scales_of_keys_and_values_do_not_decide_for_the_weights() -> None:
    parts = ("q_proj", "k_proj", "v_proj")
    name = f"{LAYER}self_attn.qkv_proj"
    stored = {f"{name}.k_scale": "F32"} | {f"{LAYER}self_attn.{part}.weight_packed": "I32" for part in parts}
    found = read("compressed-tensors").with_stored(stored)
    assert None not in found.part_schemes(name, parts)


PROJECTIONS = [
    f"model.layers.{layer}.{module}_proj"
    for layer in (1, 10, 11)
    for module in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
]
WAYS: dict[str, tuple[str, Callable[[str], dict[str, Any]]]] = {
    "modules_to_not_convert": ("fp8", lambda name: {"modules_to_not_convert": [name, "lm_head"]}),
    "ignored_layers": ("fp8", lambda name: {"ignored_layers": [name]}),
    "ignore": ("compressed-tensors", lambda name: {"ignore": ["lm_head", name]}),
    "ignore by expression": ("compressed-tensors", lambda name: {"ignore": [f"re:^{re.escape(name)}$"]}),
    "wrapped": ("compressed-tensors", lambda name: {"ignore": [f"{name}.linear"]}),
    "dynamic": ("gptq", lambda name: {"dynamic": {f"-:{re.escape(name)}$": {}}}),
    "awq": ("awq", lambda name: {"modules_to_not_convert": [name]}),
    "exclude_modules": ("modelopt", lambda name: {"exclude_modules": [name]}),
    "wildcards": ("modelopt", lambda name: {"exclude_modules": [f"*{name}*"]}),
    "extra_config": ("auto-round", lambda name: {"extra_config": {name: {"bits": 16}}}),
    "extra_config by expression": ("auto-round", lambda name: {"extra_config": {f"^{re.escape(name)}$": {"bits": 16}}}),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_excludes_one_layer_under_any_prefix(way: str) -> None:
    method, fields = WAYS[way]
    for excluded in PROJECTIONS:
        for spelling in spellings(excluded):
            found = read(method, **fields(spelling))
            assert [name for name in PROJECTIONS if not is_quantized(found, name)] == [excluded], spelling


def test_groups_of_compressed_tensors_name_layers_under_any_prefix() -> None:
    weights = CONFIGS["compressed-tensors"]["config_groups"]["group_0"]["weights"]
    for named in PROJECTIONS:
        for spelling in spellings(named):
            other = {"targets": [spelling], "weights": weights | {"group_size": 32}}
            groups = CONFIGS["compressed-tensors"]["config_groups"] | {"group_1": other}
            found = read("compressed-tensors", config_groups=groups)
            schemes = {name: found.scheme_for(name) for name in PROJECTIONS}
            assert [name for name, scheme in schemes.items() if scheme != found.default] == [named]


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_expressions_for_all_but_the_text_model_leave_it_quantized(prefix: str) -> None:
    name, wrapper = "model.layers.3.mlp.down_proj", prefix.rpartition(".")[0].removesuffix(".model")
    for expression in (rf"^(?!{re.escape(wrapper)}\.).*", "^(?!.*language_model).*"):
        ignored = read("compressed-tensors", ignore=[f"re:{expression}"])
        excluded = read("gptq", dynamic={f"-:{expression}": {}})
        packed = ignored.with_stored({f"{prefix}layers.3.mlp.down_proj.weight_packed": "I32"})
        stored = excluded.with_stored({f"{prefix}layers.3.mlp.down_proj.qweight": "I32"})
        assert all(is_quantized(found, name) for found in (ignored, excluded, packed, stored))


def test_expressions_of_autoround_match_anywhere_in_a_name() -> None:
    found = read("auto-round", extra_config={r"layers\.\d+\.mlp\.down_proj": {"bits": 16}})
    assert not is_quantized(found, f"{LAYER}mlp.down_proj")
    assert is_quantized(found, f"{LAYER}mlp.up_proj")


def test_of_targets_names_come_before_expressions_of_any_group() -> None:
    weights = CONFIGS["compressed-tensors"]["config_groups"]["group_0"]["weights"]
    targets = {
        "a": (["re:.*mlp.*", "re:.*self_attn.*"], 32),
        "b": ([f"{LAYER}mlp.down_proj"], 64),
        "c": (["Linear"], 128),
    }
    groups = {
        key: {"targets": named, "weights": weights | {"group_size": size}} for key, (named, size) in targets.items()
    }
    found = read("compressed-tensors", config_groups=groups)
    schemes = [found.scheme_for(LAYER + name) for name in ("mlp.down_proj", "mlp.up_proj", "linear_attn.out_proj")]
    assert [scheme.group for scheme in schemes if isinstance(scheme, Int4Scheme)] == [64, 32, 128]


def test_deeply_nested_lists_of_blocks_are_read() -> None:
    nested: Any = ["mlp.up_proj"]
    for _ in range(5000):
        nested = [nested]
    found = read("gptq", modules_in_block_to_quantize=nested)
    assert is_quantized(found, f"{LAYER}mlp.up_proj") and not is_quantized(found, f"{LAYER}mlp.down_proj")
    with pytest.raises(ConfigError, match="blocks"):
        read("gptq", modules_in_block_to_quantize=[[3]])


@pytest.mark.parametrize("entry", ["model.language_model.layers.3.mlp", "re:model.language_model.layers.3.*"])
def test_errors_quote_entries_as_the_config_has_them(entry: str) -> None:
    found = read("fp8", modules_to_not_convert=[entry]).with_stored({f"{LAYER}mlp.down_proj.weight": "F8_E4M3"})
    with pytest.raises(ConfigError, match=re.escape(f'"{entry}"')):
        found.scheme_for(f"{LAYER}mlp.down_proj")


def test_few_of_many_expressions_are_matched_with_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of 20,000 experts with three expressions for each layer would take seconds to build otherwise."""
    parts = ("mlp.gate", "self_attn", "input")
    found = read(
        "gptq", dynamic={rf"-:.*layers\.{layer}\.{re.escape(part)}.*": {} for layer in range(48) for part in parts}
    )
    matched: list[str] = []
    matches = NamePattern.matches

    def counting(pattern: NamePattern, names: tuple[str, ...], stored_as: str | None) -> bool:
        matched.append(pattern.entry)
        return matches(pattern, names, stored_as)

    monkeypatch.setattr(NamePattern, "matches", counting)
    assert len(found.rules) == 2
    assert is_quantized(found, f"{LAYER}mlp.experts.7.up_proj") and matched == []
    assert not is_quantized(found, f"{LAYER}self_attn.q_proj") and len(matched) == 1
