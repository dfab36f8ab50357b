"""Asynchronous part of offline inference.

This is an engine process, a connection to it, and the requests in flight.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import msgspec

from tandem.frontend.api.chat_completions.request import parse_chat
from tandem.frontend.api.completions.request import parse_completion
from tandem.frontend.api.service import Service, build_service
from tandem.frontend.config import ChatOptions, FrontendConfig
from tandem.frontend.errors import ApiError, malformed, unsupported
from tandem.frontend.generation.admission import Admitted, check_ids
from tandem.frontend.generation.generation import Generation
from tandem.frontend.offline.batch import Batch, BatchOptions
from tandem.frontend.offline.engine_process import EngineProcess
from tandem.frontend.offline.fields import Conversation, Fields, VerifyFields
from tandem.frontend.offline.result import (
    ChoiceStream,
    EngineError,
    OutputDelta,
    RequestError,
    Result,
    ResultBuilder,
    Verification,
    failed_result,
    failed_verification,
    verification,
)
from tandem.frontend.request.ignored_fields import IgnoredFields
from tandem.frontend.request.prompts import Prompt
from tandem.frontend.run_directory import run_directory
from tandem.frontend.supervisor.launch import adapters_argv, private_endpoint
from tandem.frontend.supervisor.model import ModelFolder
from tandem.protocol.commands import MAX_VERIFIED
from tandem.protocol.engine_options import EngineOptions
from tandem.protocol.events import NO_LIMIT
from tandem.protocol.logs import LogLevel

_POLL_SECONDS = 0.05
MAX_LOGITS_REQUESTS = 2
"""Maximum number of requests with logits that run at once: each has up to 65 times the vocabulary in float32."""
_END_SECONDS = 5.0
"""Seconds to wait for the exit of an engine whose connection broke, to report its reason."""
_ANY_CONVERSATION = ({"role": "user", "content": "x"},)

Item = Prompt | Conversation
"""A prompt to complete, or a conversation to answer."""


class OfflineSession:
    """Engine process and frontend parts of one `LLM`.

    They run in one event loop, from `open` to `close`.
    """

    def __init__(
        self, options: EngineOptions, chat: ChatOptions, log_level: LogLevel, adapters: Mapping[str, str] | None = None
    ) -> None:
        """Keep the settings. adapters: folders by name."""
        self.adapters = adapters or {}
        self.options = options
        self._chat = chat
        self._log_level = log_level
        self._resources = ExitStack()
        self._engine: EngineProcess | None = None
        self._service: Service | None = None

    @property
    def engine_pid(self) -> int | None:
        return self._engine.pid if self._engine is not None else None

    async def open(self, model: ModelFolder, timeout: float) -> None:
        """Start the engine for a local model and wait until it accepts requests.

        timeout: maximum seconds to wait. Raises TokenizerError for a model that cannot be served, EngineError if the
        engine exits or is not ready in time. `close` must be called in any case.
        """
        private = self._resources.enter_context(run_directory())
        endpoint = private_endpoint(private)
        config = FrontendConfig(
            endpoint,
            model.folder,
            max_concurrent=NO_LIMIT,
            max_queued_tokens=NO_LIMIT,
            hold_timeout=0.0,
            chat=self._chat,
            store=False,
        )
        self._service = build_service(config)
        flags = adapters_argv(private, self.adapters) if self.options.enable_lora else ()
        self._engine = EngineProcess(endpoint, model.options(self.options), self._log_level, flags)
        await self._engine.start()
        self._service.client.start()
        deadline = time.monotonic() + timeout
        while not (health := self._service.client.health()).ready:
            await self._engine.check()
            if time.monotonic() > deadline:
                raise EngineError(
                    f"the engine core is not ready after {timeout:.0f} s: {health.reason}; raise startup_timeout"
                )
            await asyncio.sleep(_POLL_SECONDS)

    async def close(self) -> None:
        """Stop the engine and release everything acquired by `open`. Idempotent."""
        with self._resources:
            if self._service is not None:
                await self._service.close()
            if self._engine is not None:
                await self._engine.stop()

    async def generate(self, prompts: Sequence[Prompt], fields: Fields, options: BatchOptions) -> list[Result]:
        self._check_values(fields, chat=False)
        return await self._run_all("generate", prompts, fields, options)

    async def chat(self, conversations: Sequence[Conversation], fields: Fields, options: BatchOptions) -> list[Result]:
        self._check_values(fields, chat=True)
        return await self._run_all("chat", conversations, fields, options)

    async def stream(self, item: Item, fields: Fields, *, chat: bool) -> AsyncIterator[OutputDelta]:
        """Yield the output of one request while it is generated.

        Raises RequestError if it is refused or fails, EngineError if the engine has exited.
        """
        try:
            generation, builder = await self._start(item, fields, chat)
            streams = [ChoiceStream(builder) for _ in range(generation.admitted.num_choices)]
            try:
                async for batch in generation.batches():
                    for piece in batch:
                        yield streams[piece.index].push(piece)
            finally:
                generation.close("cancelled")
        except ApiError as error:
            await self._check_lost()
            raise RequestError(0, error) from None

    async def _run_all(self, label: str, items: Sequence[Item], fields: Fields, options: BatchOptions) -> list[Result]:
        batch, workers = Batch(label, len(items), options), await self._num_workers()

        async def run(item: Item) -> Result:
            try:
                generation, builder = await self._start(item, fields, label == "chat")
                try:
                    choices = await batch.collect(generation)
                    return builder.result(choices, generation.usage(), generation.drafts())
                finally:
                    generation.close("cancelled")
            except ApiError:
                await self._check_lost()
                raise

        return await batch.run(run, items, workers, failed_result)

    async def verify(
        self, items: Sequence[tuple[Prompt, Prompt]], fields: VerifyFields, options: BatchOptions
    ) -> list[Verification]:
        """Verify continuations. items: prompts, each with its continuation."""
        self._check_values(fields.request, chat=False)
        batch = Batch("verify", len(items), options)
        workers = MAX_LOGITS_REQUESTS if fields.logits else await self._num_workers()

        async def run(item: tuple[Prompt, Prompt]) -> Verification:
            try:
                service = await self._running()
                admitted = await self._admit_verified(service, *item, fields)
                generation = self._begin(service, admitted)
                try:
                    [choice] = await batch.collect(generation)
                    ids = admitted.prompts[0].ids
                    return verification(ids, choice, generation.usage(), generation.logits())
                finally:
                    generation.close("cancelled")
            except ApiError:
                await self._check_lost()
                raise

        return await batch.run(run, items, workers, lambda error, _: failed_verification(error))

    async def _num_workers(self) -> int:
        """Return the number of requests that run at once.

        Twice the rows, so that a request is waiting in the engine whenever a row becomes free.
        """
        return 2 * (await self._running()).ready().limits.max_rows

    async def _running(self) -> Service:
        """Return the service. Raises EngineError if the engine has exited."""
        if self._engine is None or self._service is None:
            raise EngineError("the engine core was not started")
        await self._engine.check()
        return self._service

    async def _check_lost(self) -> None:
        """Raise EngineError if a request failed because the engine process has exited."""
        assert self._service is not None and self._engine is not None, "a request was started"
        deadline = time.monotonic() + _END_SECONDS
        while not self._service.client.health().ready and time.monotonic() < deadline:
            await self._engine.check()
            await asyncio.sleep(_POLL_SECONDS)
        await self._engine.check()

    def _check_values(self, fields: Fields, *, chat: bool) -> None:
        """Raise RequestError for a value that is invalid for every request of the call."""
        any_item: dict[str, Any] = {"messages": _ANY_CONVERSATION} if chat else {"prompt": "x"}
        body = msgspec.json.encode({"model": "any", **fields.body, **any_item})
        try:
            if chat:
                parse_chat(body, self._chat.default_max_tokens, IgnoredFields())
            else:
                parse_completion(body, IgnoredFields())
        except ApiError as error:
            raise RequestError(0, error) from None

    async def _start(self, item: Item, fields: Fields, chat: bool) -> tuple[Generation, ResultBuilder]:
        """Submit one request. The caller closes the generation."""
        service = await self._running()
        builder = await (self._admit_chat(service, item, fields) if chat else self._admit(service, item, fields))
        return self._begin(service, builder.admitted), builder

    def _begin(self, service: Service, admitted: Admitted) -> Generation:
        """Submit an admitted request. The caller closes the generation."""
        generation = Generation(service.client, service.tokenizer, service.metrics, admitted, time.monotonic())
        try:
            generation.start(*service.config.load_limits)
        except BaseException:
            generation.close("cancelled")
            raise
        return generation

    async def _admit(self, service: Service, prompt: Any, fields: Fields) -> ResultBuilder:
        ready = service.ready()
        body = msgspec.json.encode({"model": ready.model.name, **fields.body, "prompt": prompt})
        parsed = parse_completion(body, IgnoredFields())
        options = msgspec.structs.replace(parsed.options, prompt_logprobs=fields.prompt_logprobs)
        admitted = await service.admission.admit(
            options, parsed.prompts, ready, add_special_tokens=parsed.add_special_tokens
        )
        return ResultBuilder(admitted, prompt if isinstance(prompt, str) else None, None, fields.with_logprobs)

    async def _admit_verified(
        self, service: Service, prompt: Prompt, continuation: Prompt, fields: VerifyFields
    ) -> Admitted:
        ready, encode = service.ready(), service.tokenizer.encode
        first = await encode(prompt) if isinstance(prompt, str) else prompt
        rest = await encode(continuation, add_special_tokens=False) if isinstance(continuation, str) else continuation
        if not first:
            raise malformed("the prompt has no tokens; the first token of a continuation needs one before it", "prompt")
        if not 1 <= len(rest) <= MAX_VERIFIED:
            raise unsupported(
                f"the continuation has {len(rest)} tokens; at least 1 and at most {MAX_VERIFIED} are verified at once",
                "continuation",
            )
        check_ids(rest, ready.model.vocab_size, "continuation")
        body = msgspec.json.encode({"model": ready.model.name, **fields.request.body, "prompt": "x"})
        parsed = parse_completion(body, IgnoredFields())
        options = msgspec.structs.replace(
            parsed.options,
            prompt_logprobs=fields.request.prompt_logprobs,
            num_verified=len(rest),
            logits=fields.logits,
            speculation=False,
        )
        return await service.admission.admit(options, [[*first, *rest]], ready)

    async def _admit_chat(self, service: Service, conversation: Any, fields: Fields) -> ResultBuilder:
        ready = service.ready()
        body = msgspec.json.encode({"model": ready.model.name, **fields.body, "messages": conversation})
        ignored = IgnoredFields()
        parsed = parse_chat(body, self._chat.default_max_tokens, ignored)
        admitted, shape = await service.chat.admit(parsed.options, parsed.conversation, parsed.tool_use, ready, ignored)
        return ResultBuilder(admitted, admitted.prompts[0].text, shape, fields.with_logprobs)
