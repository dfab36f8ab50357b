"""The settings that follow from options, model and machine."""

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from tandem.engine_core.config import (
    ModelShape,
    StepConfig,
    default_cuda_rows,
    resolve,
    resolve_device,
    resolve_dtype,
    resolve_grammar_workers,
    resolve_threads,
)  # fmt: skip
from tandem.engine_core.errors import ConfigError
from tandem.protocol.engine_options import EngineOptions

MODEL = ModelShape("tiny", max_positions=2048)


GIB = 2**30


def decide(device: str = "cpu", model: ModelShape = MODEL, gpu_bytes: int = 0, **options: Any) -> StepConfig:
    return resolve(EngineOptions(**options), model, device, "float32", gpu_bytes)


class TestDefaults:
    def test_a_cpu_has_small_steps_and_one_in_flight(self) -> None:
        config = decide()
        assert (config.depth, config.max_rows, config.max_step_tokens, config.prefill_chunk) == (1, 32, 128, 128)
        assert (config.max_len, config.page_size, config.max_waiting) == (2048, 16, 1024)
        assert (config.model_name, config.device, config.dtype) == ("tiny", "cpu", "float32")

    @pytest.mark.parametrize(
        ("options", "most"),
        [({}, 1024), ({"max_concurrent": 4096}, 4096), ({"max_concurrent": 5}, 5), ({"max_waiting": 7}, 7),
         ({"max_waiting": 7, "max_concurrent": 4096}, 7)],
    )  # fmt: skip
    def test_the_limit_of_waiting_requests_is_the_limit_of_open_ones(self, options: dict[str, int], most: int) -> None:
        assert decide(**options).max_waiting == most

    def test_cuda_has_large_steps_and_two_in_flight(self) -> None:
        config = decide("cuda")
        assert (config.depth, config.max_rows, config.max_step_tokens, config.prefill_chunk) == (2, 256, 8192, 8192)

    @pytest.mark.parametrize(
        ("gpu", "weights", "options", "rows"),
        [
            (80, 15, {}, 1024),
            (80, 2.3, {}, 1024),
            (40, 15, {}, 512),
            (24, 2.3, {}, 512),
            (24, 15, {}, 256),
            (15.6, 2.3, {}, 256),
            (15.6, 15, {}, 256),
            (80, 15, {"gpu_memory": 0.4}, 512),
            (24, 15, {"max_rows": 2000}, 2000),
            (80, 15, {"max_step_tokens": 700}, 512),
            (80, 15, {"max_step_tokens": 2400, "prefill_chunk": "off"}, 256),
            (80, 15, {"max_step_tokens": 4096, "batching": "static"}, 1024),
        ],
    )
    def test_rows_on_cuda_follow_the_memory_that_the_weights_leave(
        self, gpu: float, weights: float, options: dict[str, Any], rows: int
    ) -> None:
        model = ModelShape("some", max_positions=2048, weight_bytes=int(weights * GIB))
        config = decide("cuda", model, int(gpu * GIB), **options)
        assert (config.max_rows, config.graph_rows[-1], config.mixed_graph_rows[-1]) == (rows, rows, rows)
        assert config.max_step_tokens == options.get("max_step_tokens", 8192)

    def test_a_small_pool_leaves_the_context_to_the_model(self) -> None:
        """A request that does not fit the pool is refused with the pool's numbers, not as too long for the model."""
        assert decide(kv_tokens=100).max_len == 2048

    def test_a_step_serves_every_row(self) -> None:
        assert decide(max_rows=300).max_step_tokens == 300

    def test_the_served_name_replaces_the_models(self) -> None:
        assert decide(served_model_name="mine").model_name == "mine"

    @pytest.mark.parametrize(("device", "pipeline", "depth"), [("cpu", "on", 2), ("cpu", "off", 1), ("cuda", "off", 1)])
    def test_depth_follows_the_requested_pipeline(self, device: str, pipeline: str, depth: int) -> None:
        assert decide(device, pipeline=pipeline).depth == depth

    @pytest.mark.parametrize(("asked", "chunk", "step"), [(100, 100, 128), (500, 500, 500), (10_000, 2048, 2048)])
    def test_a_step_holds_the_requested_chunk(self, asked: int, chunk: int, step: int) -> None:
        config = decide(prefill_chunk=asked)
        assert (config.prefill_chunk, config.max_step_tokens) == (chunk, step)

    @pytest.mark.parametrize(
        ("max_len", "page_size", "pages"), [(32, 16, 2), (33, 16, 3), (2, None, 1), (5, 1, 5), (33, 64, 1)]
    )
    def test_a_row_has_pages_for_its_whole_length(self, max_len: int, page_size: int | None, pages: int) -> None:
        config = decide(max_len=max_len, page_size=page_size)
        assert (config.page_columns[0].count, config.max_page_entries) == (pages, 32 * pages)

    @pytest.mark.parametrize(
        ("max_len", "page_size"), [(None, 2048), (2, 2), (3, 4), (4, 4), (5, 8), (1024, 1024), (1025, 2048)]
    )
    def test_the_largest_page_holds_one_sequence(self, max_len: int | None, page_size: int) -> None:
        config = decide(max_len=max_len, page_size="max")
        assert (config.page_size, config.page_columns[0].count) == (page_size, 1)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"page_size": 0}, "--page-size 0"),
    ({"page_size": -16}, "--page-size -16"),
    ({"page_size": 12}, "--page-size 12 "),
    (
        {"page_size": 4096},
        r"--page-size 4096 .*--max-len 2048\b.* 2048\b",
    ),
    (
        {"page_size": 128, "max_len": 33},
        r"--page-size 128 .*--max-len 33\b.* 64\b",
    ),
    ({"max_rows": 0}, "--max-rows 0: .* 1 to 16384"),
    ({"max_rows": -1}, "--max-rows -1: .* 1 to 16384"),
    ({"max_waiting": 0}, "--max-waiting 0: .* 1"),
    ({"max_step_tokens": 0}, "--max-step-tokens 0: .* 1 to 1048576"),
    ({"max_step_tokens": 31}, "--max-step-tokens 31 is below --max-rows 32"),
    ({"prefill_chunk": 0}, "--prefill-chunk 0: .* 1"),
    ({"max_step_tokens": 512, "prefill_chunk": 513}, "--prefill-chunk 513 .*--max-step-tokens 512"),
    ({"graph_rows": "1,2"}, "--graph-rows 1,2 .*--device cpu"),
    ({"graph_tokens": "64"}, "--graph-tokens 64 .*--device cpu"),
    ({"max_len": 0}, "--max-len 0: .* 2"),
    ({"max_len": 1}, "--max-len 1: .* 2"),
    ({"max_len": 2049}, "--max-len 2049, .* 2048"),
    (
        {"speculate_min_match": 5},
        "--speculate-min-match 5 and --speculate-max-match 4 ",
    ),
    (
        {"speculate": "ngram", "graph_rows": "off"},
        "--speculate ngram and --graph-rows off ",
    ),
    ({"speculate_tokens": 8}, "--speculate-tokens 8: .* 1 to 7"),
    ({"swap_copy": True}, "--swap-copy needs --enable-weight-updates; "),
    ({"speculate_tokens": 3}, "--speculate-tokens 3 and --speculate off "),
    (
        {"speculate": "model:small", "speculate_max_match": 5},
        "^--speculate-max-match 5 and --speculate model:small ",
    ),
    (
        {"speculate": "model:small", "speculate_min_match": 3},
        "^--speculate-min-match 3 and --speculate model:small ",
    ),
    (
        {"speculate": "model:small", "speculate_min_match": 3, "speculate_max_match": 5},
        "^--speculate-min-match 3 and --speculate-max-match 5 and --speculate model:small ",
    ),
]


