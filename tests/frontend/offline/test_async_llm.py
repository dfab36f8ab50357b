"""`AsyncLLM` with a fake engine as its process, in the loop of the test."""

import asyncio
from pathlib import Path

import psutil
import pytest

from tandem import AsyncLLM
from tandem.frontend.offline.llm import EngineError, RequestError
from tests.fakes.engine_request import fake_logprob
from tests.fakes.tokenizer import write_chat_template, write_tokenizer
from tests.support.tandem_with_fake_engine import write_tandem

SERVING = "import sys; from tests.fakes.engine import run_as_process; run_as_process(sys.argv)"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_tokenizer(tmp_path)
    write_chat_template(tmp_path)
    monkeypatch.setenv("PYTHONPATH", write_tandem(tmp_path, SERVING))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_calls_and_streams_run_at_once_in_one_loop(folder: Path) -> None:
    talk = [{"role": "user", "content": "use os.path.join"}]

    async def use() -> int | None:
        async with AsyncLLM(str(folder), log_level="warning") as llm:
            streamed, (whole,), (answer,) = await asyncio.gather(
                _join(llm, "the fox"), llm.generate("the fox", max_tokens=9), llm.chat(talk, max_tokens=9)
            )
            assert streamed == whole.text
            assert answer.text == "".join([piece.text async for piece in llm.stream_chat(talk, max_tokens=9)])
            verified, refused = await llm.verify(["the fox", "a"], [[7, 8, 9], []], logprobs=2)
            first = len(verified.prompt_token_ids)
            scores = [fake_logprob(first + index, token) for index, token in enumerate([7, 8, 9])]
            assert [at[token].logprob for at, token in zip(verified.logprobs, [7, 8, 9], strict=True)] == scores
            assert (verified.cumulative_logprob, verified.logits) == (sum(scores), None)
            assert refused.error is not None and refused.error.param == "continuation"
            with pytest.raises(RequestError, match="'n'"):
                await llm.generate("a", n=0)
            endless = asyncio.create_task(llm.generate("a", max_tokens=2000))
            await asyncio.sleep(0)
            endless.cancel()
            with pytest.raises(asyncio.CancelledError):
                await endless
            assert (await llm.generate("a", max_tokens=1))[0].error is None
            return llm.engine_pid

    pid = asyncio.run(use())
    assert pid is not None and not psutil.pid_exists(pid)


async def _join(llm: AsyncLLM, prompt: str) -> str:
    return "".join([piece.text async for piece in llm.stream(prompt, max_tokens=9)])


def test_a_call_before_the_start_or_after_the_end_is_refused(folder: Path) -> None:
    async def use() -> None:
        llm = AsyncLLM(str(folder))
        with pytest.raises(EngineError, match="`async with`"):
            await llm.generate("a")
        await llm.close()
        with pytest.raises(EngineError, match="closed"):
            llm.stream("a")
        with pytest.raises(EngineError, match="closed"):
            await llm.start()

    asyncio.run(use())
