"""ZMQ context that closes its sockets at the end of a test."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import zmq


class KeepingContext(zmq.Context[Any]):
    """A context that records its sockets in `made`; `destroy` closes them all."""

    def socket(self, *args: Any, **kwargs: Any) -> Any:
        made = super().socket(*args, **kwargs)
        self.made.append(made)
        return made

    @property
    def made(self) -> list[Any]:
        kept: list[Any] = self.__dict__.setdefault("_made", [])
        return kept


@contextmanager
def ipc_context() -> Iterator[tuple[KeepingContext, str]]:
    """Yield a context and an ipc endpoint in a folder of its own; close the sockets and remove the folder."""
    context = KeepingContext()
    with tempfile.TemporaryDirectory(prefix="td-") as folder:
        yield context, f"ipc://{folder}/engine"
        context.destroy(linger=0)
