"""Constrained output of the default model at temperature 1.5, validated with `jsonschema` and `re`."""

import json
import re

import jsonschema
import pytest
import tokenizers
from llguidance import LLMatcher

from tandem.engine_core.constraints.grammars import Grammars
from tandem.engine_core.startup.engine import DEFAULT_MODEL
from tandem.protocol.engine_options import EngineOptions
from tandem.protocol.errors import FinishReason
from tandem.protocol.events import Failure, Finished
from tandem.protocol.params import SamplingParams
from tests.support.engine_driver import DrivenEngine
from tests.support.grammar_cases import REGEXES, SCHEMAS

LONGEST, SHORT = 160, 5
PROMPT = "What does json.loads do?"


def seeds_of(name: str) -> int:
    """Return how often a grammar is followed to its end.

    A number may have decimals without end, and about three of four are cut short.
    """
    return 8 if name == "number in a range" else 2


def grammar_of(name: str) -> str:
    if name in REGEXES:
        return LLMatcher.grammar_from_regex(REGEXES[name])
    return LLMatcher.grammar_from_json_schema(SCHEMAS[name], overrides={"whitespace_flexible": False})


class Outputs:
    """Run everything on one engine at once: each grammar some times to its end, and once cut short."""

    def __init__(self, depth: str) -> None:
        self.tokenizer = tokenizers.Tokenizer.from_file(str(DEFAULT_MODEL / "tokenizer.json"))
        self.driven = DrivenEngine.build(EngineOptions(device="cpu", pipeline=depth, max_len=512, max_waiting=4096))
        prompt = self.tokenizer.encode(PROMPT).ids
        self.ids: dict[tuple[str, int], int] = {}
        for name in (*SCHEMAS, *REGEXES):
            for seed in range(seeds_of(name) + 1):
                most = SHORT if seed == seeds_of(name) else LONGEST
                params = SamplingParams(most, temperature=1.5, seed=seed)
                self.ids[name, seed] = self.driven.submit(prompt, params, constraint=grammar_of(name))
        self.driven.run()

    def of(self, name: str, seed: int) -> tuple[list[int], Finished | Failure]:
        request_id = self.ids[name, seed]
        return self.driven.tokens(request_id), self.driven.outcome(request_id)

    def text(self, tokens: list[int]) -> str:
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return text


@pytest.fixture(scope="module", params=["off", "on"], ids=["one step in flight", "two"])
def outputs(request: pytest.FixtureRequest) -> Outputs:
    return Outputs(request.param)


def judge(name: str, text: str) -> None:
    if name in REGEXES:
        assert re.fullmatch(REGEXES[name], text), f"{name}: {text!r}"
    else:
        value = json.loads(text)
        jsonschema.validate(value, SCHEMAS[name], format_checker=jsonschema.FormatChecker())


def check_prefix(grammars: Grammars, name: str, tokens: list[int]) -> None:
    """Check that a new matcher accepts the whole output and can go on."""
    matcher = LLMatcher(grammars.prepare(), grammar_of(name), log_level=0)
    assert matcher.consume_tokens(tokens), f"{name}: {matcher.get_error()}"
    assert any(matcher.compute_bitmask())


@pytest.fixture(scope="module")
def model_grammars() -> Grammars:
    return Grammars(DEFAULT_MODEL / "tokenizer.json", 4096, (2,))


@pytest.mark.parametrize("name", [*SCHEMAS, *REGEXES])
def test_every_constrained_output_is_valid(outputs: Outputs, model_grammars: Grammars, name: str) -> None:
    finished = 0
    for seed in range(seeds_of(name) + 1):
        tokens, outcome = outputs.of(name, seed)
        assert isinstance(outcome, Finished), outcome
        if outcome.reason is FinishReason.STOP:
            finished += 1
            judge(name, outputs.text(tokens))
        else:
            assert outcome.reason is FinishReason.LENGTH
            assert len(tokens) == (SHORT if seed == seeds_of(name) else LONGEST)
            check_prefix(model_grammars, name, tokens)
    assert finished or name == "recursion"


def test_jump_forward_saves_steps(outputs: Outputs) -> None:
    """A text with only one possible continuation takes no step at all."""
    stats = outputs.driven.engine.stats
    assert stats.mask_rows < stats.generation_tokens
    assert sum(stats.compile_time.counts) == len(SCHEMAS) + len(REGEXES), "one compilation each"
    tokens, outcome = outputs.of("exact text", 0)
    assert outputs.text(tokens) == "There is exactly one way to say this."
    assert outcome == Finished(outputs.ids["exact text", 0], FinishReason.STOP)
