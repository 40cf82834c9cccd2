"""How the workers share the tests (tests/by_file.py)."""

from types import SimpleNamespace

import pytest

from tests.by_file import ROOT, ByFile, _starts_several

TESTS = [
    *("tests/test_layout.py::test_a", "tests/test_layout.py::test_b[x::y]", "tests/test_layout.py::test_c"),
    *("tests/test_processes_fsdp.py::test_a", "tests/test_processes_fsdp.py::test_b"),
    *("tests/test_demo.py::test_a", "tests/test_fmt.py::test_a", "tests/test_fmt.py::test_b"),
]


class Worker:
    """A worker that is told what to run."""

    shutting_down = False

    def __init__(self, name: str):
        self.gateway = SimpleNamespace(id=name)
        self.told: list[str] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.told += [TESTS[index] for index in indices]

    def shutdown(self) -> None:
        self.shutting_down = True


@pytest.fixture
def started() -> tuple[ByFile, Worker, Worker]:
    options = SimpleNamespace(loadscopereorder=True)
    scheduler = ByFile(SimpleNamespace(getvalue=lambda name: ["popen", "popen"], option=options))
    workers = Worker("gw0"), Worker("gw1")
    for worker in workers:
        scheduler.add_node(worker)
        scheduler.add_node_collection(worker, TESTS)
    scheduler.schedule()
    return scheduler, *workers


def ends(scheduler: ByFile, worker: Worker) -> None:
    """The worker has run all that it was told."""
    for test in tuple(worker.told):
        scheduler.mark_test_complete(worker, TESTS.index(test))


def test_one_worker_has_the_files_that_start_several_processes(started):
    _, first, second = started
    assert first.told == [TESTS[3], TESTS[4], TESTS[5]]
    assert second.told == TESTS[:3]


def test_a_worker_that_has_ended_its_own_helps(started):
    scheduler, first, second = started
    ends(scheduler, first)
    assert first.told[3:] == [TESTS[6], TESTS[7]]
    ends(scheduler, second)
    assert first.shutting_down or second.shutting_down
    assert sorted(first.told + second.told) == sorted(TESTS)


def test_what_such_files_import_is_there(request):
    files = [path.relative_to(ROOT).as_posix() for path in request.path.parent.glob("test_*.py")]
    several = [file for file in files if _starts_several(file)]
    assert {file for file in files if file.startswith("tests/test_processes_")} <= {*several}
    assert {"tests/test_adversaries.py", "tests/test_demo.py", "tests/test_checkpoints.py"} <= {*several}
    assert len(several) < len(files) / 2
