"""The engine's loop.

`Engine.tick` calls scheduler, pipeline and runtime, which never call each other.

`pipeline.py` draws the timeline and lists the invariants I1 to I9. In steady decode the tick commits step t-1 and
launches t+1 while the device runs t.

Terms: a row is one sequence's share of a step. Its *run* is the list of tokens that the step yields for it: none (a
chunk of a prompt), one, or with verified drafts several. A *jump* appends the tokens that a grammar forces next without
sampling them. A *zombie* is a sequence that ended while a step in flight holds it (I4).
"""

import logging
from collections import deque
from collections.abc import Callable

from msgspec import Struct, structs

from tandem.engine_core.contracts import Compiler, GrammarAdvancer, Mailbox, MaskedRows, Runtime, StepResult
from tandem.engine_core.control import Control
from tandem.engine_core.errors import DeviceMemoryError, FatalError
from tandem.engine_core.pipeline import PipelineState, Step
from tandem.engine_core.plan import StepPlan
from tandem.engine_core.scheduler.commit import SchedulerUpdates, masked_tokens
from tandem.engine_core.scheduler.inspection import copy_gauges
from tandem.engine_core.scheduler.scheduler import Scheduler
from tandem.engine_core.scheduler.sleep_switch import SleepSwitch
from tandem.engine_core.scheduler.timelines import Timelines
from tandem.engine_core.scheduler.weight_switch import WeightSwitch
from tandem.engine_core.stats import StageClock, count_end, count_first_token, count_start, count_verified
from tandem.engine_core.weight_swaps import WeightSwaps
from tandem.protocol.commands import Goodbye, Submit
from tandem.protocol.errors import ErrorCode
from tandem.protocol.events import Answer, Failure, Limits, ModelFacts, WeightFacts
from tandem.protocol.stats import EngineStats

logger = logging.getLogger(__name__)

IDLE_SECONDS = 0.25
"""Longest sleep of an idle loop in seconds. A command wakes it at once, a stop signal within this time."""
RETRY_SECONDS = 0.005
"""Sleep of an idle loop, in seconds, while it holds output for a frontend that does not read."""
DRAIN_SECONDS = 0.001
"""Maximum time in seconds that a tick spends on commands while sequences run; the next tick continues. A prompt of
32k tokens takes about 0.1 ms to decode and check."""
MAX_FINAL_DRAINS = 64
"""Maximum number of times that an exiting engine drains and refuses requests that have arrived."""
MAX_FINAL_FLUSHES = 200
"""Flushes tried, RETRY_SECONDS apart, before an engine exits with output unsent."""


class Collected(Struct, frozen=True):
    """A step and its tokens on the host."""

    step: Step
    result: StepResult
    at: float
    """Time of their arrival, in seconds of the stages' clock."""


