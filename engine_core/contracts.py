"""Interfaces between the engine's layers.

`tests/fakes` implements each one; a conformance test checks the fakes and the real classes against these signatures.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from typing import Any, Literal, Protocol, TypeVar

from msgspec import Struct

from tandem.engine_core.errors import RequestError
from tandem.engine_core.plan import StepPlan
from tandem.protocol.commands import (
    AnyCommand,
    FinishWeightUpdate,
    InitWeightTransfer,
    SleepTag,
    StartWeightUpdate,
    UpdateWeights,
)
from tandem.protocol.events import (
    AnyEvent,
    Failure,
    Finished,
    SequenceTimes,
    Started,
    TokenLogits,
    TokenLogprobs,
)


class TokenDelta(Struct, frozen=True):
    """New tokens for one frontend, in columns.

    The i-th token belongs to the i-th request.
    """

    request_ids: list[int]
    """Request of each token; a request with several tokens is listed several times."""
    tokens: list[int]
    """Token ids; the tokens of one request are in order."""
    logprobs: list[TokenLogprobs] = []
    drafted: list[int] = []
    """Request of each row whose drafts were verified."""
    drafts: list[int] = []
    """Three numbers for each of them, as in `DetailedOutput.drafts`."""
    logits: list[TokenLogits] = []


class StepLogprobs(Struct, frozen=True):
    """Log-probabilities of one step, as packed records.

    Same format as `TokenLogprobs` with `top` alternatives.
    """

    top: int
    records: bytes
    """One record for each sampled token, then one for each prompt position with log-probabilities
    (`ScheduledSequence.prompt_logprob_ids`), both in the plan's order. Records of sequences that want no
    log-probabilities (`NewSequence.logprobs`) are undefined."""
    ranks: bytes = b""
    """Packed int32 ranks of the tokens at these prompt positions, as in `TokenLogprobs`; b"": they are not known."""


NO_TOKEN = -1
"""Sampled id of a row that cannot be sampled: its logits contain NaN or +inf, or are all -inf."""
PENDING_TOKEN = -2
"""Value in the memory of a step's tokens until the device has written them."""


class StepResult(Struct, frozen=True):
    """Tokens that one step sampled: a run of zero or more for each row of its plan."""

    counts: list[int]
    """Number of tokens of each row, in the plan's order; 0 for a row that does not sample."""
    tokens: list[int]
    """The runs of all rows, concatenated in the plan's order: `sum(counts)` ids, each of the vocabulary or NO_TOKEN."""
    logprobs: StepLogprobs | None = None
    """Log-probabilities, or None if no row wanted any."""
    milliseconds: float = 0.0
    """Time that the device worked on the step, without its wait for masks; 0 for a step that was not timed."""
    num_drafts: list[int] = []
    """Number of drafts of each row that the step verified; empty for a step without drafts (`StepPlan.num_drafts`)."""
    predicted: list[bool] = []
    """For each row, True if its drafts are from the prediction of its request; as long as `num_drafts`."""
    logits: list[bytes] = []
    """For each row with `ScheduledSequence.logits`, packed float32 [num_logits, vocab_size], in the plan's order: those
    of its scored positions, then of its sample."""

    def has_one_each(self, rows: int) -> bool:
        """Return True if each row that samples has one token, or failed.

        rows: number of those.
        """
        return len(self.tokens) == rows and max(self.counts, default=0) <= 1

    def has_single_tokens(self, rows: int) -> bool:
        """Return True if each row that samples has one token, and none failed.

        rows: number of those.
        """
        return self.has_one_each(rows) and NO_TOKEN not in self.tokens

    def runs(self) -> Iterator[Sequence[int]]:
        """Yield the tokens of each row, in the plan's order."""
        if len(self.tokens) == len(self.counts) and 0 not in self.counts:
            return zip(self.tokens)
        ends = itertools.accumulate(self.counts)
        return (self.tokens[end - count : end] for count, end in zip(self.counts, ends, strict=True))


