"""Run each path of the runtime once on the padding row, so that no request waits for compilation."""

from msgspec import structs

from tandem.engine_core.config import EngineConfig, StepConfig
from tandem.engine_core.contracts import Runtime
from tandem.engine_core.kernels.delta_rule.state import RING
from tandem.engine_core.plan import PADDING_ROW, DraftSpan, NewSequence, ScheduledSequence, StateCopy, StepPlan
from tandem.protocol.codec import pack_ids
from tandem.protocol.params import SamplingParams

GREEDY = SamplingParams(2, temperature=0.0)
FULL = SamplingParams(2, top_k=5, top_p=0.9, repetition_penalty=1.1)
"""Draws, truncates and penalizes: every kernel runs, whichever parameters ask for it."""


def warm_up(runtime: Runtime, config: StepConfig) -> None:
    """Run the largest possible step and some short ones in every slot.

    A step that copies states of recurrent layers, a short prefill and decode steps follow the largest step. The short
    steps run greedily and with every sampling feature on. The first ones follow as steps with adapters, which run other
    kernels. Nothing is left in flight, and the allocator keeps the memory
    that steps need.
    """
    for slot in range(config.depth):
        run_step(runtime, slot, full_step(config))
        if isinstance(config, EngineConfig) and config.state_slots:
            run_step(runtime, slot, _copying_step())
        for params, logprobs in ((GREEDY, -1), (FULL, 1)):
            for plan in _short_steps(params, config.max_len, logprobs):
                run_step(runtime, slot, plan)
        if config.max_adapters:
            for plan in (full_step(config), *_short_steps(GREEDY, config.max_len, -1)):
                run_step(runtime, slot, structs.replace(plan, has_adapters=True))
    runtime.synchronize()


def full_step(config: StepConfig) -> StepPlan:
    """Plan the largest possible step.

    Every row is sampled, and the step has the maximum number of positions, all with prompt log-probabilities. Processed
    log-probabilities take the most memory with all parameters.
    """
    length, longer = divmod(config.max_step_tokens, config.max_rows)
    # The token that is sampled needs a position of its own.
    lengths = [min(length + (index < longer), config.max_len - 1) for index in range(config.max_rows)]
    rows = tuple([padding_prompt(length, prompt_logprobs=True) for length in lengths])
    params = GREEDY if config.options.logprobs_mode == "raw_logprobs" else FULL
    plan = StepPlan.of(0, rows, (NewSequence(-1, PADDING_ROW, 1, params),), logprobs=1)
    if config.options.draft_model is None:
        return plan
    spans = tuple([DraftSpan(-1, PADDING_ROW, 0, length) for length in lengths])
    return structs.replace(plan, draft_spans=spans)


def _copying_step() -> StepPlan:
    """Plan a step that copies the state of the padding row to a slot and back."""
    copies = (StateCopy(PADDING_ROW, 0, RING),)
    plan = StepPlan.of(0, (padding_prompt(1),), (NewSequence(-1, PADDING_ROW, 1, GREEDY),))
    return structs.replace(plan, saves=copies, loads=copies)


def _short_steps(params: SamplingParams, max_len: int, logprobs: int) -> tuple[StepPlan, ...]:
    """Plan a prefill and two decode steps.

    The decode row samples only if it has room for the token.
    """
    length = max(1, min(4, max_len - 2))
    decode = ScheduledSequence(-1, PADDING_ROW, length, 1, length + 1 < max_len)
    masked = ScheduledSequence(-1, PADDING_ROW, length, 1, length + 1 < max_len, constrained=True)
    admission = NewSequence(-1, PADDING_ROW, length, params)
    return (
        StepPlan.of(0, (padding_prompt(length, prompt_logprobs=logprobs >= 0),), (admission,), logprobs),
        StepPlan.of(0, (decode,), (), logprobs),
        StepPlan.of(0, (masked,), (), logprobs),
    )


def padding_prompt(length: int, prompt_logprobs: bool = False) -> ScheduledSequence:
    """Return a prompt in the padding row.

    The page table of that row holds nothing but the padding page.
    """
    ids = pack_ids([0] * length)
    following = pack_ids([0] * (length - 1)) if prompt_logprobs else b""
    return ScheduledSequence(-1, PADDING_ROW, 0, length, True, tokens=ids, prompt_logprob_ids=following)


def run_step(runtime: Runtime, slot: int, plan: StepPlan) -> None:
    """Run one step from its launch to its results."""
    runtime.launch(slot, plan)
    runtime.sample(slot, [] if plan.needs_mask else None)
    runtime.collect(slot)
