"""Adapters of a hybrid model, whose state goes on with the adapter that it began with."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from msgspec import structs

from tandem.engine_core.startup import engine as startup_engine
from tandem.engine_core.startup.device import open_parts
from tandem.protocol.engine_options import EngineOptions
from tandem.protocol.params import SamplingParams
from tests.engine_core.models.test_qwen3_5 import save_random
from tests.engine_core.test_recurrent_drafts import any_kind, know, right
from tests.fakes.recording_gpu import oracle_attention, oracle_parts
from tests.support.engine_driver import CLIENT, DrivenEngine
from tests.support.lora_engine import LoraEngine
from tests.support.lora_folder import merge, modules_of, write_adapter
from tests.support.model_folder import write_model
from tests.support.parity import VOCAB, random_tokens
from tests.support.tiny_llama import CONFIG

TARGETS = ("q_proj", "v_proj", "down_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
LENGTHS = (31, 30, 17, 70)
TOKENS = 12
PARAMS = SamplingParams(TOKENS, temperature=0.0, ignore_eos=True)
NAMES = ("a", "b", "")
SIZES = {"max_len": 96, "max_rows": 6, "kv_tokens": 1024, "dtype": "float32"}


class Case:
    """A model with two adapters, prompts, and the tokens of the merged models by adapter."""

    def __init__(self, folder: Path) -> None:
        model = self.model = folder / "model"
        model.mkdir()
        save_random(model, {"num_hidden_layers": 3, "layer_types": ["linear_attention"] * 2 + ["full_attention"]})
        self.adapters = {
            name: write_adapter(
                folder / name, model, TARGETS, rank, seed=rank, size=1.0, modules=modules_of(model, TARGETS)
            )
            for name, rank in (("a", 4), ("b", 9))
        }
        self.prompts = [tokens.tolist() for tokens in random_tokens(LENGTHS, VOCAB, seed=3)]
        folders = {name: merge(model, path, folder / f"merged {name}") for name, path in self.adapters.items()}
        self.expected = {}
        for name, path in ({"": model} | folders).items():
            driven = DrivenEngine.build(EngineOptions(model=str(path), device="cpu", **SIZES))
            self.expected[name] = driven.generate(self.prompts, [PARAMS] * len(self.prompts))

    @property
    def texts(self) -> list[list[int]]:
        """Prompts with their answers, those of all adapters."""
        return [[*one, *found] for own in self.expected.values() for one, found in zip(self.prompts, own, strict=True)]

    def check(self, engine: LoraEngine) -> dict[str, list[int]]:
        """Ask each adapter for each prompt, all at once; return the numbers of cached tokens by adapter."""
        ids = {name: [engine.ask(prompt, name, TOKENS) for prompt in self.prompts] for name in NAMES}
        engine.run()
        for name, own in ids.items():
            assert [engine.tokens(request_id) for request_id in own] == self.expected[name], name
        return {name: [engine.mailbox.cached[CLIENT, request_id] for request_id in own] for name, own in ids.items()}


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    found = Case(tmp_path_factory.mktemp("hybrid"))
    assert len({str(tokens) for tokens in found.expected.values()}) == 3
    return found


@pytest.mark.parametrize("fields", [{}, {"max_step_tokens": 7}, {"kv_tokens": 112, "max_rows": 3}])
def test_a_hybrid_with_adapters_equals_the_merged_models(fields: dict[str, Any], case: Case) -> None:
    engine = LoraEngine.start(case.model, case.adapters, **SIZES | fields)
    case.check(engine)
    assert (engine.engine.stats.preemptions > 0) == ("kv_tokens" in fields)


def test_states_are_continued_within_an_adapter_alone(case: Case) -> None:
    engine = LoraEngine.start(case.model, case.adapters, **SIZES | {"kv_tokens": 4096})
    assert not any(sum(cached) for cached in case.check(engine).values()), "each adapter computes each prompt"
    again = case.check(engine)
    assert all(cached[-1] == 64 for cached in again.values()), again


@pytest.mark.parametrize("graphs", [{}, {"graph_rows": "2,6", "graph_tokens": "64"}])
def test_graphs_of_a_hybrid_have_adapters(graphs: dict[str, str], case: Case) -> None:
    before = torch.get_num_threads()
    given = {"device": "cuda", "max_step_tokens": 64, **SIZES, **graphs}
    with patch.object(startup_engine.configuration, "resolve_device", lambda *_: "cuda"), oracle_attention():
        case.check(LoraEngine.start(case.model, case.adapters, oracle_parts, **given))
    torch.set_num_threads(before)


DRAFTED: dict[str, dict[str, Any]] = {
    "cpu": {"pipeline": "on", "speculate_tokens": 5},
    "short of pages": {"pipeline": "on", "speculate_tokens": 3, "kv_tokens": 160, "max_rows": 3},
    "graphs": {
        "device": "cuda",
        "max_step_tokens": 64,
        "graph_rows": "2,6",
        "graph_tokens": "64",
        "speculate_tokens": 3,
    },
}


@pytest.mark.parametrize("name", DRAFTED)
def test_rows_with_adapters_say_with_drafts_what_they_say_without(name: str, case: Case) -> None:
    """Their states take in the accepted drafts, computed with the adapter of the row."""
    given, before = SIZES | {"speculate": "ngram"} | DRAFTED[name], torch.get_num_threads()
    on_gpu = name == "graphs"
    device = patch.object(startup_engine.configuration, "resolve_device", lambda *_: "cuda" if on_gpu else "cpu")
    with device, oracle_attention() if on_gpu else nullcontext():
        engine = LoraEngine.start(case.model, case.adapters, oracle_parts if on_gpu else open_parts, **given)
        drafter = know(engine, any_kind(4), case.texts)
        case.check(engine)
        drafter.guess = right
        case.check(engine)
    torch.set_num_threads(before)
    stats = engine.engine.stats
    assert 60 < stats.spec_decode_num_accepted_tokens < stats.spec_decode_num_draft_tokens
    assert (stats.preemptions > 0) == (name == "short of pages")


def test_a_draft_model_drafts_for_rows_with_adapters(case: Case, tmp_path: Path) -> None:
    """It has no adapter: its keys and values are computed by it alone."""
    write_model(tmp_path, structs.replace(CONFIG, vocab_size=VOCAB, max_positions=2304))
    (tmp_path / "tokenizer.json").unlink()
    given = SIZES | {"speculate": f"model:{tmp_path}", "speculate_tokens": 3, "pipeline": "on"}
    engine = LoraEngine.start(case.model, case.adapters, **given)
    for _ in range(2):
        case.check(engine)
    assert engine.engine.stats.spec_decode_num_draft_tokens > 60
