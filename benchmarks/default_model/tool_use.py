"""Requests with tools that the model trains on: which tool to call, with which arguments, or whether to answer itself.

Most tools are made up of a verb, a noun and parameters of several kinds, so that a model learns to read the list of
tools rather than to remember some; the ones that everybody tries first are written by hand.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.default_model.corpus import Function, listed
from benchmarks.default_model.phrasings import lines
from benchmarks.default_model.questions import Questioner, spoken
from benchmarks.default_model.values import CHOICES, KINDS, TITLES, Slot, draw_slot, draw_slots, made_up_word

VERBS = listed("""
get find search fetch show check list read create add book order send delete update cancel reserve schedule open start
stop play save track compare rate buy sell move copy print rename share report register lookup plan measure
""")
NOUNS = [
    *TITLES,
    *listed("""
    account alarm appointment article balance contract customer document event exchange file flight forecast hotel
    invoice issue job list log menu message model news note package page payment playlist post price product profile
    quote record reminder route schedule score shipment sensor status stock summary task taxi temperature timer
    timetable trip user video weather
    """),
]
FRAMES = lines(
    """
    {verb} the {noun} {rest}.
    {verb} a {noun} {rest}.
    {verb} {noun} {rest}
    Please {verb} the {noun} {rest}.
    Please {verb} a {noun} {rest}
    Can you {verb} the {noun} {rest}?
    Can you {verb} a {noun} {rest}?
    Could you {verb} my {noun} {rest}, please?
    I want to {verb} the {noun} {rest}.
    I need to {verb} a {noun} {rest}
    I would like to {verb} a {noun} {rest}.
    Help me {verb} the {noun} {rest}.
    What is the {noun} {rest}?
    What's the {noun} {rest}?
    Tell me the {noun} {rest}.
    How is the {noun} {rest}?
    I need the {noun} {rest}.
    {noun} {rest}
    Use the tool to {verb} the {noun} {rest}.
    Call {tool} {rest}.
    """
)


@dataclass(frozen=True)
class Tool:
    """A tool as a request describes it. The values of its parameters are those of the request."""

    name: str
    parameters: tuple[Slot, ...]
    description: str = ""

    @property
    def line(self) -> str:
        """The tool as the chat template writes it."""
        shown = ", ".join(f"{slot.name}: {'|'.join(slot.choices) or slot.type}" for slot in self.parameters)
        return f"{self.name}({shown})" + (f": {self.description}" if self.description else "")

    @property
    def definition(self) -> dict[str, Any]:
        """The tool as a request of OpenAI's API describes it."""
        properties = {
            slot.name: {"type": slot.type} | ({"enum": list(slot.choices)} if slot.choices else {})
            for slot in self.parameters
        }
        function: dict[str, Any] = {"name": self.name, "parameters": {"type": "object", "properties": properties}}
        if self.description:
            function["description"] = self.description
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class Use:
    """A request with tools, and the right reaction: a call of the tool with these arguments, or the answer.

    forced: True if the model would not have called the tool by itself.
    """

    tools: tuple[Tool, ...]
    question: str
    tool: Tool | None
    arguments: dict[str, Any]
    answer: str = ""
    forced: bool = False


@dataclass(frozen=True)
class Known:
    """A tool that is written by hand, under all its names.

    A parameter is the key of a slot in the questions, its kind and its names. Parameters after the mandatory ones may
    be missing from the tool, and from the questions.
    """

    names: Sequence[str]
    descriptions: Sequence[str]
    parameters: Sequence[tuple[str, str, Sequence[str]]]
    questions: Sequence[str]
    optional: Sequence[str] = ()


