"""API key claim of a request, as sent to the engine.

Limits that the request can never satisfy are checked here.
"""

from tandem.frontend.access.api_key import ApiKey
from tandem.frontend.errors import unsupported
from tandem.frontend.generation.admission import Admitted
from tandem.protocol.commands import KeyClaim


def key_claim(key: ApiKey | None, admitted: Admitted, shares_cache: bool) -> KeyClaim | None:
    """Return the claim of a request; None without a key.

    shares_cache: keys share cached prefixes. Raises ApiError 400 for a request that the limits of its key never allow.
    """
    if key is None:
        return None
    limits, options = key.limits, admitted.options
    if options.priority > max(limits.max_priority, 0):
        raise unsupported(
            f"{{param}} is {options.priority}, the API key {key.name!r} may use at most {limits.max_priority} "
            "(max_priority); lower it",
            "priority",
        )
    count, tokens = admitted.num_choices, admitted.prompt_tokens
    if limits.max_concurrent is not None and count > limits.max_concurrent:
        raise unsupported(
            f"'n' times the number of prompts is {count}, the API key {key.name!r} may have at most "
            f"{limits.max_concurrent} sequences in progress (max_concurrent); ask for fewer",
            "n" if options.n > 1 else "prompt",
        )
    if limits.tokens_per_minute is not None and tokens > limits.tokens_per_minute:
        raise unsupported(
            f"the prompt has {tokens} tokens, the API key {key.name!r} may use at most {limits.tokens_per_minute} a "
            "minute (tokens_per_minute); shorten it",
            "prompt",
        )
    return KeyClaim(key.name, limits.max_concurrent or 0, limits.tokens_per_minute or 0, count, tokens, shares_cache)


def effective_priority(priority: int, key: ApiKey | None) -> int:
    """Return the priority of a request.

    The default of 0 is lowered to the key's maximum.
    """
    return priority if key is None else min(priority, key.limits.max_priority)
