"""Descriptions of the KV pool agree with its numbers."""

import pytest
import torch
from msgspec import structs

from tandem.engine_core.config import EngineConfig, ModelShape, resolve
from tandem.engine_core.kv_cache.groups import partition
from tandem.engine_core.kv_cache.storage import KVLayout
from tandem.engine_core.startup import pool_text
from tandem.engine_core.startup.kv_sizing import GIB, Memory, short_pool, size_pool
from tandem.protocol.engine_options import EngineOptions
from tests.support.refusals import numbers_in

WINDOWS = [None, *[128] * 5] * 2


def pool_of(windows: list[int | None], **flags: object) -> tuple[EngineConfig, KVLayout]:
    groups = partition(windows, 4, 16)
    step = resolve(EngineOptions(**flags), ModelShape("tiny", 4096), "cpu", "float32")  # type: ignore[arg-type]
    step = structs.replace(step, kv_windows=tuple([group.window for group in groups]))
    layout = KVLayout(groups=groups, page_size=step.page_size, dtype=torch.float32)
    return size_pool(step, Memory(free=8 * GIB), layout.token_bytes), layout


@pytest.mark.parametrize(
    ("size", "text"),
    [(2**30, "1.00 GiB"), (2**30 - 1, "1024.0 MiB"), (57 * 2**20, "57.0 MiB"), (2**17, "0.1 MiB")],
)
def test_sizes_below_a_gib_are_in_mib(size: int, text: str) -> None:
    assert pool_text.size_text(size) == text


def test_the_numbers_of_a_pool_with_windows_are_consistent() -> None:
    config, layout = pool_of(WINDOWS)
    # A page: 2 layers, keys and values, 16 tokens, 4 heads of 16 elements, 4 bytes. A window of 128: 8 + 1 pages.
    assert numbers_in(pool_text.pages_text(config, layout)) == [9632, 16, 16, 2]
    assert config.pages - 1 == 32 * 301
    assert numbers_in(pool_text.sequence_text(config)) == [4096, 301]
    assert numbers_in(pool_text.capacity_text(config)) == [9632 // 6 * 16, 32 * 4096, 4096]


def test_given_tokens_are_those_of_sequences_of_any_length() -> None:
    config, _ = pool_of(WINDOWS, kv_tokens=20_000)
    assert numbers_in(pool_text.capacity_text(config))[0] == 20_000
    assert config.kv_tokens > 20_000


def test_a_pool_without_windows_has_one_capacity() -> None:
    config, layout = pool_of([None] * 4, kv_tokens=20_000)
    assert pool_text.capacity_text(config) == "20000 tokens"
    assert numbers_in(pool_text.pages_text(config, layout)) == [1250, 32, 16, 4]


@pytest.mark.parametrize(("tokens", "is_short"), [(160, True), (4080, True), (4096, False)])
def test_a_pool_below_one_sequence_is_short(tokens: int, is_short: bool) -> None:
    config, layout = pool_of([None] * 4, kv_tokens=tokens)
    text = short_pool(config, layout.page_bytes)
    assert bool(text) == is_short
    assert not is_short or numbers_in(text)[:2] == [tokens, 4096]
