"""Counters are kept per kernel and device."""

from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch

from tandem.engine_core.kernels.attention import split_counters as module
from tandem.engine_core.kernels.attention.split_counters import COUNTERS, split_counters

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def none_yet() -> Iterator[None]:
    with patch.dict(module._counters, clear=True):
        yield


def test_a_kernel_gets_the_same_zeroed_counters_each_time() -> None:
    """Captured graphs hold their address."""
    first = split_counters("decode", CPU)
    assert (first.dtype, first.shape, bool(first.any())) == (torch.int32, (COUNTERS,), False)
    first[7] = 3
    assert split_counters("decode", CPU) is first


def test_kernels_and_devices_have_counters_of_their_own() -> None:
    others = [
        split_counters("decode", CPU),
        split_counters("prefill", CPU),
        split_counters("decode", torch.device("meta")),
    ]
    assert len({id(each) for each in others}) == 3
    assert [each.device.type for each in others] == ["cpu", "cpu", "meta"]


def test_the_first_call_under_capture_is_refused_by_name_and_later_ones_are_not() -> None:
    """What is allocated under capture belongs to the graph, and is zeroed by each replay."""
    device = torch.device("cuda", 0)
    with patch.object(torch.cuda, "is_current_stream_capturing", lambda: True):
        with pytest.raises(RuntimeError, match=r"^decode\b.*\bgraph"):
            split_counters("decode", device)
        module._counters["decode", device] = torch.zeros(1)
        assert split_counters("decode", device) is module._counters["decode", device]
        assert len(split_counters("decode", CPU)) == COUNTERS
