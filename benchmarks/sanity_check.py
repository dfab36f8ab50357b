"""Compare every family with transformers using a prompt, with a line each.

    python -m benchmarks.sanity_check                       # a tiny random checkpoint of each family
    python -m benchmarks.sanity_check --family Qwen3ForCausalLM
    python -m benchmarks.sanity_check FOLDER [FOLDER ...] [--device cuda] [--dtype bfloat16]

A line has the number of greedy tokens equal to those of `generate`, and the largest error of the logits over prompt and
answer, prefilled and decoded. A different token is a failure unless the logits of both candidates are within twice that
error. transformers (in the extra `dev`) runs in the same dtype on the same device. The exit code is 1 if a check
failed.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from msgspec import Struct
from torch import Tensor

from benchmarks.layer_diff import token_ids
from benchmarks.porting.arguments import add_device_and_dtype, device_name
from benchmarks.porting.local_engine import LocalEngine, small_options
from benchmarks.porting.reference import load_reference, reference_logits, reference_tokens
from benchmarks.porting.tiny import save_tiny
from tandem.engine_core.models.registry import FAMILIES

PROMPT = 40
"""Tokens of a random prompt, longer than the windows of the tiny checkpoints."""
TOLERANCES = {"float32": 1e-4, "float16": 3e-2, "bfloat16": 2e-1}
"""Tolerated error of a logit, relative to the standard deviation of the logits."""


class Check(Struct, frozen=True):
    """Result of a checkpoint."""

    equal: int
    """Tokens before the first difference."""
    tokens: int
    error: float
    """Largest absolute error of a logit."""
    scale: float
    """Standard deviation of the reference's logits."""
    near: bool
    """True if the first different token is as likely as the reference's, within the error."""

    def passed(self, tolerance: float) -> bool:
        return self.error <= tolerance * self.scale and (self.equal == self.tokens or self.near)

    def __str__(self) -> str:
        tie = " (then a near tie)" if self.equal < self.tokens and self.near else ""
        return (
            f"{self.equal}/{self.tokens} tokens equal{tie}, max logit error {self.error:.1e} "
            f"(deviation of the logits {self.scale:.2f})"
        )


def check(folder: Path, prompt: list[int], count: int, device: str, dtype: str) -> Check:
    """Generate `count` greedy tokens using both, and compare."""
    reference = load_reference(folder, device, dtype)
    expected = reference_tokens(reference, prompt, count)
    whole = prompt + expected
    logits = reference_logits(reference, whole)
    del reference
    engine = LocalEngine.open(small_options(folder, device, dtype, positions=len(whole) + 1))
    return judge(engine.generate(prompt, count), expected, engine.logits(whole, count), logits)


def judge(found: list[int], expected: list[int], mine: Tensor, reference: Tensor) -> Check:
    """Compare two continuations, and the logits at all positions.

    mine, reference: [T, vocab], over the prompt and the expected continuation.
    """
    error = (mine - reference).abs().max().nan_to_num(torch.inf).item()
    pairs = zip(found, expected, strict=True)
    equal = next((at for at, (one, other) in enumerate(pairs) if one != other), len(expected))
    near = False
    if equal < len(expected):
        before = reference[len(reference) - len(expected) + equal - 1]
        near = bool(before[expected[equal]] - before[found[equal]] <= 2 * error)
    return Check(equal, len(expected), error, reference.std().item(), near)


def checkpoints(folders: list[Path], families: list[str]) -> Iterator[tuple[str, Path]]:
    """Yield the name and the folder of each checkpoint.

    Tiny checkpoints are removed afterwards.
    """
    for folder in folders:
        yield folder.name, folder
    for family in families:
        with tempfile.TemporaryDirectory() as name:
            save_tiny(family, Path(name))
            yield family, Path(name)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", metavar="FOLDER", nargs="*", type=Path, help="checkpoints (default: all families)")
    parser.add_argument("--family", action="append", choices=list(FAMILIES), help="only this family; may be repeated")
    add_device_and_dtype(parser)
    parser.add_argument("--prompt", metavar="TEXT", help="prompt of the folders (default: random tokens)")
    parser.add_argument("--tokens", type=int, default=32, metavar="N", help="tokens to generate (default: 32)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = parse(sys.argv[1:] if argv is None else argv)
    device = device_name(arguments.device)
    families = arguments.family or ([] if arguments.folders else list(FAMILIES))
    failed = 0
    for name, folder in checkpoints(arguments.folders, families):
        started = time.perf_counter()
        try:
            prompt = token_ids(folder, arguments.prompt, PROMPT, seed=1)
            found = check(folder, prompt, arguments.tokens, device, arguments.dtype)
            passed, text = found.passed(TOLERANCES[arguments.dtype]), str(found)
        except Exception as error:  # a family that cannot be built must not hide the others
            passed, text = False, f"{type(error).__name__}: {error}".partition("\n")[0]
        failed += not passed
        verdict = "ok  " if passed else "FAIL"
        print(f"{verdict} {name:<24} {text}, {time.perf_counter() - started:.1f} s", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
