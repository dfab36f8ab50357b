"""A device made of lists, which obeys the contract of `contracts.Runtime` and complains about whoever does not."""

from array import array

from engine_core.contracts import DeviceTimes, Masks
from engine_core.kv_cache.pages import PADDING_PAGE
from engine_core.plan import Admission, Row, StepPlan
from engine_core.scheduler.admission import PADDING_ROW
from tests.fakes.model import choose, fold


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
        self.launched: dict[int, StepPlan] = {}
        self.results: dict[int, list[int]] = {}

    def launch(self, slot: int, plan: StepPlan) -> None:
        assert slot not in self.launched and slot not in self.results, f"slot {slot} launched before it was collected"
        for admission in plan.admitted:
            self.admissions[admission.seq_id] = admission
            self.tokens[admission.row] = {}
            self.page_table[admission.row] = []
        for row in plan.rows:
            self._forward(row)
        self.launched[slot] = plan

    def sample(self, slot: int, masks: Masks | None) -> None:
        plan = self.launched.pop(slot)
        assert (masks is not None) == plan.needs_mask, "a mask for a step that needs none, or none for one that does"
        results = []
        for index, row in enumerate(plan.rows):
            results.append(self._sample(row, masks[index] if masks else None) if row.samples else -1)
        self.results[slot] = results

    def collect(self, slot: int) -> list[int]:
        return self.results.pop(slot)

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
            assert row.start + index not in known, f"{row} uploads a position that the device has"
            known[row.start + index] = token
        state = 0
        if row.start:
            held = self.pool[self._place(row, row.start - 1)]
            assert held is not None and held[:2] == (row.seq_id, row.start - 1), f"{row} reads {held}"
            state = held[2]
        for position in range(row.start, row.end):
            state = fold(state, known[position])
            self.pool[self._place(row, position)] = (row.seq_id, position, state)

    def _sample(self, row: Row, mask: bytes | None) -> int:
        bits = int.from_bytes(mask, "little") if mask is not None else -1
        held = self.pool[self._place(row, row.end - 1)]
        assert held is not None and held[:2] == (row.seq_id, row.end - 1), f"{row} samples from {held}"
        forbidden = frozenset(self.admissions[row.seq_id].end_ids) if row.suppress_ends else frozenset()
        token = choose(held[2], forbidden, lambda candidate: bool(bits >> candidate & 1))
        assert row.end not in self.tokens[row.row], f"{row} samples a position that has a token"
        self.tokens[row.row][row.end] = token
        return token
