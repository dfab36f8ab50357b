"""An engine built from a model folder answers, or reports why it cannot be built."""

import hashlib
import io
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from llguidance import LLMatcher
from msgspec import structs

from tandem.engine_core.config import ModelShape, resolve
from tandem.engine_core.constraints.compiler import GrammarCompiler
from tandem.engine_core.constraints.grammars import Grammars
from tandem.engine_core.constraints.workers.link import WorkerLink
from tandem.engine_core.constraints.workers.mask_memory import MaskMemory
from tandem.engine_core.constraints.workers.settings import WorkerFacts
from tandem.engine_core.engine import Engine
from tandem.engine_core.errors import ConfigError
from tandem.engine_core.loader.checkpoint import Checkpoint
from tandem.engine_core.runtime.graphs import MAX_PROMPTS
from tandem.engine_core.runtime.runtime import TorchRuntime
from tandem.engine_core.startup.engine import (
    DEFAULT_MODEL,
    build_engine,
    grammar_workers,
    resolve_engine,
    scheduler_limits,
)
from tandem.engine_core.stats import new_stats
from tandem.engine_core.wire.heartbeat import Status
from tandem.protocol.codec import pack_ids
from tandem.protocol.commands import Hello, Submit
from tandem.protocol.engine_options import EngineOptions
from tandem.protocol.errors import ErrorCode, FinishReason
from tandem.protocol.events import Failure, Finished, Phase, Ready
from tandem.protocol.logs import LineHandler
from tandem.protocol.model_folder import TemplateSource
from tandem.protocol.params import SamplingParams
from tandem.protocol.version import PROTOCOL_VERSION
from tests.engine_core.models.test_qwen3_5 import QWEN35
from tests.fakes.mailbox import FakeMailbox
from tests.support.model_folder import write_config, write_model
from tests.support.quantized_checkpoint import LAYOUTS, quantize_checkpoint
from tests.support.refusals import numbers_in
from tests.support.tiny_llama import CONFIG, Compared, random_model

EPOCH, CLIENT = 5, b"c"


@pytest.fixture(autouse=True)
def _threads() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path)
    return tmp_path


def build(folder: Path, **options: Any) -> tuple[Engine, FakeMailbox, Status]:
    mailbox, status = FakeMailbox(), Status(EPOCH, new_stats())
    defaults: dict[str, Any] = {"device": "cpu", "max_rows": 4, "threads": 1}
    return build_engine(EngineOptions(model=str(folder), **defaults | options), mailbox, status), mailbox, status


@pytest.mark.parametrize("pipeline", ["on", "off"])
def test_a_built_engine_answers(folder: Path, pipeline: Any) -> None:
    engine, mailbox, status = build(folder, pipeline=pipeline)
    assert engine.pipeline.depth == (2 if pipeline == "on" else 1)
    assert status.phase is Phase.WARMING
    prompt, params = [5, 6, 7], SamplingParams(6, temperature=0.0)
    mailbox.inbox += [(CLIENT, Hello(PROTOCOL_VERSION, EPOCH, "x")), (CLIENT, Submit(1, pack_ids(prompt), params))]
    while not mailbox.outcomes:
        engine.tick()
    (outcome,) = mailbox.outcomes[CLIENT, 1]
    assert isinstance(outcome, Finished)
    assert outcome.reason in (FinishReason.LENGTH, FinishReason.STOP)
    Compared().check(random_model(), prompt, mailbox.received[CLIENT, 1], params, False)


def test_headers_of_a_checkpoint_are_opened_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    quantize_checkpoint(folder, LAYOUTS["int8"])
    opened, open_folder = list[Path](), Checkpoint.open
    monkeypatch.setattr(Checkpoint, "open", lambda directory: opened.append(directory) or open_folder(directory))
    caplog.set_level("INFO")
    build(folder)
    assert opened == [folder]
    assert "int8" in caplog.records[-1].getMessage()


