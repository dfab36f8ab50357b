"""`tandem run-batch`: send the requests of a file concurrently.

Each result is written as it arrives.
"""

import argparse
import asyncio
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator

import httpx
import msgspec
from msgspec import Raw, Struct

from tandem.frontend.cli.batch_files import (
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
from tandem.frontend.cli.connection import ServerError, headers, timeouts, unreachable
from tandem.frontend.cli.flags import INTERRUPTED, api_key
from tandem.frontend.progress import Progress

RETRIED = frozenset({429, 502, 503, 504})
"""Statuses of a busy server or proxy, which say nothing about the request itself."""

FIRST_PAUSE = 0.5
"""Seconds before the first retry."""
LAST_PAUSE = 30.0
"""Longest pause between retries in seconds."""
_JSON = {"content-type": "application/json"}


class BatchSender:
    """Send the requests of a batch, and retry those that a busy server turns away.

    A request is retried up to `retries` times after RETRIED statuses and broken connections. The pause doubles with
    each retry and is at least the server's Retry-After, but at most LAST_PAUSE seconds.
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
        """Send a request and return its result.

        Raises ServerError if the server cannot be reached, which is not a result of the request.
        """
        pause = FIRST_PAUSE
        for retries_left in range(self._retries, -1, -1):
            retry_after = 0.0
            try:
                response = await self._http.post(
                    self._url + request.url, content=memoryview(request.body).tobytes(), headers=_JSON
                )
            except (httpx.ReadTimeout, httpx.WriteTimeout) as error:
                return BatchFailure("request_timeout", str(unreachable(self._url, error)))
            except httpx.HTTPError as error:
                if not retries_left:
                    raise unreachable(self._url, error) from error
            else:
                if response.status_code not in RETRIED or not retries_left:
                    return _to_result(response)
                retry_after = _retry_after(response)
            await self._sleep(min(LAST_PAUSE, max(retry_after, pause)))
            pause *= 2
        raise AssertionError("the last attempt returns or raises")


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


class _Usage(Struct):
    """Token counts under the names of both of OpenAI's APIs."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0


class _Body(Struct):
    usage: _Usage


def _usage(body: Raw) -> _Usage:
    """Read the usage of an answer, or zeros if the server does not report it."""
    try:
        return msgspec.json.decode(body, type=_Body).usage
    except msgspec.ValidationError:
        return _Usage()


class Tally:
    """Count the results and tokens of one run."""

    def __init__(self) -> None:
        self.succeeded = 0
        self.failures: Counter[str] = Counter()
        """Number of failures by status, or by error code if there was no response."""
        self.tokens_in = 0
        self.tokens_out = 0

    def count(self, outcome: BatchResult) -> None:
        """Add one result."""
        response = outcome.response
        if response is None:
            assert outcome.error is not None
            self.failures[outcome.error.code] += 1
        elif response.status_code != 200:
            self.failures[str(response.status_code)] += 1
        else:
            self.succeeded += 1
            usage = _usage(response.body)
            self.tokens_in += usage.prompt_tokens + usage.input_tokens
            self.tokens_out += usage.completion_tokens + usage.output_tokens

    def line(self, seconds: float) -> str:
        """Format the counts of a run of this duration as one line."""
        failed = ", ".join(f"{count} with {name}" for name, count in sorted(self.failures.items()))
        return (
            f"this run: {self.succeeded} succeeded, {self.failures.total()} failed{f' ({failed})' if failed else ''}; "
            f"{self.tokens_in} tokens in, {self.tokens_out} out, {seconds:.1f} s, "
            f"{self.tokens_out / max(seconds, 1e-9):.1f} tokens/s"
        )


def run_batch(arguments: argparse.Namespace) -> int:
    """Run the command `run-batch` and return its exit code.

    The code is 0 if every request of the file has succeeded, 1 if not, and 2 for invalid files.
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
    code = 0
    try:
        asyncio.run(_send_all(arguments, todo, output, tally))
    except KeyboardInterrupt:
        code = INTERRUPTED
    except ServerError as error:
        print(f"tandem: {error}", file=sys.stderr)
        code = 1
    print(tally.line(time.monotonic() - started), file=sys.stderr)
    succeeded, left = sum(output.done.values()), len(requests) - len(output.done)
    print(
        f"{len(requests)} requests: {succeeded} succeeded, {len(output.done) - succeeded} failed, {left} left"
        + ("; run the same command again to continue" if left else ""),
        file=sys.stderr,
    )
    return code or int(not all(output.done.values()))


async def _send_all(
    arguments: argparse.Namespace, requests: list[BatchRequest], output: BatchOutput, tally: Tally
) -> None:
    progress = Progress("batch", len(requests), None)
    workers = min(arguments.concurrency, len(requests))
    limits = httpx.Limits(max_connections=workers or 1, max_keepalive_connections=workers or 1)
    started = time.monotonic()

    def add_result(outcome: BatchResult) -> None:
        output.add(outcome)
        tally.count(outcome)
        progress.draw(tally.succeeded + tally.failures.total(), time.monotonic() - started)

    key = headers(api_key(arguments))
    async with httpx.AsyncClient(headers=key, timeout=timeouts(arguments.timeout), limits=limits) as http:
        sender = BatchSender(http, arguments.url, arguments.retries)
        queue = iter(requests)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(workers):
                    group.create_task(_work(sender, queue, add_result))
        except* ServerError as errors:
            raise errors.exceptions[0] from None
        finally:
            progress.clear()


async def _work(sender: BatchSender, queue: Iterator[BatchRequest], add_result: Callable[[BatchResult], None]) -> None:
    for request in queue:
        add_result(result(request.custom_id, await sender.send(request)))
