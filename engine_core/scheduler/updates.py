"""Updates of requests on their way from the scheduler to the frontends."""

from msgspec import Struct, field

from tandem.engine_core.contracts import TokenDelta
from tandem.engine_core.sequence import Sequence
from tandem.protocol.events import Started


class SchedulerUpdates(Struct):
    """Starts, tokens and ends since the updates were taken last.

    Frontends have to learn all of them.
    """

    started: list[tuple[bytes, Started]] = field(default_factory=list)
    """Frontend and start of each request whose first token is on its way, if part of its prompt was cached."""
    deltas: dict[bytes, TokenDelta] = field(default_factory=dict)
    """New tokens by frontend."""
    ended: list[Sequence] = field(default_factory=list)
    """Sequences that got their outcome, each exactly once (I8)."""
    num_zombies: int = 0
    """Rows of committed steps whose sequence had already ended."""

    @property
    def num_tokens(self) -> int:
        """Number of new tokens over all frontends."""
        return sum([len(delta.tokens) for delta in self.deltas.values()])

    def delta(self, client: bytes) -> TokenDelta:
        """Return the delta that collects a frontend's tokens."""
        return self.deltas.setdefault(client, TokenDelta([], []))
