"""Reports of all instrument values of a process, sent every second."""

from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

from tandem.frontend.metrics.families import Family, Labels, Sample


class InstrumentLayout(Struct, frozen=True, array_like=True):
    """Layout of the values of an instrument.

    Each series has one value; a histogram has a value for each bucket, and the sum.
    """

    name: str
    text: str
    kind: str
    """Prometheus type."""
    bounds: tuple[str, ...] = ()
    """Upper bounds of the buckets of a histogram."""
    label_names: tuple[str, ...] = ()
    series: tuple[tuple[str, ...], ...] = ((),)
    """Labels of each series."""


class Report(Struct, frozen=True, array_like=True):
    """Values of the metrics of one process."""

    values: list[float] = []
    """Values of all instruments, in the order of their layouts."""
    layout: tuple[InstrumentLayout, ...] | None = None
    """Layout of the values; None if unchanged since the last report."""
    others: tuple[Family, ...] = ()
    """Metrics that do not come from instruments."""


def families_of(layouts: Iterable[InstrumentLayout], values: Sequence[float]) -> list[Family]:
    """Return the metrics with these values."""
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
    """Yield the series of a histogram, with cumulative buckets as in Prometheus."""
    total = 0.0
    for bound in bounds:
        total += next(values)
        yield Sample(f"{name}_bucket", tuple(sorted((*labels, ("le", bound)))), total)
    yield Sample(f"{name}_count", labels, total)
    yield Sample(f"{name}_sum", labels, next(values))