def test_a_context_that_can_be_stretched_is_as_long_as_asked() -> None:
    model = ModelShape("stretched", max_positions=2048, longest_context=8192)
    assert decide(model=model).max_len == 2048
    assert decide(model=model, max_len=8192).max_len == 8192
    with pytest.raises(ConfigError, match=r"--max-len 8193\b.*\b8192\b"):
        decide(model=model, max_len=8193)


@pytest.mark.parametrize(("options", "text"), WRONG, ids=[text for _, text in WRONG])
def test_contradicting_options_are_refused_with_numbers(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        decide(**options)


@pytest.mark.parametrize(
    ("tokens", "sizes"),
    [
        ("auto", (1, 2, 3, 5, 7)),
        (1, (1,)),
        (3, (1, 2, 3)),
        (4, (1, 2, 3, 4)),
        (6, (1, 2, 3, 5, 6)),
        (7, (1, 2, 3, 5, 7)),
    ],
)
def test_the_largest_number_of_drafts_and_some_smaller_ones_are_captured(tokens: Any, sizes: tuple[int, ...]) -> None:
    config = decide("cuda", speculate="ngram", speculate_tokens=tokens)
    assert config.draft_sizes == sizes and config.max_lead == 2 * sizes[-1]
    assert all(rows * (1 + drafts) <= 512 for rows, drafts in config.verify_shapes)
    assert decide("cuda").verify_shapes == () and decide("cuda").max_lead == 0
    assert config.draft_prompt_tokens == (), "n-gram drafts have no prompts"
    captured = [drafts for _, drafts in decide("cuda", speculate="ngram", max_rows=256).verify_shapes]
    assert [captured.count(drafts) for drafts in (1, 2, 3, 5, 7)] == [17, 14, 13, 10, 9]
    assert decide("cuda", speculate="ngram", max_len=64).max_prediction == 64
    assert decide("cuda").max_prediction == 0


def test_a_ring_of_pages_has_room_for_the_positions_ahead_of_the_host() -> None:
    """Even if steps are shorter than the drafts in flight."""
    sizes: dict[str, Any] = {"max_step_tokens": 8, "prefill_chunk": 8, "max_rows": 4, "page_size": 1, "max_len": 256}
    sizes |= {"kv_windows": (16,), "draft_sizes": (7,), "depth": 2}
    config = structs.replace(decide(), **sizes)
    assert [columns.ring for columns in config.page_columns] == [16 + 1 + 14 + 2]
    assert structs.replace(config, draft_sizes=()).page_columns[0].ring == 16 + 8 + 2


def test_mixed_graphs_need_decode_graphs() -> None:
    with pytest.raises(ConfigError, match=r"--graph-rows\b.*--graph-tokens\b"):
        decide("cuda", graph_rows="off", graph_tokens="128")
    for off in ({"graph_rows": "off"}, {"graph_rows": "off", "graph_tokens": "off"}):
        assert (decide("cpu", **off).graph_rows, decide("cuda", **off).graph_rows) == ((), ())
    assert decide("cuda", graph_rows="4", graph_tokens="128").graph_tokens == (128,)


@pytest.mark.parametrize("max_rows", [1, 100, 256, 300, 512, 1024, 1500, 4096])
def test_graphs_hold_steps_of_all_rows(max_rows: int) -> None:
    """Padding adds at most half of the rows, with prompts the same number again, or a few."""
    config = decide("cuda", max_rows=max_rows, max_step_tokens=8192)
    for sizes, share, few in ((config.graph_rows, 1.5, 8), (config.mixed_graph_rows, 2.0, 32)):
        assert sizes[-1] == max_rows and list(sizes) == sorted(set(sizes))
        for rows, larger in itertools.pairwise(sizes):
            assert larger <= max(share * (rows + 1), rows + few), (rows, larger)


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
    def test_device_is_resolved_by_option_and_machine(self, asked: Any, cuda: bool, device: str) -> None:
        assert resolve_device(EngineOptions(device=asked), cuda) == device

    def test_unavailable_cuda_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="CUDA"):
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
    def test_dtype_is_resolved_by_option_and_device(self, asked: Any, device: str, dtype: str) -> None:
        assert resolve_dtype(EngineOptions(dtype=asked), device, "bfloat16") == dtype


