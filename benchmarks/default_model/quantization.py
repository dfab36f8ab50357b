"""Measure the accuracy of the default model with quantized weights and with FP8 keys and values.

    python -m benchmarks.default_model.quantization [--only weights|kv] [--save NAME]

Weights are rounded to the nearest number of a format, without the calibration of GPTQ's and AWQ's own tools, and read
as a checkpoint of that format, with group size 32. There are two texts. One has the judge's questions in held-out
wordings with the expected answers: the model knows nearly all of them, so that only large errors change a token. The
other is the project's licence in windows of 256 tokens, which the model has never seen: small errors show there.
Figures cover the answers' tokens, or all but the first of a window, in float32 on a CPU: perplexity (meaningless for
the licence, which the model mispredicts), the share of tokens with the same argmax as the 16-bit weights, and the mean
and maximum difference of a logit relative to the standard deviation of the logits.

For formats with 8-bit activations, the lines "inputs too" quantize inputs as the GPU kernels do from two rows on, with
static scales calibrated on every fifth text. On a CPU the engine does not quantize inputs.

Keys and values are stored with a scale of 1 and with the scales that the engine calibrates at startup, for the default
model and for the same model with keys multiplied and queries divided by 4,096, which exceeds the range of FP8.
"""

import argparse
import math
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from msgspec import Struct, to_builtins
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from benchmarks.default_model.corpus import load as load_corpus
from benchmarks.default_model.judge import draw_named, draw_tasks
from benchmarks.default_model.rounded_inputs import calibrate, rounded_inputs
from benchmarks.measuring.results import save
from tandem.engine_core.kv_cache.storage import KVLayout
from tandem.engine_core.layers.quantized.eight_bit_linear import EightBitLinear
from tandem.engine_core.models.registry import Model
from tandem.engine_core.quantization.quantization import Quantization
from tandem.engine_core.quantization.scheme import ONLINE_FP8
from tandem.engine_core.startup.engine import DEFAULT_MODEL
from tandem.engine_core.startup.kv_calibration import calibrate_kv_scales
from tests.support.paged_model import PagedRun, load
from tests.support.quantized_checkpoint import LAYOUTS, quantize_checkpoint

ONLINE = "--quantize fp8"
LICENCE = Path(__file__).parents[2] / "LICENSE"
WINDOW = 256
KEY_FACTOR = 4096.0
"""Factor of the keys, large enough that they need scales."""


class Text(Struct, frozen=True):
    """Ids of a question and its answer."""

    ids: list[int]
    asked: int
    """Number of ids of the question."""


@dataclass(frozen=True)
class Sample:
    """Texts with the logits of the 16-bit weights."""

    name: str
    texts: list[Text]
    exact: Tensor
    """Logits that predict the tokens, [tokens, vocab]."""

    @property
    def targets(self) -> Tensor:
        """Tokens that are predicted, [tokens]."""
        return torch.cat([torch.tensor(text.ids[text.asked :]) for text in self.texts])


class Accuracy(Struct, frozen=True):
    """Accuracy of a format."""

    perplexity: float
    agreement: float
    mean_difference: float
    largest_difference: float

    def __str__(self) -> str:
        return (
            f"perplexity {self.perplexity:.5f}, {self.agreement:.1%} of tokens agree, "
            f"logits differ by {self.mean_difference:.4f} (largest {self.largest_difference:.3f}) deviations"
        )


Figures: TypeAlias = dict[str, Accuracy]


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


def windows() -> list[Text]:
    """Return the licence in windows, whose first tokens are given."""
    tokenizer = Tokenizer.from_file(str(DEFAULT_MODEL / "tokenizer.json"))
    ids = tokenizer.encode(LICENCE.read_text(), add_special_tokens=False).ids
    return [Text(ids[start : start + WINDOW], 1) for start in range(0, len(ids) - 1, WINDOW)]


