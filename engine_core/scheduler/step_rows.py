"""Build the per-sequence rows of a `StepPlan`."""

from collections.abc import Sequence as Items

from tandem.engine_core.kv_cache.manager import KVManager
from tandem.engine_core.plan import NewSequence, ScheduledSequence
from tandem.engine_core.sequence import Sequence


def build_row(seq: Sequence, length: int, memory: KVManager) -> ScheduledSequence:
    """Return the row with the next `length` positions of a sequence.

    It contains everything that the device needs for them and does not have yet.
    """
    start = seq.num_scheduled_tokens
    end = start + length
    first = min(start, seq.device.uploaded_len) if start < seq.device.upload_end else start
    needs_logprobs = seq.needs_prompt_logprobs and seq.wire.reported_len < seq.prompt_len
    scored = max(start + 1, seq.first_scored) if needs_logprobs else seq.prompt_len
    scored_ids = seq.tokens[scored : min(end + 1, seq.prompt_len)]
    return ScheduledSequence(
        seq.id,
        seq.row,
        start,
        length,
        length == seq.pending,
        constrained=seq.constraint is not None,
        tokens=seq.tokens[first : min(end, seq.device.upload_end)].tobytes() if first < seq.device.upload_end else b"",
        new_pages=memory.unmapped_pages(seq, memory.row_end(seq, length)),
        first_page=seq.device.num_mapped_pages,
        skipped=start - first,
        prompt_logprob_ids=scored_ids.tobytes(),
        num_unscored=scored - start - 1 if scored_ids else 0,
        logits=seq.submit.logits and end >= seq.cacheable_len,
    )


def insert_paged_rows(
    rows: list[ScheduledSequence], others: Items[tuple[int, Sequence]], memory: KVManager
) -> tuple[ScheduledSequence, ...]:
    """Insert the rows of steady sequences that were given a page.

    Return the inserted rows. rows: rows of the sequences that needed no page, in order; others: the other sequences,
    with their indices in the order of all. Sequences without positions to compute get no row.
    """
    paged, num_complete = [], 0
    for index, seq in others:
        start, first = seq.num_scheduled_tokens, seq.device.num_mapped_pages
        if start >= seq.total_len - 1:
            num_complete += 1
            continue
        constrained = seq.constraint is not None
        if memory.num_groups == 1:
            pages = tuple(seq.pages[0][first:])
        else:
            pages = memory.unmapped_pages(seq, memory.row_end(seq, 1))
        row = ScheduledSequence(seq.id, seq.row, start, constrained=constrained, new_pages=pages, first_page=first)
        rows.insert(index - num_complete, row)
        paged.append(row)
    return tuple(paged)


def build_steady_rows(running: Items[Sequence]) -> list[ScheduledSequence]:
    """Return the rows of sequences in steady decode that need no new page.

    Their next position lies in a page that the device knows.
    """
    return [
        ScheduledSequence(seq.id, seq.row, seq.num_scheduled_tokens)
        for seq in running
        if seq.num_scheduled_tokens < seq.next_page_boundary
    ]


def build_steady_rows_some_constrained(running: Items[Sequence]) -> list[ScheduledSequence]:
    """Return the rows of `build_steady_rows` where some have a grammar.

    It is a separate loop so that `build_steady_rows` need not check for grammars.
    """
    return [
        ScheduledSequence(seq.id, seq.row, seq.num_scheduled_tokens, constrained=seq.constraint is not None)
        for seq in running
        if seq.num_scheduled_tokens < seq.next_page_boundary
    ]


def new_sequence(seq: Sequence) -> NewSequence:
    """Return the per-sequence data that the device needs before the first row."""
    return NewSequence(
        seq.id,
        seq.row,
        seq.prompt_len,
        seq.submit.sampling,
        tuple(seq.end_ids) if seq.min_tokens else (),
        seq.submit.logprobs is not None,
        seq.drafts.max_drafts,
        seq.submit.prediction if seq.drafts.max_drafts else b"",
        seq.adapter.slot if seq.adapter is not None else 0,
    )
