"""Token counts of a request."""

from msgspec import Struct


class PromptDetails(Struct, frozen=True):
    """Prompt token details, as in OpenAI's API."""

    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache for the first choice of each prompt."""


class Usage(Struct, frozen=True):
    """Token counts of a request, as in OpenAI's API.

    Each prompt counts once, regardless of the number of choices.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails = PromptDetails()
