"""`tandem run-batch`: send the requests of a file concurrently.

Each result is written as it arrives.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterator

import httpx
import msgspec
from msgspec import Raw

from tandem.frontend.cli.batch.files import (
    RETRIED,
    BatchError,
    BatchFailure,
    BatchOutput,
    BatchRequest,
    BatchResponse,
    BatchResult,
    open_output,
    read_requests,
    result,
)
from tandem.frontend.cli.batch.progress import BatchProgress, Tally
from tandem.frontend.cli.connection import ServerError, error_of_response, headers, timeouts, unreachable
from tandem.frontend.cli.connection_failure import is_permanent
from tandem.frontend.cli.ending import INTERRUPTED
from tandem.frontend.cli.flags import api_key, trust
from tandem.frontend.cli.server_address import base_url, shown_url, unix_path

FIRST_PAUSE = 0.5
"""Seconds before the first retry."""
LAST_PAUSE = 60.0
"""Maximum seconds between retries, which is the longest Retry-After of this server."""
_JSON = {"content-type": "application/json"}


class BatchSender:
    """Send the requests of a batch, and retry those that are rejected by a busy server.

    A request is retried up to `retries` times after RETRIED statuses and broken connections. The pause doubles with
    each retry and is at least the server's Retry-After, but at most LAST_PAUSE seconds.

    """

    def __init__(
        self,
        http: httpx.AsyncClient,
        url: str,
        retries: int,
        progress: BatchProgress,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._http = http
        self._url = url
        self._retries = retries
        self._progress = progress
        self._sleep = sleep

    async def send(self, request: BatchRequest) -> BatchResponse | BatchFailure:
        """Send a request and return its result.

        This is the result of the last attempt. Raises ServerError if the server is unreachable or refuses the API key,
        which is not a result of the request.
        """
        pause = FIRST_PAUSE
        for retries_left in range(self._retries, -1, -1):
            retry_after = 0.0
            try:
                response = await self._http.post(
                    base_url(self._url) + request.url, content=memoryview(request.body).tobytes(), headers=_JSON
                )
            except (httpx.ReadTimeout, httpx.WriteTimeout) as error:
                return BatchFailure("request_timeout", str(unreachable(self._url, error)))
            except httpx.HTTPError as error:
                if not retries_left or is_permanent(error):
                    raise unreachable(self._url, error) from error
                remedy = "start one with `tandem serve`, or name another with --url"
                self._progress.wait(f"waiting for the server at {shown_url(self._url)}; {remedy}")
            else:
                if _refuses_key(response):
                    raise error_of_response(response)
                if response.status_code not in RETRIED or not retries_left:
                    self._progress.proceed()
                    return _to_result(response)
                shown = shown_url(self._url)
                self._progress.wait(f"waiting for the server at {shown}, which answers {response.status_code}")
                retry_after = _retry_after(response)
            await self._sleep(min(LAST_PAUSE, max(retry_after, pause)))
            pause *= 2
        raise AssertionError("the last attempt returns or raises")


def _refuses_key(response: httpx.Response) -> bool:
    """Return True if the server refuses the API key of the run.

    The key is invalid or lacks a right, so no request can succeed.
    """
    return response.status_code == 401 or (
        response.status_code == 403 and error_of_response(response).code == "insufficient_permissions"
    )


def _to_result(response: httpx.Response) -> BatchResponse | BatchFailure:
    body = response.content
    try:
        msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        return BatchFailure("invalid_response", f"the server's answer ({response.status_code}) is not JSON")
    return BatchResponse(response.status_code, response.headers.get("x-request-id", ""), Raw(body))


def _retry_after(response: httpx.Response) -> float:
    """Return the Retry-After header in seconds; 0 if it is absent or a date."""
    try:
        return max(0.0, float(response.headers.get("retry-after", 0)))
    except ValueError:
        return 0.0


def run_batch(arguments: argparse.Namespace) -> int:
    """Run the command `run-batch` and return its exit code.

    The code is 0 if every request has succeeded, 1 if not, and 2 for invalid files.
    """
    try:
        requests = read_requests(arguments.input)
        with open_output(arguments.output) as output:
            return _run(arguments, requests, output)
    except BatchError as error:
        print(f"tandem: {error}", file=sys.stderr)
        return 2


def _run(arguments: argparse.Namespace, requests: list[BatchRequest], output: BatchOutput) -> int:
    ids = {request.custom_id for request in requests}
    if unknown := [name for name in output.done if name not in ids]:
        raise BatchError(
            f"{arguments.output} has results of another batch, such as {unknown[0]!r}; choose another output"
        )
    todo = [request for request in requests if request.custom_id not in output.done]
    tally, started = Tally(), time.monotonic()
    unfinished: list[str] = []
    code = 0
    try:
        asyncio.run(_send_all(arguments, todo, output, tally, unfinished))
    except KeyboardInterrupt:
        code = INTERRUPTED
    except (ServerError, BatchError) as error:
        print(f"tandem: {error}", file=sys.stderr)
        code = 1
    if unfinished:
        print(
            f"tandem: requests left without an answer: {len(unfinished)}; the first, {unfinished[0]}", file=sys.stderr
        )
    print(tally.line(time.monotonic() - started), file=sys.stderr)
    succeeded, left = sum(output.done.values()), len(requests) - len(output.done)
    print(
        f"{len(requests)} requests: {succeeded} succeeded, {len(output.done) - succeeded} failed, {left} left"
        + ("; run the same command again to continue" if left else ""),
        file=sys.stderr,
    )
    return code or int(left > 0 or not all(output.done.values()))


async def _send_all(
    arguments: argparse.Namespace,
    requests: list[BatchRequest],
    output: BatchOutput,
    tally: Tally,
    unfinished: list[str],
) -> None:
    """Send the requests and write their results.

    Requests that the next run sends again are described in `unfinished`.
    """
    progress = BatchProgress(len(requests), tally)
    workers = min(arguments.concurrency, len(requests))
    limits = httpx.Limits(max_connections=workers or 1, max_keepalive_connections=workers or 1)

    def add_result(outcome: BatchResult) -> None:
        if outcome.is_final:
            output.add(outcome)
        elif outcome.response is not None:
            unfinished.append(f"{outcome.custom_id!r}: {_describe(outcome.response)}")
        tally.count(outcome)

    key = headers(api_key(arguments))
    allowed, context = timeouts(arguments.timeout), trust(arguments).context()
    path = unix_path(arguments.url)
    # A custom transport ignores the proxies of the environment, so use it only where none applies.
    unix = None if path is None else httpx.AsyncHTTPTransport(limits=limits, uds=path)
    async with httpx.AsyncClient(headers=key, timeout=allowed, limits=limits, verify=context, transport=unix) as http:
        sender = BatchSender(http, arguments.url, arguments.retries, progress)
        queue = iter(requests)
        drawing = asyncio.create_task(progress.keep_drawing())
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(workers):
                    group.create_task(_work(sender, queue, add_result))
        except* (ServerError, BatchError) as errors:
            raise errors.exceptions[0] from None
        finally:
            drawing.cancel()
            await asyncio.wait([drawing])


def _describe(response: BatchResponse) -> str:
    body = memoryview(response.body).tobytes()
    return str(error_of_response(httpx.Response(response.status_code, content=body)))


async def _work(sender: BatchSender, queue: Iterator[BatchRequest], add_result: Callable[[BatchResult], None]) -> None:
    for request in queue:
        add_result(result(request.custom_id, await sender.send(request)))
