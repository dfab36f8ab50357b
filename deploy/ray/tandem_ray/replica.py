"""One replica of the application."""

import asyncio
import re
from contextlib import ExitStack
from typing import Any

import httpx
from ray import serve

from tandem.frontend.run_directory import run_directory
from tandem_ray.proxy import UnixProxy
from tandem_ray.scaling import QUEUED_TOKENS, ROW_SHARE
from tandem_ray.settings import Settings
from tandem_ray.supervisor import TANDEM, Supervisor, end_process

_POLL_SECONDS = 0.2
_SECONDS_TO_ANSWER = 10.0


@serve.ingress()
class TandemReplica:
    """A supervisor with its engine core and frontends, behind Ray's proxies.

    Ray calls the methods by their names. A replica whose service has ended ends at once, with the process.
    """

    def __init__(self, settings: Settings) -> None:
        self._stack = ExitStack()
        uds = str(self._stack.enter_context(run_directory()) / "http")
        self._proxy = UnixProxy(uds)
        self._supervisor = Supervisor(settings.command(TANDEM, uds), self._on_exit)
        self._ops = httpx.AsyncClient(timeout=_SECONDS_TO_ANSWER)
        self._serves = False

    async def __serve_build_asgi_app__(self) -> UnixProxy:
        """Start the service, wait until it is ready, and return the application that passes requests on.

        Raises RuntimeError, with what the service said last, if it ends before.
        """
        self._supervisor.start()
        while await self._problem():
            if self._supervisor.exit_status:
                raise RuntimeError(
                    f"tandem serve ended with {self._supervisor.exit_status} before it was ready:\n"
                    f"{self._supervisor.last_words}"
                )
            await asyncio.sleep(_POLL_SECONDS)
        self._serves = True
        return self._proxy

    async def check_health(self) -> None:
        """Raise RuntimeError, with its reason, while the service is not ready."""
        if problem := await self._problem():
            raise RuntimeError(problem)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the statistics that the number of replicas follows; none while the service cannot be asked."""
        try:
            text = (await self._ops.get(f"{self._supervisor.ops_url}/metrics")).text
        except (httpx.HTTPError, httpx.InvalidURL):
            return {}
        queued, running, rows = (
            metric(text, f"tandem_{name}") for name in ("num_queued_prompt_tokens", "num_requests_running", "num_rows")
        )
        if queued is None or running is None or not rows:
            return {}
        return {QUEUED_TOKENS: queued, ROW_SHARE: running / rows}

    async def __del__(self) -> None:
        """Stop the service once Ray has no more requests for this replica."""
        self._serves = False
        await asyncio.to_thread(self._supervisor.stop)
        await self._ops.aclose()
        self._stack.close()

    async def _problem(self) -> str:
        """Return why the service takes no requests, or ""."""
        try:
            answer = await self._proxy.client.get("/health/ready", timeout=_SECONDS_TO_ANSWER)
        except httpx.TransportError as error:
            return f"the service does not answer: {error or type(error).__name__}"
        return "" if answer.status_code == 200 else f"the service is not ready: {answer.text}"

    def _on_exit(self) -> None:
        if self._serves:
            end_process()


def metric(text: str, name: str) -> float | None:
    """Return the sum of a metric's series in the text format of Prometheus; None without any."""
    found: list[Any] = re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
    return sum(map(float, found)) if found else None
