"""Texts that a model with one tool may answer, and the shape in which they are parsed."""

from tandem.frontend.chat.message_parser import MessageShape
from tandem.frontend.chat.tool_formats import FORMATS
from tandem.frontend.grammar.grammar import ThinkingMode
from tandem.frontend.request.tools import Tool, ToolChoice, ToolUse

USE = ToolUse((Tool("look", None, False, {}),), ToolChoice("auto"))
SHAPE = MessageShape(USE, FORMATS["hermes"], thinking=ThinkingMode.OPTIONAL, think_end_id=8)
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
