"""A kernel that notes how it is launched, and does nothing."""

from typing import Any


class LaunchedKernel:
    """Fake of a Triton kernel."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}
        """Named arguments of the last launch."""

    def __getitem__(self, grid: Any) -> "LaunchedKernel":
        return self

    def __call__(self, *arguments: Any, **options: Any) -> None:
        self.options = options
