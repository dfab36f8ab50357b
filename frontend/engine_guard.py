"""Ends an engine that will not recover by itself, so that it is started again."""

import asyncio
import logging

from tandem.frontend.engine.monitor import EngineMonitor
from tandem.frontend.supervisor.process import Child

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.25


async def guard_engine(engine: Child, monitor: EngineMonitor) -> None:
    """Kills the engine's process whenever its beats say that it is hung, or have long stopped. Runs until cancelled."""
    loop = asyncio.get_running_loop()
    expected = loop.time()
    while True:
        await asyncio.sleep(TICK_SECONDS)
        now = loop.time()
        if now - expected > TICK_SECONDS + 1.0:
            monitor.excuse()
        expected = now
        if engine.pid is not None and (reason := monitor.hopeless()):
            logger.error("the %s, process %d, is killed: %s", engine.name, engine.pid, reason)
            engine.restart()
