"""Records of requests.

Times are seconds of the machine's monotonic clock, which all its processes share.
"""

from msgspec import Struct, field


class Record(Struct):
    index: int
    asked: int
    """Number of tokens requested; a server that stops earlier has done less work than the others."""
    start: float = 0.0
    """Before the connection is taken, so that waiting for one counts."""
    lag: float = 0.0
    """Open loop: how late the client itself was, or how long the request waited for a slot in flight."""
    first: float | None = None
    """Arrival of the first chunk with output."""
    last: float | None = None
    """Arrival of the last chunk of the choice."""
    end: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    counted_by: str = ""
    """Source of `tokens`: usage, token_ids or chunks, in this order of preference."""
    gaps: list[float] = field(default_factory=list)
    error: str | None = None
    """Kind of failure, one of a few short texts; None for a complete response."""
    detail: str = ""
    priority: int = 0

    @property
    def ttft(self) -> float | None:
        return None if self.first is None else self.first - self.start

    @property
    def tpot(self) -> float | None:
        """Mean time of an output token after the first; a single token has none."""
        if self.first is None or self.last is None or self.tokens < 2:
            return None
        return (self.last - self.first) / (self.tokens - 1)

    @property
    def e2e(self) -> float:
        return self.end - self.start


class Share(Struct):
    """Results of one client process under one load."""

    records: list[Record]
    cpu_seconds: float
