"""A frontend's requests and the engines that they meet, without sockets and in the time of a fake clock."""

import asyncio
from collections import Counter
from collections.abc import Sequence

from msgspec import structs
from prometheus_client import CollectorRegistry

from tandem.frontend.api.completions.request import parse_completion
from tandem.frontend.engine.client import EngineClient
from tandem.frontend.engine.compatibility import Fingerprints
from tandem.frontend.engine.health import EngineWatch
from tandem.frontend.errors import ApiError
from tandem.frontend.generation.admission import Admitted, AdmittedPrompt, _sampling
from tandem.frontend.generation.choice import ChoiceDelta
from tandem.frontend.generation.detokenizer import Detokenizer
from tandem.frontend.generation.generation import Generation
from tandem.frontend.generation.request_record import RequestRecord
from tandem.frontend.metrics.frontend_metrics import FrontendMetrics
from tandem.frontend.request.ignored_fields import IgnoredFields
from tandem.protocol.codec import step_output, unpack_ids
from tandem.protocol.commands import Submit
from tandem.protocol.errors import ErrorCode, FinishReason
from tandem.protocol.events import Finished, ModelFacts
from tandem.protocol.sockets import Transport
from tests.fakes.clock import FakeClock
from tests.fakes.engine_link import FACTS, FakeLink, connect, heartbeat
from tests.fakes.tokenizer import byte_level_tokenizer

RAW = byte_level_tokenizer()
LENGTH = 4
"""Tokens of every choice."""
HOLD = 60.0


def script(submit: Submit) -> list[int]:
    """Return the tokens of a sequence, which depend on its prompt, seed and choice."""
    (prompt,) = unpack_ids(submit.prompt_ids)
    first = prompt + submit.sampling.seed + 7 * submit.sampling.choice
    return [60 + (first + number) % 200 for number in range(LENGTH)]


class Ids:
    """The part of a tokenizer that generations use."""

    def detokenizer(self, skip_special_tokens: bool = True, tags: object = None) -> Detokenizer:
        return Detokenizer(RAW, (), skip_special_tokens)


class Asked:
    """One request, its user, and what the user got."""

    def __init__(
        self, world: "World", number: int, n: int, stream: bool, waits: tuple[float | None, ...], timeout: float
    ) -> None:
        body = b'{"model": "m", "prompt": [%d], "n": %d, "stream": %b, "max_tokens": %d}'
        fields = body % (number, n, b"true" if stream else b"false", LENGTH)
        options = parse_completion(fields, IgnoredFields()).options
        prompt = AdmittedPrompt("", [number], number.to_bytes(4, "little"), LENGTH)
        admitted = Admitted(options, FACTS, [prompt], _sampling(structs.replace(options, seed=number), {}))
        self.name, self.stream, self.waits, self.timeout = f"request {number}", stream, waits, timeout
        self.generation = Generation(
            world.client, Ids(), world.metrics, admitted, world.clock(), world.clock  # type: ignore[arg-type]
        )  # fmt: skip
        self.texts = [""] * n
        self.keep_alives = 0
        self.error: ApiError | None = None
        self.task = asyncio.create_task(self._use())

    @property
    def expected(self) -> list[str]:
        """Text of each choice, whatever happens to engines."""
        admitted = self.generation.admitted
        (prompt,) = admitted.prompts
        submits = [
            Submit(0, prompt.packed, structs.replace(admitted.sampling, choice=choice))
            for choice in range(admitted.num_choices)
        ]
        return [RAW.decode(script(submit)) for submit in submits]

    async def _use(self) -> None:
        generation = self.generation
        try:
            generation.start(1000, 10**6, RequestRecord(generation.arrived, self.name), self.timeout)
            if self.stream:
                async for batch in generation.batches(*self.waits):
                    self._show(batch)
            else:
                self._show(await generation.collect())
        except ApiError as error:
            self.error = error
        finally:
            generation.close("cancelled")

    def _show(self, batch: list[ChoiceDelta]) -> None:
        self.keep_alives += not batch
        for delta in batch:
            self.texts[delta.index] += delta.text


