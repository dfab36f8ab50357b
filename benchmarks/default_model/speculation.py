"""Measure n-gram drafts with the default model on a CPU, over the judge's questions in held-out wordings.

    python -m benchmarks.default_model.speculation [--runs N] [--streams N ...]

Runs with and without drafts alternate, in two engines that are up at the same time, so that other load of the machine
affects both alike. Answers are greedy, and have to be the same.
"""

import argparse
import statistics
import time
from collections.abc import Sequence

from benchmarks.default_model.corpus import load as load_corpus
from benchmarks.default_model.judge import draw_named, draw_tasks
from tandem.frontend.offline.llm import LLM
from tandem.frontend.offline.result import Result

Conversation = list[dict[str, str]]


def questions() -> list[Conversation]:
    """Return the judge's questions, each as a conversation."""
    rows = load_corpus()
    return [[{"role": "user", "content": drawn.text}] for drawn in (*draw_named(rows), *draw_tasks(rows))]


def timed(llm: LLM, asked: Sequence[Conversation], streams: int) -> tuple[float, list[Result]]:
    """Return tokens per second, and the results. streams: conversations at a time."""
    began, results = time.perf_counter(), list[Result]()
    for first in range(0, len(asked), streams):
        results += llm.chat(asked[first : first + streams], temperature=0, max_tokens=128, progress=False)
    return sum(result.usage.completion_tokens for result in results) / (time.perf_counter() - began), results


def main() -> None:
    """Print tokens per second with and without drafts, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    arguments = parser.parse_args()
    asked = questions()
    with LLM(log_level="warning") as plain, LLM(log_level="warning", speculate="ngram") as drafting:
        for streams in arguments.streams:
            rates: list[tuple[float, float]] = []
            for run in range(arguments.runs + 1):
                (slow, expected), (fast, found) = (timed(llm, asked, streams) for llm in (plain, drafting))
                if [result.text for result in expected] != [result.text for result in found]:
                    raise SystemExit("the answers differ")
                if run:  # The first one warms up.
                    rates.append((slow, fast))
            drafted, accepted = (
                sum(getattr(result, name) for result in found) for name in ("drafted_tokens", "accepted_tokens")
            )
            ratio = statistics.median(fast / slow for slow, fast in rates)
            print(
                f"{streams} streams: {statistics.median(slow for slow, _ in rates):.0f} tokens/s without drafts, "
                f"{statistics.median(fast for _, fast in rates):.0f} with, ratio {ratio:.3f}; {accepted} of {drafted} "
                "drafts accepted"
            )


if __name__ == "__main__":
    main()
