"""Decode steps with adapters from graphs, built and replayed as on CUDA, over a GPU that records calls."""

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from msgspec import structs

from tandem.engine_core.runtime.graph_bucket import GraphBucket
from tandem.engine_core.startup import engine as startup_engine
from tandem.protocol.engine_options import EngineOptions
from tests.engine_core.runtime.test_recorded_graphs import MODEL
from tests.fakes.recording_gpu import RecordedGraph, oracle_attention, oracle_parts
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
    adapters = {name: folder.parent / name for name in "ab"}
    given = {"device": "cuda", "dtype": "float32", "graph_tokens": "24", **sizes, **options}
    with patch.object(startup_engine.configuration, "resolve_device", lambda *_: "cuda"):
        return LoraEngine.start(folder, adapters, new_parts=oracle_parts, **given)


def test_steps_from_graphs_equal_those_of_a_cpu(folder: Path) -> None:
    asked = [(prompt, name) for prompt, name in zip(PROMPTS, ("a", "", "b", "a"), strict=True)]
    engine = on_gpu(folder)
    graphs = runtime_of(engine).graphs
    assert graphs is not None and sorted(graphs.adapted[0]) == [1, 4]
    replayed: list[RecordedGraph] = []
    replay = RecordedGraph.replay

    def note(graph: RecordedGraph) -> None:
        replayed.append(graph)
        replay(graph)

    with patch.object(RecordedGraph, "replay", note):
        found = engine.answers(*asked)
        adapted = {id(graph) for slot in graphs.adapted for graph in slot.values()}
        assert sum(id(graph) in adapted for graph in replayed) >= 6, "decode steps with adapters"
        replayed.clear()
        plain = engine.answers(*[(prompt, "") for prompt in PROMPTS])
        assert not any(id(graph) in adapted for graph in replayed), "no row has an adapter any more"
    adapters = {name: folder.parent / name for name in "ab"}
    cpu = LoraEngine.start(folder, adapters)
    assert found == cpu.answers(*asked)
    assert plain == cpu.answers(*[(prompt, "") for prompt in PROMPTS])
    assert found[1] == plain[1]


def test_a_slot_that_changes_its_adapter_needs_no_other_graph(folder: Path) -> None:
    """vllm#15090: the slot of a row is read from the device's table at each replay."""
    engine, cpu = on_gpu(folder, max_loras=1), LoraEngine.start(folder, {name: folder.parent / name for name in "ab"})
    for name in ("a", "b", "a"):
        assert engine.answers((PROMPTS[0], name)) == cpu.answers((PROMPTS[0], name))


def test_steps_with_prompts_or_more_rows_have_no_graph(folder: Path) -> None:
    engine = on_gpu(folder)
    graphs = runtime_of(engine).graphs
    assert graphs is not None
    plans = []
    runtime = engine.engine.runtime
    launch = runtime.launch
    with patch.object(runtime, "launch", lambda slot, plan: (plans.append(plan), launch(slot, plan))[1]):
        engine.answers(*[([3 + row, 4], "a") for row in range(6)])
    assert all(plan.has_adapters for plan in plans)
    for plan in plans:
        bucket = graphs.bucket(plan)
        assert bucket == (GraphBucket(4, 0) if plan.is_decode_only and 1 < len(plan.rows) <= 4 else bucket)
        if len(plan.rows) > 4 or any(row.length > 1 for row in plan.rows):
            assert bucket is None
        without = structs.replace(plan, has_adapters=False)
        assert (graphs.bucket(without) is not None) >= (bucket is not None)


def test_drafts_and_adapters_exclude_each_other_on_a_gpu(folder: Path) -> None:
    from tandem.engine_core.errors import ConfigError

    with pytest.raises(ConfigError, match="--enable-lora and --speculate"):
        on_gpu(folder, speculate="ngram")
    assert EngineOptions().enable_lora is False
