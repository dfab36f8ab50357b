"""The loop. Scheduler, pipeline and runtime never call each other: `Engine.tick` calls the three.

`pipeline.py` draws the timeline and lists the invariants I1 to I8. In steady decode the device always has one whole
step queued behind the running one: the tick commits step t-1 and launches t+1 while t runs.
"""

import logging

from tandem.engine_core.contracts import Compiler, Mailbox, Runtime
from tandem.engine_core.control import Control
from tandem.engine_core.errors import FatalError, RowError
from tandem.engine_core.pipeline import PipelineState, Step
from tandem.engine_core.plan import StepPlan
from tandem.engine_core.scheduler.inspection import oldest_wait
from tandem.engine_core.scheduler.scheduler import Scheduler
from tandem.engine_core.sequence import Sequence
from tandem.engine_core.stats import StageClock, count_outcome
from tandem.protocol.errors import ErrorCode
from tandem.protocol.events import Failure
from tandem.protocol.stats import EngineStats

logger = logging.getLogger(__name__)

IDLE_SECONDS = 0.25
"""Longest sleep of an idle loop; a command wakes it at once, a stop signal within this."""
RETRY_SECONDS = 0.005
"""Sleep of an idle loop that still holds output for a frontend that does not read."""
MAX_FINAL_FLUSHES = 200
"""Flushes tried, RETRY_SECONDS apart, before an engine exits with output unsent."""


