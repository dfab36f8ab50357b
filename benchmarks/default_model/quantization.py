"""Measure the loss of each format of quantized weights on the default model.

    python -m benchmarks.default_model.quantization [--save NAME]

The weights are rounded to the nearest number of a format, without the calibration of GPTQ's and AWQ's own tools, and
read as a checkpoint of that format; groups have 32 inputs. The text is what the judge of the default model asks, in
wordings that training never used, with the answers it expects. All numbers are of the answers' tokens, computed in
float32 on a CPU: the perplexity, the share of tokens whose most probable one is that of the 16-bit weights, and the
mean and largest difference of a logit over the standard deviation of the logits.
"""

import argparse
import math
import shutil
import tempfile
from pathlib import Path

import torch
from msgspec import Struct, to_builtins
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from benchmarks.default_model.corpus import load as load_corpus
from benchmarks.default_model.judge import draw_named, draw_tasks
from benchmarks.measuring.results import save
from tandem.engine_core.models.registry import Model
from tandem.engine_core.quantization.scheme import ONLINE_FP8
from tandem.engine_core.startup.engine import DEFAULT_MODEL
from tests.support.paged_model import PagedRun, load
from tests.support.quantized_checkpoint import LAYOUTS, quantize_checkpoint

ONLINE = "--quantize fp8"


class Text(Struct, frozen=True):
    """Ids of a question and its answer."""

    ids: list[int]
    asked: int
    """Number of ids of the question."""


class Accuracy(Struct, frozen=True):
    """Loss of one format."""

    perplexity: float
    agreement: float
    mean_difference: float
    largest_difference: float

    def __str__(self) -> str:
        return (
            f"perplexity {self.perplexity:.4f}, {self.agreement:.1%} of tokens agree, "
            f"logits differ by {self.mean_difference:.4f} (largest {self.largest_difference:.3f}) deviations"
        )


def texts() -> list[Text]:
    """Return the judge's questions with the answers it expects."""
    tokenizer = Tokenizer.from_file(str(DEFAULT_MODEL / "tokenizer.json"))
    rows = load_corpus()
    found = []
    for question in (*draw_named(rows), *draw_tasks(rows)):
        asked = tokenizer.encode(question.text).ids
        answer = tokenizer.encode(" " + question.row.answer, add_special_tokens=False).ids
        found.append(Text(asked + answer, len(asked)))
    return found


def answer_logits(model: Model, found: list[Text]) -> Tensor:
    """Return the logits that predict the answers' tokens, [tokens, vocab]."""
    parts = []
    for text in found:
        run = PagedRun(model, [torch.tensor(text.ids)], 16, seed=0)
        parts.append(run.step([(0, 0, len(text.ids))])[text.asked - 1 : -1])
    return torch.cat(parts)


def accuracy(logits: Tensor, exact: Tensor, targets: Tensor) -> Accuracy:
    """Compare the logits of a format with those of the 16-bit weights."""
    difference = (logits - exact).abs() / exact.std()
    return Accuracy(
        math.exp(functional.cross_entropy(logits, targets).item()),
        (logits.argmax(1) == exact.argmax(1)).float().mean().item(),
        difference.mean().item(),
        difference.max().item(),
    )


def plain_folder(directory: Path) -> Path:
    """Copy the default model in float32, which the writers of formats expect."""
    shutil.copytree(DEFAULT_MODEL, directory)
    path = directory / "model.safetensors"
    tensors = {name: tensor.float() for name, tensor in load_file(path).items()}
    path.unlink()
    save_file(tensors, path)
    return directory


def measure(name: str, scratch: Path, found: list[Text], exact: Tensor, targets: Tensor) -> Accuracy:
    """Write the default model in a format, load and measure it."""
    directory = plain_folder(scratch / name.replace(" ", "_"))
    scheme = ONLINE_FP8
    if name != ONLINE:
        quantize_checkpoint(directory, LAYOUTS[name], fitted=True)
        scheme = None
    return accuracy(answer_logits(load(directory, scheme=scheme), found), exact, targets)


def main() -> None:
    """Measure every format."""
    parser = argparse.ArgumentParser(description="what each format of quantized weights loses")
    parser.add_argument("--save", metavar="NAME", help="write benchmarks/results/NAME.json")
    arguments = parser.parse_args()
    found = texts()
    targets = torch.cat([torch.tensor(text.ids[text.asked :]) for text in found])
    exact = answer_logits(load(DEFAULT_MODEL), found)
    figures = {"16 bits": accuracy(exact, exact, targets)}
    print(f"{'16 bits':24} {figures['16 bits']}")
    with tempfile.TemporaryDirectory() as scratch:
        for name in (ONLINE, *LAYOUTS):
            figures[name] = measure(name, Path(scratch), found, exact, targets)
            print(f"{name:24} {figures[name]}", flush=True)
    if arguments.save:
        print(save(arguments.save, {"texts": len(found), "tokens": len(targets)}, to_builtins(figures)))


if __name__ == "__main__":
    main()