class Engine:
    """One engine core.

    It only decides the order of calls; `startup` builds the parts.
    """

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
        advancer: GrammarAdvancer,
        publish_weights: Callable[[WeightFacts], None],
    ) -> None:
        self.scheduler = scheduler
        self.pipeline = pipeline
        self.runtime = runtime
        self.mailbox = mailbox
        self.control = control
        self.compiler = compiler
        self.stats = stats
        self.stages = stages
        self.advancer = advancer
        self.publish_weights = publish_weights
        self.timelines = Timelines()
        self.stopping = False
        """Set from outside, for example by a signal handler, to end `run`."""
        self._weight_facts = control.weights.facts
        self._refuses_new = False
        """True if a pause refuses requests, according to the heartbeats."""
        self._last_step_id = 0
        self._has_undrained = False
        """True if the last drain may have left commands."""
        self._masks: deque[MaskedRows] = deque()
        """Masks of the sampled steps in flight, oldest first."""

    @classmethod
    def assemble(
        cls,
        scheduler: Scheduler,
        runtime: Runtime,
        mailbox: Mailbox,
        compiler: Compiler,
        *,
        depth: int,
        epoch: int,
        model: ModelFacts,
        limits: Limits,
        stats: EngineStats,
        clock: Callable[[], float],
        stage_clock: Callable[[], float],
        advancer: GrammarAdvancer,
        weights: WeightSwitch | None = None,
        swaps: WeightSwaps | None = None,
        sleep: SleepSwitch | None = None,
        publish_weights: Callable[[WeightFacts], None] = lambda _: None,
    ) -> "Engine":
        """Build an engine from the parts that differ between startup, benchmarks and tests.

        depth: steps in flight; epoch: epoch that a Hello must carry; clock: seconds, for queues and sessions;
        stage_clock: seconds, for the time that each stage of the loop takes;
        weights, swaps, sleep: None if weights cannot change; publish_weights: called with their state when it has
        changed.
        """
        stats.page_size = limits.page_size
        control = Control(scheduler, compiler, epoch, model, limits, stats, clock, weights, swaps, sleep)
        stages = StageClock(stats.stage_seconds, stage_clock)
        given = runtime, mailbox, control, compiler, stats, stages, advancer, publish_weights
        return cls(scheduler, PipelineState(depth), *given)

    def run(self) -> None:
        """Tick until `stopping` is set.

        Raises FatalError after any exception, once every open request got its terminal event.
        """
        try:
            while not self.stopping:
                if not self.tick():
                    self.mailbox.wait(RETRY_SECONDS if self.mailbox.has_backlog else IDLE_SECONDS)
        except Exception as error:
            logger.exception("fatal: %s; scheduler holds %s", self.pipeline, list(self.scheduler.held)[:8])
            reason = next(iter(str(error).splitlines()), "")
            self._close(ErrorCode.ENGINE_FAILED, f"the engine failed: {type(error).__name__}: {reason}")
            raise FatalError(str(error)) from error
        self._close(ErrorCode.SHUTTING_DOWN, "the engine is shutting down; retry on another replica or later")

    def tick(self) -> bool:
        """Run one iteration: drain commands, commit, plan, sample the step that waits for masks, launch, send.

        Then a pause, a change of the weights or a sleep takes place if no step is in flight. Return False if idle.

        A step whose plan `needs_mask` is sampled in the next tick, after the previous step is committed: its masks
        depend on that step's tokens. All other steps are sampled right behind their launch.
        """
        self.stages.start()
        idle = self.pipeline.in_flight == 0
        collected = None
        if self.pipeline.unsampled() is not None and self.pipeline.in_flight > 1:
            collected = self._collect_oldest()
        self._drain()
        if collected is not None:
            self._commit(collected)
        if self.pipeline.full:
            # With one slot the oldest step may itself wait for its masks; with two it is committed above in that case.
            self._sample_waiting()
            self._commit_oldest()
        plan = None if self._holds_rows else self._plan()
        if plan is not None and plan.max_lead and self.runtime.needs_exact_positions(plan):
            plan = None  # Commit first, and plan again in the next tick.
        # After planning, so that the next step is staged while workers write the masks.
        self._sample_waiting(plan)
        if plan is not None:
            self._launch(plan)
        elif self.pipeline.in_flight:
            self._commit_oldest()
        if self.scheduler.updates.ended or self.mailbox.has_backlog:
            self._send(self.scheduler.take_updates())
        if self.control.pause.needs_report or self.stats.paused:
            self._report_pause()
        has_changed = self._change_weights()
        has_changed |= self._sleep_or_wake()
        self._report_weights()
        for client, reply in [*self.control.weights.take_replies(), *self.control.sleep.take_replies()]:
            self.mailbox.reply(client, reply)
        self._update_gauges()
        return plan is not None or not idle or has_changed

    @property
    def _holds_rows(self) -> bool:
        """True if no step may be launched."""
        control = self.control
        return control.pause.holds_rows or control.weights.holds_rows or control.sleep.holds_rows

    def _drain(self) -> None:
        """Apply the commands that have arrived, and collect compiled grammars.

        While sequences run, a tick spends at most DRAIN_SECONDS on commands and leaves the rest to the next tick, so
        that a burst of arrivals does not stall running streams.
        """
        rejected, self._has_undrained = False, False
        busy = bool(self.pipeline.in_flight or self.scheduler.running)
        now = self.stages.clock()
        deadline = now + DRAIN_SECONDS
        self.control.key_limits.advance(now)
        for client, command in self.mailbox.drain():
            answer = self.control.apply(client, command)
            if (usage := self.control.key_limits.pop_usage_update()) is not None:
                self.mailbox.reply(client, usage)
            if isinstance(answer, Failure):
                self.mailbox.add_outcome(client, answer)
                rejected = True
            elif answer is not None:
                self.mailbox.reply(client, answer)
            if busy and self.stages.clock() >= deadline:
                self._has_undrained = True
                break
        if self.scheduler.compiling or self.compiler.is_busy:
            for seq_id, result in self.compiler.take_finished():
                self.scheduler.set_constraint(seq_id, result)
        if (adapters := self.scheduler.adapters) is not None:
            self.scheduler.advance_adapters(now)
            for client, call, problem in self.control.take_adapter_results(adapters):
                self.mailbox.reply(client, Answer(call, not problem, problem, adapters=adapters.listed))
        self.control.advance_updates()
        self.control.advance_swaps(now)
        self.stages.mark("drain")
        if rejected:
            self._send(self.scheduler.take_updates())

    def _plan(self) -> StepPlan | None:
        """Admit the sequences that fit, plan the next step, and announce the sequences that it starts.

        Announcements are sent before the launch, because the step may crash the process, and frontends resubmit a
        request that was begun only once. If a request in the plan has already lost an engine, wait until its
        announcement has left the process. If a send fails, the sequences of that frontend end: admit and plan again
        without them.
        """
        now = self.stages.clock()
        scheduler = self.scheduler
        scheduler.advance(now)
        while True:
            # A grammar may force all tokens of a sequence at its admission. It ends at once, which frees its row.
            pause = self.control.pause
            begun_only = self.control.weights.change is not None or pause.mode is not None
            while not pause.holds_rows and (admitted := scheduler.admit_waiting(begun_only)):
                for seq in admitted:
                    self.timelines.on_admit(seq, now)
                    if not seq.preemptions:
                        count_start(self.stats, seq, now)
            plan = scheduler.plan_step(self._last_step_id + 1)
            self.stages.mark("plan")
            if not scheduler.updates.started:
                return plan
            self._send(scheduler.take_updates())
            if not scheduler.updates.ended:
                break
        if plan is not None and any(scheduler.running[new.seq_id].submit.lost_engines for new in plan.admitted):
            self.mailbox.await_sent()
        return plan

    def _launch(self, plan: StepPlan) -> None:
        """Enqueue a step, and its sampling unless that depends on the previous step.

        In that case the next tick samples it.
        """
        slot = self.pipeline.free_slot()
        assert slot is not None, f"planned without a free slot: {self.pipeline}"
        try:
            self.runtime.launch(slot, plan)
        except DeviceMemoryError as error:
            self._end_newest_prompt(plan, error)
            return
        step = self.pipeline.launch(plan)
        self.scheduler.on_launch(plan)
        self._last_step_id = plan.step_id
        self.stats.steps_launched += 1
        self.stats.step_rows.observe(len(plan.rows))
        self.stats.iteration_tokens.observe(plan.total_tokens)
        if len(self.timelines):
            self.timelines.on_launch(plan, self.stages.clock())
        self.stages.mark("launch")
        if plan.needs_mask:
            self._prefetch_masks(step)
        else:
            self._sample(step)

    def _prefetch_masks(self, step: Step) -> None:
        """Have workers write the masks of a step once the tokens of the previous step arrive."""
        masks = self._masks[0] if self._masks else ()
        if masks:
            arriving = self.runtime.arriving_tokens(self.pipeline.steps[0].slot, masks)
            if self.advancer.accept_on_arrival(masks, arriving):
                self.runtime.prefetch_masks(step.slot, self.scheduler.masks(step.plan))
        self.stages.mark("sample")

    def _end_newest_prompt(self, plan: StepPlan, error: DeviceMemoryError) -> None:
        """End the newest prompt of a step that could not be launched.

        The next tick plans the step again without it. Raises the error if the step computes no prompt.
        """
        prompts = [row.seq_id for row in plan.rows if row.length > 1]
        if not prompts:
            raise error
        seq = self.scheduler.running[max(prompts)]
        message = (
            f"the device has too little memory for a step of {plan.total_tokens} positions; retry later, or start the "
            "engine with a lower --gpu-memory or --max-step-tokens"
        )
        logger.error("%s; ending %s: %s", message, seq, error)
        self.scheduler.end(seq, Failure(seq.request_id, ErrorCode.OVERLOADED, message))

    def _sample_waiting(self, plan: StepPlan | None = None) -> None:
        """Enqueue the sampling of the step that waits for its masks, if there is one.

        plan: next step to launch; it is staged while workers write the masks.
        """
        step, slot = self.pipeline.unsampled(), self.pipeline.free_slot()
        if step is not None:
            if plan is not None and slot is not None:
                self.runtime.stage(slot, plan)
                self.stages.mark("launch")
            self._sample(step)

    def _sample(self, step: Step) -> None:
        """Enqueue the sampling of a launched step."""
        masks = self.scheduler.masks(step.plan) if step.plan.needs_mask else None
        self.runtime.sample(step.slot, masks)
        self._masks.append(masks or ())
        self.pipeline.mark_sampled(step)
        self.stages.mark("sample")

    def _commit_oldest(self) -> None:
        """Wait for the oldest step (I2), apply its tokens and send them."""
        self._commit(self._collect_oldest())

    def _collect_oldest(self) -> Collected:
        """Wait for the tokens of the oldest step, and start advancing grammars with them."""
        has_unsampled = self.pipeline.unsampled() is not None
        step, masks = self.pipeline.begin_commit(), self._masks.popleft()
        result = self.runtime.collect(step.slot)
        collected = Collected(step, result, self.stages.mark("collect"))
        if step.plan.needs_mask:
            tokens = masked_tokens(step.plan, result, masks)
            # If the next step is launched, it samples the first forced token anyway, so a jump must save one more.
            least = self.scheduler.min_jump + (1 if has_unsampled else 0)
            self.advancer.start_accept(masks if tokens else (), tokens, least)
            self.stages.mark("commit")
        return collected

    def _commit(self, collected: Collected) -> None:
        """Apply the tokens of a step, free its slot (I6), and send the tokens."""
        step = collected.step
        advanced = self.advancer.finish_accept() if step.plan.needs_mask else frozenset()
        updates = self.scheduler.commit(step.plan, collected.result, advanced)
        for seq in updates.first_tokens:
            count_first_token(self.stats, seq, collected.at)
        if updates.verified:
            count_verified(self.stats, updates.verified)
        self.pipeline.finish_commit(step)
        self.stats.steps_committed += 1
        if len(self.timelines):
            for line in self.timelines.on_commit(self.stages.clock()):
                self.mailbox.add_times(line.seq.client, line.times(None))
        self.stages.mark("commit")
        self._send(updates)

    def _send(self, updates: SchedulerUpdates) -> None:
        """Send updates, and output that could not be sent before.

        Starts go first, then tokens, terminal events last.
        """
        self.stats.generation_tokens += updates.num_tokens
        self.stats.zombie_rows += updates.num_zombies
        for client, started in updates.started:
            self.mailbox.add_start(client, started)
        for client, delta in updates.deltas.items():
            self.mailbox.add_tokens(client, delta)
        for seq in updates.ended:
            assert seq.outcome is not None, f"ended without an outcome: {seq}"
            count_end(self.stats, seq, self.stages.clock())
            self.control.key_limits.end(seq)
            if seq.compiling:
                self.compiler.cancel(seq.id)
            self.mailbox.add_outcome(seq.client, seq.outcome)
            if seq.submit.is_traced:
                self.mailbox.add_times(seq.client, self.timelines.on_end(seq, self.stages.clock()))
        for client, reason in self.mailbox.flush(self._last_step_id).items():
            name = self.control.clients.get(client)
            if self.control.forget(client):
                logger.warning("%s is gone: %s; aborting its open requests", name, reason)
                self.scheduler.abort_client(client)
        self.stages.mark("send")

    def _report_pause(self) -> None:
        """Publish the pause state and answer pending pause requests."""
        pause = self.control.pause
        num_begun = self.scheduler.num_begun if pause.mode == "wait" else 0
        complete = pause.is_complete(self.pipeline.in_flight, num_begun)
        has_changed = complete != self.stats.paused
        if has_changed:
            self.stats.paused = int(complete)
            self.stats.pause_changes += 1
        if has_changed or pause.refuses_new != self._refuses_new:
            self._refuses_new = pause.refuses_new
            self.mailbox.announce()
        for client, answer in pause.take_answers(complete):
            self.mailbox.reply(client, structs.replace(answer, pause_changes=self.stats.pause_changes))

    def _change_weights(self) -> bool:
        """Apply the change of the weights that is due, or cancel it at its deadline.

        Return True if either happened.
        """
        weights, scheduler = self.control.weights, self.scheduler
        change = weights.change
        # Commands that were not drained may hold further sequences of a request that has begun.
        may_begin = self._has_undrained and change is not None and change.running == "wait"
        if change is not None and not may_begin and weights.is_due(self.pipeline.in_flight, scheduler.num_begun):
            self._report_weights()
            self.runtime.synchronize()
            if weights.apply():
                self.control.sleep.note_filled()
                scheduler.change_weights(weights.version, change.running == "keep")
            elif weights.problem:
                scheduler.fail_all(ErrorCode.WEIGHTS_CHANGED, f"the weights could not be replaced: {weights.problem}")
            self._send(scheduler.take_updates())
        elif change is not None and self.control.clock() > change.deadline:
            count = scheduler.num_begun
            which = "1 request was" if count == 1 else f"{count} requests were"
            is_paused = " (the engine is paused)" if self.control.pause.holds_rows else ""
            weights.cancel(f"{which} still running at the end of the grace period{is_paused}")
        return change is not None and weights.change is None

    def _sleep_or_wake(self) -> bool:
        """Begin the sleep that is due, and carry out calls to wake up. Return True if there was a sleep or a call."""
        sleep, weights, scheduler = self.control.sleep, self.control.weights, self.scheduler
        is_due = sleep.is_due(self.pipeline.in_flight, scheduler.num_open)
        if not is_due and not sleep.wakes:
            return False
        if is_due or sleep.has_released:
            sleep.is_changing = True
            self._report_weights()
            self.runtime.synchronize()
        if is_due:
            # The KV is lost: sequences are computed again, the prefix cache and sessions are empty.
            scheduler.change_weights(weights.version, keeps_rows=False)
            sleep.fall_asleep()
        for woken in sleep.wake():
            weights.note_woken(woken, sleep.has_folder)
        sleep.is_changing = False
        self.stats.sleeping = int(bool(sleep.asleep))
        return True

    def _report_weights(self) -> None:
        """Publish the state of the weights if it has changed."""
        facts = self.control.sleep.facts(self.control.weights.facts)
        if facts != self._weight_facts:
            self._weight_facts = facts
            self.publish_weights(facts)
            self.mailbox.announce()

    def _update_gauges(self) -> None:
        """Update the gauges in the stats, once per tick."""
        stats, times = self.stats, self.runtime.device_times()
        copy_gauges(self.scheduler, stats, self.stages.clock())
        stats.steps_in_flight, stats.frontends = self.pipeline.in_flight, len(self.control.clients)
        stats.gpu_busy_seconds, stats.gpu_idle_seconds, stats.gpu_timed_steps = times.busy, times.idle, times.steps

    def _close(self, code: ErrorCode, message: str) -> None:
        """End every request, open or still in the mailbox.

        The device is not touched again.
        """
        self.pipeline.abandon()
        self.scheduler.fail_all(code, message)
        self.scheduler.abandon()
        self.compiler.close()
        for _ in range(MAX_FINAL_DRAINS):
            if not self._refuse_arrived(code, message):
                break
        self._send(self.scheduler.take_updates())
        for _ in range(MAX_FINAL_FLUSHES):
            if not self.mailbox.has_backlog:
                return
            # Commands left in the queue would end every wait at once.
            self._refuse_arrived(code, message)
            self.mailbox.wait(RETRY_SECONDS)
            self._send(self.scheduler.take_updates())
        logger.error("exiting with output that a frontend did not read")

    def _refuse_arrived(self, code: ErrorCode, message: str) -> bool:
        """End the requests that have arrived and were not accepted.

        Frontends that leave are forgotten. Return False if nothing had arrived.
        """
        arrived = False
        for client, command in self.mailbox.drain():
            arrived = True
            if isinstance(command, Submit) and client in self.control.clients:
                self.mailbox.add_outcome(client, Failure(command.request_id, code, message))
            elif isinstance(command, Goodbye):
                self.control.forget(client)
        return arrived
