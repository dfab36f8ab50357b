"""A drafter that knows what rows will say."""

from collections.abc import Callable, Sequence

from torch import Tensor

from tandem.engine_core.kernels.sampling.inputs import SamplingTables
from tandem.engine_core.kernels.speculation.reference import row_int


class KnownDrafter:
    """Implement `Drafter` with the tokens that follow in known texts, changed by a function."""

    def __init__(self, tables: SamplingTables, guess: Callable[[list[int]], list[int]]) -> None:
        """Start without texts. guess: returns the drafts of a row, given the tokens that will follow."""
        self.tables = tables
        self.guess = guess
        self.texts: list[Sequence[int]] = []

    def propose(self, rows: Tensor, num_drafts: int, sources: Tensor, needs: int = 0) -> None:
        sources.zero_()
        for row in [row for row in rows.tolist() if row]:
            length, tokens = int(self.tables.lengths[row]), self.tables.tokens[row]
            known = tokens[:length].tolist()
            following = next((list(text[length:]) for text in self.texts if list(text[:length]) == known), [])
            most = min(num_drafts, row_int(self.tables, row, "max_drafts"))
            drafts = self.guess(following[:most])
            room = tokens[length : length + num_drafts]
            room.fill_(-1)
            for index, draft in enumerate(drafts[: len(room)]):
                room[index] = draft

    def note_accepted(self, rows: Tensor, counts: Tensor) -> None:
        return None