class Engine:
    """One engine core. Everything it calls is handed in; `build.py` does the wiring."""

    def __init__(
        self,
        scheduler: Scheduler,
        pipeline: PipelineState,
        runtime: Runtime,
        mailbox: Mailbox,
        control: Control,
        compiler: Compiler,
        stats: EngineStats,
        stages: StageClock,
    ) -> None:
        self.scheduler = scheduler
        self.pipeline = pipeline
        self.runtime = runtime
        self.mailbox = mailbox
        self.control = control
        self.compiler = compiler
        self.stats = stats
        self.stages = stages
        self.stopping = False
        self._steps = 0

    def run(self) -> None:
        """Ticks until `stopping`. Raises FatalError, after every open request got its terminal event."""
        try:
            while not self.stopping:
                if not self.tick():
                    self.mailbox.wait(RETRY_SECONDS if self.mailbox.backlog else IDLE_SECONDS)
        except Exception as error:
            logger.exception("fatal: %s; scheduler holds %s", self.pipeline, list(self.scheduler.held)[:8])
            reason = next(iter(str(error).splitlines()), "")
            self._close(ErrorCode.ENGINE_FAILED, f"the engine failed: {type(error).__name__}: {reason}")
            raise FatalError(str(error)) from error
        self._close(ErrorCode.SHUTTING_DOWN, "the engine is shutting down; retry on another replica or later")

    def tick(self) -> bool:
        """One turn: sample what waited for its mask, commit, plan, launch. False if there was nothing to do.

        A step with a constrained row is sampled a tick after its launch, once the step before has been committed:
        what such a row may sample depends on that step's token. All other steps are sampled right behind their launch.
        """
        self.stages.start()
        self._drain()
        idle = self.pipeline.in_flight == 0
        waiting_step = self.pipeline.unsampled()
        if waiting_step is not None:
            if self.pipeline.in_flight > 1:
                self._commit_oldest()
            self._sample(waiting_step)
        if self.pipeline.full:
            self._commit_oldest()
        plan = self._plan()
        if plan is not None:
            self._launch(plan)
        elif self.pipeline.in_flight:
            self._commit_oldest()
        if self.scheduler.ended or self.mailbox.backlog:
            self._send()
        self._gauge()
        return plan is not None or not idle

    def _drain(self) -> None:
        refused = False
        for client, command in self.mailbox.drain():
            answer = self.control.apply(client, command)
            if isinstance(answer, Failure):
                self.mailbox.ended(client, answer)
                refused = True
            elif answer is not None:
                self.mailbox.reply(client, answer)
        if self.scheduler.compiling:
            for seq_id, result in self.compiler.finished():
                self.scheduler.set_constraint(seq_id, result)
        self.stages.mark("drain")
        if refused:
            self._send()

    def _plan(self) -> StepPlan | None:
        """Admits what fits, then selects the next step."""
        now = self.stages.clock()
        self.scheduler.advance(now)
        while admitted := self.scheduler.admit_waiting():
            for seq in admitted:
                if not seq.preemptions:
                    self.stats.queue_time.observe(now - seq.arrival)
                    self.stats.prompt_tokens += seq.prompt_len
                if seq.constraint is not None:
                    self._begin(seq)
        plan = self.scheduler.plan_step(self._steps + 1)
        self.stages.mark("plan")
        return plan

    def _begin(self, seq: Sequence) -> None:
        """Takes what the grammar of a sequence forces at its beginning, which may be all of it; the next flush sends
        it."""
        delta = self.scheduler.start(seq)
        if delta.tokens:
            self.stats.generation_tokens += len(delta.tokens)
            self._tell_started()
            self.mailbox.tokens(seq.client, delta)

    def _tell_started(self) -> None:
        for client, started in self.scheduler.take_started():
            self.mailbox.started(client, started)

    def _launch(self, plan: StepPlan) -> None:
        """Enqueues a step, and its sampling unless that has to wait for the step before (then the next tick does)."""
        slot = self.pipeline.free_slot()
        assert slot is not None, f"planned without a free slot: {self.pipeline}"
        try:
            self.runtime.launch(slot, plan)
        except RowError as error:
            self.scheduler.fail(error.seq_id, error.code, error.message)
            return
        step = self.pipeline.launch(plan)
        self.scheduler.on_launch(plan)
        self._tell_started()
        self._steps = plan.step_id
        self.stats.steps_launched += 1
        self.stats.step_rows.observe(len(plan.rows))
        self.stages.mark("launch")
        if not plan.needs_mask:
            self._sample(step)

    def _sample(self, step: Step) -> None:
        masks = self.scheduler.masks(step.plan) if step.plan.needs_mask else None
        self.runtime.sample(step.slot, masks)
        self.pipeline.mark_sampled(step)
        self.stages.mark("sample")

    def _commit_oldest(self) -> None:
        """Waits for the oldest step (I2), applies its tokens and sends them; then its slot is free (I6)."""
        step = self.pipeline.begin_commit()
        tokens = self.runtime.collect(step.slot)
        wanted = step.plan.logprobs >= 0
        logprobs = self.runtime.logprobs(step.slot, step.plan) if wanted else None
        self.stages.mark("collect")
        committed = self.scheduler.commit(step.plan, tokens, logprobs)
        self.pipeline.finish_commit(step)
        self.stats.steps_committed += 1
        self.stats.generation_tokens += committed.tokens
        self.stats.zombie_rows += committed.zombies
        for client, delta in committed.deltas.items():
            self.mailbox.tokens(client, delta)
        self.stages.mark("commit")
        self._send()

    def _send(self) -> None:
        """Sends what has been added since the last time, terminal events last."""
        for seq in self.scheduler.take_ended():
            assert seq.outcome is not None, f"ended without an outcome: {seq}"
            count_outcome(self.stats, seq.outcome)
            if seq.compiling:
                self.compiler.forget(seq.id)
            self.mailbox.ended(seq.client, seq.outcome)
        for client in self.mailbox.flush(self._steps):
            if self.control.forget(client):
                logger.warning("frontend %s is gone; aborting what it had open", client.hex())
                self.scheduler.abort_client(client)
        self.stages.mark("send")

    def _gauge(self) -> None:
        """The gauges of the metrics, taken once a tick."""
        scheduler, stats = self.scheduler, self.stats
        memory = scheduler.memory
        stats.running = len(scheduler.running)
        stats.waiting = len(scheduler.waiting) + len(scheduler.compiling)
        stats.pages_used, stats.pages_cached, stats.pages_evicted = memory.in_use, memory.cached, memory.evicted
        stats.prefix_queries, stats.prefix_hits = memory.queried, memory.hit
        stats.preemptions = scheduler.preemptions
        stats.sessions, stats.sessions_evicted = len(memory.sessions), memory.sessions.evicted
        stats.steps_in_flight = self.pipeline.in_flight
        times = self.runtime.device_times()
        stats.gpu_busy_seconds, stats.gpu_idle_seconds, stats.gpu_timed_steps = times.busy, times.idle, times.steps
        stats.oldest_wait = oldest_wait(scheduler, self.stages.clock())

    def _close(self, code: ErrorCode, message: str) -> None:
        """Ends everything that is open; the device is not touched again."""
        self.pipeline.abandon()
        self.scheduler.fail_all(code, message)
        self._send()
        self.compiler.close()
        for _ in range(MAX_FINAL_FLUSHES):
            if not self.mailbox.backlog:
                return
            self.mailbox.drain()
            self.mailbox.wait(RETRY_SECONDS)
            self._send()
        logger.error("exiting with output that a frontend did not read")
