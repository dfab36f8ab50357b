"""Questions made from rows of the corpus, in many wordings and with noise.

The wordings are those of `phrasings`, with all the ways to write a name. A model of five million parameters learns the
names and sentences easily; what it must not learn is that only these wordings ask for them. So words of a question are
dropped, swapped, misspelt and padded with others at random.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from benchmarks.default_model.corpus import Function, listed
from benchmarks.default_model.phrasings import CLOSINGS, NAMED, OPENINGS, TASK
from benchmarks.default_model.small_talk import SMALL_TALK

PARAPHRASES = Path(__file__).with_name("paraphrases.tsv")

VERBS = frozenset(
    listed("""
    return set get create convert remove execute open add read decode wait encode parse change test log make generate
    write insert find print compare check run send call close perform register extract copy clear compute put fail
    append split update enable mark lookup partition strip determine choose restore push format start retrieve
    implement enter compile yield initialize rename escape disable guess replace receive take extend save leave report
    round use duplicate force fork truncate kill iterate normalize wrap serialize handle turn resolve walk disassemble
    compress decompress skip flush load concatenate pad reverse wake indicate fetch terminate assert evaluate build
    abort translate delete join collapse try shuffle divide deserialize transform pop construct discard arrange
    schedule cast unregister stop clean connect represent emit resize quote block cancel obtain prepare compose
    announce ensure transfer expand unpack fill scan calculate drop apply merge delay seed pass exit query prompt
    examine install submit ask reveal recalculate issue associate do configure work detect increment tokenize produce
    optimize adapt hash pack look unescape indent combine mix verify summarize display freeze unfreeze define import
    reload debug suspend sleep instantiate specify allow shift bootstrap sort release raise rotate move list
    recursively estimate byte-compile pretty-print map enumerate
    """)
)
SYNONYMS = {
    "return": ("get", "find", "give me", "obtain", "have", "compute", "know", "fetch"),
    "test": ("check", "see", "find out", "know"),
    "determine": ("check", "find", "find out", "tell"),
    "check": ("test", "see", "find out"),
    "remove": ("delete", "drop", "get rid of", "take away"),
    "create": ("make", "build", "produce"),
    "make": ("create", "build"),
    "generate": ("make", "create", "produce"),
    "execute": ("run", "start"),
    "run": ("execute", "start"),
    "convert": ("turn", "transform", "change"),
    "get": ("find", "read", "fetch", "obtain"),
    "print": ("show", "display"),
    "add": ("put in", "insert", "append"),
    "read": ("load", "get"),
    "write": ("save", "store"),
    "open": ("start using", "access"),
    "set": ("change", "assign", "configure"),
    "change": ("alter", "set", "modify"),
    "find": ("locate", "search for", "look for"),
    "split": ("break up", "divide", "cut"),
    "join": ("combine", "put together", "connect"),
    "wait": ("pause", "block"),
    "parse": ("read", "interpret", "analyse"),
    "copy": ("duplicate", "clone"),
    "compute": ("calculate", "work out", "get"),
    "close": ("shut", "end"),
    "log": ("write", "record"),
    "list": ("show", "enumerate"),
    "strip": ("trim", "remove", "cut off"),
    "replace": ("swap", "substitute", "change"),
}
SYLLABLES = ["".join(parts) for parts in product("bcdfghlmnprstvwy", "aeiou", ("", "n", "r", "s", "t", "ck", "ing"))]


def base_form(verb: str) -> str | None:
    """Return the imperative of a verb such as "Returns" or "Return".

    Returns None if the word is not a verb of the corpus.
    """
    lower = verb.lower().strip(",;")
    endings = (lower, lower.removesuffix("s"), lower.removesuffix("es"), re.sub("ies$", "y", lower))
    return next((form for form in endings if form in VERBS), None)


def task_of(sentence: str) -> str:
    """Turn a sentence into a task.

    "Returns the X." and "The X." become "return the X" and "get the X".
    """
    first, _, rest = sentence.rstrip(".").partition(" ")
    verb = base_form(first)
    if verb is not None:
        return f"{verb} {rest}"
    plain_start = first[1:].islower() or len(first) == 1
    return f"get {first.lower() if plain_start else first} {rest}"


class Questioner:
    """Generator of questions about the rows.

    All randomness comes from the `rng` that each call is given.
    """

    def __init__(self, rows: Sequence[Function]) -> None:
        self.rows = rows
        self.by_name = {row.dotted: row for row in rows}
        tails = Counter(self._tail(row) for row in rows)
        self.unique_tails = {row.dotted for row in rows if tails[self._tail(row)] == 1}
        self.tasks = {row.dotted: task_of(row.sentence) for row in rows}
        self.cuts = self._distinct_cuts()
        self.paraphrases = self._read_paraphrases()
        sentence_words = {word for row in rows for word in re.findall(r"\b[a-z]{2,}\b", row.sentence)}
        self.fillers = sorted(sentence_words | _wording_words())

    @staticmethod
    def _tail(row: Function) -> str:
        return row.name.rsplit(".", 1)[-1]

    def _distinct_cuts(self) -> dict[str, list[int]]:
        """Return the numbers of leading words that make each task distinct.

        A task whose sentence other rows share has no entry.
        """
        starts: Counter[str] = Counter()
        for task in self.tasks.values():
            words = task.lower().split()
            starts.update(" ".join(words[:n]) for n in range(1, len(words) + 1))
            starts[" ".join(words) + "$"] += 1
        cuts: dict[str, list[int]] = {}
        for name, task in self.tasks.items():
            words = task.lower().split()
            if starts[" ".join(words) + "$"] > 1:
                continue
            found = [n for n in range(4, len(words)) if starts[" ".join(words[:n])] == 1]
            cuts[name] = [*found, len(words)]
        return cuts

    def _read_paraphrases(self) -> list[tuple[Function, str]]:
        pairs = []
        for line in PARAPHRASES.read_text(encoding="utf-8").splitlines():
            name, tasks = line.split("\t")
            pairs += [(self.by_name[name], task.strip()) for task in tasks.split(" | ")]
        return pairs

    def written(self, rng: random.Random, row: Function) -> str:
        """Choose one of the ways in which people write the function's name."""
        dotted, tail = row.dotted, self._tail(row)
        owner = dotted.rpartition(".")[0]
        forms = [(44, dotted), (16, f"{dotted}()"), (8, f"`{dotted}`"), (3, f"`{dotted}()`"), (2, f"'{dotted}'")]
        forms += [(3, f"{dotted}{row.signature}"), (5, f"the {dotted} function"), (3, f"the function {dotted}")]
        if owner:
            forms += [(6, f"the {tail} function in {owner}"), (4, f"{tail} from {owner}"), (3, f"{tail} in {owner}")]
            forms += [(2, f"the function {tail} of the {owner} module"), (2, f"{owner}'s {tail}")]
        else:
            forms += [(6, f"the built-in {dotted}"), (4, f"the builtin {dotted}"), (2, f"builtins.{dotted}")]
        forms += [(3, f"Python's {dotted}")]
        if row.dotted in self.unique_tails:
            forms += [(3, tail), (2, f"{tail}()")]
        if row.name.count(".") == 1 and row.module != "builtins":
            forms += [(4, row.name)]
        return rng.choices([form for _, form in forms], [weight for weight, _ in forms])[0]

    def wanted(self, rng: random.Random, row: Function) -> str:
        """Vary the row's task.

        It is cut where it is still distinct, has another verb or lacks some small words.
        """
        words = self.tasks[row.dotted].split()
        cuts = self.cuts[row.dotted]
        words = words[: cuts[-1] if rng.random() < 0.4 else rng.choice(cuts)]
        if words[0] in SYNONYMS and rng.random() < 0.6:
            words[0] = rng.choice(SYNONYMS[words[0]])
        if rng.random() < 0.2:
            words = [w for w in words if w not in ("the", "a", "an", "of", "to") or rng.random() < 0.4]
        if len(words) > 5 and rng.random() < 0.15:
            del words[rng.randrange(1, len(words))]
        return " ".join(words).rstrip(",;:")

    def question(self, rng: random.Random) -> tuple[str, str]:
        """Make a question and its answer. One in a hundred asks about no function."""
        if rng.random() < 0.01:
            asks, answer = rng.choice(SMALL_TALK)
            return spoken(rng, rng.choice(asks)), answer
        question, row = self.asked(rng)
        return question, row.answer

    def asked(self, rng: random.Random) -> tuple[str, Function]:
        """Make a question about a function, and return the function's row."""
        draw = rng.random()
        if draw < 0.05:
            row, task = rng.choice(self.paraphrases)
            return self._worded(rng, rng.choice(TASK), "{t}", task), row
        row = rng.choice(self.rows)
        if draw < 0.28 and row.dotted in self.cuts:
            return self._worded(rng, rng.choice(TASK), "{t}", self.wanted(rng, row)), row
        return self._worded(rng, rng.choice(NAMED), "{f}", self.written(rng, row)), row

    def _worded(self, rng: random.Random, body: str, slot: str, filling: str) -> str:
        """Fill a wording after adding noise to it.

        In this order the noise never garbles the filling.
        """
        opening = rng.choice(OPENINGS) if rng.random() < 0.25 else ""
        closing = rng.choice(CLOSINGS) if rng.random() < 0.22 else ""
        if closing and rng.random() < 0.5:
            body = body.rstrip("?.")
        words = f"{opening} {body} {closing}".split()
        if rng.random() < 0.35:
            words = self._scrambled(rng, words)
        if rng.random() < 0.3:
            words = self._padded(rng, words)
        wording = spoken(rng, " ".join(words))
        if rng.random() < 0.06:
            filling = filling.lower()
        return wording.replace(slot.upper(), slot).replace(slot, filling)

    def _scrambled(self, rng: random.Random, words: list[str]) -> list[str]:
        """Replace, drop or misspell some of the words.

        An unknown wording looks like this.
        """
        share = rng.choice((0.15, 0.3, 0.6, 1.0))
        changed = []
        for word in words:
            if "{" in word or rng.random() > share:
                changed.append(word)
                continue
            kind = rng.random()
            if kind < 0.55:
                changed.append(self._filler(rng))
            elif kind < 0.75 and len(word) > 3:
                at = rng.randrange(1, len(word) - 1)
                changed.append(word[:at] + word[at + 1] + word[at] + word[at + 2 :])
        return changed

    def _filler(self, rng: random.Random) -> str:
        """Draw another word.

        It is one of the corpus, or made up so that pieces of words never seen there occur too.
        """
        if rng.random() < 0.75:
            return rng.choice(self.fillers)
        return "".join(rng.choice(SYLLABLES) for _ in range(rng.choice((1, 2, 2, 3))))

    def _padded(self, rng: random.Random, words: list[str]) -> list[str]:
        """Add up to eight other words before the question and up to eight after it."""
        before = [self._filler(rng) for _ in range(rng.choice((0, 1, 2, 3, 5, 8)))]
        after = [self._filler(rng) for _ in range(rng.choice((0, 0, 1, 2, 4, 8)))]
        if before and rng.random() < 0.4:
            before[-1] += rng.choice((",", ".", ":", ";", " -"))
        if after and rng.random() < 0.4:
            words = [*words[:-1], words[-1].rstrip("?.") + rng.choice((",", ";", " -", ".", ":", "?"))]
        if after and rng.random() < 0.4:
            after[-1] += rng.choice("?.!")
        return before + words + after


def _wording_words() -> set[str]:
    """Return the words of the training wordings."""
    return set(re.findall(r"\b[a-z]{2,}\b", " ".join(NAMED + TASK + OPENINGS + CLOSINGS).lower()))


def spoken(rng: random.Random, wording: str) -> str:
    """Vary a wording as people type it.

    It may lack its last mark or have another one, and be in lower case or in capitals.
    """
    if rng.random() < 0.25:
        wording = wording.rstrip("?.!")
    elif rng.random() < 0.08:
        wording = wording.rstrip("?.!") + rng.choice(("?", ".", "!", "??", " ?", "?!", "..."))
    case = rng.random()
    if case < 0.3:
        return wording.lower()
    if case < 0.33:
        return wording.upper()
    return wording[:1].upper() + wording[1:] if case < 0.6 and not wording.startswith("{") else wording
