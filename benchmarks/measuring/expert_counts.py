"""Number of distinct experts that routers choose in a step, without a shared one."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from tandem.engine_core.layers.moe import MixtureOfExperts


class ExpertCounts:
    """Distinct experts of each layer and step."""

    def __init__(self) -> None:
        self.found: list[int] = []

    @property
    def mean(self) -> float:
        """Mean over layers and steps."""
        return sum(self.found) / len(self.found)


@contextmanager
def counting_experts(model: Any) -> Iterator[ExpertCounts]:
    """Count the experts of the eager steps in this context. Each step waits for the device."""
    counts = ExpertCounts()
    mixtures = [layer.mlp for layer in model.layers if isinstance(layer.mlp, MixtureOfExperts)]
    kernels = [mixture.kernels for mixture in mixtures]

    def counted(route: Any, top_k: int) -> Any:
        def norm_and_route(*given: Any) -> Any:
            normed, total, routed, quantized = route(*given)
            counts.found.append(int((routed.ids[:, :top_k].unique() >= 0).sum()))
            return normed, total, routed, quantized

        return norm_and_route

    for mixture in mixtures:
        route = counted(mixture.kernels.norm_and_route, mixture.top_k)
        mixture.kernels = replace(mixture.kernels, norm_and_route=route)
    try:
        yield counts
    finally:
        for mixture, own in zip(mixtures, kernels, strict=True):
            mixture.kernels = own
