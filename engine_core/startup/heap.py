"""The garbage collector of a serving engine."""

import gc

THRESHOLDS = (50_000, 20, 1000)
"""Objects more than were freed before the youngest generation is collected, and how many collections of one generation
make one of the next. So a full collection comes about once in a thousand million objects."""


def freeze_heap() -> None:
    """Exempt the objects of the start from garbage collection.

    Also make full collections rare: one over the objects of all imports takes about 40 ms, which stalls all streams.
    The loop creates hardly any cycles, so reference counts free the objects of a request.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
