"""Offline inference for asyncio: `from tandem import AsyncLLM`.

async with AsyncLLM(model="/models/qwen3") as llm:
    async for piece in llm.stream("Once upon a time", max_tokens=64):
        print(piece.text, end="")
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tandem.frontend.config import ChatOptions
from tandem.frontend.offline.batch import BatchOptions
from tandem.frontend.offline.engine_process import check_log_level
from tandem.frontend.offline.fields import (
    Conversation,
    chat_fields,
    check_prompt,
    completion_fields,
    continued_prompts,
    conversation_batch,
    engine_options,
    find_lora_modules,
    hub_options,
    prompt_batch,
    refuse_parameters,
    verify_fields,
)
from tandem.frontend.offline.result import EngineError, OutputDelta, Result, Verification
from tandem.frontend.offline.session import OfflineSession
from tandem.frontend.request.prompts import Prompt
from tandem.frontend.supervisor.launch import check_engine_installed
from tandem.frontend.supervisor.model import ModelFolder, find_draft_model, find_model
from tandem.frontend.supervisor.preflight import check_before_weights


class AsyncLLM:
    """`LLM` for asyncio, with the same arguments, fields, results and errors.

    The engine process runs from `start` to `close`, or in an `async with` block. Any number of calls may run at once in
    that loop; they share the engine's batches. A cancelled call stops its requests.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        chat: ChatOptions | None = None,
        startup_timeout: float = 600.0,
        log_level: str = "info",
        revision: str | None = None,
        hf_token: str | None = None,
        download_dir: str | Path | None = None,
        lora_modules: Mapping[str, str | Path] | None = None,
        **options: Any,
    ) -> None:
        """Store the settings, which are those of `LLM`, without starting the engine.

        Raises TypeError for an unknown option, ValueError for an invalid value.
        """
        settings = engine_options(model, options)
        chat = chat or ChatOptions()
        self._session = OfflineSession(settings, chat, check_log_level(log_level))
        self._settings, self._lora_modules, self._chat = settings, lora_modules, chat
        self._model, self._hub = model, hub_options(revision, hf_token, download_dir)
        self._startup_timeout = startup_timeout
        self._state = "not started"

    @property
    def engine_pid(self) -> int | None:
        """Process id of the engine; None before its start and after its end."""
        return self._session.engine_pid

    async def start(self) -> None:
        """Start the engine and wait until it is ready.

        A model from the hub is downloaded first if it is not in the cache.

        Raises LaunchError, TokenizerError or EngineError like the constructor of `LLM`.

        """
        if self._state != "not started":
            raise EngineError(f"this AsyncLLM cannot be started, it is {self._state}")
        check_engine_installed()
        self._state = "running"
        try:
            self._settings = await asyncio.to_thread(find_draft_model, self._settings, self._hub)
            self._session.options = self._settings
            model = await self._find_model()
            given = self._lora_modules, self._settings, model.served_name, self._hub
            self._session.adapters = await asyncio.to_thread(find_lora_modules, *given)
            await self._session.open(model, self._startup_timeout)
        except BaseException:
            await self.close()
            raise

    async def _find_model(self) -> ModelFolder:
        """Find or download the model in a thread, which is stopped if this call is cancelled."""
        stop, check = threading.Event(), check_before_weights(self._settings, self._chat)
        try:
            return await asyncio.to_thread(find_model, self._model, self._hub, stop=stop, before_weights=check)
        finally:
            stop.set()

    async def close(self) -> None:
        """Stop the engine process and wait for its end. Idempotent."""
        self._state = "closed"
        await self._session.close()

    async def __aenter__(self) -> "AsyncLLM":
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: object = None,
        *,
        progress: bool = False,
        raise_on_error: bool = False,
        **fields: Any,
    ) -> list[Result]:
        """Complete prompts like `LLM.generate`.

        The progress bar is off by default, because calls may run concurrently.
        """
        refuse_parameters(sampling_params, "await llm.generate(prompts")
        batch, checked = prompt_batch(prompts), completion_fields(fields)
        self._check_running()
        return await self._session.generate(batch, checked, BatchOptions(progress, raise_on_error))

    async def chat(
        self,
        conversations: Conversation | Sequence[Conversation],
        sampling_params: object = None,
        *,
        progress: bool = False,
        raise_on_error: bool = False,
        **fields: Any,
    ) -> list[Result]:
        """Answer conversations like `LLM.chat`."""
        refuse_parameters(sampling_params, "await llm.chat(conversations")
        batch, checked = conversation_batch(conversations), chat_fields(fields)
        self._check_running()
        return await self._session.chat(batch, checked, BatchOptions(progress, raise_on_error))

    async def verify(
        self,
        prompts: Prompt | Sequence[Prompt],
        continuations: Prompt | Sequence[Prompt],
        *,
        logprobs: int = 0,
        logits: bool = False,
        progress: bool = False,
        raise_on_error: bool = False,
        **fields: Any,
    ) -> list[Verification]:
        """Verify continuations of prompts like `LLM.verify`."""
        batch, checked = continued_prompts(prompts, continuations), verify_fields(logprobs, logits, fields)
        self._check_running()
        return await self._session.verify(batch, checked, BatchOptions(progress, raise_on_error))

    def stream(self, prompt: Prompt, **fields: Any) -> AsyncIterator[OutputDelta]:
        """Yield the completion of one prompt, like `LLM.stream`."""
        checked = completion_fields(fields, stream=True)
        self._check_running()
        return self._session.stream(check_prompt(prompt), checked, chat=False)

    def stream_chat(self, conversation: Conversation, **fields: Any) -> AsyncIterator[OutputDelta]:
        """Yield the answer to one conversation, like `LLM.stream_chat`."""
        [one] = conversation_batch([conversation])
        checked = chat_fields(fields, stream=True)
        self._check_running()
        return self._session.stream(one, checked, chat=True)

    def _check_running(self) -> None:
        if self._state != "running":
            raise EngineError(f"this AsyncLLM is {self._state}; use `async with` or `await llm.start()`")
