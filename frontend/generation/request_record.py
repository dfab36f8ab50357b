"""Figures of one HTTP request, for its access line, the metrics and its trace."""

from collections.abc import Sequence

from msgspec import Struct, field

from tandem.frontend.access.api_key import ApiKey
from tandem.frontend.engine.streams import TokenStream
from tandem.frontend.generation.admission import Admitted
from tandem.frontend.generation.stage import Attempt, Stage, TracedSequence
from tandem.frontend.generation.usage import Usage
from tandem.protocol.commands import KeyClaim
from tandem.protocol.events import Ready


class RequestRecord(Struct):
    """Figures of one HTTP request.

    The outermost middleware creates it, whoever learns a figure sets it, and the middleware reads it at the end. Times
    are those of the monotonic clock, in seconds.
    """

    arrived: float
    """Time at which the headers had arrived."""
    request_id: str = ""
    """Id of the HTTP request, in its answer and in the engine."""
    key: ApiKey | None = None
    """API key of the request; None on a server without keys."""
    claim: KeyClaim | None = None
    """Name and limits of the key, as the engine gets them with each sequence."""
    stages: list[Stage] = field(default_factory=list)
    """Stages of its work before the engine had it, in their order."""
    model: str = ""
    """Name of the model, as the request gave it; "" for a request that generates nothing, or was refused."""
    num_choices: int = 0
    """Number of sequences that it was admitted with, of all its prompts."""
    max_tokens: int = 0
    """Largest number of tokens that one of its sequences may have."""
    is_streamed: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    output_tokens: int = 0
    """Generated tokens of all its sequences."""
    submitted_at: float | None = None
    """Time at which its sequences were first sent to an engine."""
    first_token_at: float | None = None
    """Time at which this frontend had the first token of any of its sequences, from whichever engine."""
    decoding_since: float | None = None
    """Time of the first token from the engine that it was last sent to."""
    last_token_at: float | None = None
    finish_reasons: list[str] = field(default_factory=list)
    """Reason for the end of each sequence that ended without an error, in the order of their ends."""
    num_attempts: int = 0
    """Times that it was sent to an engine."""
    is_traced: bool = False
    """True if the engine is to tell the times of its sequences."""
    attempts: list[Attempt] = field(default_factory=list)
    """Each time that it was sent to an engine, if it is traced."""
    admitted: Admitted | None = None
    """The request as the engine got it."""
    error: str = ""
    """Code of the error that answered it, or that ended its stream after the status 200; "" for none."""
    refusal: str = ""
    """Limit of this frontend that it exceeded, if it was refused for that, as a label of the metrics."""
    status: int = 0
    """Status of the answer; 0 while there is none."""
    is_answered: bool = False
    """True once the last byte of the answer was given to a connection that was still open."""
    ended_at: float | None = None

    @property
    def end(self) -> str:
        """The way it ended: complete, error or disconnect.

        It is an error if the answer is one, or if the stream broke; disconnect if the client left before the end.
        """
        if not self.is_answered:
            return "disconnect"
        return "error" if self.error or self.status >= 400 else "complete"

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from its arrival to its first token.

        The token may be one of an engine that was lost. The histogram of the metrics has this time of each choice, and
        this is the smallest of them; None without any token.
        """
        return None if self.first_token_at is None else self.first_token_at - self.arrived

    @property
    def duration(self) -> float | None:
        """Seconds from its arrival to the end of its answer; None before that."""
        return None if self.ended_at is None else self.ended_at - self.arrived

    @property
    def decoding(self) -> float:
        """Seconds from the first token to the last; 0 without any.

        Both are of the engine that answered.
        """
        first, last = self.decoding_since, self.last_token_at
        return 0.0 if first is None or last is None else last - first

    def begin_attempt(self, now: float, engine: Ready | None) -> None:
        """Begin anew at an engine.

        What a lost one generated counts only for the time to the first token.
        """
        if self.is_traced:
            self.attempts.append(Attempt(now, 0 if engine is None else engine.engine_epoch))
        self.num_attempts += 1
        if self.submitted_at is None:
            self.submitted_at = now
        self.decoding_since = self.last_token_at = None
        self.finish_reasons.clear()

    def tokens_arrived(self, now: float) -> None:
        """Record the time of tokens of any of its sequences."""
        if self.decoding_since is None:
            self.decoding_since = now
            if self.first_token_at is None:
                self.first_token_at = now
        self.last_token_at = now

    def end_attempt(self, now: float, streams: Sequence[TokenStream]) -> None:
        """Record what a trace tells of an attempt that has ended. Idempotent."""
        if self.attempts and self.attempts[-1].ended is None:
            self.attempts[-1].ended = now
            told = [TracedSequence(stream.choice, stream.times, stream.cached_tokens) for stream in streams]
            self.attempts[-1].sequences = told

    def describe(self, admitted: Admitted, usage: Usage) -> None:
        """Set what is known of a request that the engine has served, or was to serve."""
        self.admitted, self.model = admitted, admitted.model.name
        self.stages += admitted.stages
        self.num_choices = admitted.num_choices
        self.max_tokens = max(prompt.max_tokens for prompt in admitted.prompts)
        self.is_streamed = admitted.options.stream
        self.prompt_tokens, self.output_tokens = usage.prompt_tokens, usage.completion_tokens
        self.cached_tokens = usage.prompt_tokens_details.cached_tokens
