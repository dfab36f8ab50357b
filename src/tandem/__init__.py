"""Serve large language models: an HTTP frontend, an engine core, and the messages between them."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tandem.frontend.offline.async_llm import AsyncLLM
    from tandem.frontend.offline.llm import LLM

__all__ = ["LLM", "AsyncLLM"]


def __getattr__(name: str) -> Any:
    """Import `LLM` and `AsyncLLM` on first use, so that an engine core never loads the frontend."""
    if name == "AsyncLLM":
        from tandem.frontend.offline.async_llm import AsyncLLM

        return AsyncLLM
    if name == "LLM":
        from tandem.frontend.offline.llm import LLM

        return LLM
    raise AttributeError(f"module 'tandem' has no attribute {name!r}")
