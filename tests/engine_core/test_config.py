"""From wishes, model and machine to decisions."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_core import config as configuration
from engine_core.config import (
    EngineConfig,
    Machine,
    ModelShape,
    resolve,
    resolve_device,
    resolve_dtype,
    resolve_threads,
)
from engine_core.errors import ConfigError
from protocol.engine_options import EngineOptions

GIB = 2**30
MODEL = ModelShape("tiny", max_positions=2048, kv_bytes_per_token=1024)
CPU = Machine("cpu", 8 * GIB)
CUDA = Machine("cuda", 64 * GIB)


def decide(machine: Machine = CPU, model: ModelShape = MODEL, **options: Any) -> EngineConfig:
    return resolve(EngineOptions(**options), model, machine, "float32")


class TestDefaults:
    def test_of_a_cpu(self) -> None:
        config = decide()
        assert (config.depth, config.max_rows, config.max_step_tokens, config.prefill_chunk) == (1, 32, 128, 128)
        assert (config.max_len, config.page_size, config.max_waiting) == (2048, 16, 1024)
        assert config.kv_tokens == 32 * 2048, "no more than all rows together could use"
        assert (config.model_name, config.device, config.dtype) == ("tiny", "cpu", "float32")

    def test_of_cuda(self) -> None:
        config = decide(CUDA)
        assert (config.depth, config.max_rows, config.max_step_tokens, config.prefill_chunk) == (2, 256, 2048, 2048)
        assert config.kv_tokens == int(64 * GIB * 0.85) // 1024 // 16 * 16

    def test_a_cpu_pool_is_bounded_by_share_and_by_size(self) -> None:
        model = ModelShape("big", 100_000, 1 << 20)
        assert decide(Machine("cpu", 4 * GIB), model).kv_tokens == 1024
        assert decide(Machine("cpu", 1000 * GIB), model).kv_tokens == 4096

    def test_a_small_pool_leaves_the_context_to_the_model(self) -> None:
        """A request that does not fit the pool is refused with the pool's numbers, not as too long for the model."""
        assert decide(kv_tokens=100).max_len == 2048

    def test_a_step_serves_every_row(self) -> None:
        assert decide(max_rows=300).max_step_tokens == 300

    def test_a_name_to_serve_under(self) -> None:
        assert decide(served_model_name="mine").model_name == "mine"

    @pytest.mark.parametrize(("machine", "pipeline", "depth"), [(CPU, "on", 2), (CPU, "off", 1), (CUDA, "off", 1)])
    def test_the_pipeline_as_asked(self, machine: Machine, pipeline: str, depth: int) -> None:
        assert decide(machine, pipeline=pipeline).depth == depth

    def test_a_chunk_is_no_longer_than_a_step(self) -> None:
        assert decide(prefill_chunk=10_000).prefill_chunk == 128
        assert decide(prefill_chunk=100).prefill_chunk == 100

    @pytest.mark.parametrize(("max_len", "page_size", "pages"), [(32, 16, 2), (33, 16, 3), (2, 16, 1), (5, 1, 5)])
    def test_pages_of_a_row(self, max_len: int, page_size: int, pages: int) -> None:
        assert decide(max_len=max_len, page_size=page_size).pages_per_row == pages


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"page_size": 0}, "--page-size 0"),
    ({"page_size": -16}, "--page-size -16"),
    ({"page_size": 12}, "--page-size 12 is no power of two"),
    ({"max_rows": 0}, "--max-rows 0: at least 1"),
    ({"max_rows": -1}, "--max-rows -1: at least 1"),
    ({"max_waiting": 0}, "--max-waiting 0: at least 1"),
    ({"max_step_tokens": 0}, "--max-step-tokens 0: at least 1"),
    ({"max_step_tokens": 31}, "--max-step-tokens 31 is below --max-rows 32"),
    ({"prefill_chunk": 0}, "--prefill-chunk 0: at least 1"),
    ({"max_len": 0}, "--max-len 0: at least 1"),
    ({"max_len": 1}, "--max-len 1: at least 2"),
    ({"max_len": 2049}, "--max-len 2049, but the model's positions end at 2048"),
    ({"kv_tokens": 0}, "less than one page of 16; raise --kv-tokens"),
    ({"kv_tokens": -5}, "less than one page"),
    ({"kv_tokens": 15}, "the KV pool has 15 tokens"),
    ({"kv_tokens": 100, "max_len": 97}, "--max-len 97 does not fit the KV pool of 96 tokens"),
    ({"kv_tokens": 1, "page_size": 1}, "--kv-tokens"),
]


