"""The ports between the layers. `tests/fakes` implements each; a conformance test pins fake and real to these."""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from engine_core.plan import StepPlan
from protocol.commands import AnyCommand
from protocol.events import AnyEvent, Failure, Finished

Masks = Sequence[bytes | None]
"""One entry a row of the plan: bits of the allowed token ids (bit i of little-endian uint32 word i // 32), or None."""


class Delta(Struct, frozen=True):
    """One step's tokens for one frontend, in columns: the i-th token belongs to the i-th request."""

    request_ids: list[int]
    tokens: list[int]


class Constraint(Protocol):
    """What a sequence's next token may be, given the tokens it has."""

    def mask(self) -> bytes:
        """Bits of the tokens allowed next, as in `Masks`."""

    def accept(self, token: int) -> None:
        """Advances by one committed token."""


class DeviceTimes(Struct):
    """Sums over a sample of steps, in seconds; nothing where a device cannot tell."""

    busy: float = 0.0
    idle: float = 0.0
    steps: int = 0


class Runtime(Protocol):
    """The device. Launch and sample enqueue work and return; only collect waits, for one step's own results.

    A slot takes one step through launch, sample and collect, in this order, before it takes the next.
    """

    def launch(self, slot: int, plan: StepPlan) -> None:
        """Enqueues the forward pass of a step.

        Raises RowError if one row cannot be staged: then nothing was enqueued. Any other exception is fatal.
        """

    def sample(self, slot: int, masks: Masks | None) -> None:
        """Enqueues sampling of the launched step, and the copy of its tokens to the host."""

    def collect(self, slot: int) -> list[int]:
        """Waits for the step's tokens: one a row of its plan, meaningless where the row does not sample."""

    def synchronize(self) -> None:
        """Waits until nothing is in flight. Never called on the launch path."""

    def device_times(self) -> DeviceTimes:
        """How long the device has worked and waited, over the steps that were timed."""


class Mailbox(Protocol):
    """The engine's end of the wire."""

    def drain(self) -> list[tuple[bytes, AnyCommand]]:
        """Every command that has arrived, with its sender. Never blocks."""

    def wait(self, seconds: float) -> None:
        """Blocks until a command arrives or the time is up."""

    def reply(self, client: bytes, event: AnyEvent) -> None:
        """Sends one event to a frontend, at once or dropped."""

    def tokens(self, client: bytes, delta: Delta) -> None:
        """Adds one step's tokens to what the next flush sends."""

    def ended(self, client: bytes, outcome: Finished | Failure) -> None:
        """Adds one terminal event to what the next flush sends."""

    def flush(self, step_id: int) -> list[bytes]:
        """Sends what was added, keeping what cannot go yet. Returns the frontends found gone."""

    @property
    def backlog(self) -> bool:
        """Whether a flush kept something."""