def test_settings_are_fields_of_a_line_at_the_level_debug(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    build(folder, max_len=60)
    (record,) = [record for record in caplog.records if record.getMessage() == "settings"]
    fields = json.loads(LineHandler("engine", "json", io.StringIO()).format(record))
    assert (fields["level"], fields["device"], fields["max_rows"], fields["max_len"]) == ("debug", "cpu", 4, 60)
    assert (fields["graph_rows"], fields["threads"]) == ([], 1)


@pytest.mark.parametrize("page_size", [1, 2, 8, 64, "max"])
def test_an_engine_answers_with_any_page_size(folder: Path, page_size: Any) -> None:
    engine, mailbox, _ = build(folder, page_size=page_size, max_len=60)
    prompts, params = [[5, 6, 7], [9] * 30, [3]], SamplingParams(25, temperature=0.0, ignore_eos=True)
    mailbox.inbox.append((CLIENT, Hello(PROTOCOL_VERSION, EPOCH, "x")))
    mailbox.inbox += [(CLIENT, Submit(index, pack_ids(prompt), params)) for index, prompt in enumerate(prompts)]
    while len(mailbox.outcomes) < len(prompts):
        engine.tick()
    compared = Compared()
    for index, prompt in enumerate(prompts):
        compared.check(random_model(), prompt, mailbox.received[CLIENT, index], params, False)


@pytest.mark.parametrize(("max_len", "rounded"), [(32, False), (33, True)])
def test_a_region_that_is_rounded_up_is_logged(
    folder: Path, max_len: int, rounded: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        build(folder, page_size="max", max_len=max_len)
    assert any({64, 33} <= set(numbers_in(line)) and "--max-len" in line for line in caplog.messages) == rounded


def test_the_pool_takes_the_requested_memory(folder: Path) -> None:
    token_bytes = 2 * CONFIG.layers * CONFIG.kv_heads * CONFIG.head_dim * 4
    for kv_dtype, width in (("auto", 1), ("fp8", 4), ("fp8_e4m3", 4)):
        engine, _, status = build(folder, kv_memory=100 * 16 * token_bytes, kv_dtype=kv_dtype)
        assert status.stats.pages_total == 100 * width - 1
        assert isinstance(engine.runtime, TorchRuntime)
        assert engine.runtime.kv.pool.nbytes == 100 * 16 * token_bytes


def test_ready_names_the_facts_and_limits(folder: Path) -> None:
    engine, mailbox, status = build(folder, kv_tokens=100, max_waiting=7, max_step_tokens=33, served_model_name="mine")
    mailbox.inbox.append((CLIENT, Hello(PROTOCOL_VERSION, EPOCH, "x")))
    engine.tick()
    ((_, ready),) = mailbox.replies
    assert isinstance(ready, Ready)
    facts, limits = ready.model, ready.limits
    assert (facts.name, facts.vocab_size, facts.max_len, facts.end_ids) == ("mine", CONFIG.vocab_size, 64, [1])
    assert facts.tokenizer_fingerprint == hashlib.sha256(b"{}").hexdigest()
    assert (facts.device, facts.dtype, facts.weight_format, facts.kv_dtype) == (
        *("cpu", "float32"),
        *("float32", "float32"),
    )
    assert (limits.max_rows, limits.kv_tokens, limits.page_size) == (4, 96, 16)
    assert (limits.max_step_tokens, limits.max_waiting) == (33, 7)
    assert (status.stats.rows_total, status.stats.pages_total) == (4, 6)


def test_ready_names_the_formats_of_weights_keys_and_values(folder: Path) -> None:
    engine, mailbox, _ = build(folder, kv_tokens=100, quantize="fp8", kv_dtype="fp8")
    mailbox.inbox.append((CLIENT, Hello(PROTOCOL_VERSION, EPOCH, "x")))
    engine.tick()
    ((_, ready),) = mailbox.replies
    assert isinstance(ready, Ready)
    assert (ready.model.dtype, ready.model.weight_format, ready.model.kv_dtype) == ("float32", "fp8", "float8_e4m3fn")


def test_ready_has_the_checkpoints_chat_template(folder: Path) -> None:
    engine, _, _ = build(folder)
    assert engine.control.model.template_fingerprint == ""
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    engine, _, _ = build(folder)
    assert engine.control.model.template_fingerprint == TemplateSource({"default": "{{ messages }}"}, "").fingerprint


def test_the_name_is_the_folders_and_a_missing_tokenizer_has_no_fingerprint(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    engine, _, _ = build(folder)
    assert engine.control.model.name == folder.name
    assert engine.control.model.tokenizer_fingerprint == ""


WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"device": "cuda"}, "CUDA device"),
    ({}, {"max_len": 65}, r"--max-len 65\b.* 64\b"),
    ({}, {"max_rows": 0}, "--max-rows"),
    ({}, {"kv_tokens": 1, "page_size": 1}, "--kv-tokens"),
    ({}, {"threads": -1}, "--threads"),
    ({}, {"kv_tokens": 100, "kv_memory": 2**20}, "--kv-memory and --kv-tokens"),
    ({}, {"gpu_memory": 0.5}, "--gpu-memory .*--device cpu"),
    ({}, {"kv_memory": 2**50}, r"1048576\.00 GiB .*\b256 bytes"),
    ({"architectures": ["GPT2LMHeadModel"]}, {}, "GPT2LMHeadModel"),
    ({"hidden_size": 64}, {}, r"\nmisshaped |\n  misshaped "),
    ({"eos_token_id": list(range(33))}, {}, r"\b33 .*\b32\b"),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a device that must not be there")
@pytest.mark.parametrize(("config", "options", "text"), WRONG, ids=[text for *_, text in WRONG])
def test_a_build_that_cannot_succeed_is_refused_with_the_reason(
    folder: Path, config: dict[str, Any], options: dict[str, Any], text: str
) -> None:
    write_config(folder, **config)
    with pytest.raises(ConfigError, match=text):
        build(folder, **options)


@pytest.mark.parametrize(("name", "size"), [("linear_key_head_dim", 24), ("linear_value_head_dim", 8)])
def test_recurrent_heads_without_cuda_kernels_are_refused(name: str, size: int, tmp_path: Path) -> None:
    fields = QWEN35 | {"architectures": ["Qwen3_5ForCausalLM"], name: size}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    options = EngineOptions(model=str(tmp_path), device="cuda", max_len=64)
    with pytest.raises(ConfigError, match=rf"--device cuda: {name} {size} "):
        resolve_engine(options, cuda=True, gpu_bytes=2**34)
    assert resolve_engine(structs.replace(options, device="cpu"), cuda=True).config.device == "cpu"


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        build(tmp_path / "missing")


def test_a_compiled_grammar_wakes_the_loop() -> None:
    """Uses the default model's folder, because a grammar needs a tokenizer."""
    engine, mailbox, _ = build(DEFAULT_MODEL)
    woken = threading.Event()
    compiler = engine.compiler
    assert isinstance(compiler, GrammarCompiler)
    assert compiler.wake == mailbox.wake
    compiler.wake = woken.set
    constraint = LLMatcher.grammar_from_regex("[0-9]{4}x")
    submit = Submit(1, pack_ids([5, 6]), SamplingParams(9, seed=3), constraint)
    mailbox.inbox += [(CLIENT, Hello(PROTOCOL_VERSION, EPOCH, "x")), (CLIENT, submit)]
    engine.tick()
    assert woken.wait(60)
    while not mailbox.outcomes:
        engine.tick()
    assert mailbox.outcomes[CLIENT, 1] == [Finished(1, FinishReason.STOP)]
    engine.compiler.close()


def test_a_folder_without_a_tokenizer_serves_unconstrained_requests(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    engine, mailbox, _ = build(folder)
    free, bound = (Submit(number, pack_ids([5, 6]), SamplingParams(2), text) for number, text in ((1, None), (2, "x")))
    mailbox.inbox += [(CLIENT, Hello(PROTOCOL_VERSION, EPOCH, "x")), (CLIENT, free), (CLIENT, bound)]
    while len(mailbox.outcomes) < 2:
        engine.tick()
    assert isinstance(mailbox.outcomes[CLIENT, 1][0], Finished)
    (failure,) = mailbox.outcomes[CLIENT, 2]
    assert isinstance(failure, Failure)
    assert failure.code is ErrorCode.INVALID_REQUEST
    assert "no tokenizer.json" in failure.message
    engine.compiler.close()


@pytest.mark.parametrize(
    ("device", "flags", "prompts"),
    [
        ("cuda", {}, MAX_PROMPTS),
        ("cuda", {"max_prefill_chunks_per_step": 2}, 2),
        ("cuda", {"max_prefill_chunks_per_step": 100}, 100),
        ("cuda", {"graph_tokens": "off"}, 0),
        ("cpu", {}, 0),
    ],
)
def test_a_step_takes_no_more_prompts_than_a_graph_holds(device: str, flags: dict[str, Any], prompts: int) -> None:
    config = resolve(EngineOptions(**flags), ModelShape("tiny", max_positions=2048), device, "float32", 0)
    assert scheduler_limits(config).prompts_a_step == prompts


def test_workers_are_started_with_the_tokenizer_and_whole_words_of_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[WorkerFacts, MaskMemory]] = []
    monkeypatch.setattr(WorkerLink, "start", lambda facts, masks: started.append((facts, masks)))
    file, memory = DEFAULT_MODEL / "tokenizer.json", MaskMemory()
    pool = grammar_workers(3, Grammars(file, 4200, (2, 5)), memory, new_stats())
    assert pool.count == 3
    pool._start_link()
    assert started == [(WorkerFacts(str(file), 4200, (2, 5), 4 * 132), memory)]


@pytest.mark.parametrize(
    ("shape", "flags", "windows"),
    [
        ("gemma-3-4b", {"max_len": 32_768}, (None, *[1024] * 6)),
        ("gemma-3-4b", {"max_len": 1025}, (None, *[1024] * 6)),
        ("gemma-3-4b", {"max_len": 1024}, (None,)),
        ("gemma-3-4b", {"page_size": "max", "max_len": 32_768}, (None,)),
        ("mistral-7b-v0.1", {}, (4096,)),
        ("llama-3.2-1b", {}, (None,)),
    ],
)
def test_layers_are_in_groups_by_window(shape: str, flags: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    """A window that no sequence exceeds is none. Each layer knows its group, whose window is its own."""
    folder = Path(__file__).parents[3] / "benchmarks" / "shapes" / shape
    resolved = resolve_engine(EngineOptions(model=str(folder), device="cpu", load_format="dummy", **flags), cuda=False)
    config, layout, model = resolved.config, resolved.source.layout, resolved.source.model
    assert config.kv_windows == windows and layout.groups == resolved.groups
    for index, layer in enumerate(model.attention):
        assert index in layout.groups[layer.group].layers
        assert windows[layer.group] in (layer.window, None)
    if shape == "gemma-3-4b" and len(windows) > 1:
        assert layout.page_bytes == 5 * 2 * 16 * 4 * 256 * layout.dtype.itemsize
        assert len(config.page_columns) == 7


def test_hosts_of_trainers_that_are_none_are_refused_before_the_weights_are_loaded(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="--weight-update-hosts"):
        resolve_engine(EngineOptions(model=str(folder), weight_update_hosts="10.0.0.0/8,trainer"), cuda=False)
