"""Rotary fields of config.json: what is read, and what is refused."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.rope_config import (
    KINDS,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    RopeConfig,
    RopeReader,
    YarnScaling,
)
from tests.support.rope_fields import fields_of

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {"short_factor": [1.0] * 32, "long_factor": [2.0] * 32}
READER = RopeReader(head_dim=64, max_positions=32768)
PHI = RopeReader(
    head_dim=64, max_positions=32768, original_positions=4096, partial=True, partial_rotary_factor=0.75,
    longrope_names=("su", "yarn"),
)  # fmt: skip
GEMMA = RopeReader(head_dim=256, max_positions=131072)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, RopeConfig(64)),
        ({"rope_theta": 5e5}, RopeConfig(64, 5e5)),
        ({"rope_theta": 5e5, "rope_scaling": {}}, RopeConfig(64, 5e5)),
        ({"rope_parameters": {"rope_theta": 5e5}}, RopeConfig(64, 5e5)),
        ({"rope_theta": 3e5, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, RopeConfig(64, 5e5)),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0}}, RopeConfig(64)),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, RopeConfig(64, 1e4, LinearScaling(2.0))),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, RopeConfig(64, 1e4, DynamicScaling(2.0, 32768))),
        ({"rope_scaling": LLAMA3}, RopeConfig(64, 1e4, Llama3Scaling(8.0, 1.0, 4.0, 32768))),
        (
            {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 8192}},
            RopeConfig(64, 1e4, Llama3Scaling(8.0, 1.0, 4.0, 8192)),
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}},
            RopeConfig(64, 1e4, YarnScaling(4.0, 8192, 0.1 * math.log(4) + 1)),
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 8192, "truncate": False}},
            RopeConfig(64, 1e4, YarnScaling(4.0, 8192, 0.1 * math.log(4) + 1, truncate=False)),
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                              "beta_fast": 32, "beta_slow": 1, "finetuned": True}},
            RopeConfig(64, 1e4, YarnScaling(40.0, 32768, 1.0)),
        ),
        (
            {"rope_scaling": {"type": "su", **LONGROPE, "original_max_position_embeddings": 4096}},
            RopeConfig(64, 1e4, LongRopeScaling((1.0,) * 32, (2.0,) * 32, 4096, math.sqrt(1 + 3 / 12))),
        ),
        (
            {"rope_scaling": {"type": "longrope", **LONGROPE, "attention_factor": 1.25}},
            RopeConfig(64, 1e4, LongRopeScaling((1.0,) * 32, (2.0,) * 32, 32768, 1.25)),
        ),
        (
            {"rope_parameters": {"rope_type": "proportional", "partial_rotary_factor": 0.25}},
            RopeConfig(64, 1e4, ProportionalScaling(1.0, 8)),
        ),
    ],
)  # fmt: skip
def test_both_layouts_are_read(fields: dict[str, Any], expected: RopeConfig) -> None:
    assert READER.read(**fields) == expected


def test_the_original_positions_outside_the_rotary_fields_win() -> None:
    scaling = {"type": "longrope", "short_factor": [1.0] * 24, "long_factor": [2.0] * 24}
    expected = RopeConfig(48, 1e4, LongRopeScaling((1.0,) * 24, (2.0,) * 24, 4096, math.sqrt(1 + 3 / 12)))
    assert PHI.read(rope_scaling=scaling) == expected
    assert PHI.read(rope_scaling={**scaling, "original_max_position_embeddings": 8192}) == expected


def test_a_family_can_name_a_scaling_its_own_way() -> None:
    scaling = {"short_factor": [1.0] * 24, "long_factor": [2.0] * 24}
    found = [PHI.read(rope_scaling={"type": name, **scaling}) for name in ("su", "yarn", "longrope")]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    ("fields", "full", "sliding"),
    [
        ({}, RopeConfig(256, 1e6), RopeConfig(256, 1e4)),
        ({"rope_theta": 2e6, "rope_local_base_freq": 2e4}, RopeConfig(256, 2e6), RopeConfig(256, 2e4)),
        (
            {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
            RopeConfig(256, 1e6, LinearScaling(8.0)),
            RopeConfig(256, 1e4),
        ),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 3e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
                }
            },
            RopeConfig(256, 3e6, LinearScaling(8.0)),
            RopeConfig(256, 3e4),
        ),
        ({"rope_parameters": {"full_attention": None}}, RopeConfig(256, 1e6), RopeConfig(256, 1e4)),
    ],
)
def test_full_and_sliding_attention_have_tables_of_their_own(
    fields: dict[str, Any], full: RopeConfig, sliding: RopeConfig
) -> None:
    assert GEMMA.read_by_layer_type(**fields) == (full, sliding)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"rope_type": "linear", "factor": 8.0}, "factor, rope_type"),
        ({"full_attention": {}, "chunked_attention": {}}, "chunked_attention"),
        ({"full_attention": 3}, "full_attention .*3"),
        ({"sliding_attention": {"rope_type": "linear"}}, r"rope_parameters\.sliding_attention: factor\b"),
    ],
)
def test_misplaced_fields_of_layer_types_are_refused(parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        GEMMA.read_by_layer_type(rope_parameters=parameters)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"type": "mrope", "mrope_section": [16, 24, 24]}, 'rope_type "mrope"'),
        ({"rope_type": "ntk"}, 'rope_type "ntk".* default, linear, dynamic, llama3, yarn'),
        ({"type": "linear"}, 'factor .*rope_type "linear"'),
        ({"type": "linear", "factor": None}, "factor"),
        ({"type": "linear", "factor": 0.0}, "factor"),
        ({"type": "linear", "factor": "2"}, "factor"),
        ({"type": "linear", "factor": 2.0, "beta_fast": 3}, 'beta_fast .*rope_type "linear"'),
        ({"factor": 2.0}, 'factor .*rope_type "default"'),
        ({"type": "linear", "factor": 2.0, "mrope_section": [1]}, "mrope_section"),
        ({"type": "dynamic"}, "factor"),
        ({"type": "llama3", "factor": 2.0}, "low_freq_factor, high_freq_factor"),
        ({**LLAMA3, "low_freq_factor": 4.0}, r"low_freq_factor 4\.0 .*high_freq_factor 4\.0"),
        (
            {"type": "yarn", "factor": 2.0, "beta_fast": 1.0, "beta_slow": 2.0},
            r"beta_fast 1\.0 .*beta_slow 2\.0",
        ),
        ({"type": "yarn", "factor": 2.0, "short_factor": [1.0]}, "short_factor"),
        ({"type": "longrope", "short_factor": [1.0] * 32}, "long_factor"),
        ({"type": "longrope", **LONGROPE, "long_factor": [1.0] * 24}, "long_factor .*24 .*32"),
        ({"type": "longrope", **LONGROPE, "short_factor": [1.0] * 33}, "short_factor .*33 .*32"),
        ({"type": "longrope", **LONGROPE, "short_factor": [0.0] * 32}, "short_factor"),
        ({"type": "longrope", **LONGROPE, "original_max_position_embeddings": 1}, "original_max_position_embeddings 1"),
        ({"rope_theta": 1.0}, "rope_theta"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor 0\.5"),
        ({"partial_rotary_factor": 1.5}, r"partial_rotary_factor 1\.5"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention"),
    ],
)
def test_malformed_fields_are_refused_by_name(fields: dict[str, Any], words: str) -> None:
    for name in ("rope_scaling", "rope_parameters"):
        with pytest.raises(ConfigError, match=rf"{name}: .*{words}"):
            READER.read(**{name: fields})


@pytest.mark.parametrize(
    ("scaling", "lengths"),
    [
        (None, (4096, 4096)),
        (LinearScaling(4.0), (4096, 16384)),
        (DynamicScaling(2.5, 4096), (4096, 10240)),
        (LinearScaling(0.5), (4096, 4096)),
        (Llama3Scaling(8.0, 1.0, 4.0, 1024), (4096, 4096)),
        (YarnScaling(4.0, 4096, 1.1), (16384, 16384)),
        (YarnScaling(4.0, 1024, 1.1), (4096, 4096)),
        (LongRopeScaling((1.0,), (2.0,), 1024, 1.1), (4096, 4096)),
    ],
)
def test_scalings_that_can_be_stretched_have_longer_contexts(scaling: Any, lengths: tuple[int, int]) -> None:
    assert RopeConfig(64, 1e4, scaling).context_lengths(4096) == lengths


@pytest.mark.parametrize(("head_dim", "share", "words"), [(20, 0.25, "5 of 20"), (64, 0.02, "1 of 64")])
def test_a_part_of_a_head_that_makes_no_pairs_is_refused(head_dim: int, share: float, words: str) -> None:
    reader = RopeReader(head_dim=head_dim, max_positions=8, partial=True)
    with pytest.raises(ConfigError, match=rf"\b{words}\b"):
        reader.read(rope_parameters={"partial_rotary_factor": share})


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=10)
@given(data=st.data())
def test_any_complete_fields_are_read_and_none_can_be_left_out(kind: str, data: st.DataObject) -> None:
    fields = data.draw(fields_of(kind, 32))
    READER.read(rope_parameters=fields)
    for needed in KINDS[kind].needed:
        with pytest.raises(ConfigError, match=rf"\b{needed}\b"):
            READER.read(rope_parameters={name: value for name, value in fields.items() if name != needed})
