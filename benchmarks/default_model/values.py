"""Values that a request mentions, for arguments of tools and properties of JSON schemas.

A kind of value has the names that parameters of it go by, the phrases that mention it, and a way to draw one. Most
texts are drawn from large pools or made up, so that a model learns to copy them from the request.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.default_model.corpus import listed
from benchmarks.default_model.phrasings import lines
from benchmarks.default_model.questions import SYLLABLES

CITIES = lines(
    """
    Amsterdam
    Athens
    Atlanta
    Austin
    Bangkok
    Barcelona
    Beijing
    Berlin
    Boston
    Brussels
    Budapest
    Buenos Aires
    Cairo
    Cape Town
    Chicago
    Copenhagen
    Dallas
    Delhi
    Denver
    Dubai
    Dublin
    Edinburgh
    Frankfurt
    Geneva
    Hamburg
    Hanoi
    Helsinki
    Hong Kong
    Istanbul
    Jakarta
    Lagos
    Lima
    London
    Los Angeles
    Lyon
    Madrid
    Manila
    Melbourne
    Mexico City
    Miami
    Milan
    Montreal
    Moscow
    Mumbai
    Munich
    Nairobi
    New York
    Oslo
    Paris
    Porto
    Prague
    Rio de Janeiro
    Rome
    San Francisco
    Santiago
    Seattle
    Seoul
    Shanghai
    Singapore
    Stockholm
    Sydney
    Tel Aviv
    Tokyo
    Toronto
    Turin
    Vancouver
    Vienna
    Warsaw
    Washington
    Zurich
    """
)
REGIONS = listed("CA NY TX WA MA IL FL UK US France Germany Japan Italy Spain Canada Brazil India Australia")
NAMES = listed("""
Adam Alice Amir Anna Ben Bob Carla Carlos Chen Clara Daniel David Diana Elena Emma Eric Eva Felix Fatima Frank George
Grace Hana Hugo Ines Ivan Jack James Jane Jonas Julia Karen Kenji Laura Leo Lily Linda Lucas Maria Mark Mary Max Mei
Mia Mohamed Nina Noah Olga Oliver Omar Paul Peter Priya Rosa Sam Sara Simon Sofia Tom Victor Wei Yuki Zoe
""")
SURNAMES = listed("""
Brown Costa Dupont Fischer Garcia Green Hansen Johnson Kim Kumar Lee Lopez Martin Meyer Miller Nguyen Novak Patel
Rossi Sato Schmidt Silva Smith Suzuki Taylor Wang White Wilson Wood Young
""")
TITLES = listed("""
apple bridge budget car cat chair chess climate coffee concert cooking dance dinner dog engine football forest garden
guitar history holiday house island jazz keyboard laptop lunch market meeting milk moon mountain movie music novel
ocean painting party phone piano pizza planet poem project rain recipe report rice river robot science shoes soccer
solar space star story summer sun table tea tennis ticket tiger train travel tree turtle violin volcano water wine
winter yoga
""")
DAYS = listed("Monday Tuesday Wednesday Thursday Friday Saturday Sunday today tomorrow tonight")
MONTHS = listed("January February March April May June July August September October November December")
DOMAINS = listed("example.com example.org mail.com site.net work.io")


CONSONANTS, VOWELS = "bcdfghjklmnpqrstvwxyz", "aeiou"


def made_up_word(rng: random.Random) -> str:
    """Make up a word of one to three syllables, or of letters that tokens do not follow."""
    if rng.random() < 0.5:
        return "".join(rng.choice(SYLLABLES) for _ in range(rng.choice((1, 2, 2, 3))))
    letters = [rng.choice((CONSONANTS, VOWELS)[at % 2]) for at in range(rng.randrange(4, 9))]
    if rng.random() < 0.3:
        letters.insert(rng.randrange(1, len(letters)), rng.choice(CONSONANTS))
    return "".join(letters)


def city(rng: random.Random) -> str:
    """Draw a city, sometimes made up, sometimes with its region."""
    name = rng.choice(CITIES) if rng.random() < 0.4 else made_up_word(rng).capitalize()
    if rng.random() < 0.05:
        name = name.lower()
    return f"{name}, {rng.choice(REGIONS)}" if rng.random() < 0.12 else name


def person(rng: random.Random) -> str:
    """Draw a name, sometimes with a surname, sometimes made up."""
    first = rng.choice(NAMES) if rng.random() < 0.4 else made_up_word(rng).capitalize()
    if rng.random() < 0.5:
        return first
    return f"{first} {rng.choice(SURNAMES) if rng.random() < 0.5 else made_up_word(rng).capitalize()}"


def topic(rng: random.Random) -> str:
    """Draw one to four words."""
    words = [
        rng.choice(TITLES) if rng.random() < 0.4 else made_up_word(rng) for _ in range(rng.choice((1, 1, 2, 2, 3, 4)))
    ]
    text = " ".join(words)
    return text.capitalize() if rng.random() < 0.15 else text


def date(rng: random.Random) -> str:
    """Draw a day: by name, in ISO form, or as month and number."""
    form = rng.random()
    if form < 0.4:
        return rng.choice(DAYS)
    if form < 0.8:
        return f"20{rng.randrange(10, 40)}-{rng.randrange(1, 13):02}-{rng.randrange(1, 29):02}"
    return f"{rng.choice(MONTHS)} {rng.randrange(1, 29)}"


def clock_time(rng: random.Random) -> str:
    """Draw a time of day."""
    hour, minute = rng.randrange(1, 13), rng.choice(("00", "15", "30", "45"))
    return rng.choice((f"{hour:02}:{minute}", f"{hour + 11}:{minute}", f"{hour} {rng.choice(('am', 'pm'))}"))


def count(rng: random.Random) -> int:
    """Draw a whole number of one to four digits, mostly small."""
    return rng.randrange(*rng.choice(((1, 10), (1, 10), (10, 100), (10, 100), (100, 1000), (1000, 10000))))


def amount(rng: random.Random) -> float:
    """Draw a number with one or two decimals."""
    return rng.randrange(1, 1000) / 10 if rng.random() < 0.5 else rng.randrange(101, 9999) / 100


def email(rng: random.Random) -> str:
    """Draw an e-mail address."""
    name = rng.choice(NAMES).lower() if rng.random() < 0.6 else made_up_word(rng)
    return f"{name}@{rng.choice(DOMAINS)}"


def code(rng: random.Random) -> str:
    """Draw a code of letters or digits, such as an order's number."""
    letters = "".join(rng.choice("ABCDEFGHJKLMNPRSTUVWXYZ") for _ in range(rng.choice((1, 2, 3, 4))))
    form = rng.random()
    return letters if form < 0.4 else f"{letters}{rng.randrange(10, 10000)}" if form < 0.7 else str(count(rng))


