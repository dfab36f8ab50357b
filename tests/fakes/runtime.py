"""A runtime made of lists that keeps the contract of `contracts.Runtime` and asserts that its caller does."""

import itertools
from array import array
from collections.abc import Callable

from tandem.engine_core.contracts import (
    NO_TOKEN,
    ArrivingTokens,
    Constraint,
    DeviceTimes,
    MaskedRows,
    StepLogprobs,
    StepResult,
)
from tandem.engine_core.plan import PADDING_PAGE, PADDING_ROW, NewSequence, ScheduledSequence, StepPlan
from tests.fakes.constraint import own
from tests.fakes.draft_model import FakeDraftModel
from tests.fakes.model import choose, fold, logits_row, logprob_record
from tests.fakes.states import FakeStates


class FakeRuntime:
    """Executes in the order of enqueueing, like a stream; results leave a slot through `collect` only.

    Holds a token table by row, page tables by row and KV group, and a pool of positions. A slot of the pool holds what
    the KV of a position depends on: the group, the position, and the fold of all tokens up to it. Every row checks
    every slot that its attention reads against the tokens it has: a page that holds another prefix or group, was freed,
    or is not written to its end is an assertion here, not a wrong token later.
    """

    def __init__(
        self,
        max_rows: int,
        pages: int,
        page_size: int,
        windows: tuple[int | None, ...] = (None,),
        chunk: int = 0,
        states: FakeStates | None = None,
    ) -> None:
        """Start with an empty pool.

        windows: window of each KV group; chunk: largest number of positions of a row, for the tables of windows;
        states: of recurrent layers, None if the model has none.
        """
        self.recurrent = states
        self.weights = 0
        """State before the first token: other weights give other answers."""
        self.page_size = page_size
        self.windows = windows
        self.rings = [window and -(-(window + chunk) // page_size) + 2 for window in windows]
        """Number of pages in the table of each group with a window: page `index` is in column `index % ring`."""
        self.tokens: list[dict[int, int]] = [{} for _ in range(max_rows + 1)]
        self.lengths = [1] * (max_rows + 1)
        """Number of tokens of each row that are known, as in the device's table."""
        self.page_tables: list[list[dict[int, int]]] = [[{} for _ in windows] for _ in range(max_rows + 1)]
        """Page by column, for each row and group."""
        self.num_mapped = [0] * (max_rows + 1)
        """Number of pages of each row that plans have uploaded."""
        self.pool: list[tuple[int, int, int] | None] = [None] * (pages * page_size)
        """Group, position and folded state in each slot of the pool."""
        self.admissions: dict[int, NewSequence] = {}
        self.resumed: set[int] = set()
        """Sequences admitted more than once, whose uploads may hold sampled tokens."""
        self.jumped = 0
        """Number of generated tokens that were uploaded, not sampled."""
        self.launched: dict[int, StepPlan] = {}
        self.staged: dict[int, StepPlan] = {}
        self.prefetched: dict[int, set[int]] = {}
        """Rows whose masks were prefetched, by slot."""
        self.sampled_rows: dict[int, list[int]] = {}
        """Rows that were sampled from, by slot."""
        self.results: dict[int, StepResult] = {}
        self.scored: dict[int, list[bytes]] = {}
        self.logits: dict[int, list[bytes]] = {}
        """Log-probability records of the scored positions of launched steps, by slot."""
        self.states: dict[int, list[tuple[int, list[int]]]] = {}
        """First sampled position of each row of launched steps, and the folded state there and at those of its drafts,
        by slot: computed by the forward, as logits are, since the pages may serve another sequence by the time that the
        step is sampled."""
        self.draft: Callable[[list[int]], list[int]] = lambda _: []
        """Function that returns the drafts of a row, given the tokens that will follow; possibly fewer."""
        self.verified = self.verified_beside_masks = 0
        """Number of drafts that were right, and of those in steps in which other rows had masks."""
        self.draft_model: FakeDraftModel | None = None
        """Model that drafts; None: `draft` needs none."""
        self.is_shared: Callable[[int], bool] = lambda _: False
        """Function that returns True for a page in the prefix cache, where no row may write."""
        self.uploads = 0
        """Tokens uploaded by the step launched last."""
        self.breaks: Callable[[ScheduledSequence], bool] = lambda _: False
        """Function that returns True if the model computes NaN for a row: it samples NO_TOKEN then, and the table gets
        0.
        """

        self.time_of: Callable[[StepPlan], float] = lambda _: 0.0
        """Function that returns the milliseconds of a step; 0 if it was not timed."""

    def replace_weights(self, weights: int) -> None:
        """Use other weights, and forget all KV: whoever reads some from before fails."""
        assert not self.launched and not self.results, "a step is in flight"
        self.weights = weights
        self.pool = [None] * len(self.pool)
        if self.recurrent is not None:
            self.recurrent.forget()

    def needs_exact_positions(self, plan: StepPlan) -> bool:
        return plan.max_lead > 0 and plan.step_id % 7 == 0

    def stage(self, slot: int, plan: StepPlan) -> None:
        assert slot not in self.launched and slot not in self.results, f"slot {slot} staged before it was collected"
        assert slot not in self.staged, f"slot {slot} staged twice"
        self.staged[slot] = plan

    def launch(self, slot: int, plan: StepPlan) -> None:
        assert not self.needs_exact_positions(plan), f"step {plan.step_id} may begin {plan.max_lead} tokens later"
        assert self.staged.pop(slot, plan) is plan, f"slot {slot} was staged for another step"
        assert slot not in self.launched and slot not in self.results, f"slot {slot} launched before it was collected"
        for admission in plan.admitted:
            if admission.seq_id in self.admissions:
                self.resumed.add(admission.seq_id)
            self.admissions[admission.seq_id] = admission
            self.tokens[admission.row] = {}
            self.page_tables[admission.row] = [{} for _ in self.windows]
            self.num_mapped[admission.row] = 0
        assert self.recurrent is not None or not (plan.saves or plan.loads), f"step {plan.step_id} copies states"
        if self.recurrent is not None:
            self.recurrent.copy(plan.saves, plan.loads)
        scored = self.scored[slot] = []
        self.uploads = 0
        states = self.states[slot] = []
        if plan.num_drafts:
            self._compute_spans(plan)
        for row in plan.rows:
            assert plan.logprobs >= 0 or not row.prompt_logprob_ids, (
                f"{row} is scored in a step that wants no log-probabilities"
            )
            states.append(self._verify(row, plan) if plan.num_drafts else self._forward(row, plan.max_lead))
            scored += self._scored(row, plan.logprobs)
        self.logits[slot] = [self._logits(row) for row in plan.rows if row.logits]
        if not plan.num_drafts:  # Here the rows of these tokens have mapped their pages.
            self._compute_spans(plan)
        self.launched[slot] = plan

    def _compute_spans(self, plan: StepPlan) -> None:
        """Compute what the draft model is to compute as prompts."""
        assert self.draft_model is not None or not plan.draft_spans, f"step {plan.step_id} has no draft model"
        rows = {row.seq_id: row for row in plan.rows}
        for span in plan.draft_spans:
            row, known = rows[span.seq_id], self.tokens[span.row]
            assert self.draft_model is not None and self.admissions[span.seq_id].max_drafts, f"{span} needs no drafts"
            self.draft_model.caught_up += plan.num_drafts > 0
            if row.new_pages:
                self._map(row)
            tokens = [known[position] for position in range(span.end)]
            self.draft_model.compute(row.row, tokens, self._slots(row, span.end), span.start, span.end)

    def _slots(self, row: ScheduledSequence, end: int) -> list[int]:
        """Return the slots of the positions of a row below `end`."""
        return [self._slot(row, position, 0) for position in range(end)]

    def arriving_tokens(self, slot: int, masks: MaskedRows) -> ArrivingTokens:
        sampled = self.sampled_rows[slot]
        memory = memoryview(array("i", [run[0] for run in self.results[slot].runs() if run]))
        return ArrivingTokens(memory, [sampled.index(row) for row, _ in masks])

    def prefetch_masks(self, slot: int, masks: MaskedRows) -> None:
        assert self.launched[slot].needs_mask and slot not in self.prefetched, "prefetched twice, or no masks"
        self.prefetched[slot] = {row for row, _ in masks}

    def sample(self, slot: int, masks: MaskedRows | None) -> None:
        plan = self.launched.pop(slot)
        assert (masks is not None) == plan.needs_mask, "a mask for a step that needs none, or none for one that does"
        wanted = dict(masks or [])
        assert wanted.keys() <= self.prefetched.pop(slot, wanted.keys()), "a mask that was not prefetched"
        masked = {row.row for row in plan.rows if row.constrained and row.samples}
        assert len(wanted) == len(masks or []) and wanted.keys() <= masked, f"masks for {wanted.keys()} of {masked}"
        sampled = [(row, state) for row, state in zip(plan.rows, self.states.pop(slot), strict=True) if row.samples]
        if plan.num_drafts:
            result = self.results[slot] = self._accept(plan, [state for _, state in sampled], wanted)
            self.sampled_rows[slot] = [row.row for row, run in zip(plan.rows, result.runs(), strict=True) if run]
            self.scored.pop(slot)
            self.logits.pop(slot)
            return
        tokens = [self._sample(row, *state, wanted.get(row.row)) for row, state in sampled]
        records, logprobs = self.scored.pop(slot), None
        if plan.logprobs >= 0:
            records[:0] = [
                logprob_record(state[-1], max(token, 0), plan.logprobs)
                for (_, (_, state)), token in zip(sampled, tokens, strict=True)
            ]
            logprobs = StepLogprobs(plan.logprobs, b"".join(records))
        self.sampled_rows[slot] = [row.row for row, _ in sampled]
        counts = [int(row.samples) for row in plan.rows]
        logits = self.logits.pop(slot)
        self.results[slot] = StepResult(counts, tokens, logprobs, self.time_of(plan), logits=logits)

    def collect(self, slot: int) -> StepResult:
        return self.results.pop(slot)

    def synchronize(self) -> None:
        return None

    def device_times(self) -> DeviceTimes:
        return DeviceTimes()

    def free(self, pages: list[int]) -> None:
        """Erase pages: reading them is an assertion from now on."""
        for page in pages:
            self.pool[page * self.page_size : (page + 1) * self.page_size] = [None] * self.page_size
            if self.draft_model is not None:
                self.draft_model.free(page * self.page_size, (page + 1) * self.page_size)

    def _slot(self, row: ScheduledSequence, position: int, group: int) -> int:
        page = self.page_tables[row.row][group].get(self._column(position // self.page_size, group), PADDING_PAGE)
        assert page != PADDING_PAGE, f"{row} uses the reserved page for position {position} of group {group}"
        return page * self.page_size + position % self.page_size

    def _column(self, index: int, group: int) -> int:
        ring = self.rings[group]
        return index if ring is None else index % ring

    def _map(self, row: ScheduledSequence) -> None:
        """Write the new pages of a row to its tables, of those that share a column the last."""
        assert row.first_page <= self.num_mapped[row.row], f"{row} leaves a hole in the page table"
        count, rest = divmod(len(row.new_pages), len(self.windows))
        assert not rest, f"{row} brings {len(row.new_pages)} pages for {len(self.windows)} groups"
        for group, table in enumerate(self.page_tables[row.row]):
            pages = row.new_pages[group * count : (group + 1) * count]
            for index, page in enumerate(pages, row.first_page):
                assert page != PADDING_PAGE or self.windows[group], f"{row} lacks page {index} of group {group}"
                table[self._column(index, group)] = page
        self.num_mapped[row.row] = row.first_page + count

    def _forward(self, row: ScheduledSequence, max_lead: int) -> tuple[int, list[int]]:
        """Compute the positions of a row; return the last one and the state there.

        max_lead: tokens that the row may have beyond the host's count.
        """
        assert row.row != PADDING_ROW, f"{row} uses the reserved row"
        known = self.tokens[row.row]
        if row.new_pages:
            self._map(row)
        uploaded = array("i", row.tokens)
        self.uploads += len(uploaded)
        assert not row.skipped or uploaded, f"{row} skips positions and uploads nothing"
        prompt_len = self.admissions[row.seq_id].prompt_len
        for position, token in enumerate(uploaded, row.start - row.skipped):
            held = known.get(position)
            assert held is None or position >= prompt_len, f"{row} uploads a position that the device has"
            assert held in (None, token), f"{row} uploads another token than was sampled"
            self.jumped += held is None and position >= prompt_len and row.seq_id not in self.resumed
            known[position] = token
        if uploaded:
            self.lengths[row.row] = row.end
        first = row.start
        if row.length == 1:
            first = self._newest(row)
            assert 0 <= first - row.start <= max_lead, f"{row} is at {first} on the device"
        return first + row.length - 1, self._compute(row, first, first + row.length)[-1:]

    def _newest(self, row: ScheduledSequence) -> int:
        """Return the position that a decode row computes."""
        return min(self.lengths[row.row], self._limit(row) - 1) - 1

    def _limit(self, row: ScheduledSequence) -> int:
        admission = self.admissions[row.seq_id]
        return admission.prompt_len + admission.params.max_tokens

    def _compute(self, row: ScheduledSequence, first: int, end: int, is_verified: bool = False) -> list[int]:
        """Compute positions of a row; return the state at each position below `end`.

        is_verified: True if those after the first are drafts.
        """
        known = self.tokens[row.row]
        states = list(itertools.accumulate([known[position] for position in range(end)], fold, initial=self.weights))[
            1:
        ]
        for group, window in enumerate(self.windows):
            for position in range(first, end):
                slot = self._slot(row, position, group)
                assert not self.is_shared(slot // self.page_size), f"{row} writes a shared page at {position}"
                self.pool[slot] = (group, position, states[position])
            for position in range(0 if window is None else max(0, first + 1 - window), end):
                expected, read = (group, position, states[position]), self.pool[self._slot(row, position, group)]
                assert read == expected, f"{row} reads {read}, not {expected}"
        if self.recurrent is not None and not self._is_finished(row):
            compute = self.recurrent.verify if is_verified else self.recurrent.advance
            compute(row.row, first, states)
        return states

    def _is_finished(self, row: ScheduledSequence) -> bool:
        """Return whether a decode row has all its tokens: then its state stays as it is."""
        return row.length == 1 and not row.tokens and self.lengths[row.row] >= self._limit(row)

    def _verify(self, row: ScheduledSequence, plan: StepPlan) -> tuple[int, list[int]]:
        """Compute the newest token of a row and its drafts; return its position and the states from there on."""
        assert row.length == 1 and row.samples and not row.tokens, f"{row} verifies drafts"
        assert not (row.constrained and self.admissions[row.seq_id].max_drafts), f"{row} has drafts and a grammar"
        if row.new_pages:
            self._map(row)
        known, length, newest = self.tokens[row.row], self.lengths[row.row], self._newest(row)
        assert 0 <= newest - row.start <= plan.max_lead, f"{row} is at {newest} on the device, of {plan.max_lead}"
        most = min(plan.num_drafts, self.admissions[row.seq_id].max_drafts, self._limit(row) - 1 - length)
        drafts = self.draft(self._following(row, most))[: max(0, most)]
        if self.draft_model is not None:
            drafts = self._model_drafts(row, drafts, plan) if most > 0 else []
        known.update(enumerate(drafts, length))
        states = self._compute(row, newest, newest + 1 + len(drafts), is_verified=True)
        return newest, states[newest:]

    def _model_drafts(self, row: ScheduledSequence, drafts: list[int], plan: StepPlan) -> list[int]:
        """Run the draft model; return the drafts, none if it lacks too many positions."""
        model, known, length = self.draft_model, self.tokens[row.row], self.lengths[row.row]
        assert model is not None, "drafts of no model"
        tokens, slots = [known[position] for position in range(length)], self._slots(row, length + len(drafts))
        if not model.begin(row.row, tokens, slots, len(plan.rows)):
            return []
        model.follow(tokens, slots, drafts)
        return drafts

    def _following(self, row: ScheduledSequence, count: int) -> list[int]:
        """Return the tokens that a row gets next."""
        known, length = self.tokens[row.row], self.lengths[row.row]
        state = self.weights
        for position in range(length):
            state = fold(state, known[position])
        found: list[int] = []
        for position in range(length, length + count):
            found.append(self._choose(row, position, state))
            state = fold(state, found[-1])
        return found

    def _accept(self, plan: StepPlan, states: list[tuple[int, list[int]]], masks: dict[int, Constraint]) -> StepResult:
        """Sample each row at its positions, and keep the tokens up to the first that differs from its draft."""
        counts, tokens, drafted, records = [], [], [], []
        for row, (newest, of_row) in zip(plan.rows, states, strict=True):
            known, length = self.tokens[row.row], self.lengths[row.row]
            drafts = [known.pop(length + index) for index in range(len(of_row) - 1)]
            run: list[int] = []
            if row.constrained:
                run.append(self._sample(row, newest, of_row, masks.get(row.row)))
            for index, state in enumerate([] if row.constrained or length >= self._limit(row) else of_row):
                token = NO_TOKEN if self.breaks(row) else self._choose(row, newest + 1 + index, state)
                run.append(token)
                if index == len(drafts) or drafts[index] != token:
                    break
                self.verified += 1
                self.verified_beside_masks += bool(masks)
            if not row.constrained:
                known.update(enumerate([max(token, 0) for token in run], length))
                self.lengths[row.row] = length + len(run)
                if self.draft_model is not None and drafts:
                    self.draft_model.lengths[row.row] = length + min(len(run), len(drafts)) - 1
                assert self.lengths[row.row] <= self._limit(row), f"{row} is beyond its limit"
            if self.recurrent is not None:
                self.recurrent.accept(row.row, self.lengths[row.row] - 1)
            if plan.logprobs >= 0:
                scored = zip(of_row, run, strict=False)
                records += [logprob_record(state, max(token, 0), plan.logprobs) for state, token in scored]
            counts.append(len(run))
            tokens += run
            drafted.append(len(drafts))
        logprobs = StepLogprobs(plan.logprobs, b"".join(records)) if plan.logprobs >= 0 else None
        return StepResult(counts, tokens, logprobs, self.time_of(plan), num_drafts=drafted)

    def _scored(self, row: ScheduledSequence, top: int) -> list[bytes]:
        """Return the records of a row's scored positions; their targets must be the prompt's tokens."""
        targets = array("i", row.prompt_logprob_ids)
        later = array("i", row.tokens)[row.skipped + row.num_unscored + 1 :]
        assert targets[: len(later)] == later[: len(targets)], f"{row} is scored at tokens that are not its prompt's"
        first = row.start + row.num_unscored
        return [logprob_record(self._state(row, first + index), token, top) for index, token in enumerate(targets)]

    def _logits(self, row: ScheduledSequence) -> bytes:
        """Return the logits of a row's scored positions and its sample, one number each."""
        first = row.start + row.num_unscored
        positions = [*range(first, first + row.num_scored), *([row.end - 1] if row.samples else [])]
        return b"".join([logits_row(self._state(row, position)) for position in positions])

    def _state(self, row: ScheduledSequence, position: int) -> int:
        held = self.pool[self._slot(row, position, 0)]
        assert held is not None and held[:2] == (0, position), f"{row} reads {held} at {position}"
        return held[2]

    def _choose(
        self, row: ScheduledSequence, position: int, state: int, allows: Callable[[int], bool] = lambda _: True
    ) -> int:
        """Return the token of a position, after the state before it."""
        admission = self.admissions[row.seq_id]
        suppresses = position - admission.prompt_len < admission.params.min_tokens
        return choose(state, frozenset(admission.end_ids) if suppresses else frozenset(), allows)

    def _sample(self, row: ScheduledSequence, position: int, states: list[int], constraint: Constraint | None) -> int:
        """Sample the token behind a position."""
        allows = own(constraint).allows if constraint else lambda _: True
        token = self._choose(row, position + 1, states[-1], allows)
        # A row that got all of its tokens from drafts samples the last one again.
        is_again = self.lengths[row.row] == self._limit(row)
        assert is_again or position + 1 not in self.tokens[row.row], f"{row} samples a position that has a token"
        if self.breaks(row):
            token = NO_TOKEN
        self.lengths[row.row] = position + 2
        assert self.lengths[row.row] <= self._limit(row), f"{row} is beyond its limit"
        if constraint is not None or not row.constrained:  # Else nothing may depend on the token.
            self.tokens[row.row][position + 1] = max(token, 0)
        return token
