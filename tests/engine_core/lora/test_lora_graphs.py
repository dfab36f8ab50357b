"""Steps with adapters from graphs, built and replayed as on CUDA, over a GPU that records calls."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from msgspec import structs

from tandem.engine_core.config import StepConfig
from tandem.engine_core.graph_sizes import decode_rows, draft_sizes, mixed_rows, prompt_tokens
from tandem.engine_core.plan import ScheduledSequence, StepPlan
from tandem.engine_core.runtime.captured import DecodeGraphs, MixedGraph, VerifyGraphs
from tandem.engine_core.runtime.graph_bucket import GraphBucket
from tandem.engine_core.startup import engine as startup_engine
from tests.engine_core.runtime.test_recorded_graphs import MODEL
from tests.fakes.recording_gpu import RecordedGraph, oracle_attention, oracle_parts
from tests.support.engine_driver import CLIENT
from tests.support.lora_engine import LoraEngine
from tests.support.lora_folder import write_adapter
from tests.support.model_folder import write_model
from tests.support.plan_recording import runtime_of

PROMPTS = ([5, 6, 7], [8, 9, 10, 11], [12, 13], [14, 15, 16])


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    model = tmp_path / "model"
    model.mkdir()
    write_model(model, MODEL)
    for seed, name in enumerate("ab"):
        write_adapter(tmp_path / name, model, rank=4 + seed, seed=seed)
    with oracle_attention():
        yield model
    torch.set_num_threads(before)


def on_gpu(folder: Path, **options: object) -> LoraEngine:
    """Two slots, decode steps of up to 4 rows from graphs."""
    sizes = {"max_rows": 6, "max_len": 64, "max_step_tokens": 32, "kv_tokens": 512, "graph_rows": "1,4"}
    given = {"device": "cuda", "dtype": "float32", "graph_tokens": "24", **sizes, **options}
    with patch.object(startup_engine.configuration, "resolve_device", lambda *_: "cuda"):
        return LoraEngine.start(folder, adapters_of(folder), new_parts=oracle_parts, **given)


def adapters_of(folder: Path) -> dict[str, Path]:
    return {name: folder.parent / name for name in "ab"}


@contextmanager
def noted_replays() -> Iterator[list[RecordedGraph]]:
    """Collect the graphs that are replayed meanwhile."""
    replayed: list[RecordedGraph] = []
    replay = RecordedGraph.replay

    def note(graph: RecordedGraph) -> None:
        replayed.append(graph)
        replay(graph)

    with patch.object(RecordedGraph, "replay", note):
        yield replayed


def count_of(replayed: list[RecordedGraph], captured: Iterable[DecodeGraphs | MixedGraph | VerifyGraphs]) -> int:
    """Return how many of the replayed graphs are forward passes with adapters of captured steps."""
    adapted = {id(graphs.adapted) for graphs in captured}
    return sum(id(graph) in adapted for graph in replayed)


def test_steps_from_graphs_equal_those_of_a_cpu(folder: Path) -> None:
    asked = [(prompt, name) for prompt, name in zip(PROMPTS, ("a", "", "b", "a"), strict=True)]
    engine, cpu = on_gpu(folder), LoraEngine.start(folder, adapters_of(folder))
    graphs = runtime_of(engine).graphs
    assert graphs is not None
    decode, mixed = ([one for slot in kind for one in slot.values()] for kind in (graphs.decode, graphs.mixed))
    with noted_replays() as replayed:
        found = engine.answers(*asked)
        assert count_of(replayed, decode) >= 6 and count_of(replayed, mixed) >= 1
        replayed.clear()
        plain = engine.answers(*[(prompt, "") for prompt in PROMPTS])
        assert not count_of(replayed, [*decode, *mixed]), "no row has an adapter any more"
    assert found == cpu.answers(*asked)
    assert plain == cpu.answers(*[(prompt, "") for prompt in PROMPTS])
    assert found[1] == plain[1]


def test_prompts_beside_decode_rows_have_graphs_with_adapters(folder: Path) -> None:
    """The second and third request arrive while the first one decodes, and the third in chunks."""
    long = [3 + index % 50 for index in range(30)]
    late = [(PROMPTS[1], "b"), (long, "a"), (PROMPTS[2], "")]
    engine, cpu = on_gpu(folder, prefill_chunk=11), LoraEngine.start(folder, adapters_of(folder))
    tokens = []
    with noted_replays() as replayed:
        for driven in (engine, cpu):
            ids = [driven.ask(PROMPTS[0], "a", count=20)]
            while len(driven.mailbox.received[CLIENT, ids[0]]) < 3:
                driven.engine.tick()
            ids += [driven.ask(prompt, name) for prompt, name in late]
            driven.run()
            tokens.append([driven.tokens(request_id) for request_id in ids])
    assert tokens[0] == tokens[1]
    graphs = runtime_of(engine).graphs
    assert graphs is not None
    assert count_of(replayed, [one for slot in graphs.mixed for b, one in slot.items() if b.num_decode_tokens]) >= 2


def test_a_slot_that_changes_its_adapter_needs_no_other_graph(folder: Path) -> None:
    """vllm#15090: the slot of a row is read from the device's table at each replay."""
    engine, cpu = on_gpu(folder, max_loras=1), LoraEngine.start(folder, adapters_of(folder))
    for name in ("a", "b", "a"):
        assert engine.answers((PROMPTS[0], name)) == cpu.answers((PROMPTS[0], name))


