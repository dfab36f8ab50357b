"""The rotary table against that of transformers, for every scaling."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.engine_core.layers.rotary import RotaryTable, attention_factor, frequencies
from tandem.engine_core.rope_config import KINDS, DynamicScaling, LongRopeScaling, RopeConfig, RopeReader
from tests.support.rope_fields import EXTENDED, ORIGINAL, fields_of

CPU = torch.device("cpu")
HEADS = ((20, 1.0), (16, 0.75), (64, 1.0), (96, 0.5), (128, 0.75), (80, 0.4))


def of_transformers(fields: dict[str, Any], head_dim: int, share: float, length: int) -> tuple[torch.Tensor, float]:
    """Frequencies and attention factor in a sequence of `length` positions."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    config = LlamaConfig(
        head_dim=head_dim,
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=EXTENDED,
        rope_parameters={**fields, "partial_rotary_factor": share},
    )
    kind = fields["rope_type"]
    if kind == "default":
        return Phi3RotaryEmbedding.compute_default_rope_parameters(config)
    return ROPE_INIT_FUNCTIONS[kind](config, seq_len=length)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25)
@given(data=st.data())
def test_frequencies_equal_those_of_transformers(kind: str, data: st.DataObject) -> None:
    head_dim, share = data.draw(st.sampled_from(HEADS))
    length = data.draw(st.sampled_from((1, ORIGINAL, ORIGINAL + 1, EXTENDED, 3 * EXTENDED)))
    fields = data.draw(fields_of(kind, int(head_dim * share) // 2))
    rope = RopeReader(head_dim=head_dim, max_positions=EXTENDED, partial=True).read(
        rope_parameters={**fields, "partial_rotary_factor": share}
    )
    expected, factor = of_transformers(fields, head_dim, share, length)
    found = frequencies(rope, length)
    torch.testing.assert_close(found, expected, atol=0, rtol=2e-5)
    assert attention_factor(rope) == pytest.approx(factor, rel=1e-6)
    assert rope.rotary_dim == 2 * len(expected)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=3)
@given(data=st.data())
def test_tables_hold_scaled_cosines_and_signed_sines_of_every_position(kind: str, data: st.DataObject) -> None:
    fields, positions = data.draw(fields_of(kind, 12)), 700
    rope = RopeReader(head_dim=32, max_positions=EXTENDED, partial=True, partial_rotary_factor=0.75).read(
        rope_parameters=fields
    )
    where = torch.tensor([0, 1, 5, 63, 699])
    cos, sin = RotaryTable.build(rope, positions, CPU)(where)
    angles, factor = where.double()[:, None] * frequencies(rope, positions).double(), attention_factor(rope)
    assert cos.shape == sin.shape == (5, 1, rope.rotary_dim)
    close = {"atol": 1e-4, "rtol": 0.0}
    torch.testing.assert_close(cos[:, 0].double(), (angles.cos() * factor).repeat(1, 2), **close)
    expected = torch.cat((-angles.sin(), angles.sin()), -1) * factor
    torch.testing.assert_close(sin[:, 0].double(), expected, **close)


def test_longrope_takes_the_long_factors_only_above_the_original_positions() -> None:
    rope = RopeConfig(8, 10000.0, LongRopeScaling((1.0,) * 4, (2.0, 4.0, 8.0, 16.0), 64, 1.5))
    plain = frequencies(RopeConfig(8, 10000.0), 64)
    assert torch.equal(frequencies(rope, 64), plain)
    assert torch.equal(frequencies(rope, 65), plain / torch.tensor([2.0, 4.0, 8.0, 16.0]))
    # One table for all sequences: position 1 uses the long factors in an engine with 65 positions.
    cos, _ = RotaryTable.build(rope, 65, CPU)(torch.tensor([1]))
    torch.testing.assert_close(cos[0, 0, :4], 1.5 * frequencies(rope, 65).cos())


def test_tables_computed_in_slices_equal_those_computed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rope = RopeConfig(8, 10000.0, LongRopeScaling((1.0,) * 4, (2.0, 4.0, 8.0, 16.0), 16, 1.5))
    at_once = RotaryTable.build(rope, 100, CPU).table
    monkeypatch.setattr("tandem.engine_core.layers.rotary.SLICE", 32)
    assert torch.equal(RotaryTable.build(rope, 100, CPU).table, at_once)


def test_dynamic_scaling_keeps_the_base_up_to_the_original_positions() -> None:
    rope, plain = RopeConfig(8, 10000.0, DynamicScaling(4.0, 64)), RopeConfig(8, 10000.0)
    assert torch.equal(frequencies(rope, 10), frequencies(plain, 10))
    assert torch.equal(frequencies(rope, 64), frequencies(plain, 64))
    slower = frequencies(rope, 128) < frequencies(plain, 128)
    assert slower.tolist() == [False, True, True, True]
