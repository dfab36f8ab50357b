"""Write the table of request fields from the bodies' own tables: `python -m tests.support.field_tables`."""

from pathlib import Path

import msgspec

from tandem.frontend.api.chat_completions.request import BODY as CHAT
from tandem.frontend.api.completions.request import BODY as COMPLETION
from tandem.frontend.api.messages.request import BODY as MESSAGE
from tandem.frontend.api.responses.request import BODY as RESPONSE
from tandem.frontend.request.extra_fields import IGNORED_PATHS
from tandem.frontend.request.field_types import Ignored, Unsupported
from tandem.frontend.request.fields import IGNORED_FIELDS, Field

PAGE = Path(__file__).parents[2] / "frontend" / "FIELDS.md"
BODIES = {"completions": COMPLETION, "chat": CHAT, "responses": RESPONSE, "messages": MESSAGE}
"""Body of each generating endpoint, by the word that stands for it."""

_HEAD = """# Request fields

What each field of `/v1/completions`, `/v1/chat/completions`, `/v1/responses` and `/v1/messages` does. A field is
*honoured*; or it would change the output, is not supported, and is *refused* with 400; or it is *ignored* and named in
the header `x-tandem-ignored`. Null, and the values given as exceptions, mean the same as no field. Any other name, also
within messages, content parts, tools and items, is ignored and named; `--unknown-fields refuse` refuses it.

This page is written by `python -m tests.support.field_tables`; a test compares it with the code.

"""
_NESTED_HEAD = """
## Names within a body

These are known and ignored. Refused are `messages[].prefix` and `messages[].partial` (send `continue_final_message`),
`messages[].audio`, content parts that are not text, and `structured_outputs.structural_tag`.

"""


def verdict(field: Field) -> str:
    """Say whether a field is honoured, refused or ignored, and which values are taken all the same."""
    field_type = field.type
    if not isinstance(field_type, Ignored | Unsupported):
        return "honoured"
    word = "refused" if isinstance(field_type, Unsupported) else "ignored"
    values = [msgspec.json.encode(value).decode() for value in field_type.accepted]
    distinct = list(dict.fromkeys(value.removesuffix(".0") for value in values))
    return f"{word}, except for {', '.join(f'`{value}`' for value in distinct)}" if distinct else word


def rows() -> list[tuple[str, str, str, str]]:
    """Return the field, the endpoints, the verdict and the reason of every row."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for endpoint, body in BODIES.items():
        table = {field.name: field for field in (*IGNORED_FIELDS, *body.fields)}
        for field in table.values():
            found.setdefault((field.name, verdict(field), field.text), []).append(endpoint)
    return sorted((name, ", ".join(places), word, text) for (name, word, text), places in found.items())


def render() -> str:
    """Render the whole page."""
    table = ["| field | endpoint | verdict | meaning or reason |", "| --- | --- | --- | --- |"]
    for name, endpoints, word, text in rows():
        shown = "all" if endpoints.count(",") == len(BODIES) - 1 else endpoints
        table.append(f"| `{name}` | {shown} | {word} | {text} |")
    nested = ["| path | reason |", "| --- | --- |", *(f"| `{path}` | {text} |" for path, text in IGNORED_PATHS)]
    return _HEAD + "\n".join(table) + "\n" + _NESTED_HEAD + "\n".join(nested) + "\n"


def main() -> None:
    """Write the page."""
    PAGE.write_text(render())


if __name__ == "__main__":
    main()
