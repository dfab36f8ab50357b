"""Engines with a hybrid model generate transformers' tokens, whichever rows, chunks and steps compute them."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from msgspec import structs

from tandem.engine_core.errors import ConfigError, FatalError
from tandem.engine_core.kernels.delta_rule.state import RING
from tandem.engine_core.startup import engine as startup_engine
from tandem.engine_core.startup import preflight as preflight_module
from tandem.engine_core.startup.device import DeviceParts, open_parts
from tandem.engine_core.startup.kv_sizing import GIB
from tandem.engine_core.startup.preflight import Gpu, preflight
from tandem.protocol.engine_options import EngineOptions
from tandem.protocol.params import SamplingParams
from tandem.protocol.preflight import PreflightReport
from tests.engine_core.models.test_qwen3_5 import save_random
from tests.fakes.gpus import H200
from tests.fakes.recording_gpu import oracle_attention, oracle_parts
from tests.support.engine_driver import DrivenEngine
from tests.support.parity import VOCAB, greedy_tokens, random_tokens
from tests.support.plan_recording import runtime_of

LENGTHS = (1, 2, 3, 70, 16, 33, 5, 64)
TOKENS = 20
FEW_TOKENS = 112
"""KV tokens that three sequences at once may exceed."""
PARAMS = SamplingParams(TOKENS, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]], list[list[int]]]:
    """A random checkpoint, prompts, and the greedy tokens of transformers."""
    folder = tmp_path_factory.mktemp("hybrid")
    model = save_random(folder, {"num_hidden_layers": 3, "layer_types": ["linear_attention"] * 2 + ["full_attention"]})
    prompts = [tokens.tolist() for tokens in random_tokens(LENGTHS, VOCAB, seed=3)]
    return folder, prompts, [greedy_tokens(model, prompt, TOKENS) for prompt in prompts]


def options(folder: Path, **fields: Any) -> EngineOptions:
    usual: dict[str, Any] = {"device": "cpu", "max_len": 96, "max_rows": 3, "kv_tokens": 1024}
    return EngineOptions(model=str(folder), dtype="float32", **(usual | fields))


def generate(asked: EngineOptions, prompts: list[list[int]], parts: Callable[[str], DeviceParts]) -> list[list[int]]:
    cuda = patch.object(startup_engine.configuration, "resolve_device", lambda *_: asked.device)
    with cuda, oracle_attention():
        driven = DrivenEngine.build(asked, parts)
        found = driven.generate(prompts, [PARAMS] * len(prompts))
    assert driven.engine.scheduler.audit() == []
    repeats = len({*map(tuple, prompts)}) < len(prompts)
    assert not repeats or driven.engine.scheduler.memory.num_hit_tokens >= sum([(n - 1) // 16 * 16 for n in LENGTHS])
    assert (driven.engine.stats.preemptions > 0) == (asked.kv_tokens == FEW_TOKENS)
    return found


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "whole prompts": {},
    "chunks of odd sizes": {"max_step_tokens": 7},
    "one position a prompt and step": {"max_step_tokens": 4, "prefill_chunk": 1},
    "two steps in flight": {"pipeline": "on", "max_step_tokens": 32},
    "without a prefix cache": {"prefix_cache": "off"},
    "preempted": {"kv_tokens": FEW_TOKENS, "pipeline": "on"},
    "preempted, without a prefix cache": {"kv_tokens": FEW_TOKENS, "pipeline": "on", "prefix_cache": "off"},
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_rows_in_turn_give_the_tokens_of_transformers(
    name: str, checkpoint: tuple[Path, list[list[int]], list[list[int]]]
) -> None:
    """Eight sequences take turns in three rows: each begins with what the one before has left."""
    folder, prompts, expected = checkpoint
    assert generate(options(folder, **CONFIGURATIONS[name]), prompts, open_parts) == expected


@pytest.mark.parametrize("graphs", [{}, {"graph_rows": "2", "graph_tokens": "64"}])
def test_graphs_give_the_tokens_of_transformers(
    graphs: dict[str, str], checkpoint: tuple[Path, list[list[int]], list[list[int]]]
) -> None:
    folder, prompts, expected = checkpoint
    asked = options(folder, device="cuda", max_step_tokens=64, **graphs)
    assert generate(asked, prompts, oracle_parts) == expected
    assert generate(asked, prompts * 2, oracle_parts) == expected * 2, "the second half continues cached prompts"


def test_pages_that_end_between_two_states_need_the_prefix_cache_off(
    checkpoint: tuple[Path, list[list[int]], list[list[int]]],
) -> None:
    with pytest.raises(ConfigError, match="--page-size 32"):
        startup_engine.resolve_engine(options(checkpoint[0], page_size=32, prefix_cache="on"), cuda=False)
    found = startup_engine.resolve_engine(options(checkpoint[0], page_size=32), cuda=False)
    assert not found.config.prefix_cache
    assert startup_engine.resolve_engine(options(checkpoint[0], page_size=8), cuda=False).config.prefix_cache


def test_a_step_that_runs_out_of_memory_ends_the_engine(
    checkpoint: tuple[Path, list[list[int]], list[list[int]]],
) -> None:
    """It may have changed the state of some layers, so it cannot be repeated as those of other models."""
    driven = DrivenEngine.build(options(checkpoint[0]))
    driven.submit([5, 6, 7], PARAMS)
    error = torch.OutOfMemoryError("no room")
    with patch.object(runtime_of(driven).model, "forward", side_effect=error), pytest.raises(FatalError):
        driven.run()


def test_steps_are_timed_with_rows_that_read_their_states(
    checkpoint: tuple[Path, list[list[int]], list[list[int]]],
) -> None:
    tables = runtime_of(DrivenEngine.build(options(checkpoint[0], max_rows=20))).tables
    lengths = tables.sampling.lengths[1:].tolist()
    assert min(lengths) > RING
    assert len(set(lengths[:16])) > 8


@pytest.mark.parametrize(("max_len", "max_rows"), [(2, 1), (18, 1), (32, 16)])
def test_rows_are_timed_within_the_longest_sequence(
    max_len: int, max_rows: int, checkpoint: tuple[Path, list[list[int]], list[list[int]]]
) -> None:
    driven = DrivenEngine.build(options(checkpoint[0], max_len=max_len, max_rows=max_rows))
    (found,) = driven.generate([[5] * (max_len - 1)], [SamplingParams(1, ignore_eos=True)])
    assert len(found) == 1
    assert max(runtime_of(driven).tables.sampling.lengths.tolist()) <= max_len


@pytest.mark.parametrize(("shape", "state"), [("qwen3.5-9b", 64.2), ("qwen3.5-27b", 186.1)])
def test_the_preflight_check_splits_the_memory_of_a_gpu(shape: str, state: float) -> None:
    asked = EngineOptions(model=f"benchmarks/shapes/{shape}", load_format="dummy", device="cuda", dtype="bfloat16")
    with patch.multiple(preflight_module, check_installed=lambda: None, check_gpu=lambda _: None):
        found = preflight(asked, [Gpu(H200, 139 * GIB, 140 * GIB)], lambda: 0, lambda: 0)
        explicit = preflight(
            structs.replace(asked, max_rows=400), [Gpu(H200, 139 * GIB, 140 * GIB)], lambda: 0, lambda: 0
        )
    assert found.problems == explicit.problems == []
    rows, checkpoints, pages = sizes(found)
    assert rows[1] * state / 1024 == pytest.approx(rows[0], rel=0.02)
    left = rows[0] + checkpoints[0] + pages[0]
    assert 0.45 * left < rows[0] <= 0.5 * left + 0.2
    assert 0.12 * left < checkpoints[0] <= 0.126 * left
    assert sizes(explicit)[0][1] == 400


def sizes(found: PreflightReport) -> list[list[float]]:
    """Return the numbers of the report's lines about memory, in GiB the first of each."""
    names = ("recurrent state", "checkpoints", "KV cache")
    numbers = [[float(number) for number in re.findall(r"\d+(?:\.\d+)?", found.choices[name])] for name in names]
    return [numbers[0], numbers[1], numbers[2][1:]]


def test_the_preflight_check_prints_the_state(checkpoint: tuple[Path, list[list[int]], list[list[int]]]) -> None:
    asked = EngineOptions(model=str(checkpoint[0]), device="cpu", max_rows=7)
    found = preflight(asked, [], lambda: 2**34, lambda: 2**34)
    assert found.problems == []
    assert re.fullmatch(r"[1-9]\d*\.\d MiB for 7 rows|0\.[1-9] MiB for 7 rows", found.choices["recurrent state"])
    assert found.choices["prefix cache"] == "on"
    assert re.fullmatch(r"\d+\.\d MiB for 1024 of 0\.\d MiB", found.choices["checkpoints"])
    short = preflight(structs.replace(asked, max_rows=16_384), [], lambda: 2**26, lambda: 2**26)
    assert (short.shortage and "lower --max-rows" in short.shortage) or "lower --max-rows" in str(short.problems)