KNOWN = (
    Known(
        listed("get_weather get_current_weather weather weather_forecast get_forecast current_weather"),
        (
            "Get the current weather in a city.",
            "Get the weather of a place",
            "Get current temperature for a given location.",
            "Returns the weather forecast for a location.",
            "Get the current weather in a given location",
            "",
        ),
        (("v", "city", ("city", "location", "place", "city_name")),),
        lines(
            """
            What is the weather in {v}?
            What is the weather like in {v}?
            What's the weather in {v} today?
            What's the weather like in {v} right now?
            How is the weather in {v}?
            Weather in {v}
            Is it raining in {v}?
            Will it rain in {v} tomorrow?
            How warm is it in {v}?
            How cold is it in {v} now?
            Tell me the weather in {v}.
            What is the temperature in {v}?
            Do I need an umbrella in {v}?
            Is it sunny in {v}?
            Give me the forecast for {v}.
            """
        ),
        ("unit", "units", "format"),
    ),
    Known(
        listed("get_time get_current_time current_time time_in world_clock"),
        ("Get the current time in a city.", "Tell the local time of a place", ""),
        (("v", "city", ("city", "location", "timezone", "place")),),
        lines(
            """
            What time is it in {v}?
            What is the time in {v}?
            Tell me the current time in {v}.
            How late is it in {v}?
            Time in {v}
            """
        ),
    ),
    *(
        Known(
            names,
            (f"{verb.capitalize()} two numbers.", f"{verb} a and b", ""),
            (("a", "count", ("a", "x", "first")), ("b", "count", ("b", "y", "second"))),
            lines(questions),
        )
        for verb, names, questions in (
            (
                "add",
                ("add", "sum", "add_numbers"),
                "What is {a} plus {b}?\nAdd {a} and {b}.\n{a} + {b}\nSum {a} and {b}",
            ),
            ("multiply", ("multiply", "product"), "What is {a} times {b}?\nMultiply {a} by {b}.\n{a} * {b}\n{a} x {b}"),
            ("subtract", ("subtract", "minus"), "What is {a} minus {b}?\n{a} - {b}\nHow much is {a} minus {b}"),
            ("divide", ("divide",), "What is {a} divided by {b}?\nDivide {a} by {b}.\n{a} / {b}"),
        )
    ),
    Known(
        ("calculate", "calculator", "evaluate", "compute"),
        ("Evaluate a mathematical expression.", "Compute an expression", ""),
        (("e", "expression", ("expression", "formula", "input")),),
        ("What is {e}?", "Compute {e}.", "Calculate {e}", "How much is {e}?", "{e}", "{e} = ?"),
    ),
    Known(
        ("get_stock_price", "stock_price", "get_quote"),
        ("Get the price of a stock.", "Get the current stock price", ""),
        (("v", "code", ("ticker", "symbol", "company")),),
        ("What is the price of {v}?", "How much is {v} stock?", "Stock price of {v}", "What does a share of {v} cost?"),
    ),
    Known(
        ("search_web", "web_search", "search", "google"),
        ("Search the web.", "Search the internet for a query", ""),
        (("v", "topic", ("query", "q", "text", "search_query")),),
        ("Search for {v}.", "Look up {v} on the web", "Find pages about {v}", "Google {v}", "Search the web for {v}."),
        (),
    ),
    Known(
        ("send_email", "send_message", "send_mail", "email"),
        ("Send an e-mail.", "Send a message to somebody", ""),
        (("t", "email", ("to", "recipient", "address")), ("b", "topic", ("body", "text", "message", "subject"))),
        (
            "Send an email to {t} saying {b}",
            "Email {t}: {b}",
            "Write to {t} about {b}.",
            "Send {t} the message '{b}'",
            'Tell {t} "{b}" by mail',
        ),
    ),
    Known(
        ("set_timer", "start_timer", "timer"),
        ("Set a timer.", "Start a timer of some minutes", ""),
        (("n", "count", ("minutes", "duration")),),
        ("Set a timer for {n} minutes.", "Start a {n} minute timer", "Timer {n} minutes", "Wake me in {n} minutes"),
    ),
    Known(
        ("create_event", "add_reminder", "remind_me", "schedule_meeting"),
        ("Create an event in the calendar.", "Set a reminder", ""),
        (("b", "topic", ("title", "text", "name", "summary")), ("d", "date", ("date", "day", "when"))),
        ("Remind me of {b} on {d}.", "Schedule {b} for {d}", "Put {b} into my calendar for {d}", "Add '{b}' on {d}"),
    ),
    Known(
        ("get_user", "find_customer", "lookup_user"),
        ("Find a user by name.", "Get a customer's record", ""),
        (("v", "person", ("name", "user", "customer")),),
        ("Who is {v}?", "Find the user {v}.", "Show me the record of {v}", "Look up {v}"),
    ),
    Known(
        ("roll_dice", "random_number"),
        ("Roll a die.", "Draw a number up to a limit", ""),
        (("n", "count", ("sides", "limit", "max")),),
        ("Roll a die with {n} sides.", "Throw a {n} sided die", "A random number up to {n}, please"),
    ),
)

