"""Time single kernels on a GPU, in CUDA graphs.

python -m benchmarks.kernels --only linear --model 1b --rows 1 8 64 --save NAME
"""

import argparse
from collections.abc import Callable

import torch

from benchmarks.kernels import decode, fp8_kv, linear, prompt_attention, quantized, sampling, w8a8_gemm
from benchmarks.kernels.suite import MODELS, Options, Record
from benchmarks.measuring.results import save

SUITES: dict[str, tuple[Callable[[Options], list[Record]], str]] = {
    "linear": (linear.measure, "16-bit linear layers compared with cuBLAS"),
    "quantized": (quantized.measure, "linear layers in each quantized format compared with bf16"),
    "w8a8-gemm": (w8a8_gemm.measure, "8-bit GEMMs for many rows compared with the library and bf16"),
    "decode-attention": (decode.measure_attention, "decode attention"),
    "elementwise": (decode.measure_elementwise, "norms, gated activation, RoPE and input preparation"),
    "prompt-attention": (prompt_attention.measure, "attention of a prompt chunk compared with FlashInfer"),
    "fp8-kv": (fp8_kv.measure, "attention over FP8 KV compared with bf16 KV"),
    "sampling": (sampling.measure, "sampling of a decode step"),
    "sampling-kernels": (sampling.measure_kernels, "each sampling kernel"),
}
"""Benchmarks by name, with what each measures."""


def arguments_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="benchmarks:\n" + "\n".join(f"  {name:18}{text}" for name, (_, text) in SUITES.items()),
    )
    parser.add_argument(
        "--only", nargs="+", choices=SUITES, default=list(SUITES), metavar="NAME", help="benchmarks (default all)"
    )
    parser.add_argument("--model", choices=MODELS, default="8b", help="shapes (default 8b)")
    parser.add_argument("--rows", type=int, nargs="+", default=[], help="row counts of linear layers and sampling")
    parser.add_argument("--sweep", action="store_true", help="time every candidate plan, not only the chosen one")
    parser.add_argument("--save", metavar="NAME", help="write benchmarks/results/NAME.json")
    return parser


def main(argv: list[str] | None = None) -> None:
    """Run the benchmarks, print their figures and save them."""
    arguments = arguments_parser().parse_args(argv)
    options = Options(MODELS[arguments.model], tuple(arguments.rows), arguments.sweep)
    torch.manual_seed(0)
    figures = {}
    with torch.inference_mode():
        for name in arguments.only:
            print(f"{name}, {arguments.model}", flush=True)
            figures[name] = SUITES[name][0](options)
    if arguments.save:
        gpu = torch.cuda.get_device_name()
        print(save(arguments.save, {**vars(arguments), "gpu": gpu}, figures))


if __name__ == "__main__":
    main()
