"""Eight turns of a chat with a hybrid model: how much of each prompt the cache saves."""

import pytest

from tandem.engine_core.scheduler.scheduler import Scheduler
from tandem.protocol.params import SamplingParams
from tests.support.scheduling import new, run, submitted

TURNS, TOKENS, ANSWER = 8, 1024, 20
OPENING = (31, 32, 33, 34, 35)
"""Last tokens of a prompt, with which the template begins the answer."""


def scheduler(state_slots: int | None) -> Scheduler:
    return new(4, pages=2000, step=8192, chunk=8192, page_size=16, state_slots=state_slots)


def cached_tokens(scheduler: Scheduler, dropped: int, *, answers_kept: bool, overhead: int) -> list[int]:
    """Return the cached tokens of each turn's prompt.

    dropped: tokens of the opening that the next prompt lacks; answers_kept: False if it has the opening's other tokens
    and no answer, as if that was all reasoning; overhead: tokens of the template before each message.
    """
    history: list[int] = []
    cached, step = [], 1
    for turn in range(TURNS):
        user = [100 + turn] * overhead + [1000 * (turn + 1) + index for index in range(TOKENS)]
        prompt = [*history, *user, *OPENING]
        seq = submitted(turn + 1, prompt, SamplingParams(TOKENS))
        step = run(scheduler, seq, token=ANSWER, depth=2, first_step=step)
        cached.append(seq.cache.num_cached_tokens)
        history = prompt[: len(prompt) - dropped] + ([ANSWER] * TOKENS if answers_kept else [])
        assert scheduler.audit() == []
    return cached


@pytest.mark.parametrize("overhead", [0, 3, 6, 11])
@pytest.mark.parametrize(("dropped", "answers_kept"), [(0, True), (2, False), (5, False)])
def test_checkpoints_save_nearly_as_much_as_pages(dropped: int, answers_kept: bool, overhead: int) -> None:
    """Answers kept in the history, and stripped as reasoning; compared with a model whose pages can be continued."""
    pages = cached_tokens(scheduler(None), dropped, answers_kept=answers_kept, overhead=overhead)
    found = cached_tokens(scheduler(60), dropped, answers_kept=answers_kept, overhead=overhead)
    assert sum(found) >= 0.99 * sum(pages)
