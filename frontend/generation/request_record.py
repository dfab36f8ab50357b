"""Figures of an HTTP request, for access log, metrics and traces."""

from collections.abc import Sequence

from msgspec import Struct, field

from tandem.frontend.access.api_key import ApiKey
from tandem.frontend.engine.streams import DraftCounts, TokenStream
from tandem.frontend.generation.admission import Admitted
from tandem.frontend.generation.stage import Attempt, Stage, TracedSequence
from tandem.frontend.generation.usage import Usage
from tandem.protocol.commands import KeyClaim
from tandem.protocol.events import Ready


class RequestRecord(Struct):
    """Figures of an HTTP request.

    The outermost middleware creates it and reads it at the end; other code sets the figures in between. Times are in
    seconds of the monotonic clock.
    """

    arrived: float
    """Time at which all headers had arrived."""
    request_id: str = ""
    """Id of the HTTP request, in the response and in the engine."""
    key: ApiKey | None = None
    """API key of the request; None on a server without keys."""
    claim: KeyClaim | None = None
    """Name and limits of the key, as sent to the engine with each sequence."""
    stages: list[Stage] = field(default_factory=list)
    """Stages before the engine, in order."""
    model: str = ""
    """Model name in the request; "" for a request that does not generate or was refused."""
    num_choices: int = 0
    """Number of sequences, over all prompts."""
    max_tokens: int = 0
    """Maximum number of tokens of a sequence."""
    is_streamed: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    output_tokens: int = 0
    """Generated tokens of all sequences."""
    drafted_tokens: int = 0
    """Drafts that the engine verified for them."""
    accepted_tokens: int = 0
    """Drafts that were accepted."""
    submitted_at: float | None = None
    """Time at which its sequences were first sent to an engine."""
    first_token_at: float | None = None
    """Time of the first token of any sequence, from any engine."""
    decoding_since: float | None = None
    """Time of the first token from the last engine."""
    last_token_at: float | None = None
    finish_reasons: list[str] = field(default_factory=list)
    """Finish reason of each sequence that ended without an error, in order of their ends."""
    num_attempts: int = 0
    """Number of times that it was sent to an engine."""
    is_traced: bool = False
    """True to have the engine report the times of its sequences."""
    attempts: list[Attempt] = field(default_factory=list)
    """Each attempt on an engine, if it is traced."""
    admitted: Admitted | None = None
    """The admitted request."""
    error: str = ""
    """Error code of the response, or of a stream that failed after status 200; "" if there is none."""
    refusal: str = ""
    """Limit of this frontend that the request exceeded, as a label of the metrics."""
    status: int = 0
    """Status of the response; 0 before it."""
    is_answered: bool = False
    """True once the last byte of the response was written to an open connection."""
    ended_at: float | None = None

    @property
    def end(self) -> str:
        """Outcome: complete, error or disconnect.

        It is "error" for an error response or a broken stream, and "disconnect" if the client left before the end.
        """
        if not self.is_answered:
            return "disconnect"
        return "error" if self.error or self.status >= 400 else "complete"

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from its arrival to its first token.

        The token may come from a lost engine. This is the minimum over the choices, while the histogram counts
        each of them; None without any token.
        """
        return None if self.first_token_at is None else self.first_token_at - self.arrived

    @property
    def duration(self) -> float | None:
        """Seconds from its arrival to the end of the response; None before that."""
        return None if self.ended_at is None else self.ended_at - self.arrived

    @property
    def decoding(self) -> float:
        """Seconds from the first token to the last; 0 without any.

        Both come from the last engine.
        """
        first, last = self.decoding_since, self.last_token_at
        return 0.0 if first is None or last is None else last - first

    def begin_attempt(self, now: float, engine: Ready | None) -> None:
        """Start an attempt on an engine.

        Output of a lost engine counts only for the time to first token.
        """
        if self.is_traced:
            self.attempts.append(Attempt(now, 0 if engine is None else engine.engine_epoch))
        self.num_attempts += 1
        if self.submitted_at is None:
            self.submitted_at = now
        self.decoding_since = self.last_token_at = None
        self.finish_reasons.clear()

    def tokens_arrived(self, now: float) -> None:
        """Record the time of tokens of any sequence."""
        if self.decoding_since is None:
            self.decoding_since = now
            if self.first_token_at is None:
                self.first_token_at = now
        self.last_token_at = now

    def end_attempt(self, now: float, streams: Sequence[TokenStream]) -> None:
        """Record the trace of an attempt that has ended. Idempotent."""
        if self.attempts and self.attempts[-1].ended is None:
            self.attempts[-1].ended = now
            sequences = [TracedSequence(stream.choice, stream.times, stream.cached_tokens) for stream in streams]
            self.attempts[-1].sequences = sequences

    def describe(self, admitted: Admitted, usage: Usage, drafts: DraftCounts) -> None:
        """Set the figures of a request that was sent to the engine."""
        self.admitted, self.model = admitted, admitted.model.name
        self.stages += admitted.stages
        self.num_choices = admitted.num_choices
        self.max_tokens = max(prompt.max_tokens for prompt in admitted.prompts)
        self.is_streamed = admitted.options.stream
        self.prompt_tokens, self.output_tokens = usage.prompt_tokens, usage.completion_tokens
        self.cached_tokens = usage.prompt_tokens_details.cached_tokens
        self.drafted_tokens, self.accepted_tokens = drafts.drafted, drafts.accepted
