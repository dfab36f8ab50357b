"""A mixture of experts in graphs of decode and mixed steps, over a GPU that records calls: tokens are transformers'."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import torch

from tandem.engine_core.kernels.reference import moe
from tandem.engine_core.layers.moe import RoutingSwitch
from tandem.engine_core.startup import engine as startup_engine
from tandem.protocol.engine_options import EngineOptions
from tandem.protocol.params import SamplingParams
from tests.engine_core.models.test_qwen3_moe import save_random
from tests.fakes.recording_gpu import oracle_attention, oracle_parts
from tests.support.engine_driver import DrivenEngine
from tests.support.parity import greedy_tokens
from tests.support.plan_recording import runtime_of

TOKENS = 6


@contextmanager
def noted_routing(notes: list[tuple[int, int]]) -> Iterator[None]:
    """Note the numbers of padding tokens of each step and layer, and of padding tokens that have experts."""
    route = moe.route

    def noted(logits: Any, top_k: int, routing: Any, rows: Any = None, gate: Any = None) -> Any:
        routed = route(logits, top_k, routing, rows, gate)
        padding = torch.zeros(len(logits), dtype=torch.bool) if rows is None else rows == 0
        notes.append((int(padding.sum()), int((routed.ids[padding] >= 0).sum())))
        return routed

    with patch.object(moe, "route", noted):
        yield


def test_padding_is_not_routed_and_start_up_routes_uniformly(tmp_path: Path) -> None:
    reference = save_random(tmp_path, {"head_dim": 32, "num_hidden_layers": 2, "norm_topk_prob": True})
    options = EngineOptions(
        model=str(tmp_path),
        device="cuda",
        dtype="float32",
        max_rows=6,
        max_len=64,
        max_step_tokens=32,
        prefill_chunk=16,
        kv_tokens=512,
        graph_rows="1,4,6",
        graph_tokens="24",
    )
    uniform, switched, before = RoutingSwitch.uniform, list[RoutingSwitch](), torch.get_num_threads()

    def noted(switch: RoutingSwitch) -> Any:
        switched.append(switch)
        return uniform(switch)

    torch.set_num_threads(1)
    with oracle_attention(), patch.object(RoutingSwitch, "uniform", noted):
        with patch.object(startup_engine.configuration, "resolve_device", lambda *_: "cuda"):
            driven = DrivenEngine.build(options, oracle_parts)
        assert switched == [runtime_of(driven).model.routing] and not switched[0].flag.any()
        random, notes = Random(1), list[tuple[int, int]]()
        prompts = [[random.randrange(2, 150) for _ in range(length)] for length in (1, 30, 5, 2, 17)]
        numbers = []
        with noted_routing(notes):
            for prompt in prompts:
                numbers.append(driven.submit(prompt, SamplingParams(TOKENS, temperature=0.0, ignore_eos=True)))
                driven.engine.tick()
                driven.engine.tick()
            driven.run()
    torch.set_num_threads(before)
    found = [driven.tokens(number) for number in numbers]
    assert found == [greedy_tokens(reference, prompt, TOKENS) for prompt in prompts]
    assert sum(padding > 0 for padding, _ in notes) > 4, "graphs had free places"
    assert all(routed == 0 for _, routed in notes)
