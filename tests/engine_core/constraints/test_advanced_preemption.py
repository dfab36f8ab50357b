"""A constraint's forced tokens after its row was advanced, where its sequence is preempted and begins again."""

import pytest

from tandem.engine_core.constraints.grammar_advancer import BatchAdvancer
from tandem.engine_core.constraints.grammars import GrammarConstraint, Grammars
from tandem.engine_core.constraints.workers.mask_memory import MaskMemory
from tandem.engine_core.constraints.workers.pool import WorkerPool
from tandem.engine_core.contracts import StepResult
from tandem.engine_core.scheduler.admission import RowGate
from tandem.engine_core.scheduler.planner import SchedulerLimits
from tandem.engine_core.scheduler.scheduler import Scheduler
from tandem.engine_core.sequence import Sequence
from tandem.protocol.params import SamplingParams
from tests.engine_core.constraints.conftest import ENDS
from tests.fakes.inline_link import InlineLink
from tests.support.grammar_walks import fixed_record
from tests.support.kv_pool import kv_memory
from tests.support.scheduling import launched, submitted

OTHERS = 39
TEXT = fixed_record(kind={"enum": ["a", "b"]}, other={"type": "boolean"})


def step(scheduler: Scheduler, advancer: BatchAdvancer, seq: Sequence, number: int, token: int, least: int) -> bool:
    """Compute a step as the engine does; return whether the sequence's row was advanced."""
    plan = launched(scheduler, number)
    tokens = [token if row.seq_id == seq.id else 20 for row in plan.rows]
    advancer.start_accept(scheduler.masks(plan), [token], least)
    advanced = advancer.finish_accept()
    scheduler.commit(plan, StepResult([1] * len(tokens), tokens), advanced)
    return bool(advanced)


@pytest.mark.parametrize("is_remote", [False, True])
def test_an_advanced_sequence_that_is_preempted_goes_on_after_its_tokens(grammars: Grammars, is_remote: bool) -> None:
    """The run after the choice is looked at and not appended, as in a step whose one prompt is aborted meanwhile."""
    memory = MaskMemory()
    memory.allocate(1, 1)
    pool = WorkerPool(1, lambda: InlineLink(grammars, memory))
    advancer, compiled = BatchAdvancer(pool), grammars.compile(TEXT)
    if is_remote:
        compiled.add_remote(pool.compile(TEXT, []))
    scheduler = Scheduler(RowGate(OTHERS + 1), kv_memory(900), SchedulerLimits(400, 400, 50))
    seq = submitted(100, [7, 8, 9], SamplingParams(60), frozenset(ENDS))
    seq.constraint = constraint = compiled.constraint(ignore_ends=False)
    assert isinstance(constraint, GrammarConstraint)
    for each in [submitted(number, [number + 10] * 3, SamplingParams(60)) for number in range(OTHERS)] + [seq]:
        scheduler.add(each)
    scheduler.admit_waiting()
    alone = compiled.first.deep_copy()
    assert alone.consume_tokens(list(seq.tokens[3:])), "what was forced at once"
    (choice,) = grammars.prepare().tokenize_str("b")
    assert not step(scheduler, advancer, seq, 1, choice, least=1) and alone.consume_token(choice)
    run = alone.compute_ff_tokens()
    assert seq.tokens[-1] == choice and 1 < len(run) < scheduler.min_jump, (run, scheduler.min_jump)
    assert step(scheduler, advancer, seq, 2, run[0], scheduler.min_jump) and alone.consume_token(run[0])
    assert constraint.fast_forward_tokens() == alone.compute_ff_tokens()
    scheduler.preempt(seq)
    scheduler.admit_waiting()
    assert seq.outcome is None, seq.outcome
    assert alone.validate_tokens(list(seq.tokens[-len(run) + 1 :])) == len(run) - 1
