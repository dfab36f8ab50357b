"""Sequences that a pool holds at once: Gemma 3 4B's shape, of whose 34 layers 29 have a window of 1,024."""

import pytest

from tandem.engine_core.kv_cache.groups import KVGroup, partition
from tandem.protocol.params import SamplingParams
from tests.support.scheduling import commit, launched, new, submitted

PAGE, LAYERS = 16, 34
GROUPS = partition([None if layer % 6 == 5 else 1024 for layer in range(LAYERS)], kv_heads=4, head_dim=256)


def num_held(groups: tuple[KVGroup, ...], layer_pages: int, length: int, cache: bool) -> int:
    """Return how many sequences of a length have their KV in a pool at once.

    layer_pages: size of the pool, in pages of one layer.
    """
    size, prompt = max(len(group.layers) for group in groups), length - 48
    windows, chunk = tuple(group.window for group in groups), min(4096, prompt)
    scheduler = new(
        300,
        1 + layer_pages // size,
        chunk,
        chunk,
        9,
        page_size=PAGE,
        cache=cache,
        policy="prefill_first",
        windows=windows,
    )
    params, step = SamplingParams(48), 0
    for number in range(1, 300):
        scheduler.add(seq := submitted(number, range(number, number + prompt), params))
        scheduler.admit_waiting()
        while seq.id in scheduler.running and not seq.generated and not scheduler.preemptions:
            plan = launched(scheduler, step := step + 1)
            commit(scheduler, plan, [7] * len(plan.rows))
        if scheduler.preemptions or not seq.generated:
            break
    assert scheduler.audit() == []
    return number - 1


@pytest.mark.parametrize("cache", [True, False])
def test_long_sequences_hold_few_pages_of_windows(cache: bool) -> None:
    layer_pages = 4 * LAYERS * 32_768 // PAGE
    whole = num_held(partition([None] * LAYERS, 4, 256), layer_pages, 32_768, cache)
    assert num_held(GROUPS, layer_pages, 32_768, cache) >= 5 * whole


@pytest.mark.parametrize("cache", [True, False])
def test_short_sequences_hold_as_many_pages_as_without_windows(cache: bool) -> None:
    layer_pages = 60 * LAYERS * 512 // PAGE
    whole = num_held(partition([None] * LAYERS, 4, 256), layer_pages, 512, cache)
    assert num_held(GROUPS, layer_pages, 512, cache) >= 0.95 * whole
