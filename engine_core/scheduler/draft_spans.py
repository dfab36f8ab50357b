"""The positions that a draft model computes as prompts.

It computes each chunk of a prompt in the step that computes it with the large model. Steps of decode without drafts
leave it behind, and so do pages of the prefix cache that were filled in such steps (`RadixTree.has_draft_kv`). A row
makes up for that before its next drafts, and only if it has drafts.
"""

from collections.abc import Mapping
from itertools import accumulate

from msgspec import structs

from tandem.engine_core.kv_cache.manager import KVManager
from tandem.engine_core.plan import DraftSpan, StepPlan, catch_up_tokens
from tandem.engine_core.scheduler.draft_policy import MAX_GAP
from tandem.engine_core.sequence import Sequence


def with_draft_spans(
    plan: StepPlan, sequences: Mapping[int, Sequence], num_rows: int, max_tokens: int, max_catch_up: int | None
) -> StepPlan:
    """Add the positions that the draft model has to compute in a step.

    num_rows: number of rows of the step's graph; max_tokens: maximum number of positions in all. Each prompt gets at
    least one, so that the device learns how many positions it has; max_catch_up: maximum number of positions of decode
    rows, those that lack fewest first, None for no limit.
    """
    wanted: list[tuple[Sequence, int]] = []
    for row in plan.other_rows:
        seq = sequences[row.seq_id]
        if seq.drafts.max_drafts and seq.drafts.model_len < row.end:
            wanted.append((seq, row.end))
    budget, spans = max_tokens - len(wanted), list[DraftSpan]()
    if plan.num_drafts:
        room = catch_up_tokens(num_rows) - MAX_GAP
        behind: list[tuple[Sequence, int]] = []
        for row in plan.steady_rows:
            seq = sequences[row.seq_id]
            if seq.drafts.model_lag > room and seq.drafts.max_drafts and seq.drafts.model_len < row.start:
                behind.append((seq, row.start))
        if max_catch_up is not None:
            behind.sort(key=lambda member: member[1] - member[0].drafts.model_len)
            ends = accumulate([end - seq.drafts.model_len for seq, end in behind])
            behind = behind[: sum([end <= max_catch_up for end in ends])]
        wanted += behind
    for seq, end in wanted:
        start = seq.drafts.model_len
        is_prompt = not seq.in_steady_decode
        length = min(end - start, max(0, budget) + is_prompt)
        budget -= length - is_prompt
        if length:
            spans.append(DraftSpan(seq.id, seq.row, start, length))
    return structs.replace(plan, draft_spans=tuple(spans)) if spans else plan


def note_spans(plan: StepPlan, sequences: Mapping[int, Sequence], memory: KVManager) -> None:
    """Record what the draft model has computed once a step is launched, before its pages are published."""
    for span in plan.draft_spans:
        seq = sequences[span.seq_id]
        memory.on_draft_kv(seq, span.end)
        if seq.in_steady_decode:
            seq.drafts.model_lag = max(0, seq.num_scheduled_tokens - 1 - span.end)


def note_positions(plan: StepPlan, sequences: Mapping[int, Sequence], num_rows: int) -> None:
    """Record what the draft model lacks once the pages of a launched step are published."""
    room = catch_up_tokens(num_rows) - MAX_GAP
    for row in plan.steady_rows:
        stats = sequences[row.seq_id].drafts
        if not plan.num_drafts:
            stats.model_lag += 1
        elif stats.model_lag <= room:
            stats.model_lag = 0
        else:  # The row has no drafts, but gets a token.
            stats.model_lag = max(0, stats.model_lag - room - 1)
    for row in plan.other_rows:
        stats = sequences[row.seq_id].drafts
        # If pages were replaced by shared ones, the device counts too many positions: they are computed as a prompt.
        stats.model_lag = 0 if stats.model_len >= row.end else row.end
