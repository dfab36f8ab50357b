"""Settings of a worker process."""

from msgspec import Struct


class WorkerFacts(Struct, frozen=True):
    """Settings common to all workers of an engine."""

    tokenizer_file: str
    vocab_size: int
    end_ids: tuple[int, ...]
    mask_bytes: int
    """Size of a mask in bytes."""


class WorkerSettings(Struct, frozen=True):
    """Settings of one worker; the file descriptors are inherited."""

    facts: WorkerFacts
    connection_fd: int
    memory_fd: int
    wake_fd: int
    mask_fds: list[int]
