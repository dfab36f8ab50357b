"""A trainer in a process of its own: it joins the group of a server, and broadcasts the default model with noise.

Run as `python -m tests.support.trainer_process PORT`. Each line of its input is "SEED BUFFERS": the seed of the noise,
0 for none, and the number of buffers that it sends before it stops, -1 for all.
"""

import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.fakes.scripted_engine import DEFAULT_MODEL
from tests.support.gloo_trainer import GlooTrainer, packed_broadcast

BUFFER_BYTES = 100_000


def noisy_weights(seed: int, folder: Path = DEFAULT_MODEL) -> dict[str, Tensor]:
    """Return the tensors of a folder, each with noise of three times its deviation."""
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    if seed:
        for name, tensor in tensors.items():
            noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std() * 3
            tensors[name] = (tensor.float() + noise).to(tensor.dtype)
    return tensors


def main() -> None:
    trainer = GlooTrainer(int(sys.argv[1]))
    for line in sys.stdin:
        seed, limit = map(int, line.split())
        sent = 0

        def broadcast(buffer: Tensor, limit: int = limit) -> None:
            nonlocal sent
            if sent == limit:
                print("stopped", flush=True)
                time.sleep(3600)
            trainer.broadcast(buffer)
            sent += 1

        packed_broadcast(noisy_weights(seed).items(), broadcast, BUFFER_BYTES)
        print("sent", flush=True)


if __name__ == "__main__":
    main()
