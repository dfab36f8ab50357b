"""Loads W1, W2 and W3 of a matrix, with all lengths divided by a scale."""

from dataclasses import dataclass

from tandem.frontend.cli.bench.workloads import Load, Span, Workload

PROMPT_IDS = Span(100, 1000)
MAX_LEN, LONG_PROMPT = 4096, 8192
"""Maximum sequence length of a matrix, and length of the long prompts, in tokens."""


@dataclass(frozen=True)
class Scenario:
    """Load of a matrix.

    Its prompts begin with `shared` tokens that all prompts of a trial have in common.
    """

    name: str
    says: str
    streams: int
    requests: int
    """Number of requests per stream."""
    input_len: Span
    output_len: Span
    shared: int = 0
    priorities: tuple[int, ...] = (0,)
    """Priorities that the requests take in turn, by their index."""

    def load(self, trial: int) -> Load:
        """Make the load of a trial.

        Each trial has its own label, so that its prompts are new to the server.
        """
        return Load(f"{self.name} {trial}", self.streams, requests=self.requests)

    def workload(self, seed: int, trial: int) -> Workload:
        """Make the workload of a trial, which determines the shared prefix.

        The second of two loads with the same prefix finds it in the cache.
        """
        label = f"trial {trial}"
        return Workload(seed, self.input_len, self.output_len, PROMPT_IDS, self.shared, label, self.priorities)


def scenarios(scale: int, streams: int = 16, requests: int = 3) -> tuple[Scenario, ...]:
    """Return the loads W1, W2 and W3, the last one cold and warm.

    Cold, the server has not seen the shared prompt; warm, it has. Both forms of W3 are one request per stream, all at
    once, so that only the server's cache differs.
    """

    def span(low: int, high: int | None = None) -> Span:
        return Span(max(1, low // scale), max(1, (high or low) // scale))

    shared = 1024 // scale
    own, said = span(64), span(64)
    chats = f"{streams} at once, {shared} shared and {own} own in, {said} out"
    sizes = f"{streams} streams of {requests}"
    mixed = f"{sizes}, {span(32, 1024)} in, {span(64, 256)} out"
    return (
        Scenario("W1", f"{sizes}, {span(256)} in, {span(256)} out", streams, requests, span(256), span(256)),
        Scenario("W2", mixed, streams, requests, span(32, 1024), span(64, 256)),
        Scenario("W3 cold", f"{chats}, the shared part new", streams, 1, own, said, shared),
        Scenario("W3 warm", f"{chats}, the shared part seen before", streams, 1, own, said, shared),
    )
