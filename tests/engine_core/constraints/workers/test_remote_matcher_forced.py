"""Tokens that are forced on a matcher of a worker, which receives them later."""

from array import array
from random import Random
from weakref import ref

import pytest

from tandem.engine_core.constraints.grammars import CompiledGrammar, GrammarConstraint, Grammars
from tandem.engine_core.constraints.local_matcher import LocalMatcher
from tandem.engine_core.constraints.workers.channel import ACCEPT, ENDS_FORCED, MAX_FORCED, OPEN, TAKE
from tandem.engine_core.constraints.workers.mask_memory import MaskMemory
from tandem.engine_core.constraints.workers.remote_matcher import RemoteGrammar, RemoteMatcher
from tandem.engine_core.integers import ceil_div
from tests.engine_core.constraints.conftest import ENDS, VOCAB
from tests.fakes.inline_link import InlineLink
from tests.support.effort import EFFORT
from tests.support.grammar_walks import WALKED, next_token
from tests.support.remote_steps import begin_accept, begin_mask

STARTS = {"choice": "letters", "run and end": "one text", "long run": "long record", "run": "record"}
"""Grammars by what they begin with."""


@pytest.fixture(scope="module")
def compiled(grammars: Grammars) -> dict[str, CompiledGrammar]:
    return {name: grammars.compile(text) for name, text in WALKED.items()}


@pytest.fixture
def link(grammars: Grammars) -> InlineLink:
    memory = MaskMemory()
    memory.allocate(2, ceil_div(VOCAB, 32))
    return InlineLink(grammars, memory)


def on(link: InlineLink, compiled: CompiledGrammar) -> RemoteGrammar:
    """Return a grammar that the worker shares with this process."""
    link.compiled.append("")
    link.worker.grammars[len(link.compiled)] = compiled.first
    return RemoteGrammar(link, len(link.compiled))


def both(link: InlineLink, compiled: CompiledGrammar) -> tuple[RemoteMatcher, LocalMatcher]:
    return RemoteMatcher(on(link, compiled), compiled), LocalMatcher(compiled)


def pending(link: InlineLink) -> list[tuple[int, int]]:
    """Return the operations that were not sent, with their second number."""
    numbers = list(link.pending)
    return [(numbers[index], numbers[index + 2]) for index in range(0, len(numbers), 3)]


def check_equal(remote: RemoteMatcher, alone: LocalMatcher) -> None:
    forced, known = alone.compute_ff_tokens(), remote.compute_ff_tokens()
    assert known == forced[: len(known)] and bool(known) == bool(forced)
    assert remote.is_stopped() == alone.is_stopped()
    assert bool(remote.get_error()) == bool(alone.get_error())


@pytest.mark.parametrize("name", list(WALKED))
def test_the_state_at_the_start_is_known_without_the_worker(
    compiled: dict[str, CompiledGrammar], link: InlineLink, name: str
) -> None:
    """All of a run, even where a worker would report a part of it."""
    remote, alone = both(link, compiled[name])
    link.inline.do_next = lambda: None
    assert remote.compute_ff_tokens() == alone.compute_ff_tokens()
    assert remote.is_stopped() == alone.is_stopped() and remote.get_error() == ""
    assert link.num_posts == 0 and [kind for kind, _ in pending(link)] == [OPEN]


def test_start_of_a_grammar(compiled: dict[str, CompiledGrammar], grammars: Grammars) -> None:
    kinds = {kind: compiled[name].start for kind, name in STARTS.items()}
    assert [ends for _, ends in kinds.values()] == [False, True, False, False]
    assert kinds["choice"][0] == [] and len(kinds["long run"][0]) > MAX_FORCED
    assert kinds["run"][0] == compiled["record"].first.compute_ff_tokens()
    assert grammars.compile('start: ""').start[1], "nothing but the end may follow"


