"""A mask that a worker has begun with, and a matcher that was taken back before it was written."""

import numpy as np
from llguidance import LLMatcher

from tandem.engine_core.constraints.grammar_advancer import BatchAdvancer
from tandem.engine_core.constraints.grammars import Grammars
from tandem.engine_core.constraints.mask_builder import MaskBuilder
from tandem.engine_core.constraints.workers.mask_memory import MaskMemory
from tandem.engine_core.constraints.workers.pool import WorkerPool
from tandem.engine_core.stats import new_stats
from tests.engine_core.constraints.conftest import ENDS, VOCAB
from tests.fakes.clock import FakeClock
from tests.fakes.inline_link import InlineLink

REGEX = LLMatcher.grammar_from_regex("[a-d]{1,9}(xyz[a-d]{1,9}|end)")


def test_mask_of_a_matcher_that_was_taken_back_is_that_of_this_process(grammars: Grammars) -> None:
    memory = MaskMemory()
    out = memory.allocate(2, -(-VOCAB // 32))
    link = InlineLink(grammars, memory)
    pool = WorkerPool(1, lambda: link)
    here = grammars.compile(REGEX)
    here.add_remote(pool.compile(REGEX, []))
    each = here.constraint(ignore_ends=False)
    assert each.remote is not None
    advancer = BatchAdvancer(pool)
    builder = MaskBuilder(ENDS, new_stats(), FakeClock(), workers=pool, memory=memory)
    a, b = (grammars.prepare().tokenize_str(letter)[0] for letter in "ab")
    advancer.start_accept([(0, each)], [a], 1)
    builder.prefetch([(each, 0)], out)
    advancer.finish_accept()
    builder.fill([(each, 0)], out)
    # The worker's matcher fails at the next token, as it does where its tables are full; that of this process does not.
    worker, slot = link.worker, each.remote.id
    worker._matchers[slot].consume_token(b), worker._matchers[slot].consume_token(300)
    assert worker._matchers[slot].is_error()
    # The worker says that the tokens are accepted, and is slower with the mask than the loop.
    late = []
    write = worker._write_mask
    worker._write_mask = lambda *given: (late.append(given), False)[1]  # type: ignore[method-assign]
    finish = worker.channel.finish_batch
    worker.channel.finish_batch = lambda *_: worker.channel.finish_accepting()  # type: ignore[method-assign]
    advancer.start_accept([(0, each)], [b], 1)
    builder.prefetch([(each, 0)], out)
    advancer.finish_accept()
    assert each.remote is None and each.accept(b) and not each.problem
    local_mask = np.zeros_like(out)
    each.local.write_mask(local_mask.ctypes.data, out.strides[0])

    def go_on() -> None:
        for slot, index, start in late:
            worker.channel.has_mask[slot] = write(slot, index, start)
        finish(1)

    wait = pool.wait
    pool.wait = lambda: (go_on(), wait())[1]  # type: ignore[method-assign]
    builder.fill([(each, 0)], out)
    assert out[0].tolist() == local_mask[0].tolist(), "the failed matcher's mask"
