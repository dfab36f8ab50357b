"""Token counts of a request."""

from msgspec import Struct


class PromptDetails(Struct, frozen=True):
    """Details of a request's prompt tokens, as OpenAI reports them."""

    cached_tokens: int = 0
    """Prompt tokens found in the KV cache when the first choice of each prompt started."""


class Usage(Struct, frozen=True):
    """Token counts of a request as OpenAI reports them.

    Each prompt counts once, however many choices it has.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails = PromptDetails()
