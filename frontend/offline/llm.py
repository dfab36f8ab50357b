"""Offline inference, without a server: `from tandem import LLM`.

with LLM(model="/models/qwen3") as llm:
    for result in llm.generate(["Once upon a time", "In the end"], max_tokens=64, temperature=0):
        print(result.text)
"""

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tandem.frontend.config import ChatOptions
from tandem.frontend.offline.batch import BatchOptions
from tandem.frontend.offline.engine_process import check_log_level
from tandem.frontend.offline.fields import (
    Conversation,
    Fields,
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
from tandem.frontend.offline.loop_thread import LoopThread
from tandem.frontend.offline.result import EngineError, Logprob, Output, OutputDelta, RequestError, Result, Verification
from tandem.frontend.offline.session import Item, OfflineSession
from tandem.frontend.request.prompts import Prompt
from tandem.frontend.supervisor.launch import check_engine_installed
from tandem.frontend.supervisor.model import LaunchError, find_draft_model, find_model
from tandem.frontend.supervisor.preflight import check_before_weights

__all__ = [
    "LLM",
    "ChatOptions",
    "EngineError",
    "LaunchError",
    "Logprob",
    "Output",
    "OutputDelta",
    "RequestError",
    "Result",
    "Verification",
]


class LLM:
    """Model in an engine process, which runs from the constructor to `close`.

    `options` are the fields of EngineOptions, the engine flags of `tandem serve`. The process stops with `close`, with
    the `with` block, and with this process, however it exits. Several threads may call at once.
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
        """Start the engine and wait until it is ready.

        `model` is a folder or a name on the Hugging Face hub, which is downloaded first if it is not in the cache,
        using `revision`, `hf_token` and `download_dir` like the flags of `tandem serve`. By default the engine serves
        the model shipped with it. `lora_modules` are folders or hub names of adapters by name, for `lora` of a call;
        they need `enable_lora=True`. `draft_model` (a folder or hub name) and `spec_length` are short for
        `speculate="model:..."` and `speculate_tokens`. It logs to stderr from `log_level` (debug, info, warning or
        error) on. Raises LaunchError or TokenizerError for a model that cannot be served, EngineError if the engine
        exits or is not ready within `startup_timeout` seconds, TypeError for an unknown option, ValueError for an
        invalid value.
        """
        settings, level = engine_options(model, options), check_log_level(log_level)
        check_engine_installed()
        hub = hub_options(revision, hf_token, download_dir)
        settings = find_draft_model(settings, hub)
        found = find_model(model, hub, before_weights=check_before_weights(settings, chat or ChatOptions()))
        adapters = find_lora_modules(lora_modules, settings, found.served_name, hub)
        self._session = OfflineSession(settings, chat or ChatOptions(), level, adapters)
        self._thread = LoopThread("tandem-offline")
        self._thread.start()
        self._finalizer = weakref.finalize(self, _close, self._thread, self._session)
        try:
            self._thread.run(self._session.open(found, startup_timeout))
        except BaseException:
            self.close()
            raise

    @property
    def engine_pid(self) -> int | None:
        """Process id of the engine; None before its start and after its end."""
        return self._session.engine_pid

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: object = None,
        *,
        progress: bool = True,
        raise_on_error: bool = False,
        **fields: Any,
    ) -> list[Result]:
        """Complete prompts in batches and return the results in order.

        Each prompt is text or a list of token ids. `fields` are those of `POST /v1/completions` (`max_tokens`,
        `temperature`, `seed`, `stop`, `n`, `best_of`, `logprobs`, ...), with the same defaults, and apply to every
        prompt. `json_schema` is short for a `response_format`, `prompt_logprobs=N` scores the prompts, and `lora` names
        an adapter.

        A prompt that is refused or fails has a result with an `error`, and reading its `text` raises it; the other
        results are kept. With `raise_on_error`, RequestError is raised at the first failure instead. Raises
        RequestError for a value that is invalid for every prompt, TypeError for an unknown field and for
        `sampling_params`, the second argument in vLLM, and EngineError if the engine has exited.
        """
        refuse_parameters(sampling_params, "llm.generate(prompts")
        batch, checked = prompt_batch(prompts), completion_fields(fields)
        self._check_open()
        return self._thread.run(self._session.generate(batch, checked, BatchOptions(progress, raise_on_error)))

    def chat(
        self,
        conversations: Conversation | Sequence[Conversation],
        sampling_params: object = None,
        *,
        progress: bool = True,
        raise_on_error: bool = False,
        **fields: Any,
    ) -> list[Result]:
        """Answer one or several conversations, each a list of OpenAI messages.

        `fields` are those of `POST /v1/chat/completions` (`tools`, `response_format`, ... and those of `generate`), and
        `json_schema`. Raises the errors of `generate`.
        """
        refuse_parameters(sampling_params, "llm.chat(conversations")
        batch, checked = conversation_batch(conversations), chat_fields(fields)
        self._check_open()
        return self._thread.run(self._session.chat(batch, checked, BatchOptions(progress, raise_on_error)))

    def verify(
        self,
        prompts: Prompt | Sequence[Prompt],
        continuations: Prompt | Sequence[Prompt],
        *,
        logprobs: int = 0,
        logits: bool = False,
        progress: bool = True,
        raise_on_error: bool = False,
        **fields: Any,
    ) -> list[Verification]:
        """Return the log-probability of each token of a continuation of each prompt, in order.

        A continuation is text, which is tokenized on its own, or a list of token ids: 1 to 64 tokens, computed after
        the prompt in one pass if a step has room. KV of the prompt is taken from the prefix cache and kept there, that
        of the continuation is dropped. `logprobs` is the number of most probable tokens reported for each position,
        `logits` adds the logits of all tokens. `fields` are `cache_salt`, `lora`, `priority` and `session_id`.

        A prompt that is refused or fails has a result with an `error`. Raises ValueError unless there is one
        continuation for each prompt, and the errors of `generate`.
        """
        batch, checked = continued_prompts(prompts, continuations), verify_fields(logprobs, logits, fields)
        self._check_open()
        return self._thread.run(self._session.verify(batch, checked, BatchOptions(progress, raise_on_error)))

    def stream(self, prompt: Prompt, **fields: Any) -> Iterator[OutputDelta]:
        """Yield the completion of one prompt while it is generated.

        `fields` are those of `generate`. Closing the iterator stops the generation. Raises RequestError if the request
        is refused or fails, and the other errors of `generate`.
        """
        checked = completion_fields(fields, stream=True)
        self._check_open()
        return self._iterate(check_prompt(prompt), checked, chat=False)

    def stream_chat(self, conversation: Conversation, **fields: Any) -> Iterator[OutputDelta]:
        """Yield the answer to one conversation while it is generated.

        `fields` are those of `chat`, the errors those of `stream`.
        """
        [one] = conversation_batch([conversation])
        checked = chat_fields(fields, stream=True)
        self._check_open()
        return self._iterate(one, checked, chat=True)

    def close(self) -> None:
        """Stop the engine process and wait for its end. Idempotent."""
        self._finalizer()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _iterate(self, item: Item, fields: Fields, *, chat: bool) -> Iterator[OutputDelta]:
        # A method of this object, so that the engine lives as long as the stream.
        yield from self._thread.iterate(self._session.stream(item, fields, chat=chat))

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise EngineError("this LLM was closed")


def _close(thread: LoopThread, session: OfflineSession) -> None:
    if thread.is_current:  # the garbage collector runs in whichever thread allocates
        threading.Thread(target=_close, args=(thread, session)).start()
        return
    try:
        thread.run(session.close())
    finally:
        thread.stop()
