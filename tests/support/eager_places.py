"""Forward passes that run beside those of graphs, to be compared with them."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tandem.engine_core.runtime.captured import SampleBuffers
from tandem.engine_core.runtime.graph_bucket import GraphBucket
from tandem.engine_core.runtime.runtime import TorchRuntime

if TYPE_CHECKING:
    from tandem.engine_core.runtime.cuda_forward import CudaForward


def places_like(logits: Tensor) -> SampleBuffers:
    """Allocate places for as many samples, so that those of the graphs keep what they hold."""
    rows, positions = torch.zeros(2, len(logits), dtype=torch.int32, device=logits.device)
    return SampleBuffers(rows, positions, torch.empty_like(logits))


def repeat_mixed(runtime: TorchRuntime, forward: "CudaForward", slot: int, bucket: GraphBucket) -> list[Tensor]:
    """Run the kernels of a launched step with prompts once more, without its graph.

    Return whether final states and logits have the same bits, a tensor of one bool each.
    """
    assert runtime.graphs is not None
    mixed, total, inputs = runtime.graphs.mixed[slot][bucket], sum(bucket), runtime.slots[slot].device_inputs
    rows, positions = inputs[:total], inputs[total : 2 * total]
    attended = torch.zeros_like(mixed.buffers.attended)
    again = forward.mixed(rows, positions, bucket, mixed.prompts.step, attended)
    index = inputs[2 * total : 2 * total + len(mixed.logits)]
    logits = forward.head(mixed.buffers.hidden, rows, positions, index, places_like(mixed.logits))
    # Padding of both kinds writes to one place, in any order.
    return [
        ((mixed.buffers.hidden == again).all(1) | (rows == 0)).all(),
        ((mixed.logits == logits).all(1) | (index < 0)).all(),
    ]
