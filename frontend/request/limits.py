"""Limits of a request, set by the server's flags."""

from msgspec import Struct

from tandem.frontend.errors import PromptTooLongError, unsupported
from tandem.frontend.request.options import MAX_N, GenerationOptions
from tandem.protocol.errors import ErrorCode
from tandem.protocol.params import MAX_TOP_LOGPROBS

DEFAULT_STOPS = 64


class RequestLimits(Struct, frozen=True):
    """Limits of a request, in addition to those of its fields and of the model."""

    max_n: int = MAX_N
    max_top_logprobs: int = MAX_TOP_LOGPROBS
    max_stop_strings: int = DEFAULT_STOPS
    max_prompt_tokens: int | None = None

    def check(self, options: GenerationOptions) -> None:
        """Check the options of a request.

        Raises ApiError 400, with the limit and its flag, for options beyond the limits.
        """
        for name, value, limit, flag in (
            ("n", options.n, self.max_n, "--max-n"),
            ("logprobs", options.logprobs or 0, self.max_top_logprobs, "--max-top-logprobs"),
            ("stop", len(options.stop), self.max_stop_strings, "--max-stop-strings"),
        ):
            if value > limit:
                raise unsupported(f"{{param}} asks for {value}; this server allows at most {limit} ({flag})", name)

    def check_prompt(self, length: int, field: str, qualifier: str = "") -> None:
        """Check the number of prompt tokens.

        Raises ApiError 400, with the limit and its flag, for a prompt that is too long.

        """
        if self.max_prompt_tokens is not None and length > self.max_prompt_tokens:
            raise PromptTooLongError(
                f"the prompt has {qualifier}{length} tokens; this server allows at most {self.max_prompt_tokens} "
                "(--max-prompt-tokens); please reduce the length of the prompt",
                field,
                ErrorCode.CONTEXT_LENGTH,
                length,
                self.max_prompt_tokens,
            )
