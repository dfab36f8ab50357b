"""Results of offline inference, under the names of vLLM's `RequestOutput`."""

from collections.abc import Sequence

from msgspec import Struct

from tandem.frontend.api.logprobs import keep_best
from tandem.frontend.chat.message import Content, MessageDelta, Reasoning, ToolCall, join_deltas
from tandem.frontend.chat.message_parser import MessageParser, MessageShape
from tandem.frontend.engine.streams import DraftCounts
from tandem.frontend.errors import ApiError
from tandem.frontend.generation.admission import Admitted
from tandem.frontend.generation.choice import ChoiceDelta
from tandem.frontend.generation.scored_tokens import ScoredToken
from tandem.frontend.generation.usage import Usage


class EngineError(Exception):
    """The engine process failed to start, is not ready in time, or has exited."""


class RequestError(Exception):
    """A prompt or conversation was refused or failed.

    `index` is its position in the batch.
    """

    def __init__(self, index: int, error: ApiError) -> None:
        super().__init__(f"request {index}: {error.message}")
        self.index = index
        self.message = error.message
        self.param = error.param
        self.code = error.code


class Logprob(Struct, frozen=True):
    """Log-probability of a token at a position."""

    logprob: float
    rank: int | None
    """Rank, 1 for the most probable token; None for a generated token outside of the alternatives."""
    decoded_token: str
    """Text of the token; bytes that are not valid UTF-8 on their own are U+FFFD."""


Position = dict[int, Logprob]
"""Log-probabilities at a position: of the sampled or prompt token, and of the most probable ones."""


class Output(Struct, frozen=True):
    """Choice of a result."""

    text: str
    """Text of the choice; for a chat, the content of the message."""
    token_ids: list[int]
    """Sampled token ids, including the stop token."""
    finish_reason: str
    reasoning: str | None = None
    calls: Sequence[ToolCall] = ()
    """Tool calls of a chat."""
    index: int = 0
    logprobs: list[Position] | None = None
    """Log-probabilities of each token of the text, without the stop token; None unless requested."""
    cumulative_logprob: float | None = None
    """Sum of the log-probabilities of `token_ids`; None unless `logprobs` or `best_of` needed them."""


class Result(Struct, frozen=True):
    """Result of a prompt or a conversation."""

    prompt_token_ids: list[int]
    outputs: list[Output]
    """The `n` choices; empty if the request failed."""
    usage: Usage
    prompt: str | None = None
    """Text of the prompt; None for a prompt of token ids."""
    prompt_logprobs: list[Position | None] | None = None
    """Log-probabilities of each token of the prompt, None for the first; None unless requested."""
    error: RequestError | None = None
    """Reason of a refusal or failure; None on success."""
    drafted_tokens: int = 0
    """Number of drafts that were verified for the choices."""
    accepted_tokens: int = 0
    """Number of drafts that were accepted. Each saves one step."""

    @property
    def text(self) -> str:
        """Text of the first choice.

        Raises RequestError if the request failed.
        """
        if self.error is not None:
            raise self.error
        return self.outputs[0].text


class OutputDelta(Struct, frozen=True):
    """Text and tokens added to a choice of a stream."""

    index: int
    """Index of the choice."""
    text: str
    """Text added to the choice; for a chat, to the content of the message."""
    token_ids: list[int]
    finish_reason: str | None = None
    """Finish reason, in the last delta of the choice; None before."""
    reasoning: str | None = None
    calls: Sequence[ToolCall] = ()
    """Complete tool calls of a chat, in the last delta of the choice."""
    logprobs: list[Position] | None = None
    """Log-probabilities of the tokens of `text`; None unless requested."""


