"""Tokens that many matchers accept ahead, in this process and on workers."""

from random import Random

import pytest
from llguidance import LLMatcher

from tandem.engine_core.constraints.grammars import GrammarConstraint, Grammars
from tandem.engine_core.constraints.token_acceptor import TokenAcceptor
from tandem.engine_core.constraints.workers.mask_memory import MaskMemory
from tandem.engine_core.constraints.workers.pool import WorkerPool
from tandem.engine_core.constraints.workers.remote_matcher import RemoteGrammar
from tests.engine_core.constraints.conftest import ENDS, VOCAB
from tests.fakes.inline_link import InlineLink

REGEX = LLMatcher.grammar_from_regex("[a-d]{1,9}(xyz[a-d]{1,9}|end)")


@pytest.fixture(params=[0, 1], ids=["here", "half of them on a worker"])
def acceptor(request: pytest.FixtureRequest, grammars: Grammars) -> TokenAcceptor:
    masks = MaskMemory()
    masks.allocate(1, 1)
    return TokenAcceptor(WorkerPool(request.param, lambda: InlineLink(grammars, masks)))


def constraints(grammars: Grammars, rows: int, acceptor: TokenAcceptor | None = None) -> list[GrammarConstraint]:
    compiled = grammars.compile(REGEX)
    held = [compiled.constraint(ignore_ends=False) for _ in range(rows // 2)]
    if acceptor is not None and acceptor.workers.count:
        remote = acceptor.workers.compile(REGEX, [])
        assert isinstance(remote, RemoteGrammar)
        for each in held:
            each.is_new = False  # stays here
        compiled.add_remote(remote)
    return held + [compiled.constraint(ignore_ends=False) for _ in range(rows - rows // 2)]


def state(constraint: GrammarConstraint) -> tuple[bool, bool, list[int]]:
    return bool(constraint.problem), constraint.is_complete, constraint.fast_forward_tokens()


def test_outcome_is_that_of_accepting_each_token_by_itself(grammars: Grammars, acceptor: TokenAcceptor) -> None:
    """Among them tokens that the grammar rejects, ends where it may not end yet, and ids that do not exist."""
    random, num_rejected, num_plain = Random(5), 0, 0
    letters = [grammars.prepare().tokenize_str(letter)[0] for letter in "abcdxyzen"]
    for _ in range(5):
        ahead, alone = constraints(grammars, 40, acceptor), constraints(grammars, 40)
        for step in range(12):
            choices = [*letters * 8, 300, *ENDS, VOCAB, VOCAB + 7] if step else letters[:4]
            tokens = [random.choice(choices) for _ in ahead]
            acceptor.accept_ahead(list(zip(ahead, tokens, strict=True)))
            for each, reference, token in zip(ahead, alone, tokens, strict=True):
                accepted = reference.accept(token)
                assert each.accept(token) == accepted
                assert state(each) == state(reference)
                num_rejected += bool(each.problem)
                num_plain += accepted and state(each) == (False, False, [])
    assert num_rejected > 50 and num_plain > 50


def test_token_given_ahead_is_not_given_again(grammars: Grammars, acceptor: TokenAcceptor) -> None:
    held = constraints(grammars, 8, acceptor)
    (a,), (z,) = (grammars.prepare().tokenize_str(letter) for letter in "az")
    acceptor.accept_ahead([(each, a) for each in held])
    with pytest.raises(AssertionError, match="accepted ahead"):
        held[0].accept(z)
    with pytest.raises(AssertionError, match="accepted ahead"):
        held[1].accept(z)
    for each in held[2:]:
        assert each.accept(a)
        assert all(each.accept(a) for _ in range(8)), "nine letters"


def test_overdrawn_constraints_accept_nothing(grammars: Grammars, acceptor: TokenAcceptor) -> None:
    held = constraints(grammars, 4, acceptor)[:2]
    (a,) = grammars.prepare().tokenize_str("a")
    for each in held:
        each.overdrawn = "too slow"
    acceptor.accept_ahead([(each, a) for each in held])
    assert not any(each.accept(a) for each in held)


def test_no_tokens(grammars: Grammars, acceptor: TokenAcceptor) -> None:
    held = constraints(grammars, 4, acceptor)
    before = [state(each) for each in held]
    acceptor.accept_ahead([])
    assert [state(each) for each in held] == before
