"""Mailbox over lists instead of a socket."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator

from tandem.engine_core.contracts import TokenDelta
from tandem.protocol.commands import AnyCommand
from tandem.protocol.events import AnyEvent, Failure, Finished, SequenceTimes, Started, TokenLogits, TokenLogprobs


class FakeMailbox:
    """Fake of `contracts.Mailbox`: commands come from `inbox`, events collect in dictionaries by request.

    Tests may set `on_drain` to act before every tick, `on_flush` before every flush and `on_wait` when the loop sleeps.
    """

    def __init__(self) -> None:
        self.inbox: deque[tuple[bytes, AnyCommand]] = deque()
        self.replies: list[tuple[bytes, AnyEvent]] = []
        self.received: dict[tuple[bytes, int], list[int]] = defaultdict(list)
        self.logprobs: dict[tuple[bytes, int], list[TokenLogprobs]] = defaultdict(list)
        self.logits: dict[tuple[bytes, int], list[TokenLogits]] = defaultdict(list)
        self.drafts: dict[tuple[bytes, int], list[tuple[int, int, bool]]] = defaultdict(list)
        """Drafts, right ones, and whether they are from its prediction, for each request and step that verified some.
        """
        self.outcomes: dict[tuple[bytes, int], list[Finished | Failure]] = defaultdict(list)
        self.times: dict[tuple[bytes, int], list[SequenceTimes]] = defaultdict(list)
        self.cached: dict[tuple[bytes, int], int] = {}
        """Cached tokens of each request that was announced."""
        self.starts: dict[tuple[bytes, int], list[Started]] = defaultdict(list)
        """All announcements of each request."""
        self.announced: set[tuple[bytes, int]] = set()
        """Requests whose announcement was flushed."""
        self.gone: set[bytes] = set()
        self.stuck = False
        self.on_drain: Callable[[], None] = lambda: None
        self.on_flush: Callable[[], None] = lambda: None
        self.on_wait: Callable[[], None] = lambda: None
        self.on_await_sent: Callable[[], None] = lambda: None
        self.num_sent_waits = self.num_announced = 0
        self._pending: set[bytes] = set()

    @property
    def has_backlog(self) -> bool:
        return self.stuck

    def drain(self) -> Iterator[tuple[bytes, AnyCommand]]:
        self.on_drain()
        while self.inbox:
            yield self.inbox.popleft()

    def wait(self, seconds: float) -> None:
        assert seconds > 0
        self.on_wait()

    def wake(self) -> None:
        return None

    def reply(self, client: bytes, event: AnyEvent) -> None:
        self.replies.append((client, event))

    def announce(self) -> None:
        self.num_announced += 1

    def add_tokens(self, client: bytes, delta: TokenDelta) -> None:
        for request_id, token in zip(delta.request_ids, delta.tokens, strict=True):
            assert (client, request_id) not in self.outcomes, f"a token for {request_id} after its terminal event"
            self.received[client, request_id].append(token)
        for part in delta.logprobs:
            key = client, part.request_id
            assert key not in self.outcomes, f"log-probabilities for {part.request_id} after its terminal event"
            self.logprobs[key].append(part)
        for rows in delta.logits:
            assert (client, rows.request_id) not in self.outcomes, f"logits for {rows.request_id} after its end"
            self.logits[client, rows.request_id].append(rows)
        columns = (delta.drafted, delta.drafts[::3], delta.drafts[1::3], delta.drafts[2::3])
        for request_id, drafted, accepted, source in zip(*columns, strict=True):
            assert (client, request_id) not in self.outcomes, f"drafts for {request_id} after its terminal event"
            self.drafts[client, request_id].append((drafted, accepted, source > 0))
        self._pending.add(client)

    def add_start(self, client: bytes, started: Started) -> None:
        known = len(self.received.get((client, started.request_id), ()))
        assert known <= started.generated or not known, f"{started} comes after {known} tokens"
        assert not known or started.weight_version, f"{started} comes after the first token"
        self.starts[client, started.request_id].append(started)
        self.cached[client, started.request_id] = started.cached_tokens
        self._pending.add(client)

    def add_times(self, client: bytes, times: SequenceTimes) -> None:
        self.times[client, times.request_id].append(times)
        self._pending.add(client)

    def add_outcome(self, client: bytes, outcome: Finished | Failure) -> None:
        self.outcomes[client, outcome.request_id].append(outcome)
        self._pending.add(client)

    def await_sent(self) -> None:
        assert not self._pending, "flush before"
        self.num_sent_waits += 1
        self.on_await_sent()

    def flush(self, step_id: int) -> dict[bytes, str]:
        assert step_id >= 0
        self.on_flush()
        self.announced.update(self.cached)
        lost = dict.fromkeys(sorted(self._pending & self.gone), "it has disconnected")
        self._pending.clear()
        return lost
