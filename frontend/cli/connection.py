"""HTTP connection of the terminal commands to a server."""

import ssl
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import httpx
import msgspec
from msgspec import Struct

from tandem.frontend.cli.connection_failure import connection_failure
from tandem.frontend.cli.server_address import base_url, shown_url, unix_path
from tandem.frontend.cli.trust import Trust

_MAX_MESSAGE_CHARS = 500


class ServerError(Exception):
    """A request was refused, failed, or found no server.

    The message is one line for the user; `code` is the server's error code, "" if there is none.
    """

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class _Body(Struct):
    message: str
    code: str | int | None = None


class _Envelope(Struct):
    error: _Body


def error_of_response(response: httpx.Response) -> ServerError:
    """Build the error of a response with a status other than 200.

    The body must have been read.
    """
    try:
        error = msgspec.json.decode(response.content, type=_Envelope).error
    except msgspec.MsgspecError:
        return ServerError(_one_line(f"the server answered {response.status_code}: {response.text or 'nothing'}"))
    code = f", {error.code}" if error.code else ""
    remedy = "; give --api-key or set TANDEM_API_KEY" if response.status_code == 401 else ""
    return ServerError(_one_line(f"{error.message} ({response.status_code}{code}){remedy}"), str(error.code or ""))


def error_of_event(error: object) -> ServerError:
    """Build the error of a stream from its error event."""
    try:
        return ServerError(_one_line(msgspec.convert(error, _Body).message))
    except msgspec.ValidationError:
        return ServerError(_one_line(f"the server ended the answer with an error: {error}"))


def unreachable(url: str, error: httpx.HTTPError) -> ServerError:
    """Build the error of a request without a response."""
    return ServerError(_one_line(connection_failure(url, error)))


def _one_line(text: str) -> str:
    line = "".join([character if character.isprintable() else "\ufffd" for character in " ".join(text.split())])
    return line if len(line) <= _MAX_MESSAGE_CHARS else line[:_MAX_MESSAGE_CHARS] + "..."


_DATA = b"data:"
_END = b"[DONE]"


def event_data(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the data of each server-sent event up to `[DONE]`.

    Events are one line each, as in OpenAI's streams. Raises EOFError if the stream ends early. Only LF ends a line,
    since JSON may contain the other characters that Python treats as line ends.
    """
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if not line.startswith(_DATA):
                continue
            data = line.removeprefix(_DATA).strip()
            if data == _END:
                return
            yield data
    raise EOFError("the stream ended without [DONE]")


CONNECT_SECONDS = 10.0
"""Connect timeout in seconds."""


def headers(api_key: str | None) -> dict[str, str]:
    """Build the headers of every request."""
    return {"authorization": f"Bearer {api_key}"} if api_key else {}


def timeouts(seconds: float) -> httpx.Timeout:
    """Build timeouts that allow `seconds` between two bytes of a response."""
    return httpx.Timeout(seconds, connect=min(seconds, CONNECT_SECONDS), pool=None)


def client(url: str, headers: dict[str, str], timeout: httpx.Timeout, context: ssl.SSLContext) -> httpx.Client:
    """Build the HTTP client of a server, with paths relative to `base_url(url)`."""
    path = unix_path(url)
    # A custom transport would ignore the proxies of the environment.
    unix = None if path is None else httpx.HTTPTransport(uds=path)
    return httpx.Client(headers=headers, timeout=timeout, verify=context, transport=unix)


class Connection:
    """Connection to a server.

    Every method raises ServerError on failure or for an invalid response.
    """

    def __init__(self, http: httpx.Client, url: str) -> None:
        self._http = http
        self._url = url

    def __enter__(self) -> "Connection":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def first_model(self) -> str:
        """Return the name of the server's first model."""
        try:
            return str(self.get("/v1/models")["data"][0]["id"])
        except (LookupError, TypeError):
            shown = shown_url(self._url)
            raise ServerError(f"{shown}/v1/models does not list a model; give one with --model") from None

    def get(self, path: str) -> dict[str, Any]:
        """Return the JSON object at a path."""
        with self._translate_errors():
            response = self._http.get(base_url(self._url) + path)
        return self._object(path, response)

    def _object(self, path: str, response: httpx.Response) -> dict[str, Any]:
        if response.status_code != 200:
            raise error_of_response(response)
        try:
            return msgspec.json.decode(response.content, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise ServerError(f"{shown_url(self._url)}{path} is not a JSON object: {error}") from None

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the JSON object that answers a body."""
        with self._translate_errors():
            response = self._http.post(base_url(self._url) + path, json=body)
        return self._object(path, response)

    def stream(self, path: str, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """Yield the events of a streamed response. Closing the iterator stops the generation."""
        with self._translate_errors(), self._http.stream("POST", base_url(self._url) + path, json=body) as response:
            if response.status_code != 200:
                response.read()
                raise error_of_response(response)
            try:
                for data in event_data(response.iter_bytes()):
                    event = msgspec.json.decode(data, type=dict[str, Any])
                    if error := event.get("error"):
                        raise error_of_event(error)
                    yield event
            except EOFError:
                raise ServerError("the connection ended before the answer did") from None
            except msgspec.MsgspecError as error:
                raise ServerError(f"the server sent an event that cannot be read: {error}") from None

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Convert errors of the HTTP client to ServerError."""
        try:
            yield
        except httpx.HTTPError as error:
            raise unreachable(self._url, error) from error


def connect(url: str, api_key: str | None, timeout: float, trust: Trust) -> Connection:
    """Create a connection without sending anything.

    timeout: seconds allowed between two bytes.
    """
    return Connection(client(url, headers(api_key), timeouts(timeout), trust.context()), url)
