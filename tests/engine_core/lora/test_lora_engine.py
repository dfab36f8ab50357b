"""An engine with adapters answers as the merged models do, for any mix of adapters in a batch."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from msgspec import structs

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.lora import adapter_files
from tandem.engine_core.lora.adapter_loader import ThreadedLoader
from tandem.engine_core.runtime.runtime import TorchRuntime
from tandem.engine_core.startup.device_memory import adapter_bytes
from tandem.engine_core.startup.engine import resolve_engine
from tandem.engine_core.weight_version import WeightVersion
from tandem.protocol.commands import Goodbye, Hello, Renew
from tandem.protocol.engine_options import EngineOptions
from tandem.protocol.errors import ErrorCode
from tandem.protocol.events import Failure, Ready
from tandem.protocol.version import PROTOCOL_VERSION
from tests.support.engine_driver import CLIENT, EPOCH, DrivenEngine
from tests.support.lora_engine import LoraEngine
from tests.support.lora_folder import ALL, merge, write_adapter
from tests.support.model_folder import write_model

PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(autouse=True)
def _threads() -> object:
    before = torch.get_num_threads()
    yield None
    torch.set_num_threads(before)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    write_model(folder)
    return folder


def merged_answer(model: Path, adapter: Path | None, prompt: list[int], tag: str = "") -> list[int]:
    """Return the tokens of the model with an adapter merged into its weights, in an engine without adapters."""
    folder = model if adapter is None else merge(model, adapter, adapter / f"merged{tag}")
    engine = LoraEngine.start(folder, enable_lora=False)
    request_id = engine.ask(prompt)
    DrivenEngine.run(engine)
    return engine.tokens(request_id)


def test_a_batch_of_four_adapters_and_none_equals_the_merged_models(model: Path, tmp_path: Path) -> None:
    adapters = {
        f"a{rank}": write_adapter(tmp_path / f"a{rank}", model, targets, rank, seed=rank)
        for rank, targets in ((1, ALL), (3, ("q_proj", "v_proj")), (8, ("gate_proj",)), (16, ALL))
    }
    engine = LoraEngine.start(model, adapters, max_loras=4)
    found = engine.answers((PROMPT, ""), *[(PROMPT, name) for name in adapters])
    expected = [merged_answer(model, path, PROMPT) for path in (None, *adapters.values())]
    assert found == expected
    assert len({tuple(tokens) for tokens in found}) == 5


def adapter_of(model: Path, name: str, seed: int = 7, **fields: Any) -> Path:
    return write_adapter(model.parent / name, model, seed=seed, **fields)


def test_base_rows_beside_adapters_are_as_without_them(model: Path) -> None:
    """Rows without an adapter, and padding, must not see one of their step (vllm#42008)."""
    prompts = [[5 + row, 6, 7] for row in range(8)]
    engine = LoraEngine.start(model, {"a": adapter_of(model, "a")})
    alone = engine.answers(*[(prompt, "") for prompt in prompts])
    mixed = engine.answers(*[(prompt, "a" if row % 2 else "") for row, prompt in enumerate(prompts)])
    assert mixed[::2] == alone[::2]
    assert all(one != other for one, other in zip(mixed[1::2], alone[1::2], strict=True))


@pytest.mark.parametrize("rows", [1, 8])
def test_a_gate_adapter_is_added_before_the_activation(rows: int, model: Path) -> None:
    adapter = adapter_of(model, "gate", targets=("gate_proj",), size=1.5)
    engine = LoraEngine.start(model, {"gate": adapter})
    prompts = [[9 + row, 3, 4] for row in range(rows)]
    expected = [merged_answer(model, adapter, prompt, tag=str(row)) for row, prompt in enumerate(prompts[:2])]
    assert engine.answers(*[(prompt, "gate") for prompt in prompts])[:2] == expected


def test_chunks_of_a_prompt_have_its_adapter(model: Path) -> None:
    adapter, prompt = adapter_of(model, "a"), [3 + index % 50 for index in range(40)]
    engine = LoraEngine.start(model, {"a": adapter}, max_step_tokens=8, prefill_chunk=7)
    found = engine.answers((prompt, "a"), (prompt, ""), (PROMPT, "a"))
    assert found[0] == merged_answer(model, adapter, prompt)
    assert found[1] == merged_answer(model, None, prompt)


def test_cached_prefixes_are_shared_within_an_adapter_alone(model: Path) -> None:
    prompt = [3 + index % 50 for index in range(40)]
    adapters = {"a": adapter_of(model, "a"), "b": adapter_of(model, "b", seed=8)}
    engine = LoraEngine.start(model, adapters)
    first = engine.answers((prompt, "a"))
    cached = {}
    for name in ("b", "", "a"):
        request_id = engine.ask(prompt, name)
        engine.run()
        cached[name] = engine.mailbox.cached[CLIENT, request_id]
        if name == "a":
            assert engine.tokens(request_id) == first[0]
    assert cached == {"b": 0, "": 0, "a": 32}


def test_a_name_loaded_again_does_not_use_the_old_kv(model: Path) -> None:
    prompt = [3 + index % 50 for index in range(40)]
    old, new = adapter_of(model, "old"), adapter_of(model, "new", seed=9)
    engine = LoraEngine.start(model, {"a": old})
    before = engine.answers((prompt, "a"))
    assert engine.load("a", new, load_inplace=True).ok
    request_id = engine.ask(prompt, "a")
    engine.run()
    assert engine.mailbox.cached[CLIENT, request_id] == 0
    assert engine.tokens(request_id) == merged_answer(model, new, prompt) != before[0]


def test_preempted_sequences_keep_their_adapter(model: Path) -> None:
    adapters = {name: adapter_of(model, name, seed=seed) for seed, name in enumerate("abc")}
    prompts = [[3 + (index + row) % 50 for index in range(17)] for row in range(6)]
    asked = [(prompt, "abc"[row % 3]) for row, prompt in enumerate(prompts)]
    roomy = LoraEngine.start(model, adapters, max_loras=2)
    tight = LoraEngine.start(model, adapters, max_loras=2, kv_tokens=96, page_size=8, max_len=60)
    for engine in (roomy, tight):
        ids = [engine.ask(prompt, name, count=30) for prompt, name in asked]
        engine.run()
        engine.found = [engine.tokens(request_id) for request_id in ids]  # type: ignore[attr-defined]
    assert tight.engine.scheduler.preemptions > 0
    assert tight.found == roomy.found  # type: ignore[attr-defined]


def test_more_adapters_than_slots_take_turns(model: Path) -> None:
    adapters = {f"a{seed}": adapter_of(model, f"a{seed}", seed=seed, rank=1 + seed) for seed in range(6)}
    wide, narrow = (LoraEngine.start(model, adapters, max_loras=slots, max_cpu_loras=1) for slots in (6, 2))
    asked = [(PROMPT, f"a{index % 6}") for index in range(18)]
    assert narrow.answers(*asked) == wide.answers(*asked)
    assert {adapter.slot for adapter in narrow.adapters.names.values()} == {0, 1, 2}


def test_a_lower_rank_reads_nothing_that_a_higher_one_left(model: Path) -> None:
    """sglang#21864: a slot holds an adapter of rank 1 after one of rank 16."""
    high, low = adapter_of(model, "high", rank=16), adapter_of(model, "low", rank=1, targets=("o_proj",))
    engine = LoraEngine.start(model, {"high": high, "low": low}, max_loras=1)
    engine.answers((PROMPT, "high"))
    assert engine.answers((PROMPT, "low")) == [merged_answer(model, low, PROMPT)]


def test_drafts_are_verified_with_the_adapter(model: Path) -> None:
    prompt = [5, 6, 7, 8] * 6
    adapter = {"a": adapter_of(model, "a")}
    plain, drafting = (LoraEngine.start(model, adapter, speculate=mode) for mode in ("off", "ngram"))
    asked = [(prompt, "a"), (prompt, ""), (prompt[1:], "a")]
    assert drafting.answers(*asked) == plain.answers(*asked)


def test_an_unload_waits_for_running_sequences_and_refuses_new_ones(model: Path) -> None:
    engine = LoraEngine.start(model, {"a": adapter_of(model, "a")})
    expected = engine.answers((PROMPT, "a"), (PROMPT, "a"))
    running = [engine.ask(PROMPT, "a"), engine.ask(PROMPT, "a")]
    while not engine.engine.scheduler.running:
        engine.engine.tick()
    assert engine.begin_unload("a") is None, "two sequences use it"
    late = engine.ask(PROMPT, "a")
    engine.run()
    assert [engine.tokens(request_id) for request_id in running] == expected
    outcome = engine.outcome(late)
    assert isinstance(outcome, Failure) and outcome.code is ErrorCode.MODEL_NOT_FOUND
    answer = engine.await_answer()
    assert answer.ok and answer.adapters is not None and answer.adapters.adapters == []


def test_files_that_change_after_the_load_are_not_served(model: Path) -> None:
    first, second = adapter_of(model, "a"), adapter_of(model, "b", seed=1)
    engine = LoraEngine.start(model, {"a": first, "b": second}, max_loras=1, max_cpu_loras=1)
    engine.answers((PROMPT, "b"))
    write_adapter(first, model, seed=99)
    request_id = engine.ask(PROMPT, "a")
    engine.run()
    outcome = engine.outcome(request_id)
    assert isinstance(outcome, Failure) and outcome.code is ErrorCode.ADAPTER_FAILED
    assert engine.answers((PROMPT, "b"))[0]


def test_a_broken_adapter_fails_its_own_load(model: Path, tmp_path: Path) -> None:
    engine = LoraEngine.start(model)
    expected = engine.answers((PROMPT, ""))
    broken = adapter_of(model, "broken")
    (broken / "adapter_model.safetensors").write_bytes(b"x" * 100)
    for path in (broken, tmp_path / "nothing"):
        request_id = engine.ask(PROMPT)
        answer = engine.load("a", path)
        assert not answer.ok and str(path) in answer.message
        engine.run()
        assert engine.tokens(request_id) == expected[0]
    assert not engine.adapters.names


def test_a_restarted_engine_has_the_adapters_that_were_loaded(model: Path) -> None:
    first, second = adapter_of(model, "a"), adapter_of(model, "b", seed=1)
    engine = LoraEngine.start(model, {"a": first})
    assert engine.load("b", second).ok and engine.load("c", second).ok
    assert engine.begin_unload("a") is not None
    engine.load("b", first, load_inplace=True)
    version = engine.adapters.names["b"].version
    (second / "adapter_model.safetensors").unlink()
    again = LoraEngine.restart(model)
    assert list(again.adapters.names) == ["b"], "c has lost its files"
    assert again.adapters.names["b"].version == version
    assert again.load("d", first).ok and again.adapters.names["d"].version > version


def weight_versions(engine: LoraEngine) -> dict[str, str]:
    return {facts.name: facts.weight_version for facts in engine.adapters.listed.adapters}


def test_adapters_say_for_which_weights_they_were_loaded(model: Path) -> None:
    first = adapter_of(model, "a")
    engine = LoraEngine.start(model, {"a": first}, enable_weight_updates=True)
    initial = engine.engine.control.weights.version.name
    assert engine.load("b", first).ok and weight_versions(engine) == {"a": initial, "b": initial}
    engine.engine.control.weights.version = WeightVersion(1, "step-2")
    assert engine.load("c", first).ok and engine.load("b", first, load_inplace=True).ok
    expected = {"a": initial, "b": "step-2", "c": "step-2"}
    assert initial and weight_versions(engine) == expected
    assert weight_versions(LoraEngine.restart(model, enable_weight_updates=True)) == expected
    assert weight_versions(LoraEngine.start(model, {"a": first})) == {"a": ""}


def test_files_are_in_the_root_when_they_are_loaded_and_after_a_restart(model: Path, tmp_path: Path) -> None:
    """A link may have been changed since the frontend has followed it."""
    root = tmp_path / "root"
    root.mkdir()
    inside, outside = write_adapter(root / "a", model), adapter_of(model, "outside")
    engine = LoraEngine.start(model)
    assert engine.load("a", inside, root=str(root)).ok
    refused = engine.load("b", outside, root=str(root))
    assert not refused.ok and "--lora-root" in refused.message
    inside.rename(root / "old")
    inside.symlink_to(outside)
    assert not LoraEngine.restart(model).adapters.names


def test_a_registry_that_cannot_be_written_does_not_end_the_engine(model: Path) -> None:
    """As on a full disk: adapters are served, and only an engine after this one would lack them."""
    engine = LoraEngine.start(model)
    (model / "adapters.json.new").mkdir()
    assert engine.load("a", adapter_of(model, "a")).ok
    assert engine.answers((PROMPT, "a"))[0]
    assert engine.begin_unload("a") is not None and not engine.adapters.names


def test_the_session_of_an_adapter_has_no_kv_for_another(model: Path) -> None:
    prompt = [3 + index % 50 for index in range(40)]
    engine = LoraEngine.start(model, {"a": adapter_of(model, "a"), "b": adapter_of(model, "b", seed=8)}, page_size=8)
    alone = {name: engine.answers((prompt, name))[0] for name in ("a", "b", "")}
    for name in ("a", "b", "", "a"):
        request_id = engine.ask(prompt, name, session="s", cache_salt="new" if name else "none")
        engine.run()
        assert engine.tokens(request_id) == alone[name]


def test_an_adapter_without_usable_logits_spoils_no_other_row(model: Path) -> None:
    """Numbers that overflow on the way end its own requests, and leave no NaN in pages that others get afterwards."""
    good, bad = adapter_of(model, "good"), adapter_of(model, "bad", seed=8, size=1e18)
    engine = LoraEngine.start(model, {"good": good, "bad": bad}, kv_tokens=128, page_size=16, max_len=64)
    asked = [(PROMPT, "good"), (PROMPT, "")]
    expected = engine.answers(*asked)
    for first in range(4):
        spoilt = [engine.ask([first, row, *range(20)], "bad", count=20) for row in range(2)]
        ids = [engine.ask(prompt, name) for prompt, name in asked]
        engine.run()
        assert [engine.tokens(request_id) for request_id in ids] == expected
        for outcome in map(engine.outcome, spoilt):
            assert isinstance(outcome, Failure) and outcome.code is ErrorCode.MODEL_FAILED


def test_an_adapter_of_the_flags_that_cannot_be_loaded_refuses_the_start(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--lora-modules a"):
        LoraEngine.start(model, {"a": tmp_path / "nothing"})


@pytest.mark.parametrize("rounds", [40, pytest.param(500, marks=pytest.mark.slow)])
def test_loads_and_unloads_disturb_no_stream(rounds: int, model: Path) -> None:
    kept, other = adapter_of(model, "kept"), adapter_of(model, "other", seed=3, rank=2, targets=("o_proj",))
    engine = LoraEngine.start(model, {"kept": kept}, max_loras=2)
    expected = engine.answers((PROMPT, "kept"), (PROMPT, ""))
    for round_ in range(rounds):
        ids = [engine.ask(PROMPT, "kept"), engine.ask(PROMPT)]
        assert engine.load("x", other).ok
        if round_ % 3 == 0:
            ids.append(engine.ask(PROMPT, "x"))
        engine.begin_unload("x")
        engine.run()
        assert engine.await_answer().ok
        assert [engine.tokens(request_id) for request_id in ids[:2]] == expected
    adapters = engine.adapters
    assert list(adapters.names) == ["kept"] and not adapters._retired and not adapters._reading
    loader = adapters.loader
    assert isinstance(loader, ThreadedLoader)
    loader.wait()
    assert len(loader._cached) == len(loader._stamps) == 1


def test_adapters_are_read_with_one_thread_of_torch(model: Path) -> None:
    """More of them would take cores from the loop, which keeps all of its own."""
    before, found, update = torch.get_num_threads(), list[int](), adapter_files._Reader.update
    engine = LoraEngine.start(model)
    write_adapter(model.parent / "a", model)

    def noted(reader: adapter_files._Reader, own: Any) -> Any:
        found.append(torch.get_num_threads())
        return update(reader, own)

    with patch.object(adapter_files._Reader, "update", noted):
        assert engine.load("a", model.parent / "a").ok
    assert len(found) > 1 and set(found) == {1} and torch.get_num_threads() == before


def test_an_engine_without_adapters_refuses_them(model: Path) -> None:
    engine = LoraEngine.start(model, enable_lora=False)
    assert not engine.load("a", model).ok
    request_id = engine.ask(PROMPT, "a")
    DrivenEngine.run(engine)
    outcome = engine.outcome(request_id)
    assert isinstance(outcome, Failure) and outcome.code is ErrorCode.MODEL_NOT_FOUND


def test_an_unknown_adapter_is_refused(model: Path) -> None:
    engine = LoraEngine.start(model)
    request_id = engine.ask(PROMPT, "nothing")
    engine.run()
    outcome = engine.outcome(request_id)
    assert isinstance(outcome, Failure) and outcome.code is ErrorCode.MODEL_NOT_FOUND


def test_the_memory_of_adapters_is_known_before_the_start(model: Path) -> None:
    engine = LoraEngine.start(model, max_loras=3, max_lora_rank=5)
    runtime = engine.engine.runtime
    assert isinstance(runtime, TorchRuntime) and runtime.adapters is not None
    options = EngineOptions(model=str(model), device="cpu", enable_lora=True, max_loras=3, max_lora_rank=5)
    resolved = resolve_engine(options, cuda=False)
    assert adapter_bytes(resolved.config, resolved.source) == runtime.adapters.lora.num_bytes > 0
    without = resolve_engine(structs.replace(options, enable_lora=False), cuda=False)
    assert adapter_bytes(without.config, without.source) == 0


def test_a_load_is_answered_once_the_other_frontend_knows_the_adapter(model: Path) -> None:
    engine = LoraEngine.start(model)
    engine.mailbox.inbox.append((b"other", Hello(PROTOCOL_VERSION, EPOCH, "other")))
    engine.engine.tick()
    ready = engine.mailbox.replies[-1][1]
    assert isinstance(ready, Ready) and ready.adapters is not None
    path = adapter_of(model, "a")
    for known in (ready.adapters.changes + 1, ready.adapters.changes + 2):
        call = engine.begin_load("a", path, load_inplace=True)
        assert call is None
        while engine.adapters.is_busy:
            engine.engine.tick()
        engine.engine.tick()
        assert engine.answer() is None and engine.adapters.changes == known
        engine.mailbox.inbox.append((b"other", Renew(known)))
        assert engine.await_answer().ok
    engine.begin_unload("a")
    engine.mailbox.inbox.append((b"other", Goodbye()))
    assert engine.await_answer().ok
