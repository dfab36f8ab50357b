"""Run the checks of one client library and print a JSON line for each; needs only the library under test."""

import json
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

Check = Callable[[], Any]

MODEL = "tandem-default"
QUESTION = "What does textwrap.dedent do?"
ANSWER = "leading whitespace"
FORECAST = {
    "type": "object",
    "properties": {
        "unit": {"type": "string", "enum": ["celsius", "kelvin"]},
        "days": {"type": "integer", "enum": [1, 2]},
    },
    "required": ["unit", "days"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "forecast", "description": "The weather.", "parameters": FORECAST, "strict": True},
}


def is_forecast(value: dict[str, Any]) -> bool:
    return value.keys() == {"unit", "days"} and value["unit"] in ("celsius", "kelvin") and value["days"] in (1, 2)


def expect(condition: object, what: object) -> None:
    if not condition:
        raise AssertionError(str(what)[:500])


def raises(kind: type[BaseException], call: Check, status: int | None = None) -> BaseException:
    """Return the error that a call ends in, which must have this type and status."""
    try:
        answer = call()
    except kind as error:
        expect(status is None or getattr(error, "status_code", None) == status, f"{error!r} is not {status}")
        return error
    raise AssertionError(f"no {kind.__name__}, but {answer!r}"[:500])


def base_url() -> str:
    """Return the address of the server under test, from the command line."""
    return sys.argv[1]


def run(*checks: Check) -> None:
    for check in checks:
        began = time.monotonic()
        detail = ""
        try:
            check()
        except Exception as error:
            traceback.print_exc()
            detail = f"{type(error).__name__}: {error}"[:300]
        seconds = round(time.monotonic() - began, 2)
        print(json.dumps({"check": check.__name__, "ok": not detail, "detail": detail, "seconds": seconds}), flush=True)
