"""Token counts of a request."""

from collections.abc import Sequence

from msgspec import UNSET, Struct, UnsetType


class PromptDetails(Struct, frozen=True):
    """Prompt token details, as in OpenAI's API."""

    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache for the first choice of each prompt."""


class CompletionDetails(Struct, frozen=True):
    """Completion token details, as in OpenAI's API: drafts from the prediction of the request."""

    accepted_prediction_tokens: int
    """Number of these drafts that became part of the completion."""
    rejected_prediction_tokens: int
    """Number of those that did not. They are computed, and not counted as completion tokens."""


class WeightSpan(Struct, frozen=True):
    """Output tokens of a choice that one version of the weights computed."""

    choice: int
    version: str
    start: int
    """Index of the first of them."""
    end: int
    """One past the index of the last."""


def weight_spans(choice: int, versions: Sequence[tuple[str, int]], num_tokens: int) -> list[WeightSpan]:
    """Return the spans of a choice that have tokens.

    versions: each with the number of tokens before it; num_tokens: of the choice.
    """
    starts = [min(start, num_tokens) for _, start in versions]
    ends = [*starts[1:], num_tokens]
    spans = zip(versions, starts, ends, strict=True)
    return [WeightSpan(choice, name, start, end) for (name, _), start, end in spans if start < end]


def summarize(spans: list[WeightSpan], newest: str) -> tuple[str, list[WeightSpan] | UnsetType]:
    """Return the version of the last tokens, and the spans if they have several versions.

    Choices that begin before and after a change have different ones. newest: the version of a request without tokens.
    """
    has_several = len({span.version for span in spans}) > 1
    return spans[-1].version if spans else newest, spans if has_several else UNSET


class Usage(Struct, frozen=True):
    """Token counts of a request, as in OpenAI's API.

    Each prompt counts once, regardless of the number of choices.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails = PromptDetails()
    completion_tokens_details: CompletionDetails | UnsetType = UNSET
    """UNSET for a request without a prediction."""
    weight_version: str | UnsetType = UNSET
    """Version of the weights that computed the last tokens; UNSET on an engine whose weights cannot change."""
    weight_versions: list[WeightSpan] | UnsetType = UNSET
    """Versions of each choice; UNSET if all tokens have the same."""

    @property
    def version_fields(self) -> dict[str, object]:
        """The fields of weight versions that are set, for usage in the shape of other APIs."""
        found: dict[str, object] = {}
        if self.weight_version is not UNSET:
            found["weight_version"] = self.weight_version
        if self.weight_versions is not UNSET:
            found["weight_versions"] = self.weight_versions
        return found
