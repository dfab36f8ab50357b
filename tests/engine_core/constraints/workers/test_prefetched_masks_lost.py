"""Prefetched masks of matchers that have left their worker before the masks are needed."""

from collections.abc import Callable, Iterator

import pytest
from llguidance import LLMatcher

from tandem.engine_core.constraints.grammars import Grammars
from tandem.engine_core.constraints.workers import pool as pool_module
from tests.engine_core.constraints.conftest import ENDS
from tests.engine_core.constraints.test_mask_prefetch import UNTOUCHED, AdvanceBatch, Site, mixed
from tests.fakes.inline_link import InlineLink
from tests.support.grammar_walks import allowed_tokens


@pytest.fixture
def site(grammars: Grammars) -> Iterator[Site]:
    site = Site(grammars)
    yield site
    site.pool.close()


def on_workers(site: Site, count: int = 6) -> dict[int, AdvanceBatch]:
    site.spread()
    site.spread()
    held = {index: site.followed(site.compiled) for index in range(count)}
    assert {each.constraint.remote.link for each in held.values() if each.constraint.remote} == set(site.links)
    return held


def accept(held: dict[int, AdvanceBatch], token: int, advanced: object = ()) -> None:
    for index, each in held.items():
        assert each.alone.consume_token(token)
        assert index in advanced or each.constraint.accept(token)  # type: ignore[operator]


def test_a_lost_worker_that_is_forgotten_before_its_masks_are_needed(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one starts for it once its tokens were accepted here, while a thread compiles another grammar."""
    held, out, gone = on_workers(site), site.outs[0], site.links[0]
    monkeypatch.setattr(pool_module, "RESTART_SECONDS", 0.0)
    site.pool._start_link = lambda: InlineLink(site.grammars, site.memory)
    (b,) = site.grammars.prepare().tokenize_str("b")
    gone.inline.do_next = lambda: None
    site.advancer.start_accept([(index, each.constraint) for index, each in held.items()], [b] * len(held), 1)
    site.prefetch(held, out)
    gone.end()
    accept(held, b, site.advancer.finish_accept())
    assert gone.is_lost and gone.num_open == 0
    assert site.pool.compile(LLMatcher.grammar_from_regex("[x-z]+"), []) is not None
    assert gone not in site.pool._links
    site.check(held, out)


def test_a_mask_that_a_worker_still_writes_is_not_computed_before(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its matcher was taken back, and has accepted tokens since."""
    held, out = on_workers(site), site.outs[0]
    (b,) = site.grammars.prepare().tokenize_str("b")
    waiting: list[Callable[[], None]] = []
    for link in site.links:
        waiting.append(link.inline.do_next)
        link.inline.do_next = lambda: None
    site.prefetch(held, out)
    for each in held.values():
        assert each.constraint.remote is not None
        each.constraint.remote._take_over()
    for _ in range(4):
        accept(held, b)
    wait = site.pool.wait

    def go_on() -> None:
        for do_next in waiting:
            do_next()
        waiting.clear()
        wait()

    monkeypatch.setattr(site.pool, "wait", go_on)
    site.check(held, out)


def test_whole_masks_of_others_than_were_begun(site: Site) -> None:
    held, out = on_workers(site), site.outs[0]
    site.prefetch(held, out)
    (b,) = site.grammars.prepare().tokenize_str("b")
    others = {index: site.followed(site.compiled) for index in held}
    accept(others, b)
    site.masks_posted()
    site.check(others, out)
    assert len(site.masks_posted()) == len(others)


def test_masks_that_are_refused_are_computed_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of this process are not computed again with them, nor charged for twice."""
    held, out = mixed(site), site.outs[1]
    computed: list[int] = []
    compute = site.builder._compute_measured

    def record(pairs: list[tuple[object, int]], out: object) -> None:
        computed.extend(index for _, index in pairs)
        compute(pairs, out)  # type: ignore[arg-type]

    monkeypatch.setattr(site.builder, "_compute_measured", record)
    monkeypatch.setattr("tandem.engine_core.constraints.workers.worker.SLOW_SECONDS", -1.0)
    site.prefetch(held, out)
    site.check(held, out)
    assert sorted(computed) == sorted(held)


def test_a_refused_mask_has_no_ends_where_they_are_ignored(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = site.grammars.compile(LLMatcher.grammar_from_regex("[a-d]*"))
    compiled.add_remote(site.pool.compile(LLMatcher.grammar_from_regex("[a-d]*"), []))
    each, out = compiled.constraint(ignore_ends=True), site.outs[0]
    masks = [(each, 0)]
    monkeypatch.setattr("tandem.engine_core.constraints.workers.worker.SLOW_SECONDS", -1.0)
    out[:] = UNTOUCHED
    site.builder.prefetch(masks, out)
    site.builder.fill(masks, out)
    assert each.remote is None
    allowed = allowed_tokens(compiled.first)
    assert set(allowed) & set(ENDS)
    assert not any(out[0][end // 32] >> end % 32 & 1 for end in ENDS)
    assert all(out[0][token // 32] >> token % 32 & 1 for token in allowed if token not in ENDS)


def test_prefetched_masks_are_not_enqueued_again(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    held, out = on_workers(site), site.outs[0]
    site.prefetch(held, out)
    monkeypatch.setattr(type(site.builder), "_enqueue_missing", None)
    site.check(held, out)