# Parameters that take a function's name, and those that take what the model knows of it.
NAME_PARAMETERS = listed("function name symbol query topic identifier function_name subject term func keyword object")
TEXT_PARAMETERS = listed("""
text summary answer note description content explanation message body result reply response sentence comment
""")
LOOKUP_VERBS = listed("look_up lookup get find search explain describe show fetch read open query")
LOOKUP_NOUNS = listed("""
function docs documentation help manual reference library python module docstring api_docs stdlib python_docs
function_docs doc
""")
TELL_VERBS = listed("save write send give record add submit store post return print log")
TELL_NOUNS = listed("answer note summary reply explanation text result message comment description response")
WEATHERS = listed("sunny cloudy rainy windy foggy snowy stormy clear humid dry hot cold warm mild")


class ToolUser:
    """Generator of requests with tools. Questions about functions come from the questioner."""

    def __init__(self, questioner: Questioner) -> None:
        self.questioner = questioner

    def use(self, rng: random.Random) -> Use:
        """Make a request with one to four tools.

        Most requests need a call; the others ask about a function, which the model answers itself unless the request
        forces a call.
        """
        draw = rng.random()
        if draw < 0.12:
            question, answer = self.questioner.question(rng)
            return Use(_listed(rng, None), question, None, {}, answer)
        if draw < 0.17:
            question, row = self.questioner.asked(rng)
            tool, _ = made_up_tool(rng) if rng.random() < 0.6 else known_tool(rng)
            arguments = {
                slot.name: slot.choices[0] if slot.choices else _stand_in(slot, row) for slot in tool.parameters
            }
            return Use(_listed(rng, tool), question, tool, arguments, forced=True)
        if draw < 0.4:
            question, row = self.questioner.asked(rng)
            tool = function_tool(rng, row)
        elif draw < 0.62:
            tool, question = known_tool(rng)
        else:
            tool, question = made_up_tool(rng)
        # A parameter without a value is one that the request does not mention.
        arguments = {slot.name: slot.value for slot in tool.parameters if slot.value is not None}
        return Use(_listed(rng, tool), question, tool, arguments)


def made_up_tool(rng: random.Random) -> tuple[Tool, str]:
    """Make a tool of a verb and a noun, and a request for it."""
    verb, noun = rng.choice(VERBS), rng.choice(NOUNS) if rng.random() < 0.85 else made_up_word(rng)
    slots = draw_slots(rng)
    form = rng.random()
    name = f"{verb}_{noun}" if form < 0.75 else f"{verb}{noun.capitalize()}" if form < 0.87 else noun
    described = [slot.noun for slot in slots if slot.noun]
    description = f"{verb.capitalize()} {rng.choice(('the', 'a'))} {noun}"
    if described and rng.random() < 0.6:
        description += f" {rng.choice(('for', 'of', 'by', 'with', 'from'))} {' and '.join(described)}"
    description = rng.choice((f"{description}.", description, f"{description}.", ""))
    phrases = [slot.phrase for slot in slots]
    rng.shuffle(phrases)
    frame = spoken(rng, rng.choice(FRAMES))
    words = {"verb": verb, "noun": noun, "rest": " ".join(phrases), "tool": name}
    return Tool(name, tuple(slots), description), filled(frame, words)


def known_tool(rng: random.Random) -> tuple[Tool, str]:
    """Choose one of the tools written by hand, and a request for it."""
    known = rng.choices(KNOWN, [3 if index == 0 else 1 for index in range(len(KNOWN))])[0]
    values, slots = {}, []
    for key, kind, names in known.parameters:
        slot = (
            _expression(rng, rng.choice(names))
            if kind == "expression"
            else draw_slot(rng, KINDS[kind], rng.choice(names))
        )
        values[key] = str(slot.value)
        slots.append(slot)
    question = filled(spoken(rng, rng.choice(known.questions)), values)
    if known.optional and rng.random() < 0.5:
        name = rng.choice(known.optional)
        value = rng.choice(CHOICES[name]) if rng.random() < 0.4 else None
        if value is not None:
            ending = question[-1] if question[-1] in "?.!" else ""
            question = f"{question.removesuffix(ending)} {rng.choice(('in', 'as', 'with'))} {value}{ending}"
        slots.append(Slot(name, "string", value, "", "", CHOICES[name]))
    distinct = {slot.name: slot for slot in slots}
    return Tool(rng.choice(known.names), tuple(distinct.values()), rng.choice(known.descriptions)), question


