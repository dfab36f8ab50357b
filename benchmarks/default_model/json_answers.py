"""JSON that the model trains on: answers under the keys of a schema, and the call of a tool.

A schema is not part of the prompt. The server's grammar forces its keys while the model writes, so what is learnt are
the values, where each of them ends, and what follows.
"""

from __future__ import annotations

import json
import random
from typing import Any

from benchmarks.default_model.corpus import Function, listed
from benchmarks.default_model.judge import content_words
from benchmarks.default_model.tool_use import NAME_PARAMETERS, Use
from benchmarks.default_model.values import draw_slots, made_up_word

# A piece of a sample: a special token, or a text and whether it is learnt.
Text = tuple[str, bool]
Piece = int | Text

NAME_KEYS = [*NAME_PARAMETERS, *listed("name call method api title id method_name")]
MODULE_KEYS = listed("module library package namespace module_name imported_from")
SIGNATURE_KEYS = listed("signature usage prototype syntax example form")
SENTENCE_KEYS = listed("description sentence docstring doc purpose behavior effect meaning details definition")
ANSWER_KEYS = listed("""
summary answer text result explanation reply response content output message value final_answer info note data
documentation help body statement line short_answer one_liner comment reason thoughts
""")
COUNT_KEYS = listed("arguments count parameters number arity size num_arguments parameter_count length total args")
NUMBER_KEYS = listed("confidence score probability rating certainty weight relevance")
FLAG_KEYS = listed("found known valid ok success is_function relevant exists correct builtin is_builtin")
KIND_KEYS = listed("kind type category class")
LIST_KEYS = listed("keywords tags words terms topics items labels key_points list steps points")
NAME_LIST_KEYS = listed("functions names symbols calls see_also references sources examples")
NESTED_KEYS = listed("result answer data function item response info details output object meta")
MODIFIERS = listed("short main first best the my primary brief full final new")
INSTRUCTIONS = (
    "Answer in JSON.",
    "Reply with JSON.",
    "Respond in JSON format.",
    "Return a JSON object.",
    "As JSON, please.",
    "Use the schema.",
    "Give the answer as JSON",
    "Output only JSON.",
)
FACTS = ("", "", "Extract the data:", "Parse this:", "Fill in the form:", "Read the order:", "Extract the fields from:")


def json_pieces(rng: random.Random, value: Any, keys_learnt: bool, blank: str = "") -> list[Text]:
    """Write a JSON value as pieces, which are encoded one by one.

    Quotes, commas and braces are pieces of their own, so that a model that ends a string has not yet decided what
    follows it; only the grammar knows. Some keys are cut at random, since what a grammar forces need not be cut as the
    tokenizer would. `blank` is written before the value.
    """
    if isinstance(value, dict):
        pieces: list[Text] = [(blank + "{", True)]
        for number, (key, item) in enumerate(value.items()):
            if number:
                pieces.append((",", True))
            cut = rng.randrange(len(key)) if not keys_learnt and rng.random() < 0.15 else 0
            parts = [part for part in (key[:cut], key[cut:]) if part]
            pieces += [(' "' if number else '"', True), *((part, keys_learnt) for part in parts), ('"', True)]
            pieces += [(":", True), *json_pieces(rng, item, keys_learnt, " ")]
        return [*pieces, ("}", True)]
    if isinstance(value, list):
        pieces = [(blank + "[", True)]
        for number, item in enumerate(value):
            if number:
                pieces.append((",", True))
            pieces += json_pieces(rng, item, keys_learnt, " " if number else "")
        return [*pieces, ("]", True)]
    text = json.dumps(value, ensure_ascii=False)
    if isinstance(value, str):
        return [(blank + '"', True), *([(text[1:-1], True)] if value else []), ('"', True)]
    return [(blank + text, True)]


def forced_open(pieces: list[Text]) -> list[Text]:
    """Leave the first brace out of what is learnt.

    A grammar forces it; where there is none, the model is to answer in text.
    """
    return [(pieces[0][0], False), *pieces[1:]]


def forced_call(pieces: list[Text]) -> list[Text]:
    """Leave the start of a call, up to its arguments, out of what is learnt.

    A grammar forces it where the model would answer in text.
    """
    start = pieces.index(("parameters", True))
    return [(text, index > start) for index, (text, _) in enumerate(pieces)]


