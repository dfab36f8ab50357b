"""In-process engine core without sockets, whose model can also run step by step."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from tandem.engine_core.attention.base import ForwardBatch, Span
from tandem.engine_core.engine import Engine
from tandem.engine_core.integers import ceil_div
from tandem.engine_core.runtime.runtime import TorchRuntime
from tandem.engine_core.startup.engine import build_engine
from tandem.engine_core.stats import new_stats
from tandem.engine_core.wire.heartbeat import Status
from tandem.protocol.codec import pack_ids
from tandem.protocol.commands import Hello, Submit
from tandem.protocol.engine_options import EngineOptions
from tandem.protocol.params import SamplingParams
from tandem.protocol.version import PROTOCOL_VERSION
from tests.fakes.mailbox import FakeMailbox

CLIENT, EPOCH = b"porting", 1
ROW = 1
"""Table row used by steps outside the loop; row 0 is padding."""


def small_options(
    folder: Path, device: str, dtype: str, *, positions: int, rows: int = 4, load_format: str = "auto"
) -> EngineOptions:
    """Return the options of an engine without graphs, for `rows` sequences of `positions` positions."""
    return EngineOptions(
        model=str(folder),
        device=device,
        dtype=dtype,
        load_format=load_format,
        max_rows=rows,
        max_len=positions,
        kv_tokens=2 * rows * positions + 256,
        graph_rows="off",
        graph_tokens="off",
        pipeline="off",
        prefix_cache="off",
    )


class LocalEngine:
    """In-process engine core."""

    def __init__(self, engine: Engine, mailbox: FakeMailbox) -> None:
        self.engine = engine
        self.mailbox = mailbox
        self._requests = 0

    @classmethod
    def open(cls, options: EngineOptions) -> "LocalEngine":
        """Load a model. Raises ConfigError if it is not supported."""
        mailbox = FakeMailbox()
        engine = build_engine(options, mailbox, Status(EPOCH, new_stats()))
        mailbox.inbox.append((CLIENT, Hello(PROTOCOL_VERSION, EPOCH, "porting")))
        return cls(engine, mailbox)

    @property
    def runtime(self) -> TorchRuntime:
        runtime = self.engine.runtime
        assert isinstance(runtime, TorchRuntime)
        return runtime

    def submit(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[tuple[bytes, int]]:
        """Queue requests; return their keys in the mailbox."""
        first = self._requests
        for ids in prompts:
            self._requests += 1
            self.mailbox.inbox.append((CLIENT, Submit(self._requests, pack_ids(list(ids)), params)))
        return [(CLIENT, number) for number in range(first + 1, self._requests + 1)]

    def generate(self, prompt: Sequence[int], count: int) -> list[int]:
        """Return `count` greedy tokens after a prompt."""
        [key] = self.submit([prompt], SamplingParams(count, temperature=0.0, ignore_eos=True))
        while key not in self.mailbox.outcomes:
            self.engine.tick()
        return self.mailbox.received[key]

    @torch.inference_mode()
    def logits(self, ids: Sequence[int], singles: int = 0) -> Tensor:
        """Return the logits after every token, [T, vocab] in float32 on the host.

        The last `singles` tokens are computed one per step, as in decoding, the others in one step. The loop must be
        idle.
        """
        parts = []
        for start, count in _steps(len(ids), singles):
            parts.append(self._step(ids[start : start + count], start).float().cpu())
        return torch.cat(parts)

    def _step(self, ids: Sequence[int], start: int) -> Tensor:
        runtime = self.runtime
        device, tables = runtime.device.torch_device, runtime.page_tables
        used = ceil_div(start + len(ids), tables[0].page_size)
        for group, table in enumerate(tables):
            pages = torch.arange(1 + group * used, 1 + (group + 1) * used, dtype=torch.int32, device=device)
            if not table.ring:
                table.pages[ROW, :used] = pages
            for page in range(max(0, used - table.ring), used) if table.ring else ():
                table.pages[ROW, [page % table.ring, page % table.ring + table.ring]] = pages[page]
        positions = torch.arange(start, start + len(ids), device=device)
        batch = ForwardBatch(
            input_ids=torch.tensor(ids, device=device),
            positions=positions,
            slot_mapping=[table.slots(torch.full_like(positions, ROW), positions) for table in tables],
            sample_index=None,
            attention=runtime.slots[0].attention.plan([Span(ROW, 0, start, len(ids))], tables),
        )
        return runtime.model.logits(runtime.model.forward(batch, runtime.kv))


def _steps(total: int, singles: int) -> Iterator[tuple[int, int]]:
    """Yield the first position and the number of positions of each step."""
    whole = max(1, total - singles)
    yield 0, whole
    for position in range(whole, total):
        yield position, 1
