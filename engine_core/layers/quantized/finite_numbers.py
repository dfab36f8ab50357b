"""Check of numbers while they are read."""

from collections.abc import Callable

from torch import Tensor

from tandem.engine_core.errors import ConfigError


def finite(name: str, transform: Callable[[Tensor], Tensor], what: str = "scales") -> Callable[[Tensor], Tensor]:
    """Return a transform that refuses numbers which are NaN or infinite.

    It raises ConfigError. name: of the tensor; transform: makes of it what a slot holds; what: what the numbers are.
    """

    def check(stored: Tensor) -> Tensor:
        if not bool(stored.float().isfinite().all()):
            raise ConfigError(
                f"{name}: it has {what} that are NaN or infinite; the checkpoint is damaged, download it again"
            )
        return transform(stored)

    return check
