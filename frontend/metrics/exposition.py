"""Metrics in Prometheus's text format."""

from collections.abc import Callable, Iterable

from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tandem.frontend.metrics.families import Collected, added, metrics_of, snapshot
from tandem.frontend.metrics.vllm_names import aliases, with_model


class Exposition(Collector):
    """Collector that combines several sources.

    Metrics of one name are summed over all sources. Those that vLLM also has get the label `model_name`, and with
    `has_vllm_names` are repeated under vLLM's names.
    """

    def __init__(
        self, sources: Iterable[Collected], model_name: Callable[[], str], has_vllm_names: bool = False
    ) -> None:
        self._sources = tuple(sources)
        self._model_name = model_name
        self._has_vllm_names = has_vllm_names

    def collect(self) -> Iterable[Metric]:
        name = self._model_name()
        families = added([family for source in self._sources for family in snapshot(source)])
        families = [with_model(family, name) for family in families]
        if self._has_vllm_names:
            families += [alias for family in families for alias in aliases(family)]
        return metrics_of(families)

    def text(self) -> str:
        """Return the metrics in Prometheus's text format."""
        return generate_latest(self).decode()
