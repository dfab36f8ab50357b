"""`tandem.frontend.offline.llm.LLM` with a fake engine as its process."""

import gc
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tandem.frontend.offline.llm import LLM, EngineError, LaunchError, RequestError
from tests.fakes.tokenizer import byte_level_tokenizer, write_tokenizer
from tests.frontend.conftest import DEADLINE, until
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


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder)) as running:
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


def test_a_refused_request_is_named_and_the_next_call_works(llm: LLM) -> None:
    with pytest.raises(RequestError, match="request 1: This model's maximum context length is 2048") as caught:
        llm.generate(["a", "b " * 3000], max_tokens=4)
    assert (caught.value.index, caught.value.code) == (1, "context_length_exceeded")
    with pytest.raises(RequestError, match="'temperature' must be between 0 and 2, not 3"):
        llm.generate("a", temperature=3)
    with pytest.raises(RequestError, match="'suffix' is not supported"):
        llm.generate("a", suffix="x")
    with pytest.raises(TypeError, match="'temprature' is not a field of this request; did you mean 'temperature'"):
        llm.generate("a", temprature=1)
    with pytest.raises(TypeError, match="'echo_' is not a field"):
        llm.chat([{"role": "user", "content": "a"}], echo_=True)
    with pytest.raises(TypeError, match="'stream' is not a sampling field"):
        llm.generate("a", stream=True)
    with pytest.raises(RequestError, match="chat template"):
        llm.chat([{"role": "user", "content": "a"}])
    assert llm.generate("a", max_tokens=1)[0].usage.completion_tokens == 1


def test_a_dead_engine_fails_running_and_later_calls(llm: LLM) -> None:
    assert llm.engine_pid is not None
    os.kill(llm.engine_pid, signal.SIGKILL)
    with pytest.raises((RequestError, EngineError)):
        llm.generate(["a"] * 50, max_tokens=2000)
    until(lambda: not psutil.pid_exists(llm.engine_pid or 0), "the engine is gone")
    with pytest.raises(EngineError, match="ended with signal SIGKILL"):
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


def test_a_model_that_cannot_start_raises_with_the_reason(folder: Path) -> None:
    with pytest.raises(TypeError, match="max_row"):
        LLM(str(folder), max_row=3)
    with pytest.raises(LaunchError, match="not a directory"):
        LLM(str(folder / "none"))
    write_tandem(folder, "import sys; sys.exit(2)")
    with pytest.raises(EngineError, match="ended with exit code 2; its message is on stderr"):
        LLM(str(folder))
    write_tandem(folder, "import time; time.sleep(1000)")
    with pytest.raises(EngineError, match="not ready after 0 s: no heartbeat"):
        LLM(str(folder), startup_timeout=0.2)
