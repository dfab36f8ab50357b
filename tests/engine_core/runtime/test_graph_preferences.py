"""Larger graphs instead of slower ones: whichever those are, requests get the same tokens and leave nothing."""

from pathlib import Path
from random import Random
from unittest.mock import patch

import pytest
import torch

from tandem.engine_core.config import StepConfig
from tandem.engine_core.kv_cache.storage import KVLayout
from tandem.engine_core.runtime.graph_bucket import GraphBucket
from tandem.engine_core.runtime.graphs import StepGraphs
from tandem.engine_core.startup import step_timing
from tandem.engine_core.startup.step_timing import faster_buckets
from tandem.protocol.events import Finished
from tandem.protocol.params import SamplingParams
from tests.engine_core.runtime.test_recorded_graphs import MODEL, build
from tests.fakes.recording_gpu import RecordedGraph, oracle_attention
from tests.support.engine_driver import DrivenEngine
from tests.support.plan_recording import runtime_of
from tests.support.tiny_llama import Compared, random_model

MODES = (
    SamplingParams(1, temperature=0.0, ignore_eos=True),
    SamplingParams(1, temperature=0.0, min_tokens=2),
    SamplingParams(1, temperature=1.2, ignore_eos=True),
    SamplingParams(1, temperature=0.8, top_k=7, top_p=0.9, repetition_penalty=1.3),
)


def random_preferences(random: Random, graphs: StepGraphs) -> dict[GraphBucket, GraphBucket]:
    """Return those that follow from random times, as measured ones would."""
    buckets = [GraphBucket(rows, 0) for rows in graphs.rows] + list(graphs.mixed[0])
    return faster_buckets({bucket: random.choice([1.0, 2.0, 4.0]) for bucket in buckets})


def run_random(driven: DrivenEngine, random: Random, compared: Compared) -> None:
    """Run requests that arrive one after the other, each token compared with a dense model's."""
    asked = []
    for _ in range(random.randint(1, 9)):
        mode = random.choice(MODES)
        params = SamplingParams(
            random.randint(2, 12), temperature=mode.temperature, top_k=mode.top_k, top_p=mode.top_p,
            repetition_penalty=mode.repetition_penalty, min_tokens=mode.min_tokens, ignore_eos=mode.ignore_eos,
            seed=random.randrange(2**40),
        )  # fmt: skip
        prompt = [random.randrange(2, 90) for _ in range(random.choice([1, 2, 5, 17, 40]))]
        constrained = random.random() < 0.3
        number = driven.submit(prompt, params, constraint="parity" if constrained else None)
        asked.append((number, prompt, params, constrained))
        for _ in range(random.randint(0, 3)):
            driven.engine.tick()
    driven.run()
    model = random_model(config=MODEL)
    for number, prompt, params, constrained in asked:
        assert isinstance(driven.outcome(number), Finished)
        compared.check(model, prompt, driven.tokens(number), params, constrained)


@pytest.mark.parametrize("seed", range(3))
def test_random_preferences_change_no_token(tmp_path: Path, seed: int) -> None:
    random, compared, preferred = Random(seed), Compared(), 0
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with oracle_attention():
        driven = build(tmp_path, graph_rows="1,2,4,6", graph_tokens="8,16,24")
        graphs, scheduler = runtime_of(driven).graphs, driven.engine.scheduler
        assert graphs is not None
        rows = scheduler.rows.free
        for _ in range(4):
            faster = random_preferences(random, graphs)
            preferred += len(faster)
            graphs.prefer(faster)
            run_random(driven, random, compared)
            assert scheduler.rows.free == rows and scheduler.num_open == 0
    torch.set_num_threads(before)
    assert preferred > 4 and compared.tokens > 20 * compared.close


def test_graphs_are_timed_again_on_padding_after_the_longest_step_has_run(tmp_path: Path) -> None:
    """No graph holds that step here, so its words are in the slot when graphs are compared."""
    replay, dirty = RecordedGraph.replay, list[bool]()
    with oracle_attention():
        runtime = runtime_of(build(tmp_path))
        config = StepConfig(
            model_name="", device="cuda", dtype="float32", depth=2, max_rows=6, max_len=64, max_step_tokens=32,
            prefill_chunk=16, page_size=16, max_waiting=0,
        )  # fmt: skip
        layout = KVLayout.of_one_group(1, page_size=16, kv_heads=1, head_dim=32, dtype=torch.float32)

        def note(graph: RecordedGraph) -> None:
            words = set(runtime.slots[0].device_inputs.tolist())
            dirty.append(not words <= {0, step_timing.timed_position(64)})
            replay(graph)

        pair = {GraphBucket(1, 0): GraphBucket(4, 0)}
        compared = patch.object(step_timing, "faster_buckets", lambda _: pair)
        with compared, patch.object(RecordedGraph, "replay", note):
            step_timing.measure_costs(runtime, config, MODEL, layout)
    assert dirty and not any(dirty[-4:]), "the last graphs are those that were compared"
