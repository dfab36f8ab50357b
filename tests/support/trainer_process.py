"""A trainer in a process of its own: it joins the group of a server, and broadcasts weights of a seed in buffers.

Run as `python -m tests.support.trainer_process PORT FOLDER DEVICE BUFFER_BYTES`; on a `cpu` it uses gloo, on `cuda`
NCCL. It prints `started`, opens the store at the port, and waits for the server. Then each line of its input is "SEED
BUFFERS": the seed of the weights (`trainer_weights`), and the number of buffers that it sends before it stops, -1 for
all. It prints `packed` when they are ready, waits for another line, and prints `sent` or `stopped` afterwards.
"""

import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from tests.support.gloo_trainer import GlooTrainer, packed_broadcast
from tests.support.nccl_trainer import NcclTrainer
from tests.support.trainer_weights import weights_of


def main() -> None:
    port, folder, device, buffer_bytes = int(sys.argv[1]), Path(sys.argv[2]), torch.device(sys.argv[3]), sys.argv[4]
    if device.type == "cuda":
        device = torch.device("cuda", 0)
        torch.zeros(1, device=device)  # opens the device before the server waits
    print("started", flush=True)
    trainer = GlooTrainer(port) if device.type == "cpu" else NcclTrainer(port, device)
    for line in sys.stdin:
        seed, limit = map(int, line.split())
        buffers: list[Tensor] = []
        packed_broadcast(weights_of(folder, seed, device), buffers.append, int(buffer_bytes))
        if device.type == "cuda":
            torch.cuda.synchronize()
        print("packed", flush=True)
        sys.stdin.readline()
        for number, buffer in enumerate(buffers):
            if number == limit:
                print("stopped", flush=True)
                time.sleep(3600)
            trainer.broadcast(buffer)
        print("sent", flush=True)


if __name__ == "__main__":
    main()
