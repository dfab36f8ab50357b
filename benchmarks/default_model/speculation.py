"""Measure n-gram drafts with the default model on a CPU, over the judge's questions in held-out wordings.

    python -m benchmarks.default_model.speculation [--runs N] [--streams N ...]

Runs with and without drafts alternate, in two engines that are up at the same time, so that other load of the machine
affects both alike. Answers are greedy, and have to be the same.
"""

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.default_model.corpus import load as load_corpus
from benchmarks.default_model.judge import draw_named, draw_tasks
from tandem.frontend.offline.llm import LLM
from tandem.frontend.offline.result import Result

Conversation = list[dict[str, str]]


def questions() -> list[Conversation]:
    """Return the judge's questions, each as a conversation."""
    rows = load_corpus()
    return [[{"role": "user", "content": drawn.text}] for drawn in (*draw_named(rows), *draw_tasks(rows))]


def cpu_seconds(llm: LLM) -> float:
    """Return the CPU time that an engine process has taken."""
    fields = Path(f"/proc/{llm.engine_pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def timed(llm: LLM, asked: Sequence[Conversation], streams: int) -> tuple[float, float, list[Result]]:
    """Return tokens per second and per CPU second of the engine, and the results. streams: conversations at a time."""
    began, used, results = time.perf_counter(), cpu_seconds(llm), list[Result]()
    for first in range(0, len(asked), streams):
        results += llm.chat(asked[first : first + streams], temperature=0, max_tokens=128, progress=False)
    tokens = sum(result.usage.completion_tokens for result in results)
    return tokens / (time.perf_counter() - began), tokens / (cpu_seconds(llm) - used), results


def main() -> None:
    """Print tokens per second with and without drafts, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    arguments = parser.parse_args()
    asked = questions()
    with LLM(log_level="warning") as plain, LLM(log_level="warning", speculate="ngram") as drafting:
        for streams in arguments.streams:
            ratios: list[tuple[float, float]] = []
            for run in range(arguments.runs + 1):
                (slow, slow_cpu, expected), (fast, fast_cpu, found) = (
                    timed(llm, asked, streams) for llm in (plain, drafting)
                )
                if [result.text for result in expected] != [result.text for result in found]:
                    raise SystemExit("the answers differ")
                if run:  # The first one warms up.
                    ratios.append((fast / slow, fast_cpu / slow_cpu))
            drafted, accepted = (
                sum(getattr(result, name) for result in found) for name in ("drafted_tokens", "accepted_tokens")
            )
            wall, cpu = (statistics.median(column) for column in zip(*ratios, strict=True))
            tokens = sum(result.usage.completion_tokens for result in found)
            print(
                f"{streams} streams: {wall:.3f} times the tokens per second, {cpu:.3f} times those per CPU second; "
                f"{accepted} of {drafted} drafts accepted for {tokens} tokens",
                flush=True,
            )


if __name__ == "__main__":
    main()