@dataclass(frozen=True)
class Kind:
    """A kind of value: its JSON type, the names of its parameters, and the phrases with `{v}` that mention one.

    `{p}` in a phrase is the parameter's name in words.
    """

    type: str
    names: Sequence[str]
    phrases: Sequence[str]
    draw: Callable[[random.Random], Any]
    noun: str = ""
    """The value in words, as descriptions of tools write it."""


KINDS = {
    "city": Kind(
        "string",
        listed("city location place town destination region area origin address venue city_name"),
        ("in {v}", "for {v}", "in {v}", "at {v}", "near {v}"),
        city,
        "a city",
    ),
    "person": Kind(
        "string",
        listed("name person recipient to user customer author contact employee attendee full_name username owner"),
        ("for {v}", "to {v}", "with {v}", "of {v}", "{p} {v}"),
        person,
        "a person",
    ),
    "topic": Kind(
        "string",
        listed("query text topic title subject message keyword keywords search_query q term item product task note"),
        ("about {v}", "for {v}", "'{v}'", 'called "{v}"', ": {v}", "saying {v}", "{p} {v}"),
        topic,
        "a text",
    ),
    "date": Kind(
        "string",
        listed("date day when due due_date start_date deadline departure"),
        ("on {v}", "for {v}", "{v}", "by {v}", "{p} {v}"),
        date,
        "a day",
    ),
    "time": Kind(
        "string",
        listed("time hour start start_time at"),
        ("at {v}", "{v}", "from {v}"),
        clock_time,
        "a time",
    ),
    "count": Kind(
        "integer",
        listed("count number quantity limit days people guests age size minutes id top_k seats max_results pages"),
        ("with {v} {p}", "{v} {p}", "{p} {v}", "for {v} {p}", "{p} of {v}"),
        count,
        "a number",
    ),
    "amount": Kind(
        "number",
        listed("amount price value weight distance temperature rate radius height cost total"),
        ("{p} {v}", "with {p} {v}", "{v} {p}", "of {v}"),
        amount,
        "an amount",
    ),
    "email": Kind(
        "string",
        listed("email address to mail email_address"),
        ("to {v}", "{v}", "{p} {v}"),
        email,
        "an e-mail",
    ),
    "code": Kind(
        "string",
        listed("code ticker symbol order_id id number reference flight currency key"),
        ("{p} {v}", "for {v}", "of {v}", "{v}"),
        code,
        "a code",
    ),
    "flag": Kind("boolean", listed("verbose urgent detailed recursive public notify active"), ("{p}",), lambda _: True),
}
CHOICES = {
    "unit": ("celsius", "fahrenheit", "kelvin"),
    "units": ("metric", "imperial"),
    "format": ("json", "csv", "xml", "text"),
    "priority": ("low", "medium", "high"),
    "color": ("red", "green", "blue", "black", "white"),
    "size": ("small", "medium", "large"),
    "language": ("english", "german", "french", "spanish"),
    "order": ("ascending", "descending"),
    "status": ("open", "closed", "pending"),
    "category": ("news", "sports", "music", "travel"),
}
"""Values of parameters that take one of a few words, by the parameter's name."""


