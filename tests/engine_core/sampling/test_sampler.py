"""Choice of a sampling mode from the needs of a step's rows."""

import pytest

from tandem.engine_core.sampling.sampler import (
    BIASED,
    MASKED,
    PENALIZES,
    RANDOM,
    SUPPRESSES,
    TRUNCATES,
    Mode,
    needs_of,
)
from tandem.protocol.codec import pack_floats, pack_ids
from tandem.protocol.params import SamplingParams


@pytest.mark.parametrize(
    ("needs", "mode"),
    [
        (0, Mode.GREEDY),
        (RANDOM, Mode.UNTRUNCATED),
        (RANDOM | TRUNCATES, Mode.FULL),
        (PENALIZES, Mode.FULL),
        (BIASED, Mode.FULL),
        (SUPPRESSES, Mode.FULL),
        (MASKED, Mode.MASKED),
        (RANDOM | TRUNCATES | MASKED, Mode.MASKED),
    ],
)
def test_the_cheapest_mode_that_serves_all_needs_is_chosen(needs: int, mode: Mode) -> None:
    assert Mode.of(needs) is mode


@pytest.mark.parametrize(
    ("params", "needs"),
    [
        (SamplingParams(1, temperature=0.0, top_k=5), 0),
        (SamplingParams(1), RANDOM),
        (SamplingParams(1, min_p=0.1), RANDOM | TRUNCATES),
        (SamplingParams(1, temperature=0.0, repetition_penalty=1.1), PENALIZES),
        (SamplingParams(1, logit_bias_ids=pack_ids([3]), logit_bias_values=pack_floats([1.0])), RANDOM | BIASED),
    ],
)
def test_needs_follow_from_the_parameters_that_change_something(params: SamplingParams, needs: int) -> None:
    assert needs_of(params) == needs
