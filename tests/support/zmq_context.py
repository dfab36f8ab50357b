"""A ZMQ context that holds its sockets, so that a test need not."""

from typing import Any

import zmq


class KeepingContext(zmq.Context[Any]):
    """What it made lies in `made`, in order; `destroy` closes everything."""

    def socket(self, *args: Any, **kwargs: Any) -> Any:
        made = super().socket(*args, **kwargs)
        self.made.append(made)
        return made

    @property
    def made(self) -> list[Any]:
        kept: list[Any] = self.__dict__.setdefault("_made", [])
        return kept
