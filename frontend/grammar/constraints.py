"""What a request's output is held to: found in its fields, checked, and handed on for the engine to compile."""

from collections.abc import Mapping
from enum import Enum

from tandem.frontend.grammar.checker import GrammarChecker
from tandem.frontend.grammar.grammar import Grammar, output_grammar
from tandem.frontend.grammar.tool_calls import CallSyntax, tool_grammar
from tandem.frontend.request.options import GenerationOptions
from tandem.frontend.request.tools import ToolUse
from tandem.frontend.workers import Workers


class Thoughts(Enum):
    """Whether an output begins with thoughts, which no grammar holds."""

    NONE = "none"
    POSSIBLE = "possible"
    OPEN = "open"
    """The prompt has begun them."""


class Constraints:
    """Makes grammars of requests. `special` has the tokenizer's special tokens by their text."""

    def __init__(self, checker: GrammarChecker, workers: Workers, special: Mapping[str, int]) -> None:
        self._checker = checker
        self._workers = workers
        self._special = special

    async def of(
        self,
        options: GenerationOptions,
        use: ToolUse | None = None,
        syntax: CallSyntax | None = None,
        thoughts: Thoughts = Thoughts.NONE,
    ) -> str | None:
        """The grammar for the engine, or None for free text. Raises ApiError 400 naming the place of what is wrong,
        422 for what cannot be combined, 503 where grammars of others are still being compiled.

        `syntax` is how the model writes calls of `use`; without one, calls are not held to anything.
        """
        if not self._wanted(options, use):
            return None
        # A schema may have thousands of parts to look at.
        grammar = await self._workers.run(self._grammar, options, use, syntax)
        if grammar is None:
            return None
        await self._checker.check(grammar)
        if thoughts is Thoughts.NONE:
            return grammar.text
        return grammar.after_thoughts(thoughts is Thoughts.OPEN, self._special)

    def _wanted(self, options: GenerationOptions, use: ToolUse | None) -> bool:
        sources = (options.response_format, options.regex, options.grammar)
        return (
            any(source is not None for source in sources)
            or bool(options.choice)
            or (use is not None and use.active and bool(use.tools))
        )

    def _grammar(self, options: GenerationOptions, use: ToolUse | None, syntax: CallSyntax | None) -> Grammar | None:
        content = output_grammar(options.response_format, options.regex, options.choice, options.grammar)
        if use is None or syntax is None:
            return content
        return tool_grammar(use, syntax, self._special, content)
