"""Graphs of steps, built and replayed as on CUDA, over a GPU that records calls: tokens are a dense model's."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from msgspec import structs

from tandem.engine_core.attention import triton as triton_attention
from tandem.engine_core.attention.base import ForwardBatch
from tandem.engine_core.attention.triton import DecodeStep, MixedStep, RaggedGraphPlanner
from tandem.engine_core.config import StepConfig
from tandem.engine_core.kernels.sampling.inputs import SamplingBatch
from tandem.engine_core.kernels.tiles.plan_types import DecodePlan, Tile
from tandem.engine_core.kv_cache.storage import KVLayout, KVStorage
from tandem.engine_core.runtime.device import InertEvent
from tandem.engine_core.runtime.graph_bucket import GraphBucket
from tandem.engine_core.runtime.runtime import TorchRuntime
from tandem.engine_core.runtime.slots import StepSlot
from tandem.engine_core.runtime.tables import DeviceTables
from tandem.engine_core.sampling.sampler import Mode
from tandem.engine_core.scheduler.step_costs import StepWork
from tandem.engine_core.startup import engine as startup_engine
from tandem.engine_core.startup.step_timing import measure_costs
from tandem.protocol.codec import pack_floats, pack_ids, read_logprobs
from tandem.protocol.engine_options import EngineOptions
from tandem.protocol.params import SamplingParams
from tests.fakes.recording_gpu import RecordedGraph, oracle_attention, oracle_parts
from tests.support.engine_driver import CLIENT, DrivenEngine
from tests.support.model_folder import write_model
from tests.support.plan_recording import constraining, runtime_of
from tests.support.tiny_llama import CONFIG, END, Compared, random_model

MODEL = structs.replace(CONFIG, heads=2, kv_heads=1, head_dim=32)
"""A head_dim that the attention kernels have."""
GREEDY = SamplingParams(8, temperature=0.0, ignore_eos=True)
DRAWN = SamplingParams(8, temperature=1.2, seed=3, ignore_eos=True)
FULL = SamplingParams(8, temperature=0.8, top_k=7, top_p=0.9, repetition_penalty=1.3, seed=2**40 + 1, ignore_eos=True)
ENDS_LATE = SamplingParams(
    8, temperature=0.0, min_tokens=5, logit_bias_ids=pack_ids([END]), logit_bias_values=pack_floats([40.0])
)
"""Would end at once but for `min_tokens`."""


def build(folder: Path, **options: Any) -> DrivenEngine:
    """Two slots, decode steps of up to 4 rows and mixed steps of up to 24 prompt tokens from graphs."""
    write_model(folder, MODEL)
    sizes: dict[str, Any] = {
        "max_rows": 6, "max_len": 64, "max_step_tokens": 32, "prefill_chunk": 16, "kv_tokens": 512,
        "graph_rows": "1,4", "graph_tokens": "24",
    }  # fmt: skip
    asked = EngineOptions(model=str(folder), device="cuda", dtype="float32", **sizes | options)
    with patch.object(startup_engine.configuration, "resolve_device", lambda *_: "cuda"):
        driven = DrivenEngine.build(asked, oracle_parts)
    constraining(driven.engine)
    return driven


@pytest.fixture(scope="module")
def driven(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DrivenEngine]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with oracle_attention():
        yield build(tmp_path_factory.mktemp("model"))
    torch.set_num_threads(before)


@pytest.fixture
def runtime(driven: DrivenEngine) -> TorchRuntime:
    runtime = runtime_of(driven)
    for graph in [*decode_graphs(runtime), *sampling_graphs(runtime).values(), *mixed_graphs(runtime)]:
        for one in graph if isinstance(graph, list) else [graph]:
            one.replays = 0
    return runtime


def recorded(graph: object) -> RecordedGraph:
    assert isinstance(graph, RecordedGraph)
    return graph


def decode_graphs(runtime: TorchRuntime) -> list[RecordedGraph]:
    assert runtime.graphs is not None
    return [recorded(step.forward) for slot in runtime.graphs.decode for step in slot.values()]


def mixed_graphs(runtime: TorchRuntime) -> list[RecordedGraph]:
    assert runtime.graphs is not None
    return [recorded(step.forward) for slot in runtime.graphs.mixed for step in slot.values()]


def sampling_graphs(runtime: TorchRuntime) -> dict[Mode, list[RecordedGraph]]:
    assert runtime.graphs is not None
    steps = [step for slot in runtime.graphs.decode for step in slot.values()]
    return {mode: [recorded(step.sampling[mode]) for step in steps] for mode in Mode}


def replays(graphs: list[RecordedGraph]) -> int:
    return sum(graph.replays for graph in graphs)


def answer(driven: DrivenEngine, asked: list[SamplingParams], constrained: tuple[int, ...] = ()) -> list[list[int]]:
    """Run requests at once, each token compared with what a dense model in float64 gives."""
    prompts = [[5 + index, *range(40, 40 + 9 * index)] for index in range(len(asked))]
    ids = [
        driven.submit(prompt, params, constraint="parity" if index in constrained else None)
        for index, (prompt, params) in enumerate(zip(prompts, asked, strict=True))
    ]
    driven.run()
    compared, model, tokens = Compared(), random_model(config=MODEL), [driven.tokens(number) for number in ids]
    for index, (prompt, params) in enumerate(zip(prompts, asked, strict=True)):
        compared.check(model, prompt, tokens[index], params, index in constrained)
    assert compared.tokens > compared.close * 20
    return tokens


def test_every_bucket_is_captured_for_both_slots(runtime: TorchRuntime) -> None:
    graphs = runtime.graphs
    assert graphs is not None
    assert [sorted(slot) for slot in graphs.decode] == [[1, 4]] * 2
    assert [sorted(slot) for slot in graphs.mixed] == [[GraphBucket(0, 24), GraphBucket(6, 24)]] * 2
    assert {bucket: len(step.logits) for bucket, step in graphs.decode[1].items()} == {1: 1, 4: 4}


def test_every_bucket_was_timed_at_the_start(driven: DrivenEngine, runtime: TorchRuntime) -> None:
    """The events of this device are a millisecond apart."""
    graphs, costs = runtime.graphs, driven.engine.scheduler.planner.costs
    assert graphs is not None
    assert costs.token_sizes == (24, 32), "the captured size, and that of the longest step"
    assert costs.mixed_token_sizes == (24, 32), "a size that no graph holds is not avoided beside rows"
    works = [StepWork(rows, 0) for rows in graphs.rows]
    works += [StepWork(bucket.num_decode_tokens, 0, bucket.num_prefill_tokens) for bucket in graphs.mixed[0]]
    assert [costs.milliseconds(work) for work in works] == pytest.approx([1.0] * len(works), rel=0.5)


def test_a_larger_graph_gives_the_same_tokens(driven: DrivenEngine, runtime: TorchRuntime) -> None:
    graphs = runtime.graphs
    assert graphs is not None
    graphs.prefer({GraphBucket(1, 0): GraphBucket(4, 0), GraphBucket(0, 24): GraphBucket(6, 24)})
    before = [recorded(graphs.decode[slot][1].forward).replays for slot in (0, 1)]
    try:
        answer(driven, [GREEDY])
        answer(driven, [GREEDY, DRAWN])
    finally:
        graphs.prefer({})
    assert [recorded(graphs.decode[slot][1].forward).replays for slot in (0, 1)] == before


def test_graphs_are_timed_on_padding_whatever_the_slot_held(runtime: TorchRuntime) -> None:
    """Words of an earlier step would be read as rows and positions beyond the tables."""
    runtime.slots[0].device_inputs.fill_(10**6)
    config = StepConfig(
        model_name="", device="cuda", dtype="float32", depth=2, max_rows=6, max_len=64, max_step_tokens=24,
        prefill_chunk=16, page_size=16, max_waiting=0,
    )  # fmt: skip
    layout = KVLayout.of_one_group(1, page_size=16, kv_heads=1, head_dim=32, dtype=torch.float32)
    assert measure_costs(runtime, config, MODEL, layout).token_sizes == (24,)


def test_without_graphs_of_prompts_the_longest_step_is_timed(tmp_path: Path) -> None:
    with oracle_attention():
        driven = build(tmp_path, graph_tokens="off")
        assert driven.engine.scheduler.planner.costs.token_sizes == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
        answer(driven, [GREEDY, DRAWN, FULL])


def test_prompts_may_be_short_if_no_size_is_captured_with_decode_rows(tmp_path: Path) -> None:
    """As with `--graph-tokens 4096`: the time limit would not hold if every step with decode rows had at least this
    number of tokens."""
    configuration = startup_engine.configuration
    settings = configuration.resolve
    none_beside = patch.object(
        configuration, "resolve", lambda *given: structs.replace(settings(*given), max_mixed_tokens=16)
    )
    with oracle_attention(), none_beside:
        driven = build(tmp_path)
        graphs, costs = runtime_of(driven).graphs, driven.engine.scheduler.planner.costs
        assert graphs is not None and list(graphs.mixed[0]) == [GraphBucket(0, 24)]
        assert costs.mixed_token_sizes == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
        assert all((6, size) in costs.table for size in costs.mixed_token_sizes)
        answer(driven, [GREEDY, DRAWN, FULL, GREEDY])


@pytest.mark.parametrize(
    ("params", "mode"),
    [(GREEDY, Mode.GREEDY), (DRAWN, Mode.UNTRUNCATED), (FULL, Mode.FULL)],
    ids=["greedy", "drawn", "full"],
)
def test_each_mode_of_sampling_is_replayed(
    driven: DrivenEngine, runtime: TorchRuntime, params: SamplingParams, mode: Mode
) -> None:
    answer(driven, [params] * 3)
    used = {mode: replays(graphs) for mode, graphs in sampling_graphs(runtime).items()}
    decoded, mixed = replays(decode_graphs(runtime)), replays(mixed_graphs(runtime))
    assert used[mode] >= 7 and mixed >= 1
    assert decoded < sum(used.values()) == used[mode] <= decoded + mixed, "steps with prompts are sampled by them too"


@pytest.mark.parametrize("constrained", [(0,), (0, 2), (0, 1, 2)])
def test_a_constrained_row_obeys_its_grammar_from_graphs(
    driven: DrivenEngine, runtime: TorchRuntime, constrained: tuple[int, ...]
) -> None:
    tokens = answer(driven, [GREEDY, DRAWN, FULL], constrained)
    for number in constrained:
        assert [token % 2 for token in tokens[number]] == [index % 2 for index in range(8)]
    assert replays(sampling_graphs(runtime)[Mode.MASKED]) >= 7


def test_suppressed_ends_stay_suppressed_in_steps_from_graphs(driven: DrivenEngine, runtime: TorchRuntime) -> None:
    early, late, _ = answer(driven, [ENDS_LATE, structs.replace(ENDS_LATE, min_tokens=7), GREEDY])
    assert (len(early), len(late)) == (6, 8)
    assert END not in early[:5] + late[:7]
    used = {mode: replays(graphs) for mode, graphs in sampling_graphs(runtime).items()}
    assert used[Mode.FULL] >= 4, "while a row may not end"
    assert sum(used.values()) > replays(decode_graphs(runtime)) >= 7


def test_nothing_is_sampled_outside_of_graphs_that_hold_the_step(driven: DrivenEngine, runtime: TorchRuntime) -> None:
    """Whatever one row uses: min_tokens, a grammar, penalties, or a prompt in a step with decode rows."""
    eager, sampled = list[int](), list[int]()
    forward, sample = runtime.model.forward, runtime.sampler.sample

    def note_forward(batch: ForwardBatch, kv: KVStorage) -> torch.Tensor:
        if batch.sample_index is not None:
            eager.append(len(batch.sample_index))
        return forward(batch, kv)

    def note_sample(batch: SamplingBatch) -> None:
        sampled.append(len(batch.rows))
        sample(batch)

    model = Mock(wraps=runtime.model, forward=note_forward)
    with patch.object(runtime, "model", model), patch.object(runtime.sampler, "sample", note_sample):
        answer(driven, [ENDS_LATE, FULL, DRAWN, GREEDY], constrained=(2,))
    assert sampled == [count for count in eager if count], "those of more prompt positions than a graph has"
    assert replays(mixed_graphs(runtime)) >= 1


def test_one_row_with_log_probabilities_has_no_other_scored(driven: DrivenEngine, runtime: TorchRuntime) -> None:
    scored = list[int]()
    run = runtime.scorer.run

    def note(logits: torch.Tensor, chosen: torch.Tensor, top: int, records: torch.Tensor, index: torch.Tensor) -> None:
        scored.append(len(index))
        run(logits, chosen, top, records, index)

    with patch.object(runtime.scorer, "run", note):
        wanted = driven.submit([5, 6, 7], GREEDY, logprobs=2)
        others = [driven.submit([8, 9, number], GREEDY) for number in (10, 11)]
        driven.run()
    assert scored == [1] * 8
    parts = driven.mailbox.logprobs
    assert sum(len(read_logprobs(part)) for part in parts[CLIENT, wanted]) == 8
    assert not any(parts[CLIENT, number] for number in others)


def test_steps_beyond_the_largest_graph_agree_with_those_from_graphs(
    driven: DrivenEngine, runtime: TorchRuntime
) -> None:
    answer(driven, [GREEDY, DRAWN, FULL, GREEDY, DRAWN, FULL])
    assert replays(decode_graphs(runtime)) < 8


def test_inputs_and_plans_are_uploaded_before_tables_are_updated_and_pages_read_after(
    driven: DrivenEngine, runtime: TorchRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work enqueued in `upload` runs concurrently with the previous step, which may still read the tables."""
    seen: list[tuple[str, bool]] = []
    uploading = [False]

    @contextmanager
    def upload() -> Iterator[None]:
        uploading[0] = True
        yield
        uploading[0] = False

    def noted(owner: Any, name: str) -> None:
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given: (seen.append((name, uploading[0])), real(*given))[1])

    class Uploaded(InertEvent):
        def __init__(self, slot: StepSlot) -> None:
            self.slot = slot
            slot.device_inputs.fill_(-7)

        def record(self) -> None:
            assert self.slot.packed is not None
            words = self.slot.packed.total
            assert (self.slot.device_inputs[:words].numpy() == self.slot.inputs_view[:words]).all(), (
                "inputs were not copied yet"
            )

    monkeypatch.setattr(runtime.device, "upload", upload)
    for owner, name in ((RaggedGraphPlanner, "plan"), (RaggedGraphPlanner, "gather_pages"), (DeviceTables, "apply")):
        noted(owner, name)
    noted(RecordedGraph, "replay")
    for slot in runtime.slots:
        monkeypatch.setattr(slot, "uploaded", Uploaded(slot))
        noted(slot.uploaded, "record")
        noted(slot.uploaded, "wait")
    answer(driven, [GREEDY, DRAWN])
    whole = [
        ("plan", True),
        ("record", True),
        *[(name, False) for name in ("wait", "apply", "replay", "gather_pages", "replay")],
    ]
    assert set(seen) == set(whole)
    assert seen[:7] == whole


