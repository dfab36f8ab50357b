"""Metrics of an engine that has computed steps of 64 rows, all of them with a mask."""

from prometheus_client import generate_latest

from tandem.engine_core.stats import STAGES, new_stats
from tandem.frontend.engine.metrics import EngineTotals
from tandem.protocol.events import Heartbeat, Phase


def metrics_after(steps: int, ended: int = 0) -> str:
    """Return what the ops port tells after steps and ends of requests.

    A step takes 0 us in its first stage and 1 us more in each that follows, a mask 5 us; the GPU waits for a quarter of
    the time.
    """
    stats = new_stats()
    for number, stage in enumerate(STAGES):
        stats.stage_seconds[stage] = steps * number * 1e-6  # metrics have them to 2**-20 s
    for _ in range(steps):
        stats.step_rows.observe(64)
    stats.mask_rows, stats.mask_seconds = 64 * steps, 64 * steps * 5e-6
    stats.gpu_busy_seconds, stats.gpu_idle_seconds = 0.75 * steps, 0.25 * steps
    stats.requests_finished["length"] = ended
    totals = EngineTotals()
    totals.observe(Heartbeat(7, Phase.READY, 100, "", 0, stats))
    return generate_latest(totals).decode()
