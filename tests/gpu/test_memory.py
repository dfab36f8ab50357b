"""The KV pool gets the share's rest after weights, steps and graphs, which stay within their measured sizes."""

import gc
import logging
import re
from random import Random

import pytest
import torch

from tandem.protocol.engine_options import EngineOptions
from tests.support.engine_driver import DrivenEngine
from tests.support.gpu_traffic import KINDS, requests
from tests.support.plan_recording import runtime_of

pytestmark = pytest.mark.gpu

GIB = 2**30
SLACK = GIB // 4
"""Bytes that the driver takes for contexts of libraries and code of kernels that run later."""

SMALL_BLOCKS = 2**25
"""Bytes that uploads of other sizes than those measured may add, in blocks of 2 MiB."""


def free() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


@pytest.mark.parametrize(
    ("share", "page_size", "graph_rows"), [(0.3, 16, None), (0.25, "max", "1,2,4"), (0.2, 16, "off")]
)
def test_an_engine_takes_its_share_of_the_memory(
    share: float, page_size: int, graph_rows: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    total = torch.cuda.mem_get_info()[1]
    before = free()
    options = EngineOptions(
        device="cuda",
        dtype="bfloat16",
        max_rows=64,
        max_len=512,
        page_size=page_size,
        gpu_memory=share,
        graph_rows=graph_rows,
    )
    with caplog.at_level(logging.INFO):
        driven = DrivenEngine.build(options)
    runtime = runtime_of(driven)
    held = before - torch.cuda.mem_get_info()[0]
    print(f"\nasked for {share * total / GIB:.2f} GiB, holds {held / GIB:.2f}")
    print("\n".join(record.message for record in caplog.records if "GiB" in record.message))
    assert held <= share * total + SLACK
    assert held >= share * total - SLACK - GIB, "what was reserved for steps and graphs is nearly used"
    reserved = torch.cuda.memory_reserved()
    rng = Random(1)
    for _ in range(3):
        asked = requests(80, KINDS, rng, longest=400, most=60, vocab=4096)
        driven.generate([prompt for prompt, _ in asked], [params for _, params in asked])
    runtime.synchronize()
    assert torch.cuda.memory_reserved() - reserved <= SMALL_BLOCKS, "a step needed more than was measured"
    assert before - torch.cuda.mem_get_info()[0] <= share * total + SLACK


def test_graphs_take_no_more_than_was_reserved_for_them(caplog: pytest.LogCaptureFixture) -> None:
    """Counts bytes of the allocator; the driver's part shows only in the share of the test above."""
    options = EngineOptions(device="cuda", dtype="bfloat16", max_rows=256, max_len=512, kv_tokens=20_000)
    with caplog.at_level(logging.INFO):
        driven = DrivenEngine.build(options)
    runtime_of(driven).synchronize()
    text = "\n".join(record.message for record in caplog.records)
    kept = re.search(r"graphs (\d+\.\d+) \(the largest", text)
    taken = re.search(r"\bgraphs of \d+ [^\n]*\d s and (\d+\.\d+) GiB", text)
    assert kept is not None and taken is not None, text
    print(f"\nkept {kept[1]} GiB for graphs, which took {taken[1]}")
    assert float(taken[1]) <= float(kept[1]) + 0.02