class TestThreads:
    @pytest.mark.parametrize(("asked", "cores", "threads"), [(None, 8, 7), (None, 1, 1), (3, 8, 3), (1, 8, 1)])
    def test_threads_leave_one_core_to_the_frontends(self, asked: int | None, cores: int, threads: int) -> None:
        assert resolve_threads(EngineOptions(threads=asked), cores) == threads

    @pytest.mark.parametrize("threads", [0, -1])
    def test_fewer_than_one_thread_is_refused(self, threads: int) -> None:
        with pytest.raises(ConfigError, match="--threads"):
            decide(threads=threads)


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
        page_size=st.sampled_from([1, 2, 8, 16, 64, "max"]),
        max_waiting=st.none() | st.integers(1, 9),
    ),
    st.builds(ModelShape, st.just("m"), st.integers(2, 600)),
    st.sampled_from(["cpu", "cuda"]),
)
def test_resolved_settings_are_consistent(options: EngineOptions, model: ModelShape, device: str) -> None:
    try:
        config = resolve(options, model, device, "float32")
    except ConfigError:
        return
    assert 2 <= config.max_len <= model.max_positions
    assert 1 <= config.max_rows <= config.max_step_tokens
    assert 1 <= config.prefill_chunk <= config.max_step_tokens
    assert config.depth in (1, 2)
    pages = config.page_columns[0].count
    assert (pages - 1) * config.page_size < config.max_len <= pages * config.page_size
    assert config.page_size.bit_count() == 1
    for name in ("max_len", "max_rows", "max_step_tokens"):
        if getattr(options, name) is not None:
            assert getattr(config, name) == getattr(options, name), "a requested value is taken or refused"
    if options.prefill_chunk is not None:
        assert config.prefill_chunk == min(int(options.prefill_chunk), config.max_len)


