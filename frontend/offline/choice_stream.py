"""Stream of one choice of offline inference."""

from tandem.frontend.chat.message import Content, MessageDelta, Reasoning, join_deltas
from tandem.frontend.generation.choice import ChoiceDelta
from tandem.frontend.offline.result import OutputDelta, ResultBuilder


class ChoiceStream:
    """Turn the pieces of one choice into what a caller sees.

    Tool calls of a chat are held back to its end, when their arguments are complete.
    """

    def __init__(self, builder: ResultBuilder) -> None:
        self._builder = builder
        self._parser = builder.new_parser()
        self._calls: list[MessageDelta] = []

    def push(self, piece: ChoiceDelta) -> OutputDelta:
        """Return what a piece adds to the choice."""
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