class Verification(Struct, frozen=True):
    """Result of `verify` for a prompt and its continuation."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    """Token ids of the continuation."""
    logprobs: list[Position]
    """Log-probabilities of each token of the continuation."""
    usage: Usage
    """Number of tokens of both, and how many of them had cached KV."""
    logits: "memoryview[float] | None" = None
    """float32 [1 + tokens, vocab_size], such as for `numpy.asarray`: row i is the distribution of token i of the
    continuation, the last one that of the token after it. None unless requested."""
    error: RequestError | None = None
    """Reason of a refusal or failure; None on success."""

    @property
    def cumulative_logprob(self) -> float:
        """Sum of the log-probabilities of the continuation's tokens.

        Raises RequestError if the request failed.
        """
        if self.error is not None:
            raise self.error
        return sum([at[token].logprob for at, token in zip(self.logprobs, self.token_ids, strict=True)])


def failed_result(error: RequestError, item: object) -> Result:
    """Build the result of a request without output. item: its prompt or conversation."""
    return Result([], [], Usage(0, 0, 0), item if isinstance(item, str) else None, error=error)


def failed_verification(error: RequestError) -> Verification:
    """Build the result of a prompt and a continuation that were not verified."""
    return Verification([], [], [], Usage(0, 0, 0), error=error)


def verification(ids: Sequence[int], choice: ChoiceDelta, usage: Usage, logits: bytearray) -> Verification:
    """Build the result of a prompt and a continuation.

    ids: of both; choice: the log-probabilities of the continuation follow that of the token before it; logits: packed
    float32 of each token and the one after, empty without.
    """
    scored = choice.logprobs[1:]
    first = len(ids) - len(scored)
    rows = memoryview(logits).cast("f", [1 + len(scored), len(logits) // 4 // (1 + len(scored))]) if logits else None
    return Verification(list(ids[:first]), list(ids[first:]), [_position(token) for token in scored], usage, rows)


class ResultBuilder:
    """Build the result of a request from its choices.

    shape: how the choices of a chat are parsed; None for a completion. with_logprobs: whether outputs have
    log-probabilities, regardless of the prompt.
    """

    def __init__(self, admitted: Admitted, prompt: str | None, shape: MessageShape | None, with_logprobs: bool) -> None:
        self.admitted = admitted
        self._prompt = prompt
        self._shape = shape
        self._with_logprobs = with_logprobs

    def new_parser(self) -> MessageParser | None:
        """Create the parser of one choice of a chat."""
        return None if self._shape is None else self._shape.new_parser()

    def result(self, choices: Sequence[ChoiceDelta], usage: Usage, drafts: DraftCounts) -> Result:
        """Build the result from complete choices; with `best_of` only the best are kept."""
        options, ids = self.admitted.options, self.admitted.prompts[0].ids
        prompt_logprobs: list[Position | None] | None = None
        if options.prompt_logprobs is not None:
            scored = choices[0].logprobs[: len(ids)]
            prompt_logprobs = [None if token.logprob is None else _position(token) for token in scored]
        if options.num_returned is not None:
            choices = keep_best(choices, options.n, options.num_returned)
        outputs = [self._output(index, choice) for index, choice in enumerate(choices)]
        return Result(
            ids,
            outputs,
            usage,
            self._prompt,
            prompt_logprobs,
            drafted_tokens=drafts.drafted,
            accepted_tokens=drafts.accepted,
        )

    def output_logprobs(self, scored: Sequence[ScoredToken]) -> list[Position] | None:
        """Format the log-probabilities of output tokens.

        None unless they were requested.

        """
        return [_position(token) for token in scored] if self._with_logprobs else None

    def _output(self, index: int, choice: ChoiceDelta) -> Output:
        mean, ids = choice.mean_logprob, list(choice.token_ids)
        echoed = len(self.admitted.prompts[0].ids) if self.admitted.options.prompt_logprobs is not None else 0
        logprobs = self.output_logprobs(choice.logprobs[echoed:])
        cumulative = None if mean is None else mean * len(ids)
        reason, parser = choice.finish_reason or "", self.new_parser()
        if parser is None:
            return Output(choice.text, ids, reason, index=index, logprobs=logprobs, cumulative_logprob=cumulative)
        message = join_deltas(parser.push(choice))
        return Output(
            message.content or "",
            ids,
            parser.finish_reason(reason),
            message.reasoning,
            message.calls,
            index,
            logprobs,
            cumulative,
        )


def _position(token: ScoredToken) -> Position:
    """Format a position, with its own token first."""
    ids = list(token.alternative_ids)
    own = Logprob(token.logprob or 0.0, token.rank, _text(token.token))
    found = {token.token_id: own}
    for number, (token_id, (other, logprob)) in enumerate(zip(ids, token.alternatives, strict=True), 1):
        found.setdefault(token_id, Logprob(logprob, number, _text(other)))
    return found


def _text(token: bytes) -> str:
    return token.decode(errors="replace")


class ChoiceStream:
    """Convert the deltas of a choice to `OutputDelta`.

    Tool calls of a chat are held back until the end, when their arguments are complete.
    """

    def __init__(self, builder: ResultBuilder) -> None:
        self._builder = builder
        self._parser = builder.new_parser()
        self._calls: list[MessageDelta] = []

    def push(self, piece: ChoiceDelta) -> OutputDelta:
        """Return the delta for the caller."""
        ids, logprobs = list(piece.token_ids), self._builder.output_logprobs(piece.logprobs)
        if self._parser is None:
            return OutputDelta(piece.index, piece.text, ids, piece.finish_reason, logprobs=logprobs)
        deltas = self._parser.push(piece)
        self._calls += [delta for delta in deltas if not isinstance(delta, Content | Reasoning)]
        text = "".join([delta.text for delta in deltas if isinstance(delta, Content)])
        reasoning = "".join([delta.text for delta in deltas if isinstance(delta, Reasoning)]) or None
        if piece.finish_reason is None:
            return OutputDelta(piece.index, text, ids, None, reasoning, logprobs=logprobs)
        reason = self._parser.finish_reason(piece.finish_reason)
        return OutputDelta(piece.index, text, ids, reason, reasoning, join_deltas(self._calls).calls, logprobs)
