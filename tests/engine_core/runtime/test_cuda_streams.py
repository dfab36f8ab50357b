"""Streams of the devices that one thread opens, and events in them."""

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


def test_events_are_recorded_and_awaited_in_the_stream_that_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = FakeStreams(monkeypatch)
    device = open_device("cuda")
    event, mark = device.event(), device.instant()
    current = []
    for side in (device.upload, device.copy):
        event.record()
        current.append(streams.current)
        with side():
            event.wait()
            event.record()
            mark.record()
            current.append(streams.current)
    plain, timed = streams.events
    assert plain.recorded == current and len(set(current)) == 3
    assert plain.awaited == timed.recorded == current[1::2]
    assert (plain.enable_timing, timed.enable_timing) == (False, True)
    assert mark.elapsed_time(mark) == 0.5
