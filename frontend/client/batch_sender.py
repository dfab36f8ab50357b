"""One request of a batch, sent until there is an answer to keep."""

import asyncio
from collections.abc import Awaitable, Callable

import httpx
import msgspec
from msgspec import Raw

from tandem.frontend.cli.batch_files import BatchRequest
from tandem.frontend.client.batch_output import BatchFailure, BatchResponse
from tandem.frontend.client.server_error import unreachable

RETRIED = frozenset({429, 502, 503, 504})
"""Nothing is wrong with a request that gets one of these, or with the server behind a proxy."""

FIRST_PAUSE = 0.5
LAST_PAUSE = 30.0
_JSON = {"content-type": "application/json"}


class BatchSender:
    """Tries again after 429, 502, 503 and 504 and after broken connections, up to `retries` times.

    A pause doubles each time and is never shorter than the server's Retry-After, up to LAST_PAUSE seconds.
    """

    def __init__(
        self,
        http: httpx.AsyncClient,
        url: str,
        retries: int,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._http = http
        self._url = url
        self._retries = retries
        self._sleep = sleep

    async def send(self, request: BatchRequest) -> BatchResponse | BatchFailure:
        """Raises ServerError where the server cannot be reached at all: that is no fault of this request."""
        pause = FIRST_PAUSE
        for left in range(self._retries, -1, -1):
            wanted = 0.0
            try:
                response = await self._http.post(
                    self._url + request.url, content=memoryview(request.body).tobytes(), headers=_JSON
                )
            except (httpx.ReadTimeout, httpx.WriteTimeout) as error:
                return BatchFailure("request_timeout", str(unreachable(self._url, error)))
            except httpx.HTTPError as error:
                if not left:
                    raise unreachable(self._url, error) from error
            else:
                if response.status_code not in RETRIED or not left:
                    return _kept(response)
                wanted = _retry_after(response)
            await self._sleep(min(LAST_PAUSE, max(wanted, pause)))
            pause *= 2
        raise AssertionError("the last try returns or raises")


def _kept(response: httpx.Response) -> BatchResponse | BatchFailure:
    body = response.content
    try:
        msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        return BatchFailure("invalid_response", f"the server's answer ({response.status_code}) is no JSON")
    return BatchResponse(response.status_code, response.headers.get("x-request-id", ""), Raw(body))


def _retry_after(response: httpx.Response) -> float:
    """Seconds; 0 for none, and for a date, which the doubling pause has to do for."""
    try:
        return max(0.0, float(response.headers.get("retry-after", 0)))
    except ValueError:
        return 0.0