def test_drafts_are_verified_with_adapters_from_graphs(folder: Path) -> None:
    """Of 3 rows, then of 6, which the graphs do not hold: these verify none until some have ended."""
    repeated = [5, 6, 7, 8] * 4
    asked = [(repeated, "a"), (repeated[1:], ""), (repeated[2:], "b")]
    engine = on_gpu(folder, speculate="ngram", speculate_tokens=3)
    cpu = LoraEngine.start(folder, adapters_of(folder))
    graphs = runtime_of(engine).graphs
    assert graphs is not None
    verify = [one for slot in graphs.verify for one in slot.values()]
    expected = [cpu.ask(prompt, name, count=24) for prompt, name in asked]
    cpu.run()
    for copies in (1, 2):
        with noted_replays() as replayed:
            ids = [engine.ask(prompt, name, count=24) for prompt, name in asked for _ in range(copies)]
            engine.run()
        assert (count_of(replayed, verify) > 5) == (copies == 1)
        assert [engine.tokens(one) for one in ids] == [cpu.tokens(one) for one in expected for _ in range(copies)]
    assert sum(accepted for drafts in engine.mailbox.drafts.values() for _, accepted, _ in drafts) > 0
    with noted_replays() as replayed:
        engine.answers((repeated, ""))
    assert replayed and not count_of(replayed, verify)


def test_sizes_that_are_captured_with_adapters() -> None:
    """At most 256 rows, and 512 positions of prompts; none without adapters."""
    sizes = {"max_rows": 1024, "max_len": 4096, "max_step_tokens": 8192, "prefill_chunk": 512, "page_size": 16}
    config = StepConfig(
        model_name="x",
        device="cuda",
        dtype="bfloat16",
        depth=2,
        max_waiting=8,
        graph_rows=decode_rows(None, 1024),
        mixed_graph_rows=mixed_rows(1024),
        graph_tokens=prompt_tokens(None, 8192, 10**6),
        draft_sizes=draft_sizes("ngram", "auto"),
        max_adapters=8,
        **sizes,
    )
    assert config.adapted_graph_rows == tuple(rows for rows in config.graph_rows if rows <= 256)
    shapes = {tokens: config.adapted_mixed_rows(tokens) for tokens in config.graph_tokens}
    assert shapes == {tokens: (0, 32, 128, 256) if tokens <= 512 else () for tokens in config.graph_tokens}
    assert set(config.adapted_verify_shapes) == {(r, d) for r, d in config.verify_shapes if r * (1 + d) <= 256}
    plain = structs.replace(config, max_adapters=0)
    assert not plain.adapted_graph_rows and not plain.adapted_verify_shapes and not plain.adapted_mixed_rows(64)


def test_steps_of_more_rows_or_positions_have_no_graph(folder: Path) -> None:
    graphs = runtime_of(on_gpu(folder)).graphs
    assert graphs is not None

    def bucket(*lengths: int) -> GraphBucket | None:
        found = enumerate(lengths, 1)
        rows = [ScheduledSequence(row, row, 9, length, True, tokens=b"\0" * 4 * length) for row, length in found]
        return graphs.bucket(structs.replace(StepPlan.of(1, tuple(rows)), has_adapters=True))

    assert (bucket(1, 1, 1), bucket(1, 1, 1, 1, 1)) == (GraphBucket(4, 0), None)
    assert (bucket(20), bucket(1, 1, 20)) == (GraphBucket(0, 24), GraphBucket(6, 24))
    assert bucket(25) is None
