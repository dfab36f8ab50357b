"""Readings of the text that a scrape gets."""

import re

_LABEL = re.compile(r'\w+="[^"]*"')


def value(text: str, series: str) -> float:
    """Return the sum of the series of a name; 0 for none.

    `series` is written as in the text, with any part of its labels, which then selects series:
    `tandem_http_requests_total{status="200"}`.
    """
    name, _, labels = series.partition("{")
    wanted = set(_LABEL.findall(labels))
    found = re.findall(rf"^{re.escape(name)}(?:\{{(.*)\}})? (\S+)$", text, re.MULTILINE)
    return sum(float(number) for present, number in found if wanted <= set(_LABEL.findall(present)))


def counters(text: str) -> dict[str, float]:
    """Return all series that may never fall, by name and labels.

    They are those of counters and histograms.
    """
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    lasting = {name for name, kind in kinds.items() if kind in ("counter", "histogram")}
    found = {}
    for series, number in re.findall(r"^([a-z][^#\s{]*(?:\{.*\})?) (\S+)$", text, re.MULTILINE):
        name = series.partition("{")[0]
        if name in lasting or re.sub(r"_(bucket|count|sum)$", "", name) in lasting:
            found[series] = float(number)
    return found
