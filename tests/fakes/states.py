"""Recurrent states of a device made of lists: each is the fold of the tokens that it covers."""

from collections.abc import Sequence

from tandem.engine_core.plan import StateCopy

Held = tuple[int, int]
"""Number of tokens, and their fold."""


class FakeStates:
    """State of each row, its base, and slots of checkpoints.

    A row that begins with another state than that of its tokens, and a copy of another position than planned, is an
    assertion.
    """

    def __init__(self, rows: int, slots: int, interval: int) -> None:
        """Start with nothing in rows and slots. interval: positions from one base to the next."""
        self.interval = interval
        self.rows: list[Held | None] = [None] * (rows + 1)
        self.bases: list[Held | None] = [None] * (rows + 1)
        self.slots: list[Held | None] = [None] * slots
        self.drafted: dict[int, Sequence[int]] = {}
        """Fold at each position that rows with drafts have computed, until some are accepted."""
        self.saved = self.loaded = 0
        """Number of copies."""

    def copy(self, saves: Sequence[StateCopy], loads: Sequence[StateCopy]) -> None:
        """Execute the copies of a step."""
        assert len({copy.row for copy in loads}) == len(loads), f"two loads to one row: {loads}"
        for copy in saves:
            base = self.bases[copy.row]
            assert base is not None and base[0] == copy.position, f"{copy} saves {base}"
            self.slots[copy.slot] = base
        for copy in loads:
            held = self.slots[copy.slot]
            assert held is not None and held[0] == copy.position, f"{copy} loads {held}"
            self.rows[copy.row] = self.bases[copy.row] = held
        self.saved += len(saves)
        self.loaded += len(loads)

    def advance(self, row: int, first: int, folds: Sequence[int]) -> None:
        """Compute positions of a row from `first` on. folds: at each position below the end."""
        self._check(row, first, folds)
        self._hold(row, len(folds), folds)

    def verify(self, row: int, first: int, folds: Sequence[int]) -> None:
        """Compute a position of a row and its drafts; the base may cover the tokens before these only."""
        self._check(row, first, folds)
        self._hold(row, first + 1, folds)
        self.rows[row], self.drafted[row] = None, folds

    def accept(self, row: int, end: int) -> None:
        """Go back to the positions of a row below `end`, if it has computed drafts."""
        folds = self.drafted.pop(row, None)
        if folds is not None:
            self._hold(row, end, folds)

    def _check(self, row: int, first: int, folds: Sequence[int]) -> None:
        before = (first, folds[first - 1]) if first else None
        assert row not in self.drafted, f"row {row} goes on before its drafts are accepted"
        assert before is None or self.rows[row] == before, f"row {row} has {self.rows[row]} at {before}"

    def _hold(self, row: int, end: int, folds: Sequence[int]) -> None:
        self.rows[row] = end, folds[end - 1]
        position = (end - 1) // self.interval * self.interval
        self.bases[row] = (position, folds[position - 1]) if position else None

    def forget(self) -> None:
        """Erase all rows and slots."""
        self.rows, self.bases = [None] * len(self.rows), [None] * len(self.bases)
        self.slots = [None] * len(self.slots)

    def free(self, slot: int) -> None:
        """Erase a slot."""
        self.slots[slot] = None
