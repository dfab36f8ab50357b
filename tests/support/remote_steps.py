"""Steps of one matcher on a worker, as `TokenAcceptor` and `MaskBuilder` begin them for many."""

import numpy as np

from tandem.engine_core.constraints.workers.channel import ACCEPT, MASK, MAX_SLOTS
from tandem.engine_core.constraints.workers.remote_matcher import RemoteMatcher


def begin_accept(matcher: RemoteMatcher, token: int) -> None:
    matcher.tokens.append(token)
    _begin(matcher, ACCEPT, token)


def begin_mask(matcher: RemoteMatcher, place: int) -> None:
    _begin(matcher, MASK, place)


def _begin(matcher: RemoteMatcher, operation: int, value: int) -> None:
    matcher.link.begin(np.array([operation, matcher.id % MAX_SLOTS, value], dtype=np.int32).tobytes())
