"""Asynchronous half of offline inference.

It comprises an engine process, a connection to it, and the requests in flight.
"""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from typing import Any

import msgspec

from tandem.frontend.api.chat_completions.request import parse_chat
from tandem.frontend.api.completions.request import parse_completion
from tandem.frontend.api.generation_response import collect_choices
from tandem.frontend.api.service import Service, build_service
from tandem.frontend.config import ChatOptions, FrontendConfig
from tandem.frontend.errors import ApiError
from tandem.frontend.generation.admission import Admitted
from tandem.frontend.generation.choice import ChoiceDelta
from tandem.frontend.generation.generation import Generation, Usage
from tandem.frontend.offline.result import EngineError, RequestError, Result, chat_result, completion_result
from tandem.frontend.process import ManagedProcess
from tandem.frontend.progress import Progress
from tandem.frontend.request.ignored_fields import IgnoredFields
from tandem.frontend.request.prompts import Prompt
from tandem.frontend.supervisor.launch import engine_command, model_dir, private_endpoint
from tandem.protocol.engine_options import EngineOptions

_UNLIMITED = 2**31 - 1
_POLL_SECONDS = 0.05
_STOP_SECONDS = 10.0
"""Seconds that the engine gets to end before it is killed."""

Ask = Callable[[Any, dict[str, Any]], Awaitable[Result]]


class OfflineSession:
    """Engine process and frontend parts of one `LLM`.

    They run in one event loop, from `open` to `close`.
    """

    def __init__(self, options: EngineOptions, chat: ChatOptions) -> None:
        self._options = options
        self._chat = chat
        self._resources = ExitStack()
        self._engine: ManagedProcess | None = None
        self._service: Service | None = None

    @property
    def engine_pid(self) -> int | None:
        return self._engine.pid if self._engine is not None else None

    async def open(self, timeout: float) -> None:
        """Start the engine and wait until it accepts requests.

        The wait takes at most `timeout` seconds. Raises LaunchError or TokenizerError for a model that cannot be
        served, EngineError if the engine ends or is not ready in time. `close` has to be called even then.
        """
        folder = model_dir(self._options.model)
        endpoint = self._resources.enter_context(private_endpoint(None))
        self._service = build_service(
            FrontendConfig(endpoint, folder, max_concurrent=_UNLIMITED, max_queued_tokens=_UNLIMITED, store=False)
        )
        self._engine = ManagedProcess("engine core", engine_command(endpoint, self._options))
        await self._engine.start()
        self._service.client.start()
        deadline = time.monotonic() + timeout
        while not (health := self._service.client.health()).ready:
            self._check_engine()
            if time.monotonic() > deadline:
                raise EngineError(f"the engine core is not ready after {timeout:.0f} s: {health.reason}")
            await asyncio.sleep(_POLL_SECONDS)

    async def close(self) -> None:
        """Stop the engine and release whatever `open` acquired. Idempotent."""
        with self._resources:
            if self._service is not None:
                await self._service.close()
            if self._engine is not None:
                await self._engine.stop(_STOP_SECONDS)

    async def generate(self, prompts: Sequence[Prompt], fields: dict[str, Any], show: bool) -> list[Result]:
        return await self._run_all(self._complete, prompts, fields, show)

    async def chat(self, conversations: Sequence[Any], fields: dict[str, Any], show: bool) -> list[Result]:
        return await self._run_all(self._answer, conversations, fields, show)

    async def _run_all(self, ask: Ask, items: Sequence[Any], fields: dict[str, Any], show: bool) -> list[Result]:
        """Run `ask` on each item and return the results in their order.

        Raises RequestError for the first item that fails and cancels the others.
        """
        service = self._running()
        results: list[Result | None] = [None] * len(items)
        progress = Progress("generate", len(items), None)
        started = time.monotonic()
        waiting, done = iter(enumerate(items)), itertools.count(1)

        async def work() -> None:
            for index, item in waiting:
                try:
                    results[index] = await ask(item, fields)
                except ApiError as error:
                    raise RequestError(index, error) from error
                if show:
                    progress.draw(next(done), time.monotonic() - started)

        # Twice the rows, so that a row that becomes free finds a request waiting in the engine.
        workers = min(len(items), 2 * service.ready().limits.max_rows)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(workers):
                    group.create_task(work())
        except* RequestError as errors:
            raise errors.exceptions[0] from None
        finally:
            if show:
                progress.clear()
        return [one for one in results if one is not None]

    def _running(self) -> Service:
        """Return the service. Raises EngineError if the engine has ended."""
        assert self._service is not None, "the session was not opened"
        self._check_engine()
        return self._service

    def _check_engine(self) -> None:
        """Raise EngineError if the engine process does not run."""
        if self._engine is None:
            raise EngineError("the engine core was not started")
        if status := self._engine.exit_status:
            raise EngineError(f"the engine core ended with {status}; its message is on stderr")

    async def _complete(self, prompt: Prompt, fields: dict[str, Any]) -> Result:
        service = self._running()
        ready = service.ready()
        parsed = parse_completion(
            msgspec.json.encode({"model": ready.model.name, **fields, "prompt": prompt}), IgnoredFields()
        )
        admitted = await service.admission.admit(
            parsed.options, parsed.prompts, ready, add_special_tokens=parsed.add_special_tokens
        )
        return completion_result(admitted, *await self._generate(admitted))

    async def _answer(self, conversation: Any, fields: dict[str, Any]) -> Result:
        service = self._running()
        ready = service.ready()
        body = msgspec.json.encode({"model": ready.model.name, **fields, "messages": conversation})
        ignored = IgnoredFields()
        parsed = parse_chat(body, self._chat.default_max_tokens, ignored)
        admitted, shape = await service.chat.admit(parsed.options, parsed.conversation, parsed.tool_use, ready, ignored)
        return chat_result(admitted, shape, *await self._generate(admitted))

    async def _generate(self, admitted: Admitted) -> tuple[list[ChoiceDelta], Usage]:
        service = self._running()
        generation = Generation(service.client, service.tokenizer, service.metrics, admitted, time.monotonic())
        try:
            generation.start(*service.config.load_limits)
            return await collect_choices(generation.batches(), admitted.num_choices), generation.usage()
        finally:
            generation.close("cancelled")
