"""A model run over several sequences at once through a shuffled paged pool, as a runtime would run it."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor

from tandem.engine_core.attention.base import ForwardBatch, Span
from tandem.engine_core.attention.torch import TorchPlanner
from tandem.engine_core.kernels.delta_rule.state import DeltaRuleState, TokenRows
from tandem.engine_core.kernels.kv_dtype import to_pool
from tandem.engine_core.kv_cache.storage import KVLayout, KVStorage
from tandem.engine_core.layers.linear_choice import torch_build_context
from tandem.engine_core.loader.weights import load_weights
from tandem.engine_core.memory.device_memory import AllocatedIn, DeviceMemory
from tandem.engine_core.model_config import ModelConfig
from tandem.engine_core.models.registry import Model, build_model, open_checkpoint, read_config
from tandem.engine_core.quantization.quantization import Quantization

Work = tuple[int, int, int]
"""Index of the sequence, first position, number of positions."""


def load(
    directory: Path,
    dtype: torch.dtype = torch.float32,
    max_positions: int | None = None,
    quantization: Quantization | None = None,
    memory: DeviceMemory | None = None,
) -> Model:
    """Load a checkpoint in its own quantization, or a given one. memory: of the weights, None for torch's own."""
    config = read_config(directory)
    checkpoint = open_checkpoint(directory, config)
    context = torch_build_context(torch.device("cpu"), dtype, quantization or config.quantization)
    with nullcontext() if memory is None else AllocatedIn(memory, context.device):
        model = build_model(config, context, max_positions, checkpoint)
    load_weights(model, checkpoint)
    return model


class PagedRun:
    """Teacher-forced sequences over pages in random order, page 0 left out, full of stale numbers."""

    def __init__(
        self, model: Model, tokens: Sequence[Tensor], page_size: int, seed: int, dtype: torch.dtype = torch.float32
    ) -> None:
        config = model.config
        need = [-(-len(sequence) // page_size) for sequence in tokens]
        generator = torch.Generator().manual_seed(seed)
        order = (torch.randperm(sum(need), generator=generator) + 1).to(torch.int32)
        self.model = model
        self.tokens = tokens
        # Entries past a row's pages are stale, as in a table that rows take turns in.
        self.pages = torch.randint(1, sum(need) + 1, (len(tokens), max(need)), generator=generator, dtype=torch.int32)
        for row, pages in enumerate(order.split(need)):
            self.pages[row, : len(pages)] = pages
        layout = KVLayout.of_one_group(
            len(config.attention_layers),
            page_size=page_size,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            dtype=dtype,
        )
        rows = len(tokens) + 1
        recurrent = tuple(random_state(config, rows, dtype, generator) for _ in config.recurrent_layers)
        self.storage = KVStorage.allocate(layout, sum(need) + 1, "cpu", recurrent)
        self.page_table = self.storage.page_table(self.pages)
        stale = torch.empty(self.storage.pool.shape).normal_(0, 100, generator=generator)
        self.storage.pool.copy_(to_pool(stale, dtype))

    def step(self, work: Sequence[Work]) -> Tensor:
        """Run one step and return the logits of all its positions, [T, vocab]."""
        spans, ids, positions, slots, offset = [], [], [], [], 0
        for row, start, length in work:
            spans.append(Span(row, offset, start, length))
            offset += length
            where = torch.arange(start, start + length)
            ids.append(self.tokens[row][start : start + length])
            positions.append(where)
            slots.append(self.page_table.slots(torch.full_like(where, row), where))
        planner = TorchPlanner(self.model.config.attention_kinds)
        with torch.inference_mode():
            attention = planner.plan(spans, [self.page_table])
            rows = torch.tensor([row + 1 for row, _, length in work for _ in range(length)], dtype=torch.int32)
            tokens = TokenRows(rows, torch.cat(positions), max_spans=len(work)) if self.storage.recurrent else None
            given = torch.cat(ids), torch.cat(positions), [torch.cat(slots)], torch.arange(offset), attention
            batch = ForwardBatch(*given, tokens=tokens)
            return self.model.logits(self.model.forward(batch, self.storage))

    def run(self, schedule: Sequence[Sequence[Work]]) -> list[Tensor]:
        """Run steps and return each sequence's logits in the order of its positions."""
        found: list[list[Tensor]] = [[] for _ in self.tokens]
        for work in schedule:
            logits = self.step(work)
            for (row, _, _), part in zip(work, logits.split([length for _, _, length in work]), strict=True):
                found[row].append(part)
        return [torch.cat(parts) for parts in found]


def random_state(config: ModelConfig, rows: int, dtype: torch.dtype, generator: torch.Generator) -> DeltaRuleState:
    """Return the state of a recurrent layer, full of stale numbers."""
    assert config.delta_rule is not None
    state = DeltaRuleState.allocate(config.delta_rule, rows, dtype, torch.device("cpu"))
    for tensor in state.tensors:
        tensor.normal_(0, 100, generator=generator)
    return state


def chunked(lengths: Sequence[int], prefill: Sequence[int], chunk: int) -> list[list[Work]]:
    """Plan steps in which each sequence computes a chunk of its first `prefill` positions, or one of the later ones."""
    done = [0] * len(lengths)
    steps = []
    while any(have < length for have, length in zip(done, lengths, strict=True)):
        work = []
        for row, length in enumerate(lengths):
            if done[row] < length:
                count = min(chunk, prefill[row] - done[row]) if done[row] < prefill[row] else 1
                work.append((row, done[row], count))
                done[row] += count
        steps.append(work)
    return steps