def call_of(use: Use) -> dict[str, Any]:
    """Return the call of a request's tool in the server's format for Llama models."""
    assert use.tool is not None
    return {"name": use.tool.name, "parameters": use.arguments}


def json_about(rng: random.Random, row: Function) -> dict[str, Any]:
    """Make a JSON object that answers a question about a function, with one to four keys."""
    if rng.random() < 0.12:
        return {rng.choice(NESTED_KEYS): json_about(rng, row)}
    answer: dict[str, Any] = {}
    texts = 0
    for _ in range(rng.choices((1, 2, 3, 4), (45, 30, 17, 8))[0]):
        kind = rng.choices(("text", "name", "module", "signature", "sentence", "other"), (40, 12, 5, 5, 12, 26))[0]
        if kind == "text" and texts == 0:
            answer.setdefault(_key(rng, ANSWER_KEYS, 0.3), row.answer)
            texts += 1
        elif kind in ("text", "sentence") and texts < 2:
            # A second text does not repeat the first.
            answer.setdefault(_key(rng, SENTENCE_KEYS, 0.1 if kind == "sentence" else 0.5), row.sentence)
            texts += 1
        elif kind == "name":
            answer.setdefault(_key(rng, NAME_KEYS, 0.05), row.dotted)
        elif kind == "module":
            answer.setdefault(_key(rng, MODULE_KEYS, 0.05), row.module)
        elif kind == "signature":
            answer.setdefault(_key(rng, SIGNATURE_KEYS, 0.05), row.dotted + row.signature)
        else:
            key, value = _other(rng, row)
            answer.setdefault(key, value)
    return answer


def json_result(rng: random.Random, told: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Make a JSON object that answers with a tool's result, and mostly with some of the call's arguments."""
    items = [
        (_key(rng, ANSWER_KEYS, 0.3), told),
        *((key, value) for key, value in arguments.items() if rng.random() < 0.5),
    ]
    rng.shuffle(items)
    return dict(items)


def _other(rng: random.Random, row: Function) -> tuple[str, Any]:
    """Make a property other than plain text."""
    words = sorted(content_words(row.sentence), key=row.sentence.lower().find)
    kind = rng.randrange(7)
    if kind == 0:
        inside = row.signature[1:-1]
        return _key(rng, COUNT_KEYS, 0.2), inside.count(",") + 1 if inside else 0
    if kind == 1:
        return _key(rng, NUMBER_KEYS, 0.2), 0.9
    if kind == 2:
        return _key(rng, FLAG_KEYS, 0.2), True
    if kind == 3:
        return _key(rng, KIND_KEYS, 0.1), "method" if "." in row.name else "function"
    if kind == 4:
        return _key(rng, NAME_LIST_KEYS, 0.1), [row.dotted]
    if kind == 5:
        return _key(rng, NAME_LIST_KEYS, 0.1), [{rng.choice(NAME_KEYS): row.dotted}]
    return _key(rng, LIST_KEYS, 0.2), words[:3]


def _key(rng: random.Random, keys: list[str], unknown: float) -> str:
    """Draw a key, sometimes a made-up or a composed one, in one of the usual spellings."""
    if rng.random() < unknown:
        key = "_".join(made_up_word(rng) for _ in range(rng.choice((1, 1, 2))))
    else:
        key = rng.choice(keys)
    if rng.random() < 0.12:
        key = f"{rng.choice(MODIFIERS)}_{key}"
    style = rng.random()
    if style < 0.12:
        first, *rest = key.split("_")
        return first + "".join(part.capitalize() for part in rest)
    return key.capitalize() if style < 0.16 else key


def json_facts(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Make a text that mentions values, and the JSON object that holds them."""
    slots = draw_slots(rng, 4)
    phrases = [f"{slot.name.replace('_', ' ')} {slot.value}" if rng.random() < 0.4 else slot.phrase for slot in slots]
    rng.shuffle(phrases)
    joined = rng.choice((", ", " ", "; ", " and ")).join(phrases)
    text = f"{rng.choice(FACTS)} {joined}".strip()
    return text, {slot.name: slot.value for slot in slots}