class Constraint(Protocol):
    """State of a grammar after the tokens of one sequence.

    Used by that sequence only, on the loop's thread.
    """

    @property
    def is_complete(self) -> bool:
        """True if only an end token may follow."""

    @property
    def problem(self) -> str:
        """Reason for the rejection of a token, for the client; empty before."""

    def is_end(self, token: int) -> bool:
        """Return True if a token only marks the end and is not part of the text."""

    def fast_forward_tokens(self) -> list[int]:
        """Return the tokens that the grammar forces next, possibly none. Changes nothing."""

    def accept(self, token: int) -> bool:
        """Advance by one token.

        Return False if the grammar rejects it or cannot be followed any further.

        A constraint that has rejected a token has a `problem` from then on and accepts nothing more.
        """

    def accept_forced(self, tokens: Sequence[int]) -> bool:
        """Advance by tokens with which `fast_forward_tokens` begins.

        Return False if the grammar cannot be followed any further, as `accept` does.
        """


T = TypeVar("T")


class InternedList(list[T]):
    """List that is reused across steps while it is equal, so that readers may cache on it."""

    __slots__ = ("cache",)

    def __init__(self, items: Iterable[T] = ()) -> None:
        super().__init__(items)
        self.cache: dict[tuple[str, int], Any] = {}
        """Values that readers derived from the list, each under names of its own."""


def cache_of(items: Sequence[T]) -> dict[tuple[str, int], Any]:
    """Return the cache of an interned list; an empty one for any other list."""
    return items.cache if isinstance(items, InternedList) else {}


MaskedRows = Sequence[tuple[int, Constraint]]
"""(table row, constraint) of each constrained row that samples; its mask is computed from the constraint."""
IndexedMasks = Sequence[tuple[Constraint, int]]
"""The constraints, each with the index of its mask among those on the host."""


class ArrivingTokens(Struct, frozen=True):
    """Memory to which the device writes the sampled tokens of some rows of a step."""

    memory: memoryview
    """int32 words that the device writes; PENDING_TOKEN where a token has not arrived."""
    indices: Sequence[int]
    """Index of each row's token in it."""


class GrammarAdvancer(Protocol):
    """Advance the grammars of many rows, asynchronously as sampled tokens arrive."""

    def accept_on_arrival(self, masks: MaskedRows, arriving: ArrivingTokens) -> bool:
        """Let worker processes accept the sampled tokens of these rows as they arrive.

        Return False if the calling thread accepts them instead. After True, `Runtime.prefetch_masks` may add work for
        the workers. `start_accept` must be called with the same masks before any other use of the constraints.
        """

    def start_accept(self, masks: MaskedRows, tokens: Sequence[int], least: int) -> None:
        """Start accepting the sampled tokens of these rows, one for each, or NO_TOKEN.

        `finish_accept` must follow before the next call. least: minimum number of forced tokens worth appending, at
        least 1.
        """

    def finish_accept(self) -> Set[int]:
        """Wait until the tokens are accepted.

        Return the rows that need no further work: their constraint has accepted the token and forces fewer than `least`
        tokens next. For every other row the caller calls `Constraint.accept` with the same token, unless its sequence
        ends.
        """


class Compiler(Protocol):
    """Compiles grammars into constraints outside the loop's thread.

    All methods are called on the loop's thread.
    """

    @property
    def is_busy(self) -> bool:
        """True while something is being compiled or waits for that."""

    def start(self, seq_id: int, grammar: str, ignore_ends: bool, key: str = "", seconds: float = 0.0) -> None:
        """Request the constraint of one sequence.

        ignore_ends: allow end ids only where nothing else is allowed; key: name of the API key, "" for none; seconds:
        CPU time that the frontend measured for the grammar.
        """

    def cancel(self, seq_id: int) -> None:
        """Withdraw the request of a sequence. Idempotent."""

    def take_finished(self) -> list[tuple[int, Constraint | RequestError]]:
        """Return the results since the last call, without blocking.

        A result is a constraint, or the error with which the request ends.

        Called only while a sequence waits for a constraint, or the compiler is busy.
        """

    def close(self) -> None:
        """Start no more compilations.

        Those in progress run to their end in the background.
        """


