"""Streams of the devices that one thread opens."""

import pytest

from tandem.engine_core.runtime.device import CudaDevice, open_device
from tests.fakes.cuda_streams import FakeStreams


def test_devices_of_one_thread_share_its_compute_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their engines' kernels share counters; uploads and copies of each have streams of their own."""
    streams = FakeStreams(monkeypatch)
    others = []
    for _ in range(2):
        device = open_device("cuda")
        assert isinstance(device, CudaDevice)
        compute = streams.current
        assert compute.number == 1
        for side in (device.upload, device.copy):
            with side():
                others.append(streams.current)
            assert streams.current == compute, "the compute stream is current again"
    assert len({compute, streams.default, *others}) == 6
