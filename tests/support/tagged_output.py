"""Outputs of models with tags, decoded and parsed as a chat's are, in any chunks of tokens."""

from collections.abc import Sequence

import tokenizers
from msgspec import Struct
from tokenizers import AddedToken

from tandem.frontend.chat.message import Message, MessageDelta, join_deltas
from tandem.frontend.chat.message_parser import MessageShape
from tandem.frontend.chat.tool_formats import ALL_TAGS, FORMATS
from tandem.frontend.engine.streams import Terminal
from tandem.frontend.generation.choice import Choice
from tandem.frontend.generation.output_tags import OutputTags
from tandem.frontend.generation.stop_strings import StopMatcher
from tandem.frontend.generation.tokenizer import Tokenizer
from tandem.frontend.grammar.grammar import THINK_TAGS, ThinkingMode, ThinkTags
from tandem.frontend.request.tools import Tool, ToolChoice, ToolUse
from tandem.frontend.workers import Workers
from tandem.protocol.errors import FinishReason
from tandem.protocol.events import Finished
from tests.fakes.tokenizer import byte_level_tokenizer, sentence_piece_tokenizer

TOOLS = (Tool("look", None, False, {}), Tool("add", None, False, {}))


class Parsed(Struct):
    """What a client gets of one choice."""

    message: Message
    finish_reason: str
    text: str
    """The text before it is parsed."""
    num_tokens: int
    reasoning_tokens: int | None

    @property
    def calls(self) -> list[tuple[str, str]]:
        return [(call.name, call.arguments) for call in self.message.calls]


class TaggedModel:
    """A tokenizer with or without tokens for tags, and the parsing of its outputs."""

    def __init__(self, special: bool | None, sentence_piece: bool = False) -> None:
        """Make a tokenizer whose tags are special tokens, other added tokens, or with None no tokens."""
        raw: tokenizers.Tokenizer = sentence_piece_tokenizer() if sentence_piece else byte_level_tokenizer()
        if special is not None:
            raw.add_tokens([AddedToken(tag, special=special, normalized=False) for tag in ALL_TAGS])
        raw.add_tokens([AddedToken("<|other|>", special=True)])
        self.raw = raw
        self.tokenizer = Tokenizer(raw, "", Workers(1, "unused"))

    def ids(self, text: str) -> list[int]:
        """Encode a text; what stands between ¦ and ¦ is spelled with tokens of a byte."""
        ids: list[int] = []
        for index, part in enumerate(text.split("¦")):
            pieces = list(part) if index % 2 else [part]
            ids += [token for piece in pieces for token in self.raw.encode(piece, add_special_tokens=False).ids]
        return ids

    def shape(
        self,
        form: str | None = None,
        thinking: ThinkingMode = ThinkingMode.NONE,
        think: ThinkTags = THINK_TAGS,
        mode: str = "auto",
        skip_special: bool = True,
        parallel: bool = True,
    ) -> MessageShape:
        tool_format = None if form is None else FORMATS[form]
        texts = [
            *(tool_format.tags if tool_format else ()),
            *(think.texts if thinking is not ThinkingMode.NONE else ()),
        ]
        tags = OutputTags(self.tokenizer.tag_tokens(texts), thinking, think)
        use = ToolUse(TOOLS, ToolChoice(mode), parallel) if form else ToolUse()  # type: ignore[arg-type]
        return MessageShape(use, tool_format, tags, skip_special)

    def parse(
        self,
        shape: MessageShape,
        output: str | Sequence[int],
        sizes: Sequence[int] = (),
        stop: Sequence[str] = (),
        include_stop: bool = False,
        reason: FinishReason = FinishReason.STOP,
    ) -> Parsed:
        """Parse an output that arrives in chunks of `sizes` tokens, the rest at the end."""
        ids = self.ids(output) if isinstance(output, str) else list(output)
        matcher = StopMatcher(stop, shape.tags.think.end) if stop else None
        detokenizer = self.tokenizer.detokenizer(shape.drops_special, shape.tags.tokens)
        choice = Choice(0, detokenizer, matcher, 0, include_stop, None, shape.tags)
        parser = shape.new_parser()
        deltas: list[MessageDelta] = []
        text, at, finish = "", 0, None
        for size in (*sizes, len(ids)):
            chunk, at = ids[at : at + size], at + size
            end: Terminal | None = Finished(0, reason) if at >= len(ids) else None
            delta = choice.advance(chunk, end)
            text += delta.text
            deltas += parser.push(delta)
            if delta.finish_reason is not None:
                finish = parser.finish_reason(delta.finish_reason)
                break
        assert finish is not None
        return Parsed(join_deltas(deltas), finish, text, choice.num_tokens, parser.reasoning_tokens)
