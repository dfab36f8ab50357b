"""The order in which pytest-xdist hands out the files of tests.

Some tests compute, others wait for servers, and in the tree those are before these. Every second worker begins at its
end, so that processors have work while tests wait.
"""

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

TOGETHER = ("tests/e2e/default_model/",)
"""Folders whose files share a server that takes long to start: one worker runs them all."""


class FilesFromBothEnds(LoadFileScheduling):
    """Give every worker whole files: those of even number from the first on, the others from the last."""

    def _split_scope(self, nodeid: str) -> str:
        return next((folder for folder in TOGETHER if nodeid.startswith(folder)), super()._split_scope(nodeid))

    def _assign_work_unit(self, node: WorkerController) -> None:
        if int(node.gateway.id.removeprefix("gw")) % 2:
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)
