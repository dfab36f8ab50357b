"""A link to an engine that opens no socket, and the engine's end of it."""

from collections.abc import Callable, Sequence

import pytest

from tandem.frontend.engine import client as engine_client
from tandem.frontend.engine.client import EngineClient
from tandem.frontend.engine.streams import OpenStreams
from tandem.protocol.codec import decode_command, step_output
from tandem.protocol.commands import Abort, AnyCommand, Submit
from tandem.protocol.errors import ErrorCode
from tandem.protocol.events import (
    AdapterList,
    AnyEvent,
    Failure,
    Heartbeat,
    Launched,
    Limits,
    ModelFacts,
    Phase,
    Ready,
    Started,
    StepOutput,
)
from tandem.protocol.stats import EngineStats
from tandem.protocol.version import PROTOCOL_VERSION

FACTS = ModelFacts("m", 420, 2048, [1], "", "cpu", "float32", 0)
LIMITS = Limits(max_rows=64, kv_tokens=65536, page_size=16, max_step_tokens=512, max_waiting=1024)


class FakeLink:
    """An engine link that records what is sent, and the epochs of all links in `opened`."""

    opened: list[int]

    def __init__(
        self,
        _context: object,
        epoch: int,
        streams: OpenStreams,
        on_event: Callable[[AnyEvent], None],
        on_break: Callable[[str], None],
    ) -> None:
        self.epoch, self.ready, self.opened_at = epoch, None, 0.0
        self.streams, self.on_event, self.on_break = streams, on_event, on_break
        self.sent: list[AnyCommand] = []
        self.breaks_after: int | None = None
        """Commands after which the link breaks while one is sent; None for never."""

    def open(self, _endpoint: str, _transport: object, _name: str, now: float, lost_identity: bytes = b"") -> None:
        self.opened_at, self.lost_identity = now, lost_identity
        self.identity = b"link %d" % len(self.opened)
        self.opened.append(self.epoch)

    def send_encoded(self, data: bytes) -> None:
        self.send(decode_command(data))

    def send(self, command: AnyCommand) -> None:
        if self.breaks_after == len(self.sent):
            self.on_break("cannot send to the engine")
            return
        self.sent.append(command)

    def close(self, polite: bool = False) -> None:
        pass

    def answer(self, facts: ModelFacts = FACTS, limits: Limits = LIMITS, adapters: AdapterList | None = None) -> None:
        """Answer the Hello."""
        self.on_event(Ready(PROTOCOL_VERSION, self.epoch, facts, limits, adapters))

    @property
    def submitted(self) -> list[Submit]:
        """Requests that were submitted and not aborted."""
        aborted = {number for command in self.sent if isinstance(command, Abort) for number in command.request_ids}
        return [one for one in self.sent if isinstance(one, Submit) and one.request_id not in aborted]

    def start(self, request_id: int, cached_tokens: int = 0) -> None:
        """Say that a request is started."""
        self.streams.deliver(StepOutput(0, b"", b"", b"", started=[Started(request_id, cached_tokens)]))

    def emit(self, request_id: int, tokens: list[int]) -> None:
        """Send tokens of a request."""
        self.streams.deliver(step_output(0, [request_id], tokens, [len(tokens)]))

    def fail(self, request_ids: list[int], code: ErrorCode, retry_after: int = 0) -> None:
        """Send the failure of requests."""
        failures = [Failure(number, code, f"the engine says {code.value}", retry_after) for number in request_ids]
        self.streams.deliver(StepOutput(0, b"", b"", b"", [], failures))


def install(patch: pytest.MonkeyPatch) -> list[int]:
    """Give engine clients links of this kind; return the epochs of the links that they open."""
    FakeLink.opened = []
    patch.setattr(engine_client, "EngineLink", FakeLink)
    return FakeLink.opened


def heartbeat(
    epoch: int, phase: Phase = Phase.READY, stats: EngineStats | None = None, percent: int = 100
) -> Heartbeat:
    """Build a heartbeat of an engine without pending requests."""
    return Heartbeat(epoch, phase, percent, "", 0, stats or EngineStats())


def connect(
    client: EngineClient,
    epoch: int,
    facts: ModelFacts = FACTS,
    limits: Limits = LIMITS,
    launched: Sequence[int] = (),
) -> FakeLink:
    """Let the client hear an engine and shake hands with it; return the link.

    The engine knows of `launched` requests of the link before.
    """
    client._on_heartbeat(heartbeat(epoch))
    link = client._link
    assert isinstance(link, FakeLink), link
    if launched:
        link.on_event(Launched([*launched]))
    link.answer(facts, limits)
    return link
