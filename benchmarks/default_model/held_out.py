"""Wordings that only the judge uses, and the check that they are held out.

They were fixed before the first training run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from typing import Any

from benchmarks.default_model.phrasings import CLOSINGS, NAMED, OPENINGS, TASK, lines

JUDGE_NAMED = lines(
    """
    I came across {f} in some code. What is it good for?
    Could you summarise the behaviour of {f}?
    What happens when I invoke {f}?
    In plain words, what is the job of {f}?
    {f} - remind me what this one is about
    What should I expect from a call to {f}?
    My colleague uses {f} everywhere; what is the point of it?
    What can {f} be used to accomplish?
    Please document {f} in one line.
    What's the role of {f}?
    What result does {f} produce?
    How would you describe {f} to a newcomer?
    What effect does {f} have?
    Why would someone reach for {f}?
    Quick one on {f}: its purpose in life?
    Give a short account of {f}
    I forgot what {f} is supposed to do
    Read me the manual entry of {f}
    Got a simple explanation of {f}?
    When is {f} the right choice?
    """
)

JUDGE_TASK = lines(
    """
    Suppose I had to {t}; which call would do it?
    Name the library routine for somebody who must {t}.
    Does anything built in let a program {t}?
    Searching for something with which to {t}, suggestions?
    My script has to {t}, so what goes there?
    """
)


def plain(text: str) -> str:
    """Normalise a wording: lower case, without punctuation."""
    return " ".join(re.findall(r"[a-z0-9{}']+", text.lower()))


def training_wordings() -> Iterator[str]:
    """Yield every wording that a training question may have.

    A wording is a combination of opening, body and closing.
    """
    for body, opening, closing in product(NAMED + TASK, ("", *OPENINGS), ("", *CLOSINGS)):
        yield plain(f"{opening} {body} {closing}")


def overlap() -> set[str]:
    """Return the judge's wordings that training can produce, which must be empty."""
    return {plain(wording) for wording in JUDGE_NAMED + JUDGE_TASK} & set(training_wordings())


JUDGE_SCHEMAS: tuple[dict[str, Any], ...] = tuple(
    {"type": "object", "properties": properties, "required": list(properties)}
    for properties in (
        {"summary": {"type": "string"}},
        {"synopsis": {"type": "string"}},
        {"overview": {"type": "string"}, "certain": {"type": "boolean"}},
        {"routine_name": {"type": "string"}, "gist": {"type": "string"}},
        {"verdict": {"type": "string"}, "grade": {"type": "integer"}},
        {"what_it_does": {"type": "string"}, "hints": {"type": "array", "items": {"type": "string"}}},
        {"outcome": {"type": "object", "properties": {"wording": {"type": "string"}}, "required": ["wording"]}},
        {"level": {"enum": ["beginner", "expert"]}, "recap": {"type": "string"}, "trust": {"type": "number"}},
        {"brief_recap": {"type": "string"}, "passage": {"type": "string"}},
        {"rows": {"type": "array", "items": {"type": "object", "properties": {"recap": {"type": "string"}}}}},
    )
)
"""Schemas of answers about a function. All but the first, which README shows, have keys that training does not use."""


def _tool(name: str, description: str, /, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


_TEXT, _INTEGER = {"type": "string"}, {"type": "integer"}

JUDGE_FUNCTION_TOOLS = (
    _tool("consult_handbook", "Consult the handbook of Python.", entry=_TEXT),
    _tool("fetch_entry", "Fetch the entry of a function from the catalogue.", routine=_TEXT),
    _tool("deliver_finding", "Deliver the finding to the reader.", finding=_TEXT),
)
"""Tools that a request forces a call of, for the questions about functions."""

FORECAST = _tool("get_weather", "Get the current weather in a city.", city=_TEXT)

JUDGE_CALLS: tuple[tuple[tuple[dict[str, Any], ...], str, str, dict[str, Any]], ...] = (
    ((FORECAST,), "What is the weather in Lisbon?", "get_weather", {"city": "Lisbon"}),
    ((FORECAST,), "Could you tell me if Bogota gets rain this weekend?", "get_weather", {"city": "Bogota"}),
    ((FORECAST,), "I'm flying to Krakow. Weather there?", "get_weather", {"city": "Krakow"}),
    (
        (_tool("air_quality", "Get the air quality of a city.", municipality=_TEXT), FORECAST),
        "What is the air quality in Leipzig?",
        "air_quality",
        {"municipality": "Leipzig"},
    ),
    (
        (_tool("water_plants", "Water the plants.", minutes=_INTEGER),),
        "Water the plants for 12 minutes.",
        "water_plants",
        {"minutes": 12},
    ),
    (
        (
            _tool("feed_horse", "Feed a horse by name.", name=_TEXT),
            _tool("paint_fence", "Paint the fence.", color=_TEXT),
        ),
        "Please feed the horse Bella.",
        "feed_horse",
        {"name": "Bella"},
    ),
    (
        (
            _tool("feed_horse", "Feed a horse by name.", name=_TEXT),
            _tool("paint_fence", "Paint the fence.", color=_TEXT),
        ),
        "Please paint the fence in color turquoise.",
        "paint_fence",
        {"color": "turquoise"},
    ),
    (
        (_tool("get_population", "Get the population of a country.", country=_TEXT),),
        "What is the population of Portugal?",
        "get_population",
        {"country": "Portugal"},
    ),
    (
        (_tool("reserve_court", "Reserve a court.", date=_TEXT, players=_INTEGER),),
        "Reserve a court for 4 players on 2031-03-17.",
        "reserve_court",
        {"date": "2031-03-17", "players": 4},
    ),
    (
        (_tool("add", "Add two numbers.", a=_INTEGER, b=_INTEGER),),
        "What do I get when I add 17 and 25?",
        "add",
        {"a": 17, "b": 25},
    ),
    (
        (_tool("find_recipe", "Find a recipe for a dish.", dish=_TEXT), FORECAST),
        "I want to cook. Find a recipe for goulash.",
        "find_recipe",
        {"dish": "goulash"},
    ),
    (
        (_tool("send_postcard", "Send a postcard to a person.", recipient=_TEXT, message=_TEXT),),
        "Send a postcard to Henrik saying greetings from Naples",
        "send_postcard",
        {"recipient": "Henrik", "message": "greetings from Naples"},
    ),
)
"""Tools, a request for one of them, and the call that it needs.

The weather is what a newcomer asks for, and training has it, in other cities.
"""
