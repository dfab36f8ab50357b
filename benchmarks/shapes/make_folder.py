"""Model folder without weights, in a published shape.

    python -m benchmarks.shapes.make_folder benchmarks/shapes/llama-3.2-1b OUT

It has the shape's config.json and a made-up tokenizer of its vocabulary. `tandem serve --model OUT --load-format dummy`
then serves it over HTTP. Each id has a text of its own, six characters long on average, so that frontends do the work
that a real vocabulary would ask of them.
"""

import argparse
import json
import shutil
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def build_tokenizer(vocab_size: int) -> Tokenizer:
    """Build a byte-level BPE without merges: the bytes, then invented words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = (f"Ġw{number:x}" for number in range(vocab_size - len(alphabet)))
    vocabulary = {text: index for index, text in enumerate([*alphabet, *words])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def make_folder(shape: Path, out: Path) -> None:
    """Write the model folder of a shape, which has a config.json."""
    out.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(shape / "config.json", out / "config.json")
    vocab_size = json.loads((shape / "config.json").read_text())["vocab_size"]
    build_tokenizer(vocab_size).save(str(out / "tokenizer.json"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    make_folder(arguments.shape, arguments.out)


if __name__ == "__main__":
    main()
