"""The split of layers into groups with pages of one size."""

import pytest

from tandem.engine_core.kv_cache.groups import MAX_GROUPS, MAX_UNUSED, KVGroup, partition

GEMMA_3_4B = [None if layer % 6 == 5 else 1024 for layer in range(34)]


def unused(groups: tuple[KVGroup, ...]) -> float:
    """Return the share of layers without use, over all groups or those that keep all positions."""
    size = max(len(group.layers) for group in groups)
    kinds = [groups, [group for group in groups if group.window is None] or groups]
    layers = [sum(len(group.layers) for group in kind) for kind in kinds]
    return max((size * len(kind) - used) / used for kind, used in zip(kinds, layers, strict=True))


def test_layers_of_one_window_are_one_group() -> None:
    for window in (None, 512):
        assert partition([window] * 28, 8, 128) == (KVGroup(tuple(range(28)), 8, 128, window),)


def test_gemma_3_4b_has_seven_groups_of_five_layers() -> None:
    groups = partition(GEMMA_3_4B, 4, 256)
    assert [(len(group.layers), group.window) for group in groups] == [(5, None), *[(5, 1024)] * 5, (4, 1024)]
    assert groups[0].layers == (5, 11, 17, 23, 29)
    assert groups[1].layers == (0, 1, 2, 3, 4) and groups[2].layers == (6, 7, 8, 9, 10)
    assert unused(groups) == pytest.approx(1 / 34)


@pytest.mark.parametrize(
    ("full", "window", "size", "count"),
    [(4, 22, 2, 13), (8, 40, 8, 6), (10, 52, 5, 13), (21, 21, 21, 2), (18, 10, 2, 14), (1, 59, 4, 16), (1, 1, 1, 2)],
)
def test_pages_of_published_shapes(full: int, window: int, size: int, count: int) -> None:
    groups = partition([None] * full + [512] * window, 1, 8)
    assert (max(len(group.layers) for group in groups), len(groups)) == (size, count)


@pytest.mark.parametrize("full", range(0, 41))
def test_every_layer_is_in_one_group_and_little_memory_is_unused(full: int) -> None:
    """No size that the limit allows leaves less, or little in fewer groups."""
    for window in range(full == 0, 61):
        counts = [count for count in (full, window) if count]
        windows = [None] * full + [128] * window
        groups = partition(windows, 2, 64)
        assert sorted(layer for group in groups for layer in group.layers) == list(range(full + window))
        assert all(windows[layer] == group.window for group in groups for layer in group.layers)
        size = max(len(group.layers) for group in groups)
        assert len(groups) == sum(-(-count // size) for count in counts) <= max(MAX_GROUPS, len(counts))
        assert [group.window for group in groups] == sorted((g.window for g in groups), key=lambda w: w is not None)
        for other in range(1, max(counts) + 1):
            number = sum(-(-count // other) for count in counts)
            pairs = [(number, full + window), (-(-full // other), full)][: 2 if full else 1]
            wasted = max((other * groups_of - layers) / layers for groups_of, layers in pairs)
            if number <= MAX_GROUPS:
                assert unused(groups) <= max(wasted, MAX_UNUSED)
                assert number >= len(groups) or wasted > MAX_UNUSED


def test_groups_of_three_windows_have_pages_of_one_size() -> None:
    groups = partition([512, None, 1024, 512, None, 1024, 512], 1, 8)
    assert [(group.layers, group.window) for group in groups] == [
        ((1,), None),
        ((4,), None),
        ((2,), 1024),
        ((5,), 1024),
        ((0,), 512),
        ((3,), 512),
        ((6,), 512),
    ]
