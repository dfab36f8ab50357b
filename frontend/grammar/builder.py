"""Build the grammar of a request from its fields, and check it.

The check comes before the engine compiles the grammar.
"""

from collections.abc import Mapping

from msgspec import Struct

from tandem.frontend.grammar.checker import GrammarChecker
from tandem.frontend.grammar.grammar import Grammar, ThinkingMode, output_grammar
from tandem.frontend.grammar.tool_calls import CallSyntax, tool_grammar
from tandem.frontend.request.ignored_fields import IgnoredFields
from tandem.frontend.request.options import GenerationOptions
from tandem.frontend.request.tools import ToolUse
from tandem.frontend.workers import Workers


class Constraint(Struct, frozen=True):
    """Grammar of a request that has been checked."""

    text: str
    """llguidance text."""
    seconds: float
    """CPU time that the check took."""


class GrammarBuilder:
    """Build the grammars of requests.

    `special_tokens` maps the text of the tokenizer's special tokens to their id.
    """

    def __init__(self, checker: GrammarChecker, workers: Workers, special_tokens: Mapping[str, int]) -> None:
        self._checker = checker
        self._workers = workers
        self._special_tokens = special_tokens

    async def build(
        self,
        options: GenerationOptions,
        use: ToolUse | None = None,
        syntax: CallSyntax | None = None,
        thinking: ThinkingMode = ThinkingMode.NONE,
        ignored: IgnoredFields | None = None,
        client: str = "",
    ) -> Constraint | None:
        """Build the grammar for the engine, or return None for unconstrained output.

        `syntax` is the format in which the model writes the calls of `use`; without it, calls are not constrained.
        Keywords of schemas that cannot be enforced are recorded in `ignored`. `client` is the name of the API key.
        Raises ApiError 400 with the place of an error in a grammar, and for fields that cannot be combined, and 429
        while too many other grammars are being compiled.
        """
        if not self._is_constrained(options, use):
            return None
        # A schema may have thousands of subschemas to check.
        grammar = await self._workers.run(self._grammar, options, use, syntax, ignored or IgnoredFields())
        if grammar is None:
            return None
        seconds = await self._checker.check(grammar, client)
        if thinking is ThinkingMode.NONE:
            return Constraint(grammar.text, seconds)
        return Constraint(grammar.after_thinking(thinking is ThinkingMode.OPEN, self._special_tokens), seconds)

    def _is_constrained(self, options: GenerationOptions, use: ToolUse | None) -> bool:
        sources = (options.response_format, options.regex, options.grammar)
        return (
            any(source is not None for source in sources)
            or bool(options.choice)
            or (use is not None and use.active and bool(use.tools))
        )

    def _grammar(
        self, options: GenerationOptions, use: ToolUse | None, syntax: CallSyntax | None, ignored: IgnoredFields
    ) -> Grammar | None:
        content = output_grammar(options.response_format, options.regex, options.choice, options.grammar, ignored)
        if use is None or syntax is None:
            return content
        return tool_grammar(use, syntax, self._special_tokens, content)