def function_tool(rng: random.Random, row: Function) -> Tool:
    """Make a tool that takes a function's name, or what the model knows of the function."""
    if rng.random() < 0.65:
        verb, noun = rng.choice(LOOKUP_VERBS), rng.choice(LOOKUP_NOUNS)
        slots = [Slot(rng.choice(NAME_PARAMETERS), "string", row.dotted, "")]
        purpose = rng.choice(("of a function", "of Python's standard library", "by name", ""))
    else:
        verb, noun = rng.choice(TELL_VERBS), rng.choice(TELL_NOUNS)
        slots = [Slot(rng.choice(TEXT_PARAMETERS), "string", row.answer, "")]
        if rng.random() < 0.2:
            slots.insert(0, Slot("function", "string", row.dotted, ""))
        purpose = rng.choice(("to the user", "about a function", ""))
    name = f"{verb}_{noun}" if rng.random() < 0.8 else verb if rng.random() < 0.5 else noun
    description = f"{verb.replace('_', ' ').capitalize()} the {noun.replace('_', ' ')} {purpose}".strip()
    return Tool(name, tuple(slots), rng.choice((f"{description}.", description, "")))


def result_of(rng: random.Random, tool: Tool, questioner: Questioner) -> tuple[str, str]:
    """Make a result of a call of the tool, and the sentence that states it."""
    form = rng.random()
    if form < 0.35:
        fields = {slot.name: slot.value for slot in draw_slots(rng) if slot.value is not None}
        if rng.random() < 0.4:
            fields = {"temperature": rng.randrange(-20, 45), "condition": rng.choice(WEATHERS)} | fields
        written = {key: value if isinstance(value, str) else json.dumps(value) for key, value in fields.items()}
        return json.dumps(
            fields
        ), f"{tool.name} returned {', '.join(f'{key} {text}' for key, text in written.items())}."
    if form < 0.55:
        weather = f"{rng.choice(WEATHERS)}{rng.choice((' and ', ', '))}{rng.choice(WEATHERS)}"
        degrees = f"{rng.randrange(-20, 45)}{rng.choice((' degrees', ' C', '°C', ' F', ''))}"
        text = rng.choice((f"{degrees} and {rng.choice(WEATHERS)}", f"{degrees}, {weather}", weather, degrees))
    elif form < 0.7:
        text = rng.choice(questioner.rows).sentence
    else:
        text = " ".join(str(slot.value) for slot in draw_slots(rng))
    return text, f"{tool.name} returned {text.rstrip('.')}."


def filled(frame: str, values: dict[str, str]) -> str:
    """Fill the slots of a wording, whatever their letter case has become."""
    for key, value in values.items():
        frame = frame.replace(f"{{{key.upper()}}}", f"{{{key}}}").replace(f"{{{key}}}", value)
    return frame


def _stand_in(slot: Slot, row: Function) -> Any:
    """Return an argument for a parameter that a question about a function has no value for."""
    return {"string": row.dotted, "integer": 1, "number": 1.0, "boolean": True}[slot.type]


def _expression(rng: random.Random, name: str) -> Slot:
    """Draw an arithmetic expression."""
    text = str(rng.randrange(1, 200))
    for _ in range(rng.choice((1, 1, 2))):
        text += f" {rng.choice('+-*/')} {rng.randrange(1, 200)}"
    return Slot(name, "string", text.replace(" ", "") if rng.random() < 0.3 else text, "")


def _listed(rng: random.Random, tool: Tool | None) -> tuple[Tool, ...]:
    """List the tool among up to three others, in any order."""
    tools = {} if tool is None else {tool.name: tool}
    for _ in range(rng.choices(range(4), (50, 25, 15, 10))[0] + (tool is None)):
        other, _ = made_up_tool(rng) if rng.random() < 0.65 else known_tool(rng)
        tools.setdefault(other.name, other)
    found = list(tools.values())
    rng.shuffle(found)
    return tuple(found)
