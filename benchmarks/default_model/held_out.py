"""Wordings that only the judge uses, and the check that they are held out.

They were fixed before the first training run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

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
