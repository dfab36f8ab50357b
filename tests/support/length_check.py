"""Check of I9 on a real runtime: the host's counts against the device's table of lengths."""

from tandem.engine_core.engine import Engine
from tandem.engine_core.runtime.runtime import TorchRuntime
from tandem.engine_core.scheduler.audit import audit_lengths


def check_lengths(engine: Engine, wait: bool = False) -> None:
    """Check between two ticks. A GPU is asked only if it may be waited for."""
    runtime = engine.runtime
    assert isinstance(runtime, TorchRuntime)
    lengths = runtime.tables.sampling.lengths
    if wait or lengths.device.type == "cpu":
        step = engine.pipeline.unsampled()
        unsampled = {row.seq_id for row in step.plan.rows if row.samples} if step is not None else set()
        assert audit_lengths(engine.scheduler.held, lengths.tolist(), unsampled) == []
