"""A running server, as the commands of the terminal see it."""

from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import httpx
import msgspec
from msgspec import Struct

_LONGEST = 500


class ServerError(Exception):
    """The server refused, failed, or is not there; the text is one line for a person."""


class _Body(Struct):
    message: str
    code: str | int | None = None


class _Envelope(Struct):
    error: _Body


def refusal(response: httpx.Response) -> ServerError:
    """The error of a response other than 200 whose body has been read."""
    try:
        error = msgspec.json.decode(response.content, type=_Envelope).error
    except msgspec.MsgspecError:
        return ServerError(_one_line(f"the server answered {response.status_code}: {response.text or 'nothing'}"))
    code = f", {error.code}" if error.code else ""
    remedy = "; give --api-key or set TANDEM_API_KEY" if response.status_code == 401 else ""
    return ServerError(_one_line(f"{error.message} ({response.status_code}{code}){remedy}"))


def stream_failure(error: object) -> ServerError:
    """The error that ended a stream, from its event."""
    try:
        return ServerError(_one_line(msgspec.convert(error, _Body).message))
    except msgspec.ValidationError:
        return ServerError(_one_line(f"the server ended the answer with an error: {error}"))


def unreachable(url: str, error: httpx.HTTPError) -> ServerError:
    """A request that got no answer."""
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return ServerError(f"no server answers on {url}; start one with `tandem serve`, or name another with --url")
    if isinstance(error, httpx.TimeoutException):
        return ServerError(f"the server on {url} sent nothing for too long; raise --timeout")
    return ServerError(_one_line(f"the connection to {url} broke: {error or type(error).__name__}"))


def _one_line(text: str) -> str:
    line = "".join([character if character.isprintable() else "\ufffd" for character in " ".join(text.split())])
    return line if len(line) <= _LONGEST else line[:_LONGEST] + "..."


_DATA = b"data:"
_END = b"[DONE]"


def event_data(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The data of each event up to `[DONE]`; each is one line, as in OpenAI's streams.

    Raises EOFError where the bytes end before that. Lines end at a newline alone: JSON may hold the other characters
    that Python takes for line ends.
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


def headers(api_key: str | None) -> dict[str, str]:
    """What every request carries."""
    return {"authorization": f"Bearer {api_key}"} if api_key else {}


def timeouts(seconds: float) -> httpx.Timeout:
    """`seconds` between any two bytes of an answer."""
    return httpx.Timeout(seconds, connect=min(seconds, CONNECT_SECONDS), pool=None)


class Connection:
    """One server. Every method raises ServerError where there is no answer, or none that helps."""

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
        """The name of the first model that the server has."""
        try:
            return str(self.get("/v1/models")["data"][0]["id"])
        except (LookupError, TypeError):
            raise ServerError(f"{self._url}/v1/models names no model; give one with --model") from None

    def get(self, path: str) -> dict[str, Any]:
        """The JSON object at a path."""
        with self._reaching():
            response = self._http.get(self._url + path)
        if response.status_code != 200:
            raise refusal(response)
        try:
            return msgspec.json.decode(response.content, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise ServerError(f"{self._url}{path} is no JSON object: {error}") from None

    def stream(self, path: str, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The events of a streamed answer. To close the iterator is to stop the answer."""
        with self._reaching(), self._http.stream("POST", self._url + path, json=body) as response:
            if response.status_code != 200:
                response.read()
                raise refusal(response)
            try:
                for data in event_data(response.iter_bytes()):
                    event = msgspec.json.decode(data, type=dict[str, Any])
                    if error := event.get("error"):
                        raise stream_failure(error)
                    yield event
            except EOFError:
                raise ServerError("the connection ended before the answer did") from None
            except msgspec.MsgspecError as error:
                raise ServerError(f"the server sent an event that cannot be read: {error}") from None

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except httpx.HTTPError as error:
            raise unreachable(self._url, error) from error


def connect(url: str, api_key: str | None, timeout: float) -> Connection:
    """Nothing is sent yet. `timeout` is in seconds between two bytes."""
    return Connection(httpx.Client(headers=headers(api_key), timeout=timeouts(timeout)), url)
