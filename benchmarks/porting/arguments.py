"""Command-line arguments that the comparisons with transformers share."""

import argparse

import torch

DTYPES = ("float32", "bfloat16", "float16")


def add_device_and_dtype(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=DTYPES)


def device_name(device: str) -> str:
    """Return the device that `--device` names: with "auto", a GPU if any."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device
