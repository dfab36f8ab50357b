"""Reference figures of another engine."""

from pathlib import Path

import msgspec
from msgspec import Struct


class ReferenceRow(Struct):
    streams: int
    frontends: int
    output_tokens_per_s: float
    ttft_p50_ms: float
    tpot_mean_ms: float
    itl_p99_ms: float
    approximate: bool = False


class Reference(Struct):
    engine: str
    model: str
    machine: str
    input_len: str
    output_len: str
    note: str
    rows: list[ReferenceRow]

    def frontends(self) -> list[int]:
        return sorted({row.frontends for row in self.rows})

    def row(self, streams: int, frontends: int) -> ReferenceRow | None:
        return next((row for row in self.rows if (row.streams, row.frontends) == (streams, frontends)), None)


def load_reference(path: Path) -> Reference:
    """Read the figures from a file. Raises OSError or ValueError."""
    return msgspec.json.decode(path.read_bytes(), type=Reference)
