"""Table updates in one launch against their oracle, and the oracle against separate updates."""

import mmap
import random
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.engine_core.kernels.attention.table_updates import (
    BLOCK,
    PROGRAMS,
    update_tables,
    update_tables_reference,
)
from tandem.engine_core.kernels.sampling.inputs import UPDATE_FIELDS, SamplingTables
from tandem.engine_core.page_counts import PageColumns
from tandem.engine_core.plan import NewSequence, ScheduledSequence, StepPlan
from tandem.engine_core.runtime.staging import Packed, capacity, pack
from tandem.engine_core.runtime.tables import DeviceTables
from tandem.protocol.codec import pack_ids
from tandem.protocol.params import MAX_SEED, SamplingParams

NORESERVE = 0x4000
"""Linux's MAP_NORESERVE, which Python names from 3.13 on."""
ROWS, MAX_LEN, PAGES = 120, 2 * BLOCK * PROGRAMS, 300
COLUMNS = (PageColumns(0, PAGES),)


def tables_of(device: str) -> DeviceTables:
    return DeviceTables.allocate(ROWS, MAX_LEN, COLUMNS, torch.device(device))


def admission(draw: random.Random, row: int, length: int) -> NewSequence:
    params = SamplingParams(
        9, temperature=draw.random(), top_k=draw.randrange(2**31), top_p=draw.random(), seed=draw.randrange(MAX_SEED)
    )
    ends = tuple(draw.sample(range(500), draw.randrange(20)))
    return NewSequence(row, row, length, params, ends)


def random_plan(draw: random.Random, lengths: tuple[int, ...]) -> StepPlan:
    """Rows of prompts, some of them admitted or with pages, and rows that decode, some of them with a page."""
    rows, admitted = [], []
    for row, length in zip(draw.sample(range(1, ROWS + 1), len(lengths)), lengths, strict=True):
        pages = tuple(draw.choices(range(1, 2**31 - 1), k=draw.randrange(PAGES)))
        first = draw.randrange(PAGES - len(pages) + 1)
        tokens = pack_ids(draw.choices(range(2**31 - 1), k=length)) if length > 1 else b""
        start = draw.randrange(MAX_LEN - length + 1)
        rows.append(ScheduledSequence(row, row, start, length, True, tokens=tokens, new_pages=pages, first_page=first))
        if length > 1 and draw.random() < 0.9:
            admitted.append(admission(draw, row, length))
    return StepPlan.of(1, tuple(rows), tuple(admitted))


def staged(plan: StepPlan, device: str) -> tuple[Tensor, Tensor, Packed]:
    """Return the locations of a step's updates, its inputs, and the offsets of all of these."""
    out = np.full(capacity(ROWS, ROWS * MAX_LEN, ROWS * PAGES, ROWS * MAX_LEN), -77, dtype=np.int32)
    packed = pack(plan, MAX_LEN, COLUMNS, out)
    locations = torch.tensor(packed.locate_updates(), dtype=torch.int32)
    assert locations.shape == (len(UPDATE_FIELDS), 2)
    return locations.to(device), torch.from_numpy(out)[: packed.total].to(device), packed


def same(one: DeviceTables, other: DeviceTables) -> bool:
    pairs = [(getattr(one.sampling, f.name), getattr(other.sampling, f.name)) for f in fields(SamplingTables)]
    return all(torch.equal(a, b) for a, b in [*pairs, (one.pages, other.pages)])


@pytest.mark.parametrize(
    "lengths",
    [(1, 1, 1), (5, 1, 300, 2), (BLOCK,), (BLOCK + 1, 7), (BLOCK * PROGRAMS + 9, 2, 1), (2,) * ROWS],
    ids=lambda lengths: f"{len(lengths)} rows of up to {max(lengths)}",
)
def test_updates_in_one_launch_equal_those_of_each_table(lengths: tuple[int, ...], device: str) -> None:
    """Of pages only; of more tokens, and of more parameters, than all programs write at a time."""
    draw = random.Random(str(lengths))
    for _ in range(4):
        plan = random_plan(draw, lengths)
        locations, inputs, packed = staged(plan, device)
        alone, kernel, oracle = (tables_of(device) for _ in range(3))
        alone.apply(inputs, packed)
        update_tables(locations, inputs, kernel.pages, kernel.sampling)
        update_tables_reference(locations, inputs, oracle.pages, oracle.sampling)
        assert same(kernel, alone) and same(oracle, alone)
        assert packed.has_updates and not same(alone, tables_of(device))


def test_a_step_without_updates_has_none(device: str) -> None:
    """Locations are zeros while a graph is captured."""
    plan = StepPlan.of(1, (ScheduledSequence(1, 1, 4, 1, True),))
    locations, inputs, packed = staged(plan, device)
    assert not packed.has_updates and not locations.any()
    tables = tables_of(device)
    update_tables(locations, inputs, tables.pages, tables.sampling)
    assert same(tables, tables_of(device))


def sparse(words: int) -> Tensor:
    """Return zeros that take memory only where something is written."""
    memory = mmap.mmap(-1, 4 * words, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    return torch.frombuffer(memory, dtype=torch.int32)


def test_indices_have_64_bits(device: str) -> None:
    """Below, at and above what 31 and 32 bits hold."""
    if device != "cpu":
        pytest.skip("the table would take 16 GiB of the GPU; on a CPU it takes a few pages")
    places = [7, 2**31 - 1, 2**31, 2**32 - 1, 2**32 + 5]
    tables, wide = tables_of("cpu"), sparse(2**32 + 8)
    sampling = replace(tables.sampling, tokens=wide)
    values = torch.arange(1, len(places) + 1, dtype=torch.int32)
    inputs = torch.cat((torch.tensor(places).view(torch.int32), values))
    locations = torch.zeros(len(UPDATE_FIELDS), 2, dtype=torch.int32)
    locations[0] = torch.tensor([0, 2 * len(places)])
    locations[1] = torch.tensor([2 * len(places), len(places)])
    update_tables(locations, inputs, tables.pages, sampling)
    assert wide[torch.tensor(places)].equal(values)
    assert not wide[:7].any() and not wide[8:12].any()


@pytest.mark.parametrize("scattered", ["locations", "inputs", "pages", "tokens"])
def test_tables_that_are_not_contiguous_are_refused(scattered: str) -> None:
    tables = tables_of("cpu")
    locations, inputs, _ = staged(random_plan(random.Random(0), (2,)), "cpu")
    given = {"locations": locations, "inputs": inputs, "pages": tables.pages, "tokens": tables.tokens}
    given[scattered] = given[scattered].repeat_interleave(2, dim=-1)[..., ::2]
    sampling = replace(tables.sampling, tokens=given.pop("tokens"))
    with pytest.raises(ValueError, match="contiguous"):
        update_tables(**given, tables=sampling)