def answer_logits(model: Model, found: list[Text], kv_dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the logits that predict the answers' tokens, [tokens, vocab]."""
    parts = []
    for text in found:
        run = PagedRun(model, [torch.tensor(text.ids)], 16, seed=0, dtype=kv_dtype)
        parts.append(run.step([(0, 0, len(text.ids))])[text.asked - 1 : -1])
    return torch.cat(parts)


def accuracy(logits: Tensor, sample: Sample) -> Accuracy:
    """Compare the logits of a format with those of the 16-bit weights."""
    difference = (logits - sample.exact).abs() / sample.exact.std()
    return Accuracy(
        math.exp(functional.cross_entropy(logits, sample.targets).item()),
        (logits.argmax(1) == sample.exact.argmax(1)).float().mean().item(),
        difference.mean().item(),
        difference.max().item(),
    )


def measured(name: str, model: Model, samples: list[Sample], kv_dtype: torch.dtype = torch.float32) -> Figures:
    """Measure a model with each sample."""
    return compared(name, [answer_logits(model, sample.texts, kv_dtype) for sample in samples], samples)


def compared(name: str, logits: list[Tensor], samples: list[Sample]) -> Figures:
    """Compare the logits of each sample, and print a line for each."""
    figures = {}
    for found, sample in zip(logits, samples, strict=True):
        line = f"{name}: {sample.name}"
        figures[line] = accuracy(found, sample)
        print(f"{line:52} {figures[line]}", flush=True)
    return figures


def plain_folder(directory: Path) -> Path:
    """Copy the default model in float32, as the format writers expect."""
    shutil.copytree(DEFAULT_MODEL, directory)
    path = directory / "model.safetensors"
    tensors = {name: tensor.float() for name, tensor in load_file(path).items()}
    path.unlink()
    save_file(tensors, path)
    return directory


def measure(name: str, scratch: Path, samples: list[Sample]) -> Figures:
    """Write the default model in a format, load and measure it."""
    directory = plain_folder(scratch / name.replace(" ", "_"))
    quantization: Quantization | None = Quantization(ONLINE_FP8)
    if name != ONLINE:
        quantize_checkpoint(directory, LAYOUTS[name], fitted=True)
        quantization = None
    model = load(directory, quantization=quantization)
    figures = measured(name, model, samples)
    if isinstance(model.layers[0].mlp.down, EightBitLinear):  # type: ignore[attr-defined]
        calibrate(lambda: answer_logits(model, samples[0].texts[::5]))
        with rounded_inputs():
            figures |= measured(f"{name}, inputs too", model, samples)
    return figures


def enlarge_keys(directory: Path) -> Path:
    """Multiply the keys of a model by KEY_FACTOR, and divide its queries by it."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith("k_proj.weight"):
            tensor.mul_(KEY_FACTOR)
        elif name.endswith("q_proj.weight"):
            tensor.div_(KEY_FACTOR)
    save_file(tensors, path)
    return directory


def measure_kv(scratch: Path, samples: list[Sample]) -> Figures:
    """Measure 8-bit keys and values, without scales and with calibrated ones."""
    figures: Figures = {}
    for size, directory in (
        ("", plain_folder(scratch / "plain")),
        (f", keys x {KEY_FACTOR:.0f}", enlarge_keys(plain_folder(scratch / "large"))),
    ):
        model = load(directory)
        config, dtype = model.config, torch.float8_e4m3fn
        layout = KVLayout.of_one_group(
            config.layers, page_size=16, kv_heads=config.kv_heads, head_dim=config.head_dim, dtype=dtype
        )
        for scales in ("scales of 1", "calibrated scales"):
            if scales == "scales of 1":
                model.kv_scales.values.fill_(1.0)
            else:
                model.kv_scales.values.zero_()
                calibrate_kv_scales(model, layout, torch.float32, config.max_positions)
            figures |= measured(f"FP8 KV, {scales}{size}", model, samples, dtype)
    return figures


def main() -> None:
    """Measure every format."""
    parser = argparse.ArgumentParser(description="what quantized weights, keys and values lose")
    parser.add_argument("--only", choices=("weights", "kv"), help="measure one of both")
    parser.add_argument("--save", metavar="NAME", help="write benchmarks/results/NAME.json")
    arguments = parser.parse_args()
    model = load(DEFAULT_MODEL)
    samples = [
        Sample(name, found, answer_logits(model, found))
        for name, found in (("answers", texts()), ("licence", windows()))
    ]
    figures = compared("16 bits", [sample.exact for sample in samples], samples)
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.only != "weights":
            figures |= measure_kv(Path(scratch), samples)
        for name in () if arguments.only == "kv" else (ONLINE, *LAYOUTS):
            figures |= measure(name, Path(scratch), samples)
    if arguments.save:
        sizes = {sample.name: {"texts": len(sample.texts), "tokens": len(sample.targets)} for sample in samples}
        print(save(arguments.save, sizes, to_builtins(figures)))


if __name__ == "__main__":
    main()
