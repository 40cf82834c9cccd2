"""Two jobs that save one folder: stopped, continued and killed at drawn places. After each round the folder must be one job's, whole,
and not older than the newest save that succeeded.

    python -m tests.two_writers --rounds 1000 --seed 0

Both jobs are processes that live on, each a process group of its own with a planned model and its optimizer, and save with
`save_training_state`; a third process loads. All numbers of one save are one number, so that a mixture is seen. A job that is killed, or that
another has taken the place of, is started again, as a launcher does: it forgets what it saw, loads, and saves.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardplan
from shardplan.weights.folders import saves_of
from tests.sampling import add_share

PLAN = {"version": "1", "name": "two-writers", "tensor_parallel": {"first": "colwise", "second": "rowwise"}}
LONGEST = 0.03  # seconds of a delay: a save takes about as long
PATIENCE = 120.0


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


class Job:
    """A model and an optimizer, whose every number is one."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        self.model = shardplan.apply_plan(Small(), mesh, PLAN, prove=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def numbers(self) -> list[torch.Tensor]:
        moments = [state[key] for state in self.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
        return [getattr(one, "_local_tensor", one).detach() for one in (*self.model.parameters(), *moments)]

    def save(self, folder: Path, number: int) -> None:
        for tensor in self.numbers():
            tensor.fill_(number)
        shardplan.save_training_state(self.model, self.optimizer, folder, extra={"save": number}, overwrite=True)

    def load(self, folder: Path) -> int:
        """The number of the save; -1 for a mixture."""
        extra = shardplan.load_training_state(self.model, self.optimizer, folder)
        found = {extra["save"], *(value for one in self.numbers() for value in one.unique().tolist())}
        return int(found.pop()) if len(found) == 1 else -1


def serve(connection: Connection, folder: Path) -> None:
    job = Job()
    connection.send("ready")
    while True:
        what, number = connection.recv()
        begun = time.monotonic()
        try:
            found: Any = job.save(folder, number) if what == "save" else job.load(folder)
            answer = ("done", found)
        except Exception as error:
            answer = ("raised", f"{type(error).__name__}: {error}")
        connection.send((*answer, begun, time.monotonic()))


class Process:
    """A job in a process of its own, which is started again when it has died."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.start()

    def start(self) -> None:
        ours, theirs = multiprocessing.get_context("fork").Pipe()
        self.pid = os.fork()
        if not self.pid:
            try:
                serve(theirs, self.folder)
            finally:
                os._exit(1)
        theirs.close()
        self.connection = ours
        self.ready = False

    def ask(self, what: str, number: int = 0) -> None:
        if not self.ready:
            assert self.connection.poll(PATIENCE) and self.connection.recv() == "ready"
            self.ready = True
        self.connection.send((what, number))

    def do(self, what: str, number: int = 0) -> tuple[str, Any, float, float]:
        """Ask and wait; once more where it had been killed."""
        while True:
            try:
                self.ask(what, number)
            except (EOFError, ConnectionError):
                self.restart()
            else:
                if (answer := self.answer())[0] != "killed":
                    return answer

    def restart(self) -> None:
        os.waitpid(self.pid, 0)
        self.connection.close()
        self.start()

    def answer(self) -> tuple[str, Any, float, float]:
        """What came of it; ("killed", ...) where the process died."""
        assert self.connection.poll(PATIENCE), "a job hangs"
        try:
            return self.connection.recv()
        except (EOFError, ConnectionError):
            self.restart()
            return "killed", None, 0.0, 0.0

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def end(self) -> None:
        self.signal(signal.SIGKILL)
        os.waitpid(self.pid, 0)


def attack(draw: random.Random, jobs: list[Process], numbers: list[int]) -> list[tuple[str, Any, float, float]]:
    """Both save; each may begin late, be stopped for a while, and be killed."""
    now = time.monotonic()
    events: list[tuple[float, int, str]] = []
    for which in range(2):
        begin = draw.choice((0.0, draw.uniform(0, LONGEST)))
        events.append((now + begin, which, "save"))
        if draw.random() < 0.6:
            stop = begin + draw.uniform(0, LONGEST)
            events += [(now + stop, which, "stop"), (now + stop + draw.uniform(0, 4 * LONGEST), which, "continue")]
        if draw.random() < 0.04:
            events.append((now + begin + draw.uniform(0, 1.5 * LONGEST), which, "kill"))
    for when, which, what in sorted(events):
        time.sleep(max(0.0, when - time.monotonic()))
        if what == "save":
            jobs[which].ask("save", numbers[which])
        else:
            jobs[which].signal({"stop": signal.SIGSTOP, "continue": signal.SIGCONT, "kill": signal.SIGKILL}[what])
    return [job.answer() for job in jobs]


def kind(answer: tuple[str, Any, float, float]) -> str:
    if answer[0] != "raised":
        return answer[0]
    reasons = {"Superseded": "ended by the other", "is not what this job": "came after the other"}
    return next((short for text, short in reasons.items() if text in answer[1]), answer[1])


def judge(folder: Path, found: tuple[str, Any, float, float], saves: dict[int, Any], before: int) -> str:
    """What is wrong with a round: "mixed", "lost", "older", or "" if nothing is.

    Args:
        found: what a load answered.
        saves: the answers of this round, by the number of the save.
        before: the number that was there before.
    """
    if found[0] != "done":
        return "lost"
    if found[1] == -1:
        return "mixed"
    done = {number: answer for number, answer in saves.items() if answer[0] == "done"}
    if found[1] == before:
        return "older" if done else ""
    if found[1] not in saves or saves[found[1]][0] == "raised":
        return "mixed"
    if found[1] in done and any(other[2] > done[found[1]][3] for other in done.values()):
        return "older"
    return ""


def summary(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def run(rounds: int, seed: int) -> Counter[str]:
    draw, counts = random.Random(seed), Counter[str](rounds=rounds, mixed=0, lost=0, older=0)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "state")
        jobs, loader = [Process(folder), Process(folder)], Process(folder)
        try:
            assert jobs[0].do("save", 1)[0] == "done"
            last, number = 1, 1
            for round_number in range(rounds):
                numbers = [number + 1, number + 2]
                number += 2
                for job in jobs:  # a new job each, which has loaded
                    assert job.do("load")[:2] == ("done", last)
                answers = dict(zip(numbers, attack(draw, jobs, numbers), strict=True))
                found = loader.do("load")
                counts.update(kind(answer) for answer in answers.values())
                wrong = judge(folder, found, answers, last)
                if wrong:
                    counts[wrong] += 1
                    print(f"round {round_number}: {wrong}: {found[:2]} after {last}, {answers}", flush=True)
                    shutil.rmtree(folder, ignore_errors=True)  # begin anew
                    assert jobs[0].do("save", number)[0] == "done"
                    found = ("done", number)
                last = found[1]
                if round_number % 100 == 99:
                    print(summary({**counts, "rounds": round_number + 1}), flush=True)
            names = [path.suffix for path in saves_of(folder).iterdir()] if saves_of(folder).exists() else []
            counts["files of ended jobs"] = names.count(".old")
            counts["left"] = len(names) - names.count(".old")
        finally:
            for job in (*jobs, loader):
                job.signal(signal.SIGCONT)
                job.end()
    return counts


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=1000)
    add_share(parser)
    given = parser.parse_args()
    counts = run(-(-given.rounds // given.share), given.seed)
    print(summary(counts))
    raise SystemExit(bool(counts["mixed"] or counts["lost"] or counts["older"]))