@pytest.mark.parametrize(("options", "text"), WRONG, ids=[text for _, text in WRONG])
def test_contradictions_are_named_with_numbers(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        decide(**options)
    assert text in str(caught.value)


def test_no_memory_left() -> None:
    with pytest.raises(ConfigError, match=r"0\.00 GiB free, 1024 bytes a token"):
        decide(Machine("cuda", 1000))


class TestDevice:
    @pytest.mark.parametrize(
        ("asked", "cuda", "device"),
        [
            ("auto", True, "cuda"),
            ("auto", False, "cpu"),
            ("cpu", True, "cpu"),
            ("cpu", False, "cpu"),
            ("cuda", True, "cuda"),
        ],
    )
    def test_table(self, asked: Any, cuda: bool, device: str) -> None:
        assert resolve_device(EngineOptions(device=asked), cuda) == device

    def test_cuda_that_is_not_there(self) -> None:
        with pytest.raises(ConfigError, match="torch sees no CUDA device"):
            resolve_device(EngineOptions(device="cuda"), False)

    @pytest.mark.parametrize(
        ("asked", "device", "dtype"),
        [
            ("auto", "cpu", "float32"),
            ("auto", "cuda", "bfloat16"),
            ("float16", "cpu", "float16"),
            ("float32", "cuda", "float32"),
        ],
    )
    def test_dtype(self, asked: Any, device: str, dtype: str) -> None:
        assert resolve_dtype(EngineOptions(dtype=asked), device, "bfloat16") == dtype


class TestThreads:
    @pytest.mark.parametrize(("asked", "cores", "threads"), [(None, 8, 7), (None, 1, 1), (3, 8, 3), (1, 8, 1)])
    def test_one_core_is_left(self, asked: int | None, cores: int, threads: int) -> None:
        assert resolve_threads(EngineOptions(threads=asked), cores) == threads

    @pytest.mark.parametrize("threads", [0, -1])
    def test_no_threads(self, threads: int) -> None:
        with pytest.raises(ConfigError, match="--threads"):
            resolve_threads(EngineOptions(threads=threads), 8)


MAYBE = st.none() | st.integers(-2, 700)


@settings(deadline=None, max_examples=150, print_blob=True)
@given(
    st.builds(
        EngineOptions,
        pipeline=st.sampled_from([None, "on", "off"]),
        max_rows=MAYBE,
        max_len=MAYBE,
        max_step_tokens=MAYBE,
        prefill_chunk=MAYBE,
        page_size=st.sampled_from([1, 2, 8, 16, 64]),
        kv_tokens=st.none() | st.integers(2, 5000),
        max_waiting=st.integers(1, 9),
    ),
    st.builds(ModelShape, st.just("m"), st.integers(2, 600), st.integers(1, 1 << 22)),
    st.builds(Machine, st.sampled_from(["cpu", "cuda"]), st.integers(0, 64 * GIB)),
)
def test_whatever_is_decided_holds_together(options: EngineOptions, model: ModelShape, machine: Machine) -> None:
    try:
        config = resolve(options, model, machine, "float32")
    except ConfigError:
        return
    assert 2 <= config.max_len <= model.max_positions
    assert 1 <= config.max_rows <= config.max_step_tokens
    assert 1 <= config.prefill_chunk <= config.max_step_tokens
    assert config.depth in (1, 2)
    assert (config.pages_per_row - 1) * config.page_size < config.max_len <= config.pages_per_row * config.page_size
    if options.kv_tokens is not None:
        assert config.kv_tokens <= options.kv_tokens
    elif machine.device == "cpu":
        assert config.kv_tokens * model.kv_bytes_per_token <= configuration.CPU_KV_BYTES
    for name in ("max_len", "max_rows", "max_step_tokens"):
        if getattr(options, name) is not None:
            assert getattr(config, name) == getattr(options, name), "what is asked for is given or refused"
