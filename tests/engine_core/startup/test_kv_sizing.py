"""The number of KV pages follows from flags and measured memory."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from tandem.engine_core.config import EngineConfig, ModelShape, resolve
from tandem.engine_core.errors import ConfigError
from tandem.engine_core.page_counts import held_pages
from tandem.engine_core.startup import kv_sizing
from tandem.engine_core.startup.kv_sizing import GIB, Memory, StateSizes, check_memory_flags, size_pool
from tandem.protocol.engine_options import EngineOptions

MODEL = ModelShape("tiny", 2048)
CPU = Memory(free=8 * GIB)
GPU = Memory(free=57 * GIB, total=64 * GIB, free_at_start=63 * GIB, steps=1 * GIB, graphs=2 * GIB)
"""Memory of a GPU with 6 GiB of weights, and 1 GiB that other processes hold."""
TOKEN = 1024


def decide(memory: Memory, token_bytes: int = TOKEN, model: ModelShape = MODEL, **flags: Any) -> EngineConfig:
    options = EngineOptions(**flags)
    device = "cuda" if memory.total else "cpu"
    return size_pool(resolve(options, model, device, "float32"), memory, token_bytes)


def pool_bytes(config: EngineConfig, token_bytes: int = TOKEN) -> int:
    return config.pages * config.page_size * token_bytes


class TestCpu:
    def test_the_pool_is_no_larger_than_all_rows_could_fill(self) -> None:
        assert decide(CPU).kv_tokens == 32 * 2048
        assert decide(CPU, max_len=33, page_size=16).kv_tokens == 32 * 48, "whole pages"
        assert decide(CPU, max_len=33, page_size="max").kv_tokens == 32 * 64

    def test_the_pool_takes_a_share_of_the_free_memory(self) -> None:
        assert pool_bytes(decide(Memory(free=4 * GIB), 1 << 20, page_size=16), 1 << 20) == GIB

    def test_the_pool_is_bounded_in_bytes(self) -> None:
        model = ModelShape("big", 100_000)
        config = decide(Memory(free=1000 * GIB), 1 << 20, model)
        assert pool_bytes(config, 1 << 20) == kv_sizing.CPU_KV_BYTES


class TestGpu:
    def test_the_pool_takes_the_default_share_less_weights_steps_and_graphs(self) -> None:
        expected = int(64 * GIB * 0.9) - (6 + 1 + 2) * GIB - kv_sizing.CONTEXT_BYTES
        assert 0 <= expected - pool_bytes(decide(GPU)) < 16 * TOKEN

    def test_the_pool_takes_a_requested_share(self) -> None:
        expected = int(64 * GIB * 0.5) - (6 + 1 + 2) * GIB - kv_sizing.CONTEXT_BYTES
        assert 0 <= expected - pool_bytes(decide(GPU, gpu_memory=0.5)) < 16 * TOKEN

    @pytest.mark.parametrize("in_use", [0, 1, 300 * 2**20])
    def test_a_share_includes_what_cuda_holds_before_the_first_tensor(self, in_use: int) -> None:
        memory = Memory(free=60 * GIB, total=64 * GIB, free_at_start=64 * GIB - in_use)
        expected = int(64 * GIB * 0.5) - (memory.free_at_start - memory.free) - in_use
        assert 0 <= expected - pool_bytes(decide(memory, gpu_memory=0.5)) < 16 * TOKEN

    def test_memory_of_other_processes_is_not_taken(self) -> None:
        crowded = Memory(free=14 * GIB, total=64 * GIB, free_at_start=20 * GIB, steps=GIB, graphs=2 * GIB)
        assert 0 <= 11 * GIB - pool_bytes(decide(crowded)) < 16 * TOKEN

    def test_two_engines_share_a_device(self) -> None:
        """The second finds the memory of the first taken, and still takes its share of the whole."""
        first = pool_bytes(decide(GPU, gpu_memory=0.45))
        second = Memory(free=57 * GIB - first - 9 * GIB, total=64 * GIB, free_at_start=63 * GIB - first - 9 * GIB,
                        steps=GIB, graphs=2 * GIB)  # fmt: skip
        assert pool_bytes(decide(second, gpu_memory=0.45)) == first


@pytest.mark.parametrize("memory", [CPU, GPU])
class TestRequestedSizes:
    @pytest.mark.parametrize(("asked", "tokens"), [(16, 16), (31, 16), (32, 32), (100_000, 100_000)])
    def test_requested_tokens_are_rounded_down_to_pages(self, memory: Memory, asked: int, tokens: int) -> None:
        assert decide(memory, kv_tokens=asked).kv_tokens == tokens

    def test_requested_memory_is_all_that_the_pool_takes(self, memory: Memory) -> None:
        config = decide(memory, kv_memory=5 * GIB)
        assert pool_bytes(config) == 5 * GIB
        assert config.kv_tokens == 5 * GIB // TOKEN - 16

    def test_narrower_keys_give_more_tokens(self, memory: Memory) -> None:
        wide, narrow = decide(memory, 2048, kv_memory=GIB), decide(memory, 1024, kv_memory=GIB)
        assert narrow.pages == 2 * wide.pages

    def test_the_largest_page_holds_one_sequence(self, memory: Memory) -> None:
        config = decide(memory, page_size="max", max_len=1000, kv_memory=2**23)
        assert (config.page_size, config.pages, config.kv_tokens) == (1024, 8, 7 * 1024)


HYBRID = structs.replace(MODEL, row_bytes=2**20, state_interval=16, chunk_grid=64)
STATES = StateSizes(rows=20 * GIB, checkpoint=150 * 2**20)


def with_states(memory: Memory, states: StateSizes = STATES, **flags: Any) -> EngineConfig:
    device = "cuda" if memory.total else "cpu"
    return size_pool(resolve(EngineOptions(**flags), HYBRID, device, "float32"), memory, TOKEN, states)


class TestCheckpoints:
    LEFT = int(64 * GIB * 0.9) - (6 + 1 + 2) * GIB - kv_sizing.CONTEXT_BYTES
    """Bytes of `GPU` that weights, states of rows, steps and graphs leave."""

    def test_they_take_an_eighth_of_what_the_weights_leave(self) -> None:
        config = with_states(GPU)
        assert config.state_slots == (self.LEFT + STATES.rows) // 8 // STATES.checkpoint
        pages = self.LEFT - config.state_slots * STATES.checkpoint
        assert 0 <= pages - pool_bytes(config) < 16 * TOKEN

    def test_they_leave_half_to_pages_if_rows_take_more(self) -> None:
        config = with_states(GPU, StateSizes(rows=2000 * GIB, checkpoint=STATES.checkpoint), max_rows=100)
        assert config.state_slots == self.LEFT // 2 // STATES.checkpoint
        assert pool_bytes(config) >= self.LEFT // 2 - 16 * TOKEN

    def test_a_pool_of_a_given_size_keeps_it(self) -> None:
        assert pool_bytes(with_states(GPU, kv_memory=40 * GIB)) == 40 * GIB
        least = with_states(GPU, kv_memory=self.LEFT - 2 * STATES.checkpoint)
        assert least.state_slots == 2
        assert with_states(GPU, kv_memory=self.LEFT + 1).state_slots == 0

    def test_they_are_limited_in_number(self) -> None:
        assert with_states(GPU, StateSizes(GIB, 1000)).state_slots == kv_sizing.MAX_STATE_SLOTS

    def test_a_cpu_gives_them_an_eighth_of_the_bound_of_its_pool(self) -> None:
        assert with_states(CPU).state_slots == 2 * GIB // 8 // STATES.checkpoint

    def test_without_a_prefix_cache_there_are_none(self) -> None:
        assert with_states(GPU, prefix_cache="off").state_slots == 0
        assert decide(GPU).state_slots == 0


WRONG: list[tuple[Memory, dict[str, Any], str]] = [
    (CPU, {"kv_tokens": 1}, r"page of 16\b.* --kv-tokens"),
    (CPU, {"kv_tokens": -5}, "--kv-tokens -5: .* 1"),
    (CPU, {"kv_tokens": 15}, r"\b15 tokens"),
    (
        CPU,
        {"kv_tokens": 100, "max_len": 97},
        r"--max-len 97\b.*\b96 tokens;.* --kv",
    ),
    (CPU, {"kv_tokens": 1, "page_size": 1}, "page of 2;.* --kv-tokens"),
    (CPU, {"kv_memory": 31 * TOKEN}, f"--kv-memory to {32 * TOKEN} "),
    (CPU, {"kv_memory": 1}, f"--kv-memory to {32 * TOKEN} "),
    (CPU, {"kv_memory": 1, "page_size": 1}, f"--kv-memory to {3 * TOKEN} "),
    (CPU, {"kv_memory": 112 * TOKEN, "max_len": 97}, f"--max-len 97 .*--kv-memory to {128 * TOKEN} "),
    (CPU, {"page_size": "max", "kv_tokens": 2047}, r"page of 2048\b"),
    (Memory(free=100_000), {}, r"\b0\.00 GiB free"),
    (Memory(5 * GIB, 64 * GIB, 20 * GIB, 3 * GIB, 2 * GIB), {}, r"\b5\.00 GiB free, .* 5\.00\b"),
    (GPU, {"gpu_memory": 0.1}, "--gpu-memory,.* --max-rows or --max-step-tokens"),
    (
        CPU,
        {"kv_tokens": 99_999_999_999},
        r"--kv-tokens 99999999999 .* 95367\.43 GiB .* 1024 bytes .* 8\.00 GiB .*--kv-tokens",
    ),
    (GPU, {"kv_memory": 58 * GIB}, r" 58\.00 GiB .* 1024 bytes .* 57\.00 GiB .*--kv-memory"),
]


@pytest.mark.parametrize(("memory", "flags", "text"), WRONG, ids=[text for *_, text in WRONG])
def test_a_pool_of_the_wrong_size_is_refused_with_numbers_and_a_remedy(
    memory: Memory, flags: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        decide(memory, **flags)


@pytest.mark.parametrize(
    ("kv_memory", "flags"),
    [(32 * TOKEN, {}), (3 * TOKEN, {"page_size": 1}), (128 * TOKEN, {"max_len": 97})],
)
def test_the_memory_that_a_refusal_names_is_enough_and_less_is_not(kv_memory: int, flags: dict[str, Any]) -> None:
    assert decide(CPU, kv_memory=kv_memory, **flags).kv_tokens >= flags.get("max_len", 2)
    with pytest.raises(ConfigError, match=rf"--kv-memory\b.*\b{kv_memory}\b"):
        decide(CPU, kv_memory=kv_memory - 1, **flags)


EXCLUSIVE: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("cpu", {"kv_memory": GIB, "kv_tokens": 100}, ("--kv-memory", "--kv-tokens")),
    ("cuda", {"kv_memory": GIB, "gpu_memory": 0.5}, ("--gpu-memory", "--kv-memory")),
    ("cuda", {"kv_tokens": 100, "gpu_memory": 0.5}, ("--gpu-memory", "--kv-tokens")),
    ("cpu", {"gpu_memory": 0.5}, ("--gpu-memory", "--device cpu")),
]


@pytest.mark.parametrize(("device", "flags", "named"), EXCLUSIVE, ids=str)
def test_flags_that_exclude_each_other_are_both_named(
    device: str, flags: dict[str, Any], named: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_memory_flags(EngineOptions(**flags), device)
    assert all(name in str(caught.value) for name in named)


@pytest.mark.parametrize("flags", [{}, {"kv_memory": GIB}, {"kv_tokens": 5}, {"gpu_memory": 1.0}])
def test_a_single_size_flag_is_accepted(flags: dict[str, Any]) -> None:
    check_memory_flags(EngineOptions(**flags), "cuda")


@settings(deadline=None, max_examples=150, print_blob=True)
@given(
    page_size=st.sampled_from([1, 2, 16, 256, "max"]),
    max_len=st.none() | st.integers(2, 2048),
    asked=st.sampled_from(["kv_tokens", "kv_memory", "gpu_memory", None]),
    amount=st.integers(1, 1 << 24),
    token_bytes=st.integers(1, 1 << 20),
    memory=st.builds(Memory, st.integers(0, 64 * GIB), st.just(64 * GIB), st.integers(0, 64 * GIB),
                     st.integers(0, GIB), st.integers(0, GIB)),
)  # fmt: skip
def test_a_pool_keeps_its_bounds(
    page_size: Any, max_len: int | None, asked: str | None, amount: int, token_bytes: int, memory: Memory
) -> None:
    flags = {} if asked is None else {asked: amount / (1 << 24) if asked == "gpu_memory" else amount}
    try:
        config = decide(memory, token_bytes, page_size=page_size, max_len=max_len, **flags)
    except ConfigError:
        return
    assert config.pages >= 2 and config.kv_tokens >= 2
    if max_len is not None:
        assert config.kv_tokens >= max_len, "a length that was asked for fits"
    size = pool_bytes(config, token_bytes)
    if asked == "kv_tokens":
        assert config.kv_tokens <= amount
    elif asked == "kv_memory":
        assert size <= amount
    else:
        held = memory.free_at_start - memory.free
        held += min(memory.total - memory.free_at_start, kv_sizing.CONTEXT_BYTES)
        assert held + memory.steps + memory.graphs + size <= memory.total * flags.get("gpu_memory", 0.9)
        assert size <= memory.free


class TestGroups:
    """Seven groups of which six have a window; a page has a seventh of a token's bytes for each position."""

    WINDOWS = (None, *[1024] * 6)
    BYTES = 7 * TOKEN

    def decide(self, memory: Memory, **flags: Any) -> EngineConfig:
        options = EngineOptions(**flags)
        config = resolve(options, ModelShape("gemma", 32_768), "cuda" if memory.total else "cpu", "float32")
        return size_pool(structs.replace(config, kv_windows=self.WINDOWS), memory, self.BYTES)

    def test_given_tokens_fit_in_sequences_of_any_length(self) -> None:
        """Short ones take a page of each group for 16 positions; long ones leave room for more of them."""
        config = self.decide(CPU, kv_tokens=65_536)
        assert config.pages - 1 == 7 * 65_536 // 16
        assert config.kv_tokens > 5 * 65_536

    def test_the_pool_takes_all_memory_in_pages_of_one_group(self) -> None:
        config = self.decide(GPU)
        assert config.pages == int((64 * GIB * 0.9 - 9 * GIB - kv_sizing.CONTEXT_BYTES) // (16 * TOKEN))
        assert config.kv_tokens > 5 * (config.pages - 1) * 16 / 7

    def test_on_a_cpu_it_is_no_larger_than_all_rows_could_fill(self) -> None:
        config = self.decide(Memory(free=64 * GIB), max_rows=2)
        assert config.pages == 2 * (2048 + 6 * 65) + 1

    def test_prompts_that_are_computed_whole_have_all_of_their_pages(self) -> None:
        config = self.decide(CPU, kv_tokens=32_768, prefill_chunk="off")
        assert config.pages - 1 == 7 * 2048 and config.kv_tokens == 32_768

    def test_a_length_that_does_not_fit_is_refused_with_the_bytes_that_it_needs(self) -> None:
        least = (2048 + 6 * 65 + 1) * 16 * TOKEN
        with pytest.raises(ConfigError, match=f"raise --kv-memory to {least} or more"):
            self.decide(CPU, max_len=32_768, kv_memory=least - 1)
        assert self.decide(CPU, max_len=32_768, kv_memory=least).kv_tokens == 32_768

    def test_a_pool_without_a_page_for_each_group_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"\b7 KV groups"):
            self.decide(CPU, kv_memory=7 * 16 * TOKEN)
        assert self.decide(CPU, kv_memory=8 * 16 * TOKEN).kv_tokens == 16

    @pytest.mark.parametrize("pages", [7, 100, 2437, 2438, 2439, 9999])
    def test_tokens_are_the_longest_sequence_of_a_small_pool(self, pages: int) -> None:
        config = self.decide(CPU, kv_memory=(pages + 1) * 16 * TOKEN)
        longest = min(config.kv_tokens, 32_768)
        assert held_pages(self.WINDOWS, longest, 16) <= pages
        assert longest == 32_768 or held_pages(self.WINDOWS, longest + 16, 16) > pages