class LoadResult(Struct, frozen=True):
    """The end of one piece of work of a loader."""

    version: int
    slot: int
    """Slot that holds the adapter now; 0: it was read."""
    rank: int
    problem: str = ""
    """Reason of a failure; empty: it succeeded."""


class AdapterLoader(Protocol):
    """Reads adapters and copies them to the device, outside the loop's thread.

    The methods return at once; work is done in their order.
    """

    def read(self, version: int, path: str, root: str) -> None:
        """Read and check the files of a new version. root: folder that they have to be in; "": any."""

    def place(self, version: int, path: str, slot: int) -> None:
        """Copy an adapter that was read into a slot that no step in flight uses."""

    def drop(self, version: int) -> None:
        """Forget an adapter."""

    def take_results(self) -> list[LoadResult]:
        """Return the results since the last call, one for each `read` and `place`."""


RunningMode = Literal["wait", "abort", "restart", "keep"]
"""Effect of new weights on running sequences: wait lets them end before; abort ends them in an error, when the change
begins; restart computes all their tokens again; keep continues with their KV, which they share no more."""


class WeightChange(Protocol):
    """Replacement of the model's weights."""

    running: RunningMode
    """Effect on running sequences; read when the change is applied."""
    deadline: float
    """Time on the loop's clock, in seconds, after which the change is cancelled if it could not be applied."""

    def apply(self) -> str | None:
        """Replace tensors in their storage, and run the callbacks of those that derive others from them.

        Called by the loop with nothing in flight; it may take long. Return the name of the version of the weights; None
        if they are incomplete until another change. Raises WeightsError.
        """

    def finish(self, problem: str) -> None:
        """Report the end of the change. problem: why it was not applied; "" if it was."""


UpdateCommand = InitWeightTransfer | StartWeightUpdate | UpdateWeights | FinishWeightUpdate
"""Calls of a trainer that sends weights."""


class WeightUpdates(Protocol):
    """Updates of the weights by a trainer."""

    @property
    def is_receiving(self) -> bool:
        """True if some tensors of an update were received, and it is not finished."""

    def call(self, command: UpdateCommand, running: RunningMode, reply: Callable[[str], None]) -> None:
        """Carry out a call of a trainer, now or later.

        running: effect on running sequences; reply: answers the call, with its problem or "".
        """

    def refuse(self, command: UpdateCommand, problem: str) -> str:
        """Return the text of the refusal of a call, which may close the group."""

    def advance(self) -> None:
        """Continue the calls that wait for the trainer. Never blocks."""

    def abandon(self) -> None:
        """Abandon the update in progress, if any: what was received is never used."""


class CheckpointStager(Protocol):
    """Checks and reads checkpoints outside the loop, one at a time."""

    def start(self, path: str, root: str = "") -> None:
        """Begin with a checkpoint. root: folder below which its files must lie, with all links followed; "": any."""

    def cancel(self) -> None:
        """End the work in progress, if there is some."""

    def release(self) -> None:
        """Give up what is kept of a checkpoint that is no longer staged. Idempotent."""

    def progress(self) -> int:
        """Return the percentage that was read."""

    def result(self) -> str | None:
        """Return None while the work is in progress, then "" or why the checkpoint cannot be used."""


class DeviceTimes(Struct):
    """Device time over a sample of steps, in seconds.

    Zeros where a device cannot measure it.
    """

    busy: float = 0.0
    """Time from the first to the last work of the timed steps, without waits for masks."""
    idle: float = 0.0
    """Time of those waits, and between the timed steps and the ones that followed them."""
    steps: int = 0
    """Number of timed steps."""


