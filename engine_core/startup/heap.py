"""The garbage collector of a serving engine."""

import gc

THRESHOLDS = (50_000, 20, 1000)
"""Objects more than were freed before the youngest generation is collected, and how many collections of one generation
make one of the next. So a full collection comes about once in a thousand million objects."""


def freeze_heap() -> None:
    """Exempt the objects of the start from garbage collection.

    Later full collections are made rare as well. A full collection of what the imports leave takes some 40 ms, in which
    all streams stand still. The loop leaves hardly any cycles: what a request takes is freed by reference counts.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
