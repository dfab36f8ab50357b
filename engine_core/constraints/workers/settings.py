"""Settings of a worker."""

from msgspec import Struct


class WorkerFacts(Struct, frozen=True):
    """Facts that all workers of an engine are started with."""

    tokenizer_file: str
    vocab_size: int
    end_ids: tuple[int, ...]
    mask_bytes: int
    """Size of one mask."""


class WorkerSettings(Struct, frozen=True):
    """Settings that a worker is started with; the descriptors are inherited."""

    facts: WorkerFacts
    connection_fd: int
    memory_fd: int
    wake_fd: int
    mask_fds: list[int]
