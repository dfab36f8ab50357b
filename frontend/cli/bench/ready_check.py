"""Check that a server is ready, before it is measured."""

import json
import ssl
import sys
import time

import httpx

from tandem.frontend.cli.connection import client, error_of_response, headers, timeouts
from tandem.frontend.cli.connection_failure import connection_failure, is_permanent
from tandem.frontend.cli.server_address import base_url, shown_url

_ATTEMPTS = 3
"""Minimum number of attempts, for a server that is replacing one of its processes."""
_RETRY_SECONDS = 0.5
_NO_LIST = (404, 405, 501)
"""Statuses of a server without a list of models."""
_LIST_SECONDS = 10.0
"""Timeout in seconds between two bytes of the list of models."""


def wait_for_model(url: str, key: str, context: ssl.SSLContext, seconds: float, model: str | None = None) -> str:
    """Return the name of the model to measure.

    model: its name; None for the first listed one. A server need not list models if a name is given.
    """
    deadline, attempts = time.monotonic() + seconds, 0
    shown = shown_url(url)
    with client(url, headers(key), timeouts(_LIST_SECONDS), context) as http:
        while True:
            attempts += 1
            try:
                response = http.get(f"{base_url(url)}/v1/models")
                if model is not None and response.status_code in (200, *_NO_LIST):
                    return model
                if response.status_code == 200:
                    return str(response.json()["data"][0]["id"])
                if response.status_code not in (429, 502, 503, 504):
                    remedy = "; give the model's name with --model" if response.status_code in _NO_LIST else ""
                    raise ValueError(f"{shown}/v1/models: {error_of_response(response)}{remedy}")
                reason = f"the server on {shown} is not ready (it answers {response.status_code})"
            except httpx.HTTPError as error:
                reason = connection_failure(url, error)
                if is_permanent(error):
                    raise ValueError(reason) from None
            except (json.JSONDecodeError, UnicodeDecodeError):
                raise ValueError(
                    f"{shown}/v1/models did not answer JSON; give --url the address of an OpenAI-compatible server"
                ) from None
            except (KeyError, IndexError, TypeError):
                raise ValueError(f"{shown}/v1/models lists no model; give its name with --model") from None
            if attempts >= _ATTEMPTS and time.monotonic() >= deadline:
                raise OSError(f"{reason}; {_remedy(seconds)}")
            if attempts == 1 and seconds > 0:
                print(f"{reason}; waiting for it", file=sys.stderr)
            time.sleep(_RETRY_SECONDS)


def _remedy(seconds: float) -> str:
    if seconds > 0:
        return f"waited for it for {seconds:g} s (--ready-check-timeout-sec)"
    return "--ready-check-timeout-sec 300 waits for one that is starting"