class Runtime(Protocol):
    """The device, as the engine's loop uses it.

    `launch` and `sample` enqueue work and return; only `collect` waits, for the results of one step.

    A slot takes one step through launch, sample and collect, in this order, before it takes the next.
    """

    def needs_exact_positions(self, plan: StepPlan) -> bool:
        """Return True if the launch of a step needs the exact position of each row on the host.

        It then has to wait until the steps with drafts before it are committed, when `StepPlan.max_lead` is 0.
        """

    def stage(self, slot: int, plan: StepPlan) -> None:
        """Prepare the launch of a step on the host. Without this call `launch` does it.

        The launch must be the next into this slot. Steps before it may be sampled in between.
        """

    def launch(self, slot: int, plan: StepPlan) -> None:
        """Enqueue the forward pass of a step.

        Raises DeviceMemoryError if the device has too little memory for the step: the slot is free again, and the same
        positions may be planned again. Any other exception is fatal.
        """

    def sample(self, slot: int, masks: MaskedRows | None) -> None:
        """Enqueue sampling of the launched step, and the copy of its tokens to the host.

        masks: constrained rows of a step that `needs_mask`, without rows whose token is no longer needed; None for
        other steps. A row whose mask allows nothing yields id 0, one without usable logits NO_TOKEN, and a constrained
        row without a mask any id.
        """

    def arriving_tokens(self, slot: int, masks: MaskedRows) -> ArrivingTokens:
        """Return the memory to which the tokens of these rows of the sampled step are written."""

    def prefetch_masks(self, slot: int, masks: MaskedRows) -> None:
        """Start computing the masks that sampling of the launched step will probably need.

        Worker processes start once the arriving tokens are accepted. Sampling may need fewer masks.
        """

    def collect(self, slot: int) -> StepResult:
        """Wait for the results of the slot's step and return them.

        The slot is then free for the next launch.

        The result holds log-probabilities if the plan asks for them (`StepPlan.logprobs`).
        """

    def synchronize(self) -> None:
        """Wait until nothing is in flight.

        Never called on the launch path (I7).
        """

    def device_times(self) -> DeviceTimes:
        """Return how long the device has worked and waited over timed steps."""


class SleepMemory(Protocol):
    """Memory of the device that an engine releases while it sleeps. Called with nothing in flight."""

    @property
    def has_folder(self) -> bool:
        """True if `reload` finds the weights in a folder; those of a trainer are in none."""

    def release(self, tags: Collection[SleepTag], keep_weights: bool) -> int:
        """Release memory; return its bytes.

        keep_weights: copy the weights to the host. Raises SleepError; then nothing is released.
        """

    def restore(self, tags: Collection[SleepTag]) -> None:
        """Take released memory again, with the weights of the copy; without one their contents are undefined.

        The KV pool is empty. Raises SleepError; then nothing is restored.
        """

    def reload(self) -> bool:
        """Load the weights from the folder that they came from; return False if there is none. Raises SleepError."""


class Mailbox(Protocol):
    """The engine's end of the wire."""

    def drain(self) -> Iterator[tuple[bytes, AnyCommand]]:
        """Yield commands that have arrived, with their senders. Never blocks.

        One call yields a limited number; commands that the caller does not consume stay queued.
        """

    def wait(self, seconds: float) -> None:
        """Block until a command arrives, `wake` is called or the time is up."""

    def wake(self) -> None:
        """End the current wait, or the next one if the loop is not waiting.

        Called by other threads.
        """

    def reply(self, client: bytes, event: AnyEvent) -> None:
        """Send one event to a frontend at once; drop it if the frontend's queue is full."""

    def announce(self) -> None:
        """Send the next heartbeat at once, for stats that must not wait."""

    def add_tokens(self, client: bytes, delta: TokenDelta) -> None:
        """Add tokens to the next flush."""

    def add_start(self, client: bytes, started: Started) -> None:
        """Add the start of a request to the next flush.

        It is recorded at once in a file that survives the process.
        """

    def add_times(self, client: bytes, times: SequenceTimes) -> None:
        """Add the times of a traced sequence to the next flush."""

    def add_outcome(self, client: bytes, outcome: Finished | Failure) -> None:
        """Add a terminal event to the next flush."""

    def flush(self, step_id: int) -> dict[bytes, str]:
        """Send the added events, and keep the ones that cannot be sent yet.

        Return the frontends that are gone, each with the reason. Their output is dropped, including events added later.
        One that has disconnected is returned only once all that it sent was drained, which may be a `Goodbye`.
        """

    def await_sent(self) -> None:
        """Wait until the flushed messages have most probably left the process.

        It then survives the death of the process.
        """

    @property
    def has_backlog(self) -> bool:
        """True if a flush is due.

        The last flush kept output, or a frontend is gone or has disconnected.
        """
