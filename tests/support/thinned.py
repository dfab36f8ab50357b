"""Products of parameters, of which the default suite runs a sample that covers them."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
from _pytest.mark import ParameterSet

ONE_IN = 4


def thinned(*axes: Sequence[Any]) -> list[ParameterSet]:
    """Return every combination, those outside the sample marked slow.

    The sample is one combination in four, or in as many as the shortest axis has values. It has each value of two axes,
    and each pair of values of three.
    """
    stride = min(ONE_IN, *map(len, axes))
    found = []
    for chosen in product(*map(enumerate, axes)):
        sampled = sum(index for index, _ in chosen) % stride == 0
        found.append(pytest.param(*(value for _, value in chosen), marks=[] if sampled else [pytest.mark.slow]))
    return found
