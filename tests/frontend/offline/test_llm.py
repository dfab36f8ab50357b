"""`tandem.frontend.offline.llm.LLM` with a fake engine as its process."""

import gc
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tandem.frontend.offline.llm import LLM, ChatOptions, EngineError, LaunchError, RequestError
from tests.fakes.engine_request import fake_logprob
from tests.fakes.tokenizer import byte_level_tokenizer, write_chat_template, write_tokenizer
from tests.frontend.conftest import DEADLINE, until
from tests.support.published_templates import PUBLISHED
from tests.support.refusals import numbers_in
from tests.support.tandem_with_fake_engine import write_tandem

SERVING = "import sys; from tests.fakes.engine import run_as_process; run_as_process(sys.argv)"
RAW = byte_level_tokenizer()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder, and a fake engine core for it."""
    write_tokenizer(tmp_path)
    monkeypatch.setenv("PYTHONPATH", write_tandem(tmp_path, SERVING))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """An engine for all tests that leave it running."""
    path = tmp_path_factory.mktemp("model")
    write_tokenizer(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", write_tandem(path, SERVING))
        patch.chdir(path)
        started = LLM(str(path))
    with started as running:
        yield running


def test_results_come_in_order_with_ids_reasons_and_usage(llm: LLM) -> None:
    prompts = [f"the fox number {number}" for number in range(200)]
    results = llm.generate(prompts, max_tokens=5)
    assert len(results) == 200
    for prompt, result in zip(prompts, results, strict=True):
        ids = RAW.encode(prompt).ids
        assert result.prompt_token_ids == ids
        assert result.outputs[0].token_ids == (2 * ids)[:5]
        assert result.text == RAW.decode((2 * ids)[:5])
        assert result.outputs[0].finish_reason == "length"
        assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (len(ids), 5)


def test_generate_accepts_texts_and_token_ids(llm: LLM) -> None:
    assert len(llm.generate("a prompt")) == 1
    assert llm.generate([5, 6], max_tokens=3)[0].outputs[0].token_ids == [5, 6, 5]
    assert [result.prompt_token_ids for result in llm.generate([[5, 6], "a"])] == [[5, 6], RAW.encode("a").ids]
    assert len(llm.generate("a", n=3)[0].outputs) == 3
    assert llm.generate([]) == []


def test_a_refused_prompt_does_not_lose_the_others(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    prompts = ["a", "b " * 3000, "c"]
    first, refused, last = llm.generate(prompts, max_tokens=4)
    assert first.outputs[0].token_ids and last.outputs[0].token_ids
    assert (refused.outputs, refused.prompt) == ([], prompts[1])
    assert refused.error is not None
    assert (refused.error.index, refused.error.code) == (1, "context_length_exceeded")
    with pytest.raises(RequestError, match=r"\b1:.*\b2048\b"):
        _ = refused.text
    assert numbers_in(caplog.messages[-1])[:3] == [1, 3, 1]
    with pytest.raises(RequestError, match=r"\b1:.*\b2048\b"):
        llm.generate(prompts, max_tokens=4, raise_on_error=True)
    [answer] = llm.chat([{"role": "user", "content": "a"}])
    assert answer.error is not None and "chat template" in answer.error.message
    assert llm.generate("a", max_tokens=1)[0].usage.completion_tokens == 1


def test_a_value_that_no_prompt_can_have_is_raised(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"'temperature'.*\b0\b.*\b2\b.*\b3\b"):
        llm.generate(["a", "b"], temperature=3)
    with pytest.raises(RequestError, match="'suffix'"):
        llm.generate("a", suffix="x")
    with pytest.raises(RequestError, match=r"'top_logprobs'.*'logprobs'"):
        llm.chat([{"role": "user", "content": "a"}], top_logprobs=2)
    with pytest.raises(TypeError, match=r"\b0\b.*\bstr\b"):
        llm.generate([["a", "b"]])  # type: ignore[list-item]


def test_best_of_returns_the_best_choices_like_http(llm: LLM) -> None:
    [result] = llm.generate("abc", max_tokens=4, n=2, best_of=3)
    assert [output.index for output in result.outputs] == [0, 1]
    sums = [output.cumulative_logprob for output in result.outputs]
    assert sums == sorted(sums, key=lambda one: -(one or 0.0))
    assert result.outputs[0].logprobs is None
    assert len(llm.generate("abc", max_tokens=4, best_of=3)[0].outputs) == 1


def test_logprobs_of_output_and_prompt_are_in_the_result(llm: LLM) -> None:
    ids = [5, 6, 7]
    [result] = llm.generate([ids], max_tokens=3, logprobs=2, prompt_logprobs=1)
    assert result.prompt is None
    [output] = result.outputs
    assert output.text == RAW.decode(output.token_ids), "the prompt is not repeated"
    assert output.logprobs is not None and result.prompt_logprobs is not None
    for position, (token, found) in enumerate(zip(output.token_ids, output.logprobs, strict=True), len(ids)):
        assert found[token].logprob == fake_logprob(position, token)
        assert found.keys() == {token, 2, 3}
        assert (found[token].rank, found[3].rank) == (None, 2)
        assert found[token].decoded_token == RAW.decode([token])
    assert output.cumulative_logprob == sum(
        found[token].logprob for token, found in zip(ids, output.logprobs, strict=True)
    )
    assert result.prompt_logprobs[0] is None
    for position, found_or_none in enumerate(result.prompt_logprobs[1:], 1):
        assert found_or_none is not None
        assert found_or_none[ids[position]].logprob == fake_logprob(position, ids[position])
    [scored] = llm.generate("a prompt", max_tokens=0, prompt_logprobs=0)
    assert scored.prompt == "a prompt" and scored.outputs[0].text == "" and scored.outputs[0].logprobs is None
    assert scored.prompt_logprobs is not None and len(scored.prompt_logprobs) == len(scored.prompt_token_ids)
    [plain] = llm.generate("a", max_tokens=1)
    assert plain.prompt_logprobs is None and plain.outputs[0].logprobs is None
    assert plain.outputs[0].cumulative_logprob is None


def test_a_stream_yields_the_text_of_the_result(llm: LLM) -> None:
    [result] = llm.generate("the quick fox", max_tokens=20, n=2, seed=1)
    pieces = list(llm.stream("the quick fox", max_tokens=20, n=2, seed=1, logprobs=0))
    for output in result.outputs:
        mine = [piece for piece in pieces if piece.index == output.index]
        assert "".join(piece.text for piece in mine) == output.text
        assert [token for piece in mine for token in piece.token_ids] == output.token_ids
        assert [piece.finish_reason for piece in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].finish_reason == "length"
        assert sum(len(piece.logprobs or ()) for piece in mine) == 20
    with pytest.raises(RequestError, match=r"\b2048\b"):
        next(iter(llm.stream("b " * 3000)))
    with pytest.raises(TypeError, match="prompt_logprobs"):
        llm.stream("a", prompt_logprobs=1)
    abandoned = iter(llm.stream("a", max_tokens=2000))
    assert next(abandoned).token_ids
    abandoned.close()  # type: ignore[attr-defined]
    assert llm.generate("a", max_tokens=1)[0].error is None


def test_a_chat_is_rendered_by_the_template_of_its_options(folder: Path) -> None:
    template = folder / "own.jinja"
    template.write_text("{{ messages[0].content }}!")
    with LLM(str(folder), chat=ChatOptions(template=template)) as llm:
        [answer] = llm.chat([{"role": "user", "content": "use os.path.join"}], max_tokens=4)
    assert answer.prompt == "use os.path.join!"


def test_a_chat_is_rendered_by_a_template_that_takes_only_some_messages(folder: Path) -> None:
    template = folder / "own.jinja"
    template.write_text(PUBLISHED["gemma2"]["default"])
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<b>"}')
    talk = [{"role": role, "content": role} for role in ("system", "user", "user")]
    with LLM(str(folder), chat=ChatOptions(template=template)) as llm:
        [answer] = llm.chat(talk, max_tokens=4)
    assert answer.prompt == "<b><start_of_turn>user\nsystem\n\nuser\n\nuser<end_of_turn>\n<start_of_turn>model\n"


def test_a_chat_is_answered_with_reasoning_and_streamed(folder: Path) -> None:
    write_chat_template(folder)
    talk = [{"role": "user", "content": "use os.path.join"}]
    with LLM(str(folder), log_level="warning") as llm:
        one, two = llm.chat([talk, talk], max_tokens=12)
        assert one.prompt == "user: use os.path.join\nassistant:"
        assert one.text == two.text == "".join(piece.text for piece in llm.stream_chat(talk, max_tokens=12))
        [scored] = llm.chat(talk, max_tokens=2, logprobs=True, top_logprobs=1)
        assert [len(found) for found in scored.outputs[0].logprobs or ()] == [2, 2]


def test_a_dead_engine_fails_running_and_later_calls(folder: Path) -> None:
    with LLM(str(folder)) as llm:
        assert llm.engine_pid is not None
        os.kill(llm.engine_pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="SIGKILL"):
            llm.generate(["a"] * 50, max_tokens=2000)
        until(lambda: not psutil.pid_exists(llm.engine_pid or 0), "the engine is gone")
        with pytest.raises(EngineError, match="SIGKILL"):
            llm.generate("a")


def test_close_leaves_no_process_thread_or_directory(
    folder: Path, ipc_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(ipc_dir))
    llm = LLM(str(folder))
    pid = llm.engine_pid
    assert pid is not None
    assert list(ipc_dir.iterdir()) != []
    with pytest.raises(ZeroDivisionError), llm:
        raise ZeroDivisionError
    assert not psutil.pid_exists(pid)
    assert list(ipc_dir.iterdir()) == []
    llm.close()
    with pytest.raises(EngineError, match="closed"):
        llm.generate("a")


def test_an_unreferenced_llm_is_closed(folder: Path) -> None:
    llm = LLM(str(folder))
    pid = llm.engine_pid
    assert pid is not None
    del llm
    gc.collect()
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("end", ["raise SystemExit('bye')", "os.kill(os.getpid(), 9)"])
def test_the_engine_ends_with_its_process(folder: Path, end: str) -> None:
    program = f"import os\nfrom tandem import LLM\nllm = LLM({str(folder)!r})\nprint(llm.engine_pid)\n{end}"
    done = subprocess.run(
        [sys.executable, "-u", "-c", program], capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    assert done.returncode in (1, -9)
    pid = int(done.stdout)
    until(lambda: not psutil.pid_exists(pid), "the engine is gone")


def test_a_model_that_cannot_start_raises_with_the_reason(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TypeError, match=r"'max_row'.*'max_rows'"):
        LLM(str(folder), max_row=3)
    with pytest.raises(ValueError, match=r"\blog_level\b.*'loud'"):
        LLM(str(folder), log_level="loud")
    with pytest.raises(LaunchError, match=re.escape(str(folder / "none"))):
        LLM(str(folder / "none"))
    log, error = (f"2026-11-22T06:00:00.000Z engine {level}" for level in ("INFO loading", "ERROR a reason for"))
    write_tandem(folder, f"import sys; sys.exit(f'{error} {{sys.argv[-1]}}\\n{log}')")
    with pytest.raises(EngineError, match=r"\b1: a reason for --log-level=error$"):
        LLM(str(folder), log_level="error")
    assert f"{log}\n" in capsys.readouterr().err
    lines = [f"{error}:", *(f"      part {number}" for number in range(21))]
    write_tandem(folder, f"import sys; print(*{lines}, sep='\\n', file=sys.stderr); sys.exit(2)")
    with pytest.raises(EngineError, match=r"\b2: a reason for:\n      part 0\n(.*\n)+      part 20$"):
        LLM(str(folder))
    write_tandem(folder, f"import sys; print('{error} one', '{error} two', sep='\\n', file=sys.stderr); sys.exit(2)")
    with pytest.raises(EngineError, match=r"\b2: a reason for one\na reason for two$"):
        LLM(str(folder))
    write_tandem(folder, f"import sys; print('{error} one', '{error} two', sep='\\n', file=sys.stderr); sys.exit(1)")
    with pytest.raises(EngineError, match=r"\b1: a reason for two$"):
        LLM(str(folder))
    write_tandem(folder, "import sys; sys.exit(2)")
    with pytest.raises(EngineError, match=r"\bexit code 2$"):
        LLM(str(folder))
    write_tandem(folder, "import time; time.sleep(1000)")
    with pytest.raises(EngineError, match=r"\b0 s: .*heartbeat"):
        LLM(str(folder), startup_timeout=0.2)