def test_the_clock_of_steps_runs(driven: DrivenEngine, runtime: TorchRuntime) -> None:
    before = runtime.device_times().steps
    answer(driven, [structs.replace(GREEDY, max_tokens=30)])
    assert runtime.device_times().steps > before


def test_an_engine_without_graphs_gives_the_same_tokens(tmp_path: Path) -> None:
    with oracle_attention():
        driven = build(tmp_path, graph_rows="off", graph_tokens=None)
        assert runtime_of(driven).graphs is None
        answer(driven, [GREEDY, DRAWN, FULL, ENDS_LATE], constrained=(1,))


def test_tokens_are_the_same_where_attention_rotates_heads_itself(tmp_path: Path) -> None:
    """Of the two sizes of decode steps the larger does, and no step with prompts."""
    kv_heads = MODEL.kv_heads

    def rotating(_head_dim: int, pairs: int, *_given: object) -> DecodePlan | None:
        return DecodePlan(Tile(16, 4, 1), 64) if pairs == 4 * kv_heads else None

    with oracle_attention(), ExitStack() as patched:
        decoded = Mock(side_effect=triton_attention.paged_decode)
        given = {"choose_fused_rope_plan": rotating, "paged_decode": decoded}
        patched.enter_context(patch.multiple(triton_attention, **given))
        driven = build(tmp_path)
        decoded.reset_mock()
        answer(driven, [GREEDY, DRAWN, FULL])
    rotated = {len(call.args[0]) for call in decoded.call_args_list if call.kwargs["rotation"] is not None}
    others = {len(call.args[0]) for call in decoded.call_args_list if call.kwargs["rotation"] is None}
    assert rotated == {4}
    assert 1 in others


def test_only_steps_without_prompts_may_rotate_and_round_in_their_attention(
    driven: DrivenEngine, runtime: TorchRuntime
) -> None:
    seen = set[tuple[type, bool, bool]]()
    forward = runtime.model.forward

    def note(batch: ForwardBatch, kv: KVStorage) -> torch.Tensor:
        step: object = batch.attention
        seen.add((type(step), batch.fused is step, batch.fused is None))
        return forward(batch, kv)

    with patch.object(runtime.model, "forward", note):
        answer(driven, [GREEDY, DRAWN, FULL])
    assert {each for each in seen if each[0] in (DecodeStep, MixedStep)} == {
        (DecodeStep, True, False),
        (MixedStep, False, True),
    }
