"""Steps of one matcher on a worker, as `BatchAdvancer` and `MaskBuilder` begin them for many."""

import numpy as np

from tandem.engine_core.constraints.workers.channel import ACCEPT, MASK, MAX_SLOTS
from tandem.engine_core.constraints.workers.remote_matcher import RemoteMatcher


def begin_accept(matcher: RemoteMatcher, token: int) -> None:
    matcher.tokens.append(token)
    _begin(matcher, ACCEPT, token)


def begin_mask(matcher: RemoteMatcher, index: int) -> None:
    _begin(matcher, MASK, index)


def _begin(matcher: RemoteMatcher, operation: int, value: int) -> None:
    matcher.link.enqueue(np.array([operation, matcher.id % MAX_SLOTS, value], dtype=np.int32).tobytes())
