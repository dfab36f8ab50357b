"""Settings of a worker."""

from msgspec import Struct


class WorkerSettings(Struct, frozen=True):
    """Settings that a worker is started with; the descriptors are inherited."""

    tokenizer_file: str
    vocab_size: int
    end_ids: tuple[int, ...]
    connection_fd: int
    memory_fd: int
    wake_fd: int
    mask_fds: list[int]
    mask_bytes: int
    """Size of one mask."""
