"""Server configurations of a matrix.

Each differs from the previous one by the switch in its name. All have the same step size, large enough for a prompt of
the maximum length and a decoding row per sequence.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Configuration:
    """Name of a server and its flags, in addition to those shared by all servers of a run."""

    name: str
    flags: tuple[str, ...]
    says: str


CHUNK = 256
"""Prompt tokens per step, divided by the scale."""


def matrix(scale: int) -> tuple[Configuration, ...]:
    """Return the servers static contiguous, continuous, paged, chunked and prefix."""
    chunk = str(max(1, CHUNK // scale))
    contiguous, paged = ("--page-size", "max"), ("--page-size", "16")
    whole, chunked = ("--prefill-chunk", "off"), ("--prefill-chunk", chunk)
    uncached, cached = ("--prefix-cache", "off"), ("--prefix-cache", "on")
    static, continuous = ("--batching", "static"), ("--batching", "continuous")
    return (
        Configuration(
            "static contiguous",
            (*static, *contiguous, *whole, *uncached),
            "each batch runs to its end before the next; a region of the greatest length a sequence; whole prompts",
        ),
        Configuration(
            "continuous",
            (*continuous, *contiguous, *whole, *uncached),
            "--batching: sequences enter as soon as there is room",
        ),
        Configuration(
            "paged",
            (*continuous, *paged, *whole, *uncached),
            "--page-size: KV in pages of 16 tokens, taken as a sequence grows",
        ),
        Configuration(
            "chunked",
            (*continuous, *paged, *chunked, *uncached),
            f"--prefill-chunk: at most {chunk} tokens of a prompt in a step in which others decode",
        ),
        Configuration(
            "prefix",
            (*continuous, *paged, *chunked, *cached),
            "--prefix-cache: beginnings of prompts are kept and shared",
        ),
    )


def with_policy(policy: str) -> Configuration:
    """Return the default server with a policy."""
    return Configuration(policy, ("--policy", policy), f"policy {policy}")


def with_chunk(tokens: int) -> Configuration:
    """Return the default server with a prefill chunk size."""
    says = f"at most {tokens} tokens of a prompt in a step in which others decode"
    return Configuration(f"chunks of {tokens}", ("--prefill-chunk", str(tokens)), says)
