"""Values of all instruments of one process, as they are sent every second."""

from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

from tandem.frontend.metrics.families import Family, Labels, Sample


class InstrumentLayout(Struct, frozen=True, array_like=True):
    """Meaning of the values of one instrument.

    Each series has one value; of a histogram it has one for each bucket, and the sum.
    """

    name: str
    text: str
    kind: str
    """Type in the words of Prometheus."""
    bounds: tuple[str, ...] = ()
    """Bounds of the buckets of a histogram."""
    label_names: tuple[str, ...] = ()
    series: tuple[tuple[str, ...], ...] = ((),)
    """Labels of each series."""


class Report(Struct, frozen=True, array_like=True):
    """Values of the metrics of one process."""

    values: list[float] = []
    """Values of all instruments, in the order of their layouts."""
    layout: tuple[InstrumentLayout, ...] | None = None
    """Meaning of the values; None if it is that of the last report."""
    others: tuple[Family, ...] = ()
    """Metrics that are not those of instruments."""


def families_of(layouts: Iterable[InstrumentLayout], values: Sequence[float]) -> list[Family]:
    """Return the metrics that have these values."""
    rest = iter(values)
    return [Family(layout.name, layout.text, layout.kind, tuple(_samples(layout, rest))) for layout in layouts]


def _samples(layout: InstrumentLayout, values: Iterator[float]) -> Iterator[Sample]:
    name = layout.name
    for texts in layout.series:
        labels = tuple(sorted(zip(layout.label_names, texts, strict=True)))
        if layout.kind == "histogram":
            yield from _histogram(name, labels, layout.bounds, values)
        else:
            yield Sample(f"{name}_total" if layout.kind == "counter" else name, labels, next(values))


def _histogram(name: str, labels: Labels, bounds: Sequence[str], values: Iterator[float]) -> Iterator[Sample]:
    """Yield the series of one histogram, whose buckets are cumulative for Prometheus."""
    total = 0.0
    for bound in bounds:
        total += next(values)
        yield Sample(f"{name}_bucket", tuple(sorted((*labels, ("le", bound)))), total)
    yield Sample(f"{name}_count", labels, total)
    yield Sample(f"{name}_sum", labels, next(values))
