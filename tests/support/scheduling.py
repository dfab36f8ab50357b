"""A scheduler of real parts, and the calls that an engine makes on it."""

from array import array
from collections.abc import Iterable
from typing import Any

from tandem.engine_core.contracts import StepResult
from tandem.engine_core.plan import StepPlan
from tandem.engine_core.scheduler.admission import RowGate
from tandem.engine_core.scheduler.commit import SchedulerUpdates
from tandem.engine_core.scheduler.draft_policy import DraftPolicy
from tandem.engine_core.scheduler.planner import SchedulerLimits
from tandem.engine_core.scheduler.scheduler import Scheduler
from tandem.engine_core.scheduler.step_costs import StepCosts
from tandem.engine_core.sequence import Sequence
from tandem.protocol.commands import Submit
from tandem.protocol.engine_options import Policy
from tandem.protocol.params import SamplingParams
from tests.support.kv_pool import kv_memory

END = 1


def new(
    rows: int = 4,
    pages: int = 40,
    step: int = 16,
    chunk: int = 16,
    waiting: int = 50,
    *,
    page_size: int = 4,
    cache: bool = True,
    policy: Policy = "fcfs",
    prompts: int = 0,
    static: bool = False,
    max_itl: float | None = None,
    costs: StepCosts | None = None,
    windows: tuple[int | None, ...] = (None,),
    drafts: DraftPolicy | None = None,
    state_slots: int | None = None,
    grid: int = 64,
) -> Scheduler:
    """Build a scheduler.

    state_slots: number of checkpoints of a model with recurrent layers; grid: multiples at which its prompts are cut.
    """
    limits = SchedulerLimits(
        step, chunk, waiting, prompts, static=static, max_itl=max_itl, chunk_grid=0 if state_slots is None else grid
    )
    max_lead = 0 if drafts is None else 2 * drafts.sizes[-1]
    memory = kv_memory(
        pages, page_size, cache, windows=windows, max_lead=max_lead, state_slots=state_slots, grid=grid if chunk else 0
    )
    return Scheduler(RowGate(rows), memory, limits, policy, costs, drafts)


def submitted(
    number: int,
    prompt: Iterable[int],
    params: SamplingParams,
    end_ids: frozenset[int] = frozenset(),
    client: bytes = b"c",
    request_id: int | None = None,
    **fields: Any,
) -> Sequence:
    """Build the sequence of a request, which has the sequence's number by default.

    fields: further ones of `Submit`.
    """
    submit = Submit(number if request_id is None else request_id, b"", params, **fields)
    return Sequence(number, client, submit, array("i", prompt), end_ids)


def sequence(
    number: int,
    prompt: int = 5,
    max_tokens: int = 3,
    client: bytes = b"c",
    min_tokens: int = 0,
    *,
    first: int = 10,
    priority: int = 0,
    session: str = "",
) -> Sequence:
    """Build a sequence whose prompt counts up from `first`."""
    params = SamplingParams(max_tokens, min_tokens=min_tokens)
    ids = range(first, first + prompt)
    return submitted(number, ids, params, frozenset({END}), client, priority=priority, session=session)


def added(scheduler: Scheduler, *sequences: Sequence) -> None:
    for seq in sequences:
        scheduler.add(seq)
    scheduler.admit_waiting()


def launched(scheduler: Scheduler, step_id: int) -> StepPlan:
    plan = scheduler.plan_step(step_id)
    assert plan is not None
    scheduler.on_launch(plan)
    return plan


def commit(scheduler: Scheduler, plan: StepPlan, tokens: list[int]) -> SchedulerUpdates:
    """Commit a step with one value for each row, which counts where the row samples."""
    sampled = [token for row, token in zip(plan.rows, tokens, strict=True) if row.samples]
    return scheduler.commit(plan, StepResult([int(row.samples) for row in plan.rows], sampled))


def run(scheduler: Scheduler, *sequences: Sequence, token: int = 20, depth: int = 1, first_step: int = 1) -> int:
    """Compute sequences to their ends, with `token` as every sample; return the id of the next step."""
    step, flights = first_step, []
    for seq in sequences:
        scheduler.add(seq)
    while scheduler.num_open or flights:
        scheduler.admit_waiting()
        plan = scheduler.plan_step(step)
        if plan is not None:
            scheduler.on_launch(plan)
            flights.append(plan)
            step += 1
        if plan is None or len(flights) == depth:
            plan = flights.pop(0)
            commit(scheduler, plan, [token] * len(plan.rows))
        assert step < first_step + 5000, f"no end: {list(scheduler.held)}, {list(scheduler.waiting)}"
    return step