@pytest.mark.parametrize("name", ["one text", "record", "long record"])
@pytest.mark.parametrize("parts", [1, 2, 5])
def test_forced_tokens_are_accepted_at_once(
    compiled: dict[str, CompiledGrammar], link: InlineLink, name: str, parts: int
) -> None:
    """In whole or in parts, before the worker receives any; it then computes the tokens after the last of each part."""
    remote, alone = both(link, compiled[name])
    run = remote.compute_ff_tokens()
    size = ceil_div(len(run), parts)
    expected: list[tuple[int, int]] = []
    for start in range(0, len(run), size):
        part = run[start : start + size]
        assert remote.consume_tokens(part) and alone.consume_tokens(part)
        expected += [(TAKE, token) for token in part[:-1]] + [(ACCEPT, part[-1])]
        assert remote.compute_ff_tokens() == run[start + size :] and not link.num_posts
        assert remote.is_stopped() == alone.is_stopped()
    assert pending(link)[1:] == expected and remote.tokens == array("i", run)
    link.post_and_wait()
    check_equal(remote, alone)
    assert remote.local is None


def test_no_tokens_are_accepted_at_once_too(compiled: dict[str, CompiledGrammar], link: InlineLink) -> None:
    remote, alone = both(link, compiled["record"])
    assert remote.consume_tokens([])
    assert not remote.tokens and len(pending(link)) == 1
    check_equal(remote, alone)


def test_tokens_that_are_not_forced_are_an_assertion(compiled: dict[str, CompiledGrammar], link: InlineLink) -> None:
    remote, _ = both(link, compiled["record"])
    run = remote.compute_ff_tokens()
    for wrong in ([run[0], run[0]], [*run, 300], [300]):
        with pytest.raises(AssertionError, match="forced"):
            remote.consume_tokens(wrong)


def test_more_tokens_than_a_worker_reports(compiled: dict[str, CompiledGrammar], grammars: Grammars) -> None:
    """After the last one that it has reported, it is asked for the others."""
    whole, memory = compiled["one long text"], MaskMemory()
    memory.allocate(2, ceil_div(VOCAB, 32))
    for is_single in (False, True):
        link = InlineLink(grammars, memory)
        remote, alone = both(link, whole)
        (letter,) = grammars.prepare().tokenize_str("a")
        assert remote.consume_token(letter) and alone.consume_token(letter)
        told, expected, posts = [], alone.compute_ff_tokens(), link.num_posts
        while forced := remote.compute_ff_tokens():
            told.append(len(forced))
            tokens = [forced] if not is_single else [[token] for token in forced]
            assert all(remote.consume_tokens(each) for each in tokens)
            assert alone.consume_tokens(forced)
        assert told == [MAX_FORCED, len(expected) - MAX_FORCED]
        assert remote.tokens == array("i", [letter, *expected]) and remote.local is None
        assert link.num_posts > posts
        link.post_and_wait()
        check_equal(remote, alone)


def test_a_batch_of_others_brings_what_the_worker_knows(
    compiled: dict[str, CompiledGrammar], link: InlineLink, grammars: Grammars
) -> None:
    """A matcher's forced tokens that went with it are not lost, and what follows them is read."""
    (letter,) = grammars.prepare().tokenize_str("b")
    other, _ = both(link, compiled["letters"])
    remote, alone = both(link, compiled["record"])
    run = remote.compute_ff_tokens()
    assert remote.consume_tokens(run[:2]) and alone.consume_tokens(run[:2])
    begin_accept(other, letter)
    link.post()
    check_equal(remote, alone)
    assert remote.consume_tokens(run[2:]) and alone.consume_tokens(run[2:])
    begin_accept(other, letter)
    posts = link.num_posts
    check_equal(remote, alone)
    assert link.num_posts == posts, "nothing is sent for what is known"
    link.post_and_wait()
    check_equal(remote, alone)


def test_what_is_awaited_is_sent_before_a_state_is_read(
    compiled: dict[str, CompiledGrammar], link: InlineLink, grammars: Grammars
) -> None:
    remote, alone = both(link, compiled["letters"])
    (letter,) = grammars.prepare().tokenize_str("b")
    link.post_and_wait()
    begin_accept(remote, letter)
    assert alone.consume_token(letter) and link.is_awaited
    check_equal(remote, alone)
    assert not link.is_awaited and link.num_posts == 2


