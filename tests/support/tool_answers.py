"""Texts that a model with one tool may answer, and the shape in which they are parsed."""

from tandem.frontend.chat.message_parser import MessageShape
from tandem.frontend.chat.tool_formats import FORMATS
from tandem.frontend.generation.output_tags import OutputTags, TagToken
from tandem.frontend.grammar.grammar import ThinkingMode
from tandem.frontend.request.tools import Tool, ToolChoice, ToolUse

USE = ToolUse((Tool("look", None, False, {}),), ToolChoice("auto"))
SHAPE = MessageShape(USE, FORMATS["hermes"], OutputTags(thinking=ThinkingMode.OPTIONAL))
"""Shape of a model without tokens for its tags."""
THINK_END = TagToken("</think>")
TOKEN_SHAPE = MessageShape(USE, FORMATS["hermes"], OutputTags({8: THINK_END}, ThinkingMode.OPTIONAL))
"""Shape of a model with a token for the tag that ends reasoning."""
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "köln"}}\n</tool_call>'
TEXTS = [
    "plain text",
    "",
    "<think>hm",
    "<think>\n\n</think>\n\nno thoughts",
    f"<think>what\nto do</think>\n\nI look.\n{CALL}\n{CALL}",
    f"{CALL} and then more text",
    f"one\n{CALL[:-40]}",
    f"one\n{CALL[:-17]}",
]
"""Plain, thinking, calling, and cut within a call."""
