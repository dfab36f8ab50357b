"""The ports between the layers. `tests/fakes` implements each; a conformance test pins fake and real to these."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Protocol

from msgspec import Struct

from tandem.engine_core.errors import RequestError
from tandem.engine_core.plan import StepPlan
from tandem.protocol.commands import AnyCommand
from tandem.protocol.events import AnyEvent, Failure, Finished, Started, TokenLogprobs


class TokenDelta(Struct, frozen=True):
    """One step's tokens for one frontend, in columns: the i-th token belongs to the i-th request."""

    request_ids: list[int]
    tokens: list[int]
    logprobs: list[TokenLogprobs] = []


class StepLogprobs(Struct, frozen=True):
    """Log-probabilities of one step, as packed records in the format of `TokenLogprobs` with `top` alternatives."""

    top: int
    records: bytes
    """One record for each sampled token, then one for each scored position (`ScheduledSequence.targets`), both in the
    plan's order."""


class StepResult(Struct, frozen=True):
    """Tokens that one step sampled: a run of zero or more for each row of its plan."""

    counts: list[int]
    """Number of tokens of each row, in the plan's order; 0 for a row that does not sample."""
    tokens: list[int]
    """The runs of all rows, concatenated in the plan's order: `sum(counts)` ids."""
    logprobs: StepLogprobs | None = None
    """Log-probabilities, or None if no row wanted any."""

    def runs(self) -> Iterator[Sequence[int]]:
        """Yield the tokens of each row, in the plan's order."""
        if len(self.tokens) == len(self.counts) and 0 not in self.counts:
            return zip(self.tokens)
        ends = itertools.accumulate(self.counts)
        return (self.tokens[end - count : end] for count, end in zip(self.counts, ends, strict=True))


class Constraint(Protocol):
    """What a sequence's next token may be, given the tokens it has. It belongs to one sequence, and to the loop."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow but an end."""

    @property
    def problem(self) -> str:
        """Why a token was refused, for the client. Empty before that."""

    def is_end(self, token: int) -> bool:
        """Whether a token only says that the output ends, and is none of its text."""

    def fast_forward_tokens(self) -> list[int]:
        """Return the tokens that the grammar forces next, possibly none. Changes nothing."""

    def accept(self, token: int) -> bool:
        """Advance by one token; return False if the grammar rejects it or cannot be followed any further.

        A constraint that has rejected a token has a `problem` from then on and accepts nothing more.
        """


Masks = Sequence[tuple[int, Constraint]]
"""The rows of a step, by their number in the device's tables, whose sampling is constrained, each with its own."""


class Compiler(Protocol):
    """Makes constraints of grammars, away from the loop's thread. All calls come from the loop's."""

    def start(self, seq_id: int, grammar: str, ignore_ends: bool) -> None:
        """Asks for the constraint of one sequence. `ignore_ends`: end ids are allowed only where nothing else is."""

    def forget(self, seq_id: int) -> None:
        """The sequence wants no constraint any more. Idempotent."""

    def finished(self) -> list[tuple[int, Constraint | RequestError]]:
        """The constraints that have become ready, or why they never will, since the last call. Never blocks.

        Called while a sequence waits for one.
        """

    def close(self) -> None:
        """Starts nothing more. What is being compiled ends by itself."""


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
        """Enqueue the forward pass of a step. Any exception is fatal."""

    def sample(self, slot: int, masks: Masks | None) -> None:
        """Enqueues sampling of the launched step, and the copy of its tokens to the host.

        masks: for a step that `needs_mask`, its constrained rows that are still wanted. A row whose mask allows
        nothing yields id 0.
        """

    def collect(self, slot: int) -> StepResult:
        """Wait for the results of the slot's step and return them; the slot is free for the next launch.

        The result holds log-probabilities if the plan asks for them (`StepPlan.logprobs`).
        """

    def synchronize(self) -> None:
        """Waits until nothing is in flight. Never called on the launch path."""

    def device_times(self) -> DeviceTimes:
        """How long the device has worked and waited, over the steps that were timed."""


class Mailbox(Protocol):
    """The engine's end of the wire."""

    def drain(self) -> list[tuple[bytes, AnyCommand]]:
        """Every command that has arrived, with its sender. Never blocks."""

    def wait(self, seconds: float) -> None:
        """Blocks until a command arrives, somebody wakes it, or the time is up."""

    def wake(self) -> None:
        """Ends the wait that runs, or else the next one. For other threads that have news for the loop."""

    def reply(self, client: bytes, event: AnyEvent) -> None:
        """Sends one event to a frontend, at once or dropped."""

    def tokens(self, client: bytes, delta: TokenDelta) -> None:
        """Adds one step's tokens to what the next flush sends."""

    def started(self, client: bytes, started: Started) -> None:
        """Adds one request's start to what the next flush sends."""

    def ended(self, client: bytes, outcome: Finished | Failure) -> None:
        """Adds one terminal event to what the next flush sends."""

    def flush(self, step_id: int) -> list[bytes]:
        """Sends what was added, keeping what cannot go yet. Returns the frontends found gone."""

    @property
    def backlog(self) -> bool:
        """Whether a flush kept something."""
