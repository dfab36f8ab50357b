"""ZMQ context that closes its sockets at the end of a test."""

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
