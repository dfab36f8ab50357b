"""The order in which pytest-xdist hands out the files of tests.

Some tests compute, others wait for servers for half of their time. Every third worker begins with those that compute,
so that processors have work while the others wait. Of the others, every second begins at the end of the tree.
"""

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

TOGETHER = ("tests/e2e/default_model/", "tests/frontend/page/", "tests/test_")
"""Beginnings of the names of files that share what takes long to make: one worker runs them all."""
COMPUTING = ("tests/engine_core/", "tests/sim/")
"""Beginnings of the names of files whose tests compute all the time."""


class FilesByKind(LoadFileScheduling):
    """Give every worker whole files: those that compute, or those that wait from the first or from the last on.

    A worker that has finished its own kind goes on with the other.
    """

    def _split_scope(self, nodeid: str) -> str:
        return next((shared for shared in TOGETHER if nodeid.startswith(shared)), super()._split_scope(nodeid))

    def _assign_work_unit(self, node: WorkerController) -> None:
        turn = int(node.gateway.id.removeprefix("gw")) % 3
        files = list(self.workqueue)
        own = [file for file in files if file.startswith(COMPUTING) == (turn == 2)] or files
        self.workqueue.move_to_end(own[-1 if turn == 1 else 0], last=False)
        super()._assign_work_unit(node)
