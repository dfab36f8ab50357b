"""What a server answered instead of a result, as one line."""

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