@dataclass(frozen=True)
class Slot:
    """A parameter with the value that a request gives it, and the phrase that mentions the value.

    `choices` are the values of a parameter that takes one of a few.
    """

    name: str
    type: str
    value: Any
    phrase: str
    noun: str = ""
    choices: tuple[str, ...] = ()


def draw_slots(rng: random.Random, most: int = 3) -> list[Slot]:
    """Draw one to `most` parameters of different names and kinds, with a value each."""
    kinds = rng.sample(sorted(KINDS), rng.choices(range(1, most + 1), (50, 32, 18, 10)[:most])[0])
    slots: dict[str, Slot] = {}
    for name in kinds:
        slot = draw_slot(rng, KINDS[name])
        slots.setdefault(slot.name, slot)
    if rng.random() < 0.2:
        name = rng.choice(sorted(CHOICES))
        value = rng.choice(CHOICES[name])
        phrase = rng.choice(("in {v}", "with {p} {v}", "{p} {v}")).format(v=value, p=name)
        slots.setdefault(name, Slot(name, "string", value, phrase, "", CHOICES[name]))
    return list(slots.values())


def draw_slot(rng: random.Random, kind: Kind, name: str = "") -> Slot:
    """Draw a value of this kind, for a parameter of this name if it is given."""
    name = name or (rng.choice(kind.names) if rng.random() < 0.85 else f"{made_up_word(rng)}_{rng.choice(kind.names)}")
    value = kind.draw(rng)
    phrase = rng.choice(kind.phrases).format(v=value, p=name.replace("_", " "))
    return Slot(name, kind.type, value, phrase, kind.noun)
