"""A device made of lists, which obeys the contract of `contracts.Runtime` and complains about whoever does not."""

from array import array

from engine_core.contracts import Constraint, DeviceTimes, Masks, StepLogprobs
from engine_core.kv_cache.pages import PADDING_PAGE
from engine_core.plan import Admission, Row, StepPlan
from engine_core.scheduler.admission import PADDING_ROW
from tests.fakes.constraint import own
from tests.fakes.model import choose, fold, logprob_line


class FakeRuntime:
    """Executes in the order of enqueueing, like a stream; results leave a slot through `collect` alone.

    Holds a token table by row, a page table by row and a pool of positions. Every read checks that the position was
    written by the same sequence: a page that changed hands too early is an assertion here, not a wrong token later.
    """

    def __init__(self, max_rows: int, pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.tokens: list[dict[int, int]] = [{} for _ in range(max_rows + 1)]
        self.page_table: list[list[int]] = [[] for _ in range(max_rows + 1)]
        self.pool: list[tuple[int, int, int] | None] = [None] * (pages * page_size)
        """Per place: (sequence, position, folded state)."""
        self.admissions: dict[int, Admission] = {}
        self.jumped = 0
        """Positions of generated tokens that were uploaded, not sampled."""
        self.launched: dict[int, StepPlan] = {}
        self.results: dict[int, list[int]] = {}
        self.lines: dict[int, list[bytes]] = {}
        """By slot, until its next launch: log-probabilities of the sampled rows, then of the scored positions."""

    def launch(self, slot: int, plan: StepPlan) -> None:
        assert slot not in self.launched and slot not in self.results, f"slot {slot} launched before it was collected"
        for admission in plan.admitted:
            self.admissions[admission.seq_id] = admission
            self.tokens[admission.row] = {}
            self.page_table[admission.row] = []
        self.lines[slot] = []
        for row in plan.rows:
            assert plan.logprobs >= 0 or not row.targets, f"{row} is scored in a step that wants no log-probabilities"
            self._forward(row)
            self.lines[slot] += self._scored(row, plan.logprobs)
        self.launched[slot] = plan

    def sample(self, slot: int, masks: Masks | None) -> None:
        plan = self.launched.pop(slot)
        assert (masks is not None) == plan.needs_mask, "a mask for a step that needs none, or none for one that does"
        wanted = dict(masks or [])
        masked = {row.row for row in plan.rows if row.constrained and row.samples}
        assert len(wanted) == len(masks or []) and wanted.keys() <= masked, f"masks for {wanted.keys()} of {masked}"
        self.results[slot] = [self._sample(row, wanted.get(row.row)) if row.samples else -1 for row in plan.rows]
        if plan.logprobs >= 0:
            sampled = [row for row in plan.rows if row.samples]
            self.lines[slot][:0] = [self._line(row, row.end, plan.logprobs) for row in sampled]

    def collect(self, slot: int) -> list[int]:
        return self.results.pop(slot)

    def logprobs(self, slot: int, plan: StepPlan) -> StepLogprobs:
        assert slot not in self.launched and slot not in self.results, f"slot {slot} asked before it was collected"
        return StepLogprobs(plan.logprobs, b"".join(self.lines[slot]))

    def synchronize(self) -> None:
        return None

    def device_times(self) -> DeviceTimes:
        return DeviceTimes()

    def _place(self, row: Row, position: int) -> int:
        page = self.page_table[row.row][position // self.page_size]
        assert page != PADDING_PAGE, f"{row} uses the reserved page"
        return page * self.page_size + position % self.page_size

    def _forward(self, row: Row) -> None:
        assert row.row != PADDING_ROW, f"{row} uses the reserved row"
        table, known = self.page_table[row.row], self.tokens[row.row]
        assert not row.new_pages or row.first_page == len(table), f"{row} leaves a hole in the page table"
        table.extend(row.new_pages)
        uploaded = array("i", row.tokens)
        for index, token in enumerate(uploaded):
            assert known.get(row.start + index, token) == token, f"{row} uploads another token than was sampled"
            self.jumped += row.start + index >= self.admissions[row.seq_id].prompt_len
            known[row.start + index] = token
        state = 0
        if row.start:
            held = self.pool[self._place(row, row.start - 1)]
            assert held is not None and held[:2] == (row.seq_id, row.start - 1), f"{row} reads {held}"
            state = held[2]
        for position in range(row.start, row.end):
            state = fold(state, known[position])
            self.pool[self._place(row, position)] = (row.seq_id, position, state)

    def _scored(self, row: Row, top: int) -> list[bytes]:
        """The lines of a row's scored positions; their targets have to be the prompt's."""
        targets = array("i", row.targets)
        later = array("i", row.tokens)[1:]
        assert targets[: len(later)] == later[: len(targets)], f"{row} is scored at tokens that are not its prompt's"
        return [logprob_line(self._state(row, row.start + index), token, top) for index, token in enumerate(targets)]

    def _line(self, row: Row, position: int, top: int) -> bytes:
        return logprob_line(self._state(row, position - 1), self.tokens[row.row][position], top)

    def _state(self, row: Row, position: int) -> int:
        held = self.pool[self._place(row, position)]
        assert held is not None and held[:2] == (row.seq_id, position), f"{row} reads {held} at {position}"
        return held[2]

    def _sample(self, row: Row, constraint: Constraint | None) -> int:
        held = self.pool[self._place(row, row.end - 1)]
        assert held is not None and held[:2] == (row.seq_id, row.end - 1), f"{row} samples from {held}"
        forbidden = frozenset(self.admissions[row.seq_id].end_ids) if row.suppress_ends else frozenset()
        token = choose(held[2], forbidden, own(constraint).allows if constraint else lambda _: True)
        assert row.end not in self.tokens[row.row], f"{row} samples a position that has a token"
        self.tokens[row.row][row.end] = token
        return token
