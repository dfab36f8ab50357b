"""Compare two implementations of a model layer by layer.

    python -m benchmarks.layer_diff FOLDER transformers [--dtype bfloat16] [--device cuda] [--prompt TEXT]
    python -m benchmarks.layer_diff FOLDER OTHER_FOLDER
    python -m benchmarks.layer_diff FOLDER transformers:OTHER_FOLDER --reference-dtype float32

Prints the errors at each point and the first one at which the two differ. Tandem runs a folder; `transformers` (in the
extra `dev`) runs the other side's folder. Both compute the same tokens; Tandem computes the last ones one per step, as
in decoding, without CUDA graphs. The relative error is the norm of the difference over the norm of B. The exit code is
1 if a point differs by more than the tolerance, 2 if a side cannot be run.
"""

import argparse
import random
import sys
from pathlib import Path

import torch
from msgspec import Struct

from benchmarks.porting.arguments import DTYPES, add_device_and_dtype, device_name
from benchmarks.porting.streams import Streams, StructureError, of_tandem, of_transformers
from tandem.engine_core.errors import ConfigError
from tandem.engine_core.models.registry import read_config

TRANSFORMERS = "transformers"
TOLERANCES = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""Tolerated relative errors, by the coarser dtype of the two sides."""


class Difference(Struct, frozen=True):
    """Difference of two sides at a point."""

    point: str
    largest: float
    """Largest absolute difference."""
    relative: float
    """Norm of the difference over the norm of the reference."""
    token: int
    """Index of the token with the largest difference."""


def compare(found: Streams, reference: Streams) -> list[Difference]:
    """Return the difference at each point, in the order of computation.

    Raises StructureError if the sides do not have the same points of the same shapes.
    """
    if list(found) != list(reference):
        raise StructureError(f"the sides have different points: {_others(found, reference)}")
    differences = []
    for point, expected in reference.items():
        if found[point].shape != expected.shape:
            raise StructureError(f"{point} has the shapes {list(found[point].shape)} and {list(expected.shape)}")
        gap = (found[point] - expected).abs()
        # NaN compares as larger than any tolerance.
        relative = (gap.norm() / expected.norm().clamp(min=1e-30)).nan_to_num(torch.inf).item()
        differences.append(Difference(point, gap.max().item(), relative, int(gap.amax(-1).argmax())))
    return differences


def _others(found: Streams, reference: Streams) -> str:
    odd = sorted(set(found) ^ set(reference))
    return f"{', '.join(odd[:6])}{' ...' if len(odd) > 6 else ''}" if odd else "their order differs"


def table(differences: list[Difference], tolerance: float) -> str:
    """Format the differences and the first point beyond the tolerance."""
    lines = [f"{'point':<22} {'max abs':>10} {'relative':>10} {'token':>6}"]
    for one in differences:
        mark = "  <--" if one.relative > tolerance else ""
        lines.append(f"{one.point:<22} {one.largest:>10.2e} {one.relative:>10.2e} {one.token:>6}{mark}")
    first = next((one for one in differences if one.relative > tolerance), None)
    if first is None:
        lines.append(f"all points agree within a relative error of {tolerance:.0e}")
    else:
        lines.append(
            f"first difference: {first.point}, relative error {first.relative:.2e} beyond {tolerance:.0e}, "
            f"largest at token {first.token}"
        )
    return "\n".join(lines)


def sides(a: str, b: str) -> tuple[tuple[str, Path], tuple[str, Path]]:
    """Return the implementation and the folder of each side.

    Raises ValueError if no side names a folder.
    """
    named = []
    for side in (a, b):
        name, _, path = side.partition(":")
        named.append((name, path) if name == TRANSFORMERS else ("tandem", side))
    folder = next((path for _, path in named if path), None)
    if folder is None:
        raise ValueError("give a model folder as A or B, or transformers:FOLDER")
    (first, here), (second, there) = named
    return (first, Path(here or folder)), (second, Path(there or folder))


def token_ids(folder: Path, prompt: str | None, count: int, seed: int) -> list[int]:
    """Return the token ids of a prompt, or random ids.

    Raises ConfigError for a folder that Tandem does not support.
    """
    if prompt is not None:
        from tokenizers import Tokenizer

        return list(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(prompt).ids)
    vocab = read_config(folder).vocab_size
    rng = random.Random(seed)
    return [rng.randrange(vocab) for _ in range(count)]


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("a", metavar="A", help="model folder, or transformers[:FOLDER]")
    parser.add_argument("b", metavar="B", help="reference: transformers[:FOLDER], or model folder")
    add_device_and_dtype(parser)
    parser.add_argument("--reference-dtype", choices=DTYPES, help="dtype of B (default: --dtype)")
    parser.add_argument("--prompt", metavar="TEXT", help="text to run (default: random tokens)")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="number of random tokens (default: 64)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random tokens (default: 0)")
    parser.add_argument(
        "--decode", type=int, default=8, metavar="N", help="last tokens that Tandem computes one a step (default: 8)"
    )
    parser.add_argument("--tolerance", type=float, help="largest relative error (default: by the dtypes)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = parse(sys.argv[1:] if argv is None else argv)
    device = device_name(arguments.device)
    dtypes = arguments.dtype, arguments.reference_dtype or arguments.dtype
    tolerance = arguments.tolerance or max(TOLERANCES[dtype] for dtype in dtypes)
    try:
        pair = sides(arguments.a, arguments.b)
        ids = token_ids(pair[0][1], arguments.prompt, arguments.tokens, arguments.seed)
        found = [
            of_transformers(folder, ids, device=device, dtype=dtype)
            if name == TRANSFORMERS
            else of_tandem(folder, ids, device=device, dtype=dtype, singles=min(arguments.decode, len(ids) - 1))
            for (name, folder), dtype in zip(pair, dtypes, strict=True)
        ]
        differences = compare(*found)
    except (ConfigError, StructureError, ValueError, OSError) as error:
        print(f"layer_diff: {error}", file=sys.stderr)
        return 2
    print(table(differences, tolerance))
    return int(any(one.relative > tolerance for one in differences))


if __name__ == "__main__":
    sys.exit(main())
