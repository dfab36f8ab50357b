"""Scales of keys and values are calibrated before the pool is allocated."""

import logging

import pytest
import torch
from msgspec import structs
from torch import Tensor

from tandem.engine_core.attention.base import LayerAttention
from tandem.engine_core.errors import ConfigError
from tandem.engine_core.kernels.kv_dtype import LARGEST
from tandem.engine_core.kv_cache.storage import KVLayout
from tandem.engine_core.models.decoder import Decoder
from tandem.engine_core.startup.kv_calibration import MARGIN, calibrate_kv_scales
from tests.support.paged_model import PagedRun, chunked
from tests.support.refusals import numbers_in
from tests.support.tiny_llama import CONFIG, MAX_LEN, random_model

FP8 = torch.float8_e4m3fn
LAYOUT = KVLayout.of_one_group(
    CONFIG.layers,
    page_size=4,
    kv_heads=CONFIG.kv_heads,
    head_dim=CONFIG.head_dim,
    dtype=FP8,
)
LENGTHS, PREFILL = [23, 9], [20, 4]


def calibrate(model: Decoder, layout: KVLayout = LAYOUT, max_len: int = MAX_LEN) -> None:
    calibrate_kv_scales(model, layout, torch.float32, max_len)


def logits(model: Decoder, dtype: torch.dtype, chunk: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    tokens = [torch.randint(CONFIG.vocab_size, (length,), generator=generator) for length in LENGTHS]
    return torch.cat(PagedRun(model, tokens, 4, seed=7, dtype=dtype).run(chunked(LENGTHS, PREFILL, chunk)))


def loss(model: Decoder, dtype: torch.dtype = FP8) -> float:
    """Mean error of a logit, as a share of the deviation of logits."""
    exact = logits(model, torch.float32)
    return float((logits(model, dtype) - exact).abs().mean() / exact.std())


def enlarge(model: Decoder, keys: float, values: float) -> None:
    """Multiply the keys of the second layer and divide its queries, and multiply values and divide what they become.

    The model computes what it did before.
    """
    heads, kv_heads, width = CONFIG.heads * CONFIG.head_dim, CONFIG.kv_heads * CONFIG.head_dim, CONFIG.hidden_size
    for slot in model.weight_slots():
        if slot.name == "model.layers.1.self_attn.q_proj.weight":
            assert slot.target.shape == (heads, width)
            slot.target.div_(keys)
        elif slot.name == "model.layers.1.self_attn.k_proj.weight":
            assert slot.target.shape == (kv_heads, width)
            slot.target.mul_(keys)
        elif slot.name == "model.layers.1.self_attn.v_proj.weight":
            slot.target.mul_(values)
        elif slot.name == "model.layers.1.self_attn.o_proj.weight":
            slot.target.div_(values)


@pytest.mark.parametrize(("keys", "values"), [(2.0**14, 1.0), (1.0, 2.0**9), (2.0**-20, 2.0**-20)])
def test_keys_and_values_of_any_size_are_kept_with_scales_and_lost_without(keys: float, values: float) -> None:
    """With scales rounding costs what it costs numbers of a usual size."""
    usual, model = random_model(), random_model()
    calibrate(usual)
    rounding = loss(usual)
    assert 0 < rounding < 0.1
    enlarge(model, keys, values)
    model.kv_scales.values.fill_(1.0)
    assert loss(model) > 3 * rounding
    model.kv_scales.values.zero_()
    calibrate(model)
    assert loss(model) == pytest.approx(rounding, rel=0.02)


def test_a_scale_is_the_margin_over_the_largest_number_seen() -> None:
    model = random_model()
    calibrate(model)
    before = model.kv_scales.values.clone()
    assert (before > 0).all()
    enlarge(model, 8.0, 4.0)
    model.kv_scales.values.zero_()
    calibrate(model)
    torch.testing.assert_close(model.kv_scales.values / before, torch.tensor([[1.0, 1.0], [8.0, 4.0]]))


def test_calibration_gives_the_same_scales_every_time() -> None:
    first, second = random_model(), random_model()
    calibrate(first)
    calibrate(second)
    assert torch.equal(first.kv_scales.values, second.kv_scales.values)


def test_text_stays_below_the_margin() -> None:
    """Numbers of sequences that the calibration has not seen are stored without clamping."""
    model = random_model()
    calibrate(model)
    tokens = [torch.arange(50) % CONFIG.vocab_size]
    run = PagedRun(model, tokens, 4, seed=7, dtype=FP8)
    run.step([(0, 0, 50)])
    used = run.storage.pool[run.pages[0].long()].float().abs().amax((0, 3, 4, 5))
    assert (used < LARGEST).all() and (used > LARGEST / MARGIN / 4).all()


def test_scales_of_the_checkpoint_are_kept_and_the_others_calibrated(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="tandem")
    model = random_model()
    model.kv_scales.values[1, 0] = 0.125
    calibrate(model)
    scales = model.kv_scales.values
    assert scales[1, 0] == 0.125
    assert (scales > 0).all()
    assert any(numbers_in(line)[:3] == [2, 1, 3] for line in caplog.messages)


def test_scales_that_are_all_given_are_not_calibrated(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="tandem")
    model = random_model()
    model.kv_scales.values.fill_(0.5)
    calibrate(model, max_len=0)
    assert (model.kv_scales.values == 0.5).all()
    assert any(numbers_in(line)[:3] == [2, 4, 0] for line in caplog.messages)


def test_a_pool_of_the_model_s_own_dtype_uses_no_scales(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="tandem")
    model, wide = random_model(), structs.replace(LAYOUT, dtype=torch.float32)
    calibrate(model, wide)
    assert not caplog.messages
    exact = logits(model, torch.float32)
    model.kv_scales.values.fill_(0.5)
    calibrate(model, wide)
    assert "--kv-dtype fp8" in caplog.text
    assert torch.equal(logits(model, torch.float32), exact)


@pytest.mark.parametrize("scale", [-1.0, float("nan"), float("inf")])
def test_scales_that_cannot_be_are_refused(scale: float) -> None:
    model = random_model()
    model.kv_scales.values.fill_(0.5)
    model.kv_scales.values[1, 1] = scale
    with pytest.raises(ConfigError, match=rf"\b1\b.*{scale}"):
        calibrate(model)


@pytest.mark.parametrize("broken", [float("nan"), 0.0])
def test_a_model_of_which_nothing_can_be_learnt_gets_scales_of_1(broken: float) -> None:
    model = random_model()
    for slot in model.weight_slots():
        if slot.name == "model.layers.0.self_attn.k_proj.weight":
            slot.target.fill_(broken)
    calibrate(model)
    assert model.kv_scales.values[0, 0] == 1
    assert model.kv_scales.values[0, 1] > 0


@pytest.mark.parametrize("max_len", [1, 2, 17])
def test_short_contexts_are_calibrated(max_len: int) -> None:
    kinds = (LayerAttention(CONFIG.head_dim**-0.5), LayerAttention(CONFIG.head_dim**-0.5, window=3))
    model = random_model(config=structs.replace(CONFIG, attention=kinds, max_positions=max_len))
    calibrate(model, max_len=max_len)
    assert (model.kv_scales.values > 0).all()


@pytest.mark.parametrize("architecture", ["Gemma2ForCausalLM", "Olmo2ForCausalLM", "Qwen3ForCausalLM"])
def test_blocks_of_every_sort_pass_their_layer_s_scales_on(architecture: str) -> None:
    config = structs.replace(CONFIG, architecture=architecture, qk_norm=architecture == "Qwen3ForCausalLM")
    usual, model = random_model(config=config), random_model(config=config)
    calibrate(usual)
    enlarge(model, 1.0, 2.0**9)
    model.kv_scales.values.fill_(1.0)
    assert loss(model) > 2 * loss(usual)
    model.kv_scales.values.zero_()
    calibrate(model)
    assert loss(model) == pytest.approx(loss(usual), rel=0.02)
