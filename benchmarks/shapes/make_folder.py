"""Make a model folder without weights in a published shape.

    python -m benchmarks.shapes.make_folder benchmarks/shapes/llama-3.2-1b OUT [--tokenizer-of FOLDER]

It has the shape's config.json and a synthetic tokenizer for its vocabulary, and can be served using `tandem serve
--model OUT --load-format dummy`. Each id has a different text, six characters on average, so that frontends do the same
work as with a real vocabulary. --tokenizer-of uses another model's tokenizer, which may have fewer ids than the shape.
"""

import argparse
import json
import shutil
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def build_tokenizer(vocab_size: int) -> Tokenizer:
    """Build a byte-level BPE without merges: the bytes, then synthetic words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = (f"Ġw{number:x}" for number in range(vocab_size - len(alphabet)))
    vocabulary = {text: index for index, text in enumerate([*alphabet, *words])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def make_folder(shape: Path, out: Path, tokenizer_of: Path | None = None) -> None:
    """Write the model folder of a shape.

    shape: directory with a config.json; tokenizer_of: model folder to copy the tokenizer and its BOS and EOS ids from;
    None for a synthetic one.
    """
    out.mkdir(parents=True, exist_ok=True)
    config = json.loads((shape / "config.json").read_text())
    if tokenizer_of is None:
        shutil.copyfile(shape / "config.json", out / "config.json")
        build_tokenizer(config["vocab_size"]).save(str(out / "tokenizer.json"))
        return
    other = json.loads((tokenizer_of / "config.json").read_text())
    config |= {name: other[name] for name in ("bos_token_id", "eos_token_id")}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    shutil.copyfile(tokenizer_of / "tokenizer.json", out / "tokenizer.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--tokenizer-of", type=Path, metavar="FOLDER", help="model whose tokenizer it gets (default: made up)"
    )
    arguments = parser.parse_args()
    make_folder(arguments.shape, arguments.out, arguments.tokenizer_of)


if __name__ == "__main__":
    main()
