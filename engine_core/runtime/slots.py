"""Slots: the buffers and events that one step in flight occupies.

The slots are used in turn.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.engine_core.attention.base import AttentionPlanner
from tandem.engine_core.integers import ceil_div
from tandem.engine_core.kernels.sampling.inputs import UPDATE_FIELDS
from tandem.engine_core.plan import StepPlan
from tandem.engine_core.runtime.captured import DecodeGraphs, Graph
from tandem.engine_core.runtime.device import Device, Event
from tandem.engine_core.runtime.graph_bucket import GraphBucket
from tandem.engine_core.runtime.kept_logits import KeptLogits
from tandem.engine_core.runtime.masks import MaskFiller
from tandem.engine_core.runtime.staging import Packed
from tandem.engine_core.sampling.sampler import Mode
from tandem.protocol.params import MAX_TOP_LOGPROBS

HEAD_WORDS = 32
"""Words before a step's inputs: of `StepSlot.locations_view`, filled up so that the inputs are aligned."""
RECORD_WORDS = 2 + 2 * MAX_TOP_LOGPROBS
"""Maximum words of one record of log-probabilities."""


@dataclass(slots=True)
class StepSlot:
    """Buffers and events of one step in flight.

    Its pinned memory is read and written until the step has committed (I6).
    """

    host_memory: Tensor
    """[HEAD_WORDS + capacity] int32, pinned: `locations_view`, then the inputs. One copy takes both to the device."""
    locations_view: NDArray[np.int32]
    """[len(UPDATE_FIELDS), 2], view for writing: where the inputs have their updates of tables. A step without updates
    leaves it."""
    inputs_view: NDArray[np.int32]
    """[capacity], view of the inputs, for writing."""
    device_memory: Tensor
    """Copy of `host_memory` on the device."""
    device_locations: Tensor
    """View of the copy of `locations_view`."""
    device_inputs: Tensor
    """[capacity], view of the copy of the inputs."""
    host_masks: Tensor
    """[max_rows, words] int32, pinned: bits of allowed ids, by index (`mask_indices`)."""
    masks_view: NDArray[np.int32]
    """View of `host_masks`, for writing."""
    device_masks: Tensor
    """[1 + max_rows, words] int32, by mask index."""
    allowed: Tensor
    """[max_samples, words] int32 on the device: the mask of each token that is sampled from."""
    masked: Tensor
    """[max_samples] int32 on the device: the masks' indices, 0 for the mask that allows everything."""
    sample_rows: Tensor
    """[max_samples] int32 on the device, written by graphs: row of each token that is sampled from, 0 for padding."""
    sample_positions: Tensor
    """[max_samples] int32 on the device, written by graphs: position of each of these tokens."""
    sampled: Tensor
    """[max_samples + max_rows] int32 on the device: sampled ids, and after those of a step that verifies drafts the
    counts of its rows."""
    results: Tensor
    """Copy of `sampled` on the host, pinned."""
    results_view: NDArray[np.int32]
    """View of `results`, which others may map."""
    results_memory: memoryview
    """The same."""
    records: Tensor
    """[most records * RECORD_WORDS] int32 on the device: log-probabilities and then ranks, as in `StepLogprobs`."""
    host_records: Tensor
    """Copy of `records` on the host, pinned."""
    uploaded: Event
    """End of the copies of the step's inputs to the device, and of its prompts' plans if a graph holds it. Its first
    kernels wait for it."""
    masks_done: Event
    """End of the copy of the masks to the device, which sampling waits for."""
    sampling_done: Event
    copy_done: Event
    attention: AttentionPlanner
    """Plans the attention of steps that no graph holds; its memory belongs to the step in this slot."""
    plan: StepPlan | None = None
    packed: Packed | None = None
    bucket: GraphBucket | None = None
    """The graphs' bucket that holds the step, if any does."""
    logits: Tensor | None = None
    graphs: DecodeGraphs | None = None
    """Graphs that the step is replayed from, if it is a decode step that fits one; None otherwise."""
    mask_indices: dict[int, int] = field(default_factory=dict)
    """Index of each row's mask (`masks.mask_indices`)."""
    num_in_order: int = 0
    """Number of elements that `masked` is known to begin with 1, 2, 3 and so on."""
    sampling: dict[Mode, Graph] | None = None
    """Graphs that the step can be sampled by; None if its forward pass came from none, or if it has too many samples.
    Those of a step that verifies drafts accept them, too.
    """
    kept_logits: KeptLogits | None = None
    """Logits that the step returns, if a row wants some."""
    num_verified_rows: int = 0
    """Rows of a step that verifies drafts, padding included; 0 for another step."""

    @classmethod
    def allocate(
        cls,
        device: Device,
        capacity: int,
        max_rows: int,
        max_step_tokens: int,
        vocab_size: int,
        attention: AttentionPlanner,
        filler: MaskFiller,
        max_samples: int = 0,
    ) -> "StepSlot":
        """Allocate a slot's buffers.

        capacity: int32 words of the largest packed step; filler: may allocate the memory of masks and sampled ids;
        max_samples: maximum number of positions of a step that verifies drafts; 0: none does.
        """
        words_of_results, max_samples = max_samples + max_rows, max(max_samples, max_rows)

        def on_device(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device.torch_device)

        host_memory, device_memory = device.host_buffer(HEAD_WORDS + capacity), on_device(HEAD_WORDS + capacity)
        locations = 2 * len(UPDATE_FIELDS)
        words = ceil_div(vocab_size, 32)
        masks, device_masks = filler.allocate(max_rows, words), on_device(1 + max_rows, words)
        host_masks = device.host_buffer(max_rows, words) if masks is None else torch.from_numpy(masks)
        if masks is not None:
            device.pin(masks)
        ids = filler.allocate(1, words_of_results)
        is_shared = ids is not None and device.pin(ids)
        results = torch.from_numpy(ids)[0] if is_shared else device.host_buffer(words_of_results)
        device_masks[0] = -1
        record_words = (max_rows + max_step_tokens) * RECORD_WORDS
        return cls(
            host_memory=host_memory,
            locations_view=host_memory.numpy()[:locations].reshape(-1, 2),
            inputs_view=host_memory.numpy()[HEAD_WORDS:],
            device_memory=device_memory,
            device_locations=device_memory[:locations].view(-1, 2),
            device_inputs=device_memory[HEAD_WORDS:],
            host_masks=host_masks,
            masks_view=host_masks.numpy(),
            device_masks=device_masks,
            allowed=on_device(max_samples, words),
            masked=on_device(max_samples),
            sample_rows=on_device(max_samples),
            sample_positions=on_device(max_samples),
            sampled=on_device(words_of_results),
            results=results,
            results_view=results.numpy(),
            results_memory=results.numpy().data,
            records=on_device(record_words),
            host_records=device.host_buffer(record_words),
            uploaded=device.event(),
            masks_done=device.event(),
            sampling_done=device.event(),
            copy_done=device.event(),
            attention=attention,
        )
