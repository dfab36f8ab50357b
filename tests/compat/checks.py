"""Run the checks of one client and print a JSON line for each; needs nothing but the standard library."""

import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

Check = Callable[[], Any]

MODEL = "tandem-default"
QUESTION = "What does textwrap.dedent do?"
NEXT_QUESTION = "How do I join two paths?"
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
FORECAST_VALUE = {"unit": "celsius", "days": 1}
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


def run(
    first_turn: Sequence[Check] = (),
    second_turn: Sequence[Check] = (),
    tool: Sequence[Check] = (),
    streaming: Sequence[Check] = (),
    structured: Sequence[Check] = (),
    more: Sequence[Check] = (),
) -> None:
    """Run the checks of each column of the table; a column without checks is not offered by the client."""
    columns = {
        "first turn": first_turn, "second turn": second_turn, "tool": tool, "streaming": streaming,
        "structured": structured, "more": more,
    }  # fmt: skip
    for column, checks in columns.items():
        for check in checks:
            report(column, check)


def report(column: str, check: Check) -> None:
    began = time.monotonic()
    detail = ""
    try:
        check()
    except Exception as error:
        traceback.print_exc()
        detail = f"{type(error).__name__}: {error}"[:500]
    seconds = round(time.monotonic() - began, 2)
    result = {"column": column, "check": check.__name__, "ok": not detail, "detail": detail, "seconds": seconds}
    print(json.dumps(result), flush=True)