class World:
    """A client with requests, and the engines that it meets."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.metrics = FrontendMetrics(CollectorRegistry())
        watch = EngineWatch(5.0, 60.0, self.clock)
        self.client = EngineClient(
            "ipc:///nowhere", Transport(), Fingerprints(), watch, self.metrics, self.clock, hold_timeout=HOLD
        )
        self.client._context = object()  # type: ignore[assignment]
        self.epoch = 0
        self.requests: list[Asked] = []
        self.submits: list[Submit] = []
        self.links: list[FakeLink] = []
        self.position: Counter[int] = Counter()
        """Tokens sent of each sequence, by request id."""
        self.ended: set[int] = set()
        self.started: set[int] = set()

    @property
    def link(self) -> FakeLink | None:
        link = self.client._link
        assert link is None or isinstance(link, FakeLink)
        return link

    def open(self) -> list[Submit]:
        """Return the sequences that the engine has."""
        return [] if self.link is None else [one for one in self.link.submitted if one.request_id not in self.ended]

    async def settle(self) -> None:
        """Let all tasks run until they wait."""
        for _ in range(6):
            await asyncio.sleep(0)

    async def ask(
        self, n: int = 1, stream: bool = True, waits: tuple[float | None, ...] = (), timeout: float = 0.0
    ) -> Asked:
        self.clock.now += 0.001
        asked = Asked(self, len(self.requests) + 10, n, stream, waits, timeout)
        self.requests.append(asked)
        await self.settle()
        return asked

    async def engine(self, facts: ModelFacts = FACTS, launched: Sequence[int] = ()) -> FakeLink:
        """Let a new engine be ready, unless there is one. It knows of `launched` sequences of the one before."""
        if self.link is None or self.link.ready is None:
            self.epoch += 1
            self.links.append(connect(self.client, self.epoch, facts, launched=launched))
            await self.settle()
        assert self.link is not None
        return self.link

    async def lose(self) -> None:
        """Break the link."""
        self.client._on_break("the engine closed the connection")
        await self.settle()

    async def fail(self, code: ErrorCode) -> None:
        """Let the engine say that it fails or ends, and break the link."""
        if self.link is not None:
            self.link.fail([one.request_id for one in self.open()], code)
            self.ended |= {one.request_id for one in self.open()}
            await self.settle()
        await self.lose()

    async def start(self, index: int) -> None:
        if sequences := self.open():
            chosen = sequences[index % len(sequences)].request_id
            assert self.link is not None
            self.link.start(chosen)
            self.started.add(chosen)
            await self.settle()

    async def step(self, index: int, count: int) -> None:
        """Send tokens of one sequence, and its end with the last."""
        if not (sequences := self.open()):
            return
        assert self.link is not None
        submit = sequences[index % len(sequences)]
        number, begin = submit.request_id, self.position[submit.request_id]
        tokens = script(submit)[begin : begin + count]
        self.position[number] += len(tokens)
        self.started.add(number)
        output = step_output(0, [number], tokens, [len(tokens)])
        if self.position[number] == LENGTH:
            output.finished.append(Finished(number, FinishReason.LENGTH))
            self.ended.add(number)
        self.link.streams.deliver(output)
        await self.settle()

    async def later(self, seconds: float) -> None:
        """Let time pass, with heartbeats of the engine if there is one."""
        self.clock.now += seconds
        if self.link is not None and self.link.ready is not None:
            self.client._on_heartbeat(heartbeat(self.epoch))
        self.client._tick()
        await self.settle()

    async def leave(self, index: int) -> None:
        """Let the user of one request go away."""
        if self.requests:
            asked = self.requests[index % len(self.requests)]
            asked.task.cancel()
            await asyncio.gather(asked.task, return_exceptions=True)

    async def finish(self) -> None:
        """Serve everything that is left."""
        for _ in range(20):
            if all(one.task.done() for one in self.requests):
                return
            await self.later(2.0)
            await self.engine()
            while self.open():
                await self.step(0, LENGTH)
        raise AssertionError("requests without an end")

    def last_ids(self, asked: Asked) -> list[int]:
        """Return the ids of a request's sequences in the last engine."""
        sent = self.links[-1].sent
        return [one.request_id for one in sent if isinstance(one, Submit) and one.http_request_id == asked.name]

    def by_name(self, link: FakeLink) -> list[str]:
        """Return the requests that an engine got, in the order of their submission."""
        return [one.http_request_id for one in link.sent if isinstance(one, Submit)]
