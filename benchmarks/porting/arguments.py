"""Command-line arguments of the comparisons with transformers."""

import argparse

import torch

DTYPES = ("float32", "bfloat16", "float16")


def add_device_and_dtype(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=DTYPES)


def device_name(device: str) -> str:
    """Return the device for `--device`; "auto" is a GPU if available."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device
