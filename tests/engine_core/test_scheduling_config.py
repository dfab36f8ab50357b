"""Settings of the scheduler: defaults, and flags that exclude each other."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.engine_core.config import MAX_SESSIONS, STEP_UPLOADS, ModelShape, StepConfig, resolve
from tandem.engine_core.errors import ConfigError
from tandem.protocol.engine_options import POLICIES, EngineOptions

MODEL = ModelShape("tiny", max_positions=2048)


def decide(**options: Any) -> StepConfig:
    return resolve(EngineOptions(**options), MODEL, "cpu", "float32")


def test_scheduling_defaults_are_resolved() -> None:
    config = decide()
    assert (config.policy, config.static_batching, config.max_prefill_chunks_per_step) == ("fcfs", False, 0)
    assert (config.prefix_cache, config.max_sessions, config.session_ttl) == (True, MAX_SESSIONS, 600.0)


@pytest.mark.parametrize("options", [{"page_size": "max"}, {"batching": "static"}, {"prefix_cache": "off"}])
def test_sessions_need_the_prefix_cache(options: dict[str, Any]) -> None:
    config = decide(**options)
    assert (config.prefix_cache, config.max_sessions) == (False, 0)


def test_unchunked_prefill_needs_a_step_for_the_longest_prompt() -> None:
    assert (decide(prefill_chunk="off").prefill_chunk, decide(prefill_chunk="off").max_step_tokens) == (0, 2048 + 32)
    assert (decide(batching="static").prefill_chunk, decide(batching="static").max_step_tokens) == (0, 2048 + 32)
    assert decide(prefill_chunk="off", max_step_tokens=5000).max_step_tokens == 5000
    assert decide(prefill_chunk="off", max_len=100, max_rows=8).max_step_tokens == 128


def test_requested_values_are_taken() -> None:
    config = decide(policy="priority", max_prefill_chunks_per_step=3, max_sessions=7, session_ttl=1.5)
    assert (config.policy, config.max_prefill_chunks_per_step, config.max_sessions, config.session_ttl) == (
        "priority",
        3,
        7,
        1.5,
    )
    assert decide(max_sessions=0).max_sessions == 0
    assert decide(prefix_cache="off", max_sessions=0).max_sessions == 0


@pytest.mark.parametrize(("rows", "length", "uploads"), [(1, 100, 100), (32, 2048, STEP_UPLOADS), (2, 2000, 4000)])
def test_max_uploads_is_bounded_by_rows_and_a_constant(rows: int, length: int, uploads: int) -> None:
    assert decide(max_rows=rows, max_len=length).max_uploads == uploads


WRONG: list[tuple[dict[str, Any], list[str]]] = [
    ({"batching": "static", "policy": "priority"}, ["--batching static", "--policy priority"]),
    ({"batching": "static", "policy": "decode_first"}, ["--batching static", "--policy decode_first"]),
    ({"batching": "static", "prefill_chunk": 64}, ["--batching static", "--prefill-chunk 64"]),
    ({"batching": "static", "prefix_cache": "on"}, ["--batching static", "--prefix-cache on"]),
    ({"batching": "static", "max_itl": 20.0}, ["--batching static", "--max-itl 20"]),
    ({"prefill_chunk": "off", "max_itl": 2.5}, ["--prefill-chunk off", "--max-itl 2.5"]),
    ({"page_size": "max", "prefix_cache": "on"}, ["--page-size max", "--prefix-cache on"]),
    ({"prefix_cache": "off", "max_sessions": 4}, ["--prefix-cache off", "--max-sessions 4"]),
    ({"batching": "static", "max_sessions": 4}, ["--batching static", "--max-sessions 4"]),
    ({"page_size": "max", "max_sessions": 4}, ["--page-size max", "--max-sessions 4"]),
    ({"prefix_cache": "off", "session_ttl": 5.0}, ["--prefix-cache off", "--session-ttl 5"]),
    ({"batching": "static", "session_ttl": 5.0}, ["--batching static", "--session-ttl 5"]),
    ({"page_size": "max", "session_ttl": 5.0}, ["--page-size max", "--session-ttl 5"]),
    ({"max_sessions": 0, "session_ttl": 5.0}, ["--max-sessions 0", "--session-ttl 5"]),
    (
        {"prefill_chunk": "off", "max_step_tokens": 500},
        ["--max-step-tokens 500", "--max-len 2048", r"\b2080\b", "--prefill-chunk"],
    ),
    ({"max_prefill_chunks_per_step": 0}, ["--max-prefill-chunks-per-step 0: .* 1"]),
    ({"session_ttl": -1.0}, [r"--session-ttl -1: .* 0 to 1e\+10"]),
    ({"session_ttl": float("nan")}, [r"--session-ttl nan: .* 0 to 1e\+10"]),
    ({"session_ttl": float("inf")}, [r"--session-ttl inf: .* 0 to 1e\+10"]),
    ({"max_sessions": -1}, ["--max-sessions -1: .* 0"]),
]


@pytest.mark.parametrize(("options", "parts"), WRONG, ids=[parts[0] for _, parts in WRONG])
def test_contradicting_flags_are_both_named(options: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        decide(**options)
    for part in parts:
        assert re.search(part, str(caught.value))


@given(
    st.builds(
        EngineOptions,
        max_rows=st.integers(1, 40),
        max_len=st.integers(2, 300),
        max_step_tokens=st.none() | st.integers(1, 400),
        prefill_chunk=st.none() | st.just("off") | st.integers(1, 400),
        page_size=st.sampled_from([1, 16, "max"]),
        policy=st.sampled_from(POLICIES),
        batching=st.sampled_from(["continuous", "static"]),
        prefix_cache=st.sampled_from([None, "on", "off"]),
        max_sessions=st.none() | st.integers(0, 3),
    )
)
def test_resolved_settings_are_consistent(options: EngineOptions) -> None:
    try:
        config = resolve(options, MODEL, "cpu", "float32")
    except ConfigError:
        return
    least = config.max_rows + (0 if config.prefill_chunk else config.max_len)
    assert config.max_step_tokens >= least
    assert config.max_uploads >= config.max_len
    assert not (config.static_batching and (config.prefix_cache or config.prefill_chunk or config.policy != "fcfs"))
    assert config.prefix_cache or not config.max_sessions
