"""`--kv-dtype fp8` on a CPU: half the memory and more, and what accuracy it costs the default model."""

import torch

from tests.support.fp8_kv import Loss, build, logits, runtime_of, texts


def test_logits_stay_close_and_choices_stay_the_same() -> None:
    """Measured: an error of 0.08 on average and 0.96 at most, where logits deviate by 4.25; all choices the same."""
    wide, narrow = build("cpu", "auto"), build("cpu", "fp8")
    sequences = texts(wide)
    exact, found = logits(wide, sequences), logits(narrow, sequences)
    pool, reference = runtime_of(narrow).kv.pool, runtime_of(wide).kv.pool
    assert pool.dtype == torch.float8_e4m3fn
    assert pool.nbytes * 4 == reference.nbytes
    assert (runtime_of(narrow).model.kv_scales.values > 0).all(), "calibrated before the pool is used"
    for sort in exact:
        loss = Loss(exact[sort], found[sort])
        assert 0 < loss.mean < 0.05 * loss.deviation, f"{sort}: {loss}"
        assert loss.largest < 0.5 * loss.deviation, f"{sort}: {loss}"
        assert loss.same_choice >= 0.97, f"{sort}: {loss}"


def test_an_engine_with_an_fp8_pool_is_deterministic() -> None:
    narrow = build("cpu", "fp8")
    said = texts(narrow)
    assert len(said) == 4
    assert said == texts(narrow), "as deterministic as any other"
