"""Token counts of a request."""

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
