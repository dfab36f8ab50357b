"""Offline inference, without a server: `from tandem import LLM`.

with LLM(model="/models/qwen3") as llm:
    for result in llm.generate(["Once upon a time", "In the end"], max_tokens=64, temperature=0):
        print(result.text)
"""

import difflib
import threading
import weakref
from collections.abc import Collection, Mapping, Sequence
from types import TracebackType
from typing import Any

from tandem.frontend.api.chat_completions.request import BODY as CHAT
from tandem.frontend.api.completions.request import BODY as COMPLETION
from tandem.frontend.config import ChatOptions
from tandem.frontend.offline.loop_thread import LoopThread
from tandem.frontend.offline.result import EngineError, Output, RequestError, Result
from tandem.frontend.offline.session import OfflineSession
from tandem.frontend.request.prompts import Prompt
from tandem.frontend.supervisor.launch import LaunchError, check_engine_installed
from tandem.protocol.engine_options import EngineOptions

__all__ = ["LLM", "ChatOptions", "EngineError", "LaunchError", "Output", "RequestError", "Result"]

Conversation = Sequence[Mapping[str, Any]]

_RESERVED_FIELDS = ("model", "prompt", "messages", "stream", "stream_options", "echo", "return_token_ids")


class LLM:
    """A model in an engine process of its own, from the constructor to `close`.

    `options` are the fields of EngineOptions, which are the engine flags of `tandem serve`. The process ends with
    `close`, with the `with` block, and with this process, however that ends. Several threads may call at once.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        chat: ChatOptions | None = None,
        startup_timeout: float = 600.0,
        **options: Any,
    ) -> None:
        """Start the engine and wait until it is ready.

        Without `model`, the engine serves the model that ships with it. Raises LaunchError or TokenizerError for a
        model that cannot be served, EngineError for an engine that ends or is not ready within `startup_timeout`
        seconds, TypeError for an unknown option.
        """
        check_engine_installed()
        self._session = OfflineSession(EngineOptions(model=model, **options), chat or ChatOptions())
        self._thread = LoopThread("tandem-offline")
        self._thread.start()
        self._finalizer = weakref.finalize(self, _close, self._thread, self._session)
        try:
            self._thread.run(self._session.open(startup_timeout))
        except BaseException:
            self.close()
            raise

    @property
    def engine_pid(self) -> int | None:
        """Process id of the engine; None before its start and after its end."""
        return self._session.engine_pid

    def generate(self, prompts: Prompt | Sequence[Prompt], *, progress: bool = True, **fields: Any) -> list[Result]:
        """Complete prompts in batches and return the results in their order.

        Each prompt is a text or a list of token ids. `fields` are those of `POST /v1/completions` (`max_tokens`,
        `temperature`, `seed`, `stop`, `n`, ...), with the same defaults, and apply to every prompt. Raises RequestError
        for the first prompt that is refused or fails, TypeError for a name that is not a field, EngineError if the
        engine has ended.
        """
        self._check_open()
        return self._thread.run(
            self._session.generate(_as_batch(prompts), _check_fields(fields, COMPLETION.names), progress)
        )

    def chat(
        self, conversations: Conversation | Sequence[Conversation], *, progress: bool = True, **fields: Any
    ) -> list[Result]:
        """Answer one conversation or several, each a list of OpenAI messages.

        `fields` are those of `POST /v1/chat/completions` (`tools`, `response_format`, ... and those of `generate`).
        Raises the errors of `generate`.
        """
        self._check_open()
        one = bool(conversations) and isinstance(conversations[0], Mapping)
        several = [conversations] if one else list(conversations)
        return self._thread.run(self._session.chat(several, _check_fields(fields, CHAT.names), progress))

    def close(self) -> None:
        """Stop the engine process and wait for its end. Idempotent."""
        self._finalizer()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

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


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    one = bool(prompts) and isinstance(prompts[0], int)
    return [list(prompts)] if one else list(prompts)  # type: ignore[arg-type]


def _check_fields(fields: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return the fields of a request that the caller may set.

    A server ignores fields that it does not know, for the sake of its clients; here such a name is a typing error.
    Raises TypeError for it and for the fields that this interface sets; the others are checked like a request.
    """
    for name in fields:
        if name in _RESERVED_FIELDS:
            raise TypeError(f"{name!r} is not a sampling field")
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"{name!r} is not a field of this request{hint}")
    return dict(fields)