@pytest.mark.parametrize("name", list(WALKED))
def test_walks_with_runs_are_those_of_a_matcher_of_this_process(
    compiled: dict[str, CompiledGrammar], grammars: Grammars, name: str
) -> None:
    """Runs of forced tokens, in whole or in part, between single tokens and batches of others."""
    memory = MaskMemory()
    memory.allocate(2, ceil_div(VOCAB, 32))
    for seed in range(5 * EFFORT):
        random, link = Random(f"{name} {seed}"), InlineLink(grammars, memory)
        remote, alone = both(link, compiled[name])
        loss = random.choice([1000, 1000, random.randrange(20)])
        for step in range(60):
            if step == loss:
                link.end()
            if random.random() < 0.3:
                link.post()
            forced = remote.compute_ff_tokens()
            if forced and random.random() < 0.6:
                run = forced[: random.randrange(1, len(forced) + 1)]
                assert remote.consume_tokens(run) and alone.consume_tokens(run)
            else:
                token = next_token(random, alone._matcher, VOCAB, strays=0.01)
                assert remote.consume_token(token) == alone.consume_token(token)
            if random.random() < 0.7:
                check_equal(remote, alone)
        link.post_and_wait()
        check_equal(remote, alone)


class Tenant:
    """Owner that remembers what it was given."""

    def __init__(self) -> None:
        self.given: list[LocalMatcher] = []

    def take_back(self, local: LocalMatcher) -> None:
        self.given.append(local)


@pytest.mark.parametrize("reason", ["lost", "rejected", "refused"])
def test_the_owner_is_notified_once_when_a_matcher_of_this_process_takes_over(
    compiled: dict[str, CompiledGrammar], link: InlineLink, reason: str
) -> None:
    remote, tenant = RemoteMatcher(on(link, compiled["letters"]), compiled["letters"]), Tenant()
    remote.owner = ref(tenant)
    link.post_and_wait()
    if reason == "rejected":
        assert not remote.consume_token(300)
    elif reason == "lost":
        link.lose("is gone")
        assert not remote.is_stopped()
    else:
        link.worker._slow.add(1)
        begin_mask(remote, 0)
        link.post_and_wait()
        assert not remote.end_mask()
    assert remote.local is not None and tenant.given == [remote.local]
    assert not remote.end_mask() and remote.end_accept()[1] is None
    assert len(tenant.given) == 1


def test_an_owner_that_is_gone_is_not_notified(compiled: dict[str, CompiledGrammar], link: InlineLink) -> None:
    remote, tenant = RemoteMatcher(on(link, compiled["letters"]), compiled["letters"]), Tenant()
    remote.owner = ref(tenant)
    link.post_and_wait()
    del tenant
    link.lose("is gone")
    assert not remote.is_stopped() and remote.local is not None


def test_a_constraint_uses_the_matcher_that_takes_over(
    compiled: dict[str, CompiledGrammar], link: InlineLink, grammars: Grammars
) -> None:
    """It has no id of a worker's matcher then, and goes on after the same tokens, forced ones included."""
    whole = compiled["record"]
    remote, alone = both(link, whole)
    constraint = GrammarConstraint(remote, frozenset(ENDS), ignore_ends=False)
    assert (constraint.remote, constraint.remote_id, constraint.local) == (remote, remote.id, None)
    run = constraint.fast_forward_tokens()
    assert constraint.accept_forced(run) and alone.consume_tokens(run)
    (letter,) = grammars.prepare().tokenize_str("b")
    link.end()
    assert constraint.accept(letter) and alone.consume_token(letter)
    assert (constraint.remote, constraint.remote_id) == (None, -1)
    assert constraint.local is remote.local and not constraint.is_new
    assert constraint.local is not None and constraint.local.num_tokens == len(run) + 1
    assert constraint.fast_forward_tokens() == alone.compute_ff_tokens()
    assert constraint.is_complete == alone.is_stopped() and constraint.problem == ""


def test_the_end_of_a_run_is_known_before_the_worker_receives_it(
    compiled: dict[str, CompiledGrammar], link: InlineLink
) -> None:
    remote, alone = both(link, compiled["one text"])
    assert remote._flags == ENDS_FORCED and not remote.is_stopped()
    assert all(remote.consume_token(token) for token in alone.compute_ff_tokens())
    assert remote.is_stopped() and link.num_posts == 0
