"""The constraint of one sequence: a matcher of its grammar, where the sequence's tokens have led it."""

from llguidance import LLMatcher


class GrammarConstraint:
    """Implements `contracts.Constraint`."""

    __slots__ = ("_ends", "ignore_ends", "matcher", "prototype")

    def __init__(self, matcher: LLMatcher, prototype: "Prototype", ends: frozenset[int], ignore_ends: bool) -> None:
        """matcher: this constraint's alone, a copy of the prototype's; ends: the ids that llguidance allows where the
        grammar may end."""
        self.matcher = matcher
        self.prototype = prototype
        self.ignore_ends = ignore_ends
        self._ends = ends

    @property
    def complete(self) -> bool:
        return self.matcher.is_stopped()

    @property
    def problem(self) -> str:
        return reason(self.matcher)

    def is_end(self, token: int) -> bool:
        return token in self._ends

    def forced(self) -> list[int]:
        return self.matcher.compute_ff_tokens()


class Prototype:
    """A compiled grammar, from which every sequence that wants it gets a copy: microseconds, against milliseconds."""

    def __init__(self, matcher: LLMatcher, ends: frozenset[int]) -> None:
        self._matcher = matcher
        self._ends = ends

    def constraint(self, ignore_ends: bool) -> GrammarConstraint:
        return GrammarConstraint(self._matcher.deep_copy(), self, self._ends, ignore_ends)


def reason(matcher: LLMatcher) -> str:
    """Why a matcher is in its error state, without the parser's dump; empty if it is not."""
    return matcher.get_error().removesuffix("<non-verbose/>").strip()
