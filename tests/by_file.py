"""How the workers of pytest-xdist share the tests: each takes a file at a time, whose models are then built in one process only."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

ROOT = Path(__file__).parents[1]
# What files have whose tests start several processes. Two of them at a time would fight for the cores, and every step that
# waits for the slowest rank would take many times as long; and each worker has a server of processes of its own, with torch and
# transformers. So the first worker begins with them, the others with the rest.
STARTS = re.compile(
    r"^from (tests\.)?(processes|scripts|pipeline_runs|training_runs) import|get_context\(|processes=True", re.MULTILINE
)
COMMANDS = ("test_adversaries", "test_demo", "test_mutants", "test_processes_faults")  # which start them by a command


class ByFile(LoadScopeScheduling):
    """Files with many tests come first, so that all workers end at about the same time."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid.partition("::")[0]

    def _assign_work_unit(self, node: WorkerController) -> None:
        several = node is self.nodes[0]
        wanted = [file for file in self.workqueue if _starts_several(file) == several]
        if wanted:  # else it helps the others
            self.workqueue.move_to_end(wanted[0], last=False)
        super()._assign_work_unit(node)


@cache
def _starts_several(file: str) -> bool:
    return file.rpartition("/")[2].startswith(COMMANDS) or STARTS.search((ROOT / file).read_text("utf-8")) is not None