@pytest.mark.parametrize(("system", "machine"), [("linux", "aarch64"), ("darwin", "x86_64"), ("darwin", "arm64")])
def test_workers_for_grammars_are_refused_where_stores_may_be_reordered(system: str, machine: str) -> None:
    options = EngineOptions(grammar_workers=2)
    assert resolve_grammar_workers(options, "cuda", 64, "linux", "x86_64") == 2
    assert resolve_grammar_workers(EngineOptions(), "cuda", 64, system, machine) == 0
    with pytest.raises(ConfigError, match=rf"--grammar-workers\b.*\b{system}\b"):
        resolve_grammar_workers(options, "cuda", 64, system, machine)


@pytest.mark.parametrize(("cores", "workers"), [(1, 0), (3, 0), (4, 1), (8, 2), (16, 4), (128, 4)])
def test_a_gpus_engine_has_workers_for_grammars_by_its_cores(cores: int, workers: int) -> None:
    assert resolve_grammar_workers(EngineOptions(), "cuda", cores, "linux", "x86_64") == workers
    assert resolve_grammar_workers(EngineOptions(), "cpu", cores, "linux", "x86_64") == 0
    assert resolve_grammar_workers(EngineOptions(grammar_workers=0), "cuda", cores, "linux", "x86_64") == 0


@pytest.mark.parametrize(
    ("room", "row_bytes", "rows"),
    [
        (100 * 2**30, 0, 1024),
        # Half of the room, less the padding row, in multiples of 8.
        (100 * 2**30, 60 * 2**20, 848),
        (75 * 2**30, 170 * 2**20, 224),
        (2**30, 60 * 2**20, 7),
        (2**27, 60 * 2**20, 1),
        # The memory is not known.
        (-1, 60 * 2**20, 256),
    ],
)
def test_state_of_recurrent_layers_takes_half_of_the_memory_by_default(room: int, row_bytes: int, rows: int) -> None:
    assert default_cuda_rows(room, 1024, row_bytes) == rows


@pytest.mark.parametrize(("free", "rows"), [(0, 32), (100, 32), (45, 32), (30, 16), (11, 1), (8, 32)])
def test_on_a_cpu_too(free: int, rows: int) -> None:
    """10 GiB of weights, half a GiB for the state of a row; 0: the memory is not known, 8: the weights do not fit."""
    model = ModelShape("hybrid", 2048, weight_bytes=10 * 2**30, row_bytes=2**29)
    assert resolve(EngineOptions(), model, "cpu", "float32", cpu_bytes=free * 2**30).max_rows == rows
    assert resolve(EngineOptions(max_rows=20), model, "cpu", "float32", cpu_bytes=free * 2**30).max_rows == 20
