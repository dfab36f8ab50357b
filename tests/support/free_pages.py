"""NaN in all pages of a pool that nobody owns."""

from collections.abc import Sequence

import torch

from tandem.engine_core.runtime.runtime import TorchRuntime
from tests.support.engine_driver import DrivenEngine


def windows_of(driven: DrivenEngine) -> list[int | None]:
    """Return the window of each KV group of an engine."""
    runtime = driven.engine.runtime
    assert isinstance(runtime, TorchRuntime)
    return [group.window for group in runtime.kv.layout.groups]


def poison_free_pages(driven: DrivenEngine) -> None:
    """Fill every page with NaN now and whenever it is freed, except the padding page.

    Steps that read a freed page have been launched, and run before it is filled: on one stream, in order.
    """
    runtime, pages = driven.engine.runtime, driven.engine.scheduler.memory.pages
    assert isinstance(runtime, TorchRuntime)
    pool, release = runtime.kv.pool, pages.release
    pool[1:] = torch.nan

    def release_and_poison(owner: int, freed: Sequence[int]) -> None:
        release(owner, freed)
        if freed:
            pool[list(freed)] = torch.nan

    pages.release = release_and_poison  # type: ignore[method-assign, assignment]
