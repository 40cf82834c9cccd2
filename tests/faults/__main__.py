"""Jobs that meet faults: how each of their ranks ends, what is left, and whether the run that follows ends like one without a fault.

    python -m tests.faults --kind pipeline --count 25 --seed 0

Ranks are processes that end as scripts do, forked where torch and transformers are loaded. A fault is drawn by the seed: what happens, to which
rank, and at which of the calls that a run without a fault makes there.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.faults.job import EVERY, PATIENCE, PLACES, START, STEPS, Compiled, Fault, Request, run
from tests.faults.kinds import KINDS
from tests.sampling import add_share

WHOLE = 120.0  # seconds that a job without a fault may take, on a busy machine
# Seconds from a fault to the end of each other rank; before the first step, where ranks import, load and compile, what a run without a
# fault takes comes to it, as a busy machine takes longer.
ENDS = max(PATIENCE, START) + 30.0
# What is drawn from: 25 faults have each of these as often as it is here, at other places each time.
WHAT = (
    *("kill",) * 6,
    *("another",) * 4,
    *("stop",) * 3,
    *("terminate",) * 3,
    *("halt", "full", "bit", "missing") * 2,
    "read-only",
)
START_OF_ALL = "before its first step"
STEP = rf"(in step \d+|{START_OF_ALL})"


class Forked(BaseException):
    """This process is a rank."""

    def __init__(self, request: Request, log: Path):
        self.request, self.log = request, log


@dataclass
class Ended:
    """How a rank ended."""

    code: int  # of the exit; below 0 the signal
    time: float
    log: str

    @property
    def last(self) -> str:
        lines = [line for line in self.log.splitlines() if line.strip()]
        return lines[-1] if lines else ""


def job(kind: str, folder: Path, seed: int, fault: Fault | None = None) -> list[Ended]:
    """Run a job to its end. A rank that is stopped for good is killed when the others have ended, and one that has not ended in time."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (folder / "happened").unlink(missing_ok=True)
    (folder / "run").mkdir(exist_ok=True)
    pids = {}
    for rank in range(KINDS[kind].ranks):
        log = folder / f"rank-{rank}.log"
        sys.stdout.flush()
        if not (pid := os.fork()):
            raise Forked(Request(kind, rank, port, str(folder), seed, fault), log)
        pids[pid] = rank
    ended: dict[int, Ended] = {}
    begun = time.time()
    while len(ended) < len(pids):
        for pid, rank in pids.items():
            if rank not in ended:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    log = (folder / f"rank-{rank}.log").read_text(errors="replace")
                    ended[rank] = Ended(os.waitstatus_to_exitcode(status), time.time(), log)
        halted = fault is not None and fault.what == "halt" and len(ended) == len(pids) - 1
        if halted or time.time() > begun + WHOLE:
            for pid, rank in pids.items():
                if rank not in ended:
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return [ended[rank] for rank in sorted(ended)]


def result(folder: Path) -> dict[str, bytes]:
    """What a run left in the end: its last losses, and the files of its last save."""
    losses: dict[int, float] = {}
    for line in (folder / "run/losses.jsonl").read_text().splitlines():
        row = json.loads(line)
        losses[row["step"]] = row["loss"]
    last = folder / f"run/step-{STEPS}"
    files = {
        file.name: file.read_bytes()
        for file in sorted(last.iterdir())
        if file.name not in (".metadata", "checksums.json")
    }
    return {**files, "losses": repr(sorted(losses.items())).encode()}


def newest(folder: Path) -> int:
    """The step of the newest state that has its name."""
    return max((int(path.name.split("-")[1]) for path in (folder / "run").glob("step-*")), default=0)


class Judge:
    """All faults of one kind of job."""

    def __init__(self, kind: str, seed: int, only: Sequence[str] = ()):
        self.kind, self.seed, self.only, self.draw = kind, seed, only, random.Random(f"{kind} {seed}")
        self.counts: Counter[str] = Counter()
        self.left: dict[str, list[Any]] = {}  # what is not drawn yet, of each thing that is drawn
        self.place = Path(tempfile.mkdtemp(prefix="faults-"))
        self.place.chmod(0o755)

    def folder(self, name: str, model: bool = True) -> Path:
        folder = self.place / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        if model:
            shutil.copytree(self.place / "model", folder / "model")
        return folder

    def prepare(self) -> None:
        """The weights, and a run without a fault."""
        kind = KINDS[self.kind]
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind.model_type, **kind.numbers))
        model.save_pretrained(self.place / "model", max_shard_size="100KB")
        if kind.script != "loop":
            sys.path.append(str(Path(__file__).parents[1]))  # as pytest has it
            from test_finetune import make_tokenizer

            make_tokenizer(self.place / "model")
        whole = self.folder("whole")
        self.check(job(self.kind, whole, self.seed), "the run without a fault")
        self.result = result(whole)
        with torch.device("meta"):
            meta = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
        for key in pickle.loads((whole / "asked-0.pickle").read_bytes()):
            Compiled.compile(key, meta)
        again = self.folder("again")  # without what compiling calls
        begun = time.time()
        self.check(ended := job(self.kind, again, self.seed), "the run without a fault")
        self.seconds = max(one.time for one in ended) - begun
        assert result(again) == self.result, "two runs end differently"
        self.hits = [json.loads((again / f"hits-{rank}.json").read_text()) for rank in range(kind.ranks)]
        # A run that is continued, for faults while it loads.
        half = self.folder("half")
        shutil.copytree(whole / "run", half / "run")
        self.cut(half, STEPS - EVERY)
        self.check(job(self.kind, half, self.seed), "a run that is continued")
        self.loads = [json.loads((half / f"hits-{rank}.json").read_text()) for rank in range(kind.ranks)]
        assert result(half) == self.result, "a run that is continued ends otherwise"

    def check(self, ended: Sequence[Ended], what: str) -> None:
        assert all(one.code == 0 for one in ended), "\n".join([what, *(one.log for one in ended)])

    def cut(self, folder: Path, step: int) -> None:
        """The run as it was after a step."""
        for path in (folder / "run").glob("step-*"):
            if int(path.name.split("-")[1]) > step:
                shutil.rmtree(path)
        shutil.rmtree(folder / "run/model", ignore_errors=True)

    def drawn(self) -> Fault | tuple[str, str]:
        """A fault of a running job; or what is damaged between two runs: ("bit" or "missing", "weights" or "states")."""
        what = self.one_of("what", self.only or WHAT)
        if what in ("bit", "missing"):
            return what, self.one_of(what, ["weights", "states"])
        rank = self.draw.randrange(KINDS[self.kind].ranks)
        if what == "another":
            return Fault(what, rank, "", 0, self.one_of(what, KINDS[self.kind].told))
        places = ["save"] if what in ("full", "read-only") else [*PLACES]
        if what in ("kill", "halt", "stop"):  # before the loop has its lines, SIGTERM is as SIGKILL
            places.append("start")
        reached = [one for one in places if one == "start" or self.of(one)[rank].get(one)]
        place = self.one_of(f"places of {what}", reached)
        hit = 1 if place == "start" else self.draw.randint(1, self.of(place)[rank][place])
        amount = {"stop": round(self.draw.uniform(0.3, 4), 2), "full": self.draw.randint(20_000, 60_000)}.get(what)
        return Fault(what, rank, place, hit, amount)

    def one_of(self, name: str, every: Sequence[Any]) -> Any:
        """One that was not drawn yet under this name; of all again when each was."""
        left = self.left.setdefault(name, [])
        if not [one for one in left if one in every]:
            left += self.draw.sample(every, len(every))
        chosen = next(one for one in left if one in every)
        left.remove(chosen)
        return chosen

    def of(self, place: str) -> list[dict[str, int]]:
        return self.loads if place == "load" else self.hits

    def round(self, number: int) -> None:
        fault = self.drawn()
        wrong = self.damaged(*fault) if isinstance(fault, tuple) else self.met(fault)
        what = (
            " ".join(fault)
            if isinstance(fault, tuple)
            else f"{fault.what}{f' ({fault.amount})' if fault.what == 'another' else ''}"
        )
        self.counts[f"drawn: {what}"] += 1
        for one in wrong:
            self.counts[f"WRONG: {one.partition(':')[0]}"] += 1
        print(f"{self.kind} {number}: {fault}: {'; '.join(wrong) or 'right'}", flush=True)

    def met(self, fault: Fault) -> list[str]:
        """What is wrong after a job that met a fault."""
        folder = self.folder("met")
        if fault.place == "load":
            shutil.copytree(self.place / "whole/run", folder / "run")
            self.cut(folder, STEPS - EVERY)
        ended = job(self.kind, folder, self.seed, fault)
        if not (folder / "happened").exists():
            return ["the fault did not happen"]
        happened = json.loads((folder / "happened").read_text())
        for path in [folder / "run", *(folder / "run").rglob("*")]:
            if path.is_dir():
                path.chmod(0o755)
        # Of the step that a rank was in there may be a save; those before are whole. A job that leaves saves first.
        left = fault.what == "terminate" and all(one.code == 0 for one in ended)
        step = int(happened["step"] or (STEPS - EVERY + 1 if fault.place == "load" else 1))
        lost = newest(folder) < (step if left else (step - 1) // EVERY * EVERY)
        return [
            *self.ends(fault, ended, happened, newest(folder)),
            *(["a save was lost"] if lost else []),
            *self.continues(folder),
        ]

    def ends(self, fault: Fault, ended: Sequence[Ended], happened: dict, saved: int) -> list[str]:
        of_disk = fault.what in ("full", "read-only")
        if all(one.code == 0 for one in ended):
            fine = fault.what in ("stop", "terminate") or (fault.what == "another" and fault.amount == "version")
            fine |= of_disk and saved == STEPS  # it came after the last write
            self.counts["jobs that went on or left, all ranks"] += 1
            return [] if fine else ["no rank noticed"]
        wrong = []
        if fault.what == "stop":
            wrong.append("a stopped rank: " + ended[fault.rank].last)
        others = [one for rank, one in enumerate(ended) if rank != fault.rank or of_disk or fault.what == "another"]
        for one in others:
            self.counts["ranks that had to end"] += 1
            late = one.time - happened["time"]
            said, step = one.last.partition("ends here: ")[2], happened["step"]
            if of_disk and step:  # the next write notices it, perhaps in the next step
                step = max(step, *re.findall(r"in step (\d+)", said))
            named = re.search(rf"\branks? (\d+(, | and ))*{fault.rank}\b", said)
            placed = re.search(STEP, said) if step is None else (f"in step {step}" if step else START_OF_ALL) in said
            if "the store of all ranks" in said or "not begun" in said:  # nobody knows: the rank's own step is there
                placed = re.search(STEP, one.last)
            if one.code < 0:
                wrong.append(f"a signal: {one.code}, {one.last}")
            elif one.code == 0:
                wrong.append("exit code 0")
            elif late > ENDS + (0.0 if step else self.seconds):
                wrong.append(f"late: {late:.0f} s, {one.last}")
            elif not named or not placed:
                wrong.append(f"the line: {one.last}")
            else:
                self.counts["ranks that ended in time with the line"] += 1
                self.counts["seconds of the slowest"] = max(self.counts["seconds of the slowest"], round(late))
        return wrong

    def continues(self, folder: Path) -> list[str]:
        """Run it again, as it is: from the newest save, to the same end."""
        self.counts["restarts"] += 1
        again = job(self.kind, folder, self.seed)
        if any(one.code for one in again):
            return [f"the restart: {next(one.last for one in again if one.code)}"]
        if result(folder) != self.result:
            return ["the restart ends otherwise"]
        self.counts["restarts that were bit-equal"] += 1
        return []

    def damaged(self, what: str, where: str) -> list[str]:
        """A run is continued whose files are damaged, fails, and goes on from the save before, or with the weights as they were."""
        folder = self.folder("damaged")
        if where == "states":
            shutil.copytree(self.place / "whole/run", folder / "run")
            self.cut(folder, STEPS - EVERY)
        root = folder / (f"run/step-{STEPS - EVERY}" if where == "states" else "model")
        files = [file for file in sorted(root.iterdir()) if where == "states" or file.suffix == ".safetensors"]
        file = self.draw.choice(files)
        content = bytearray(file.read_bytes())
        header = len(content) if where == "states" else 8 + int.from_bytes(content[:8], "little")
        place = self.draw.randrange(header)  # values of safetensors have no checksum (docs/faults.md)
        if what == "missing":
            file.unlink()
        else:
            content[place] ^= 1 << self.draw.randrange(8)
            file.write_bytes(content)
        (folder / "happened").unlink(missing_ok=True)
        begun = time.time()
        ended = job(self.kind, folder, self.seed)
        wrong = []
        # A bit of what nobody reads, such as the metadata of safetensors, changes nothing.
        same = what == "bit" and all(one.code == 0 for one in ended) and result(folder) == self.result
        for one in () if same else ended:
            self.counts["ranks that had to end"] += 1
            if one.code != 1:
                wrong.append(f"exit code {one.code} with {file.name} damaged at {place}")
            elif one.time > begun + ENDS + self.seconds:
                wrong.append(f"late: {one.time - begun:.0f} s, {one.last}")
            elif not re.search(STEP, one.last) or (file.name not in one.log and root.name not in one.last):
                wrong.append(f"the line: {one.last}")
            else:
                self.counts["ranks that ended in time with the line"] += 1
        if where == "states":
            shutil.rmtree(root)
        else:
            shutil.rmtree(root)
            shutil.copytree(self.place / "model", root)
        return [*wrong, *self.continues(folder)]


def judge(kinds: Sequence[str], count: int, seed: int, only: Sequence[str] = ()) -> bool:
    """Whether all faults of these kinds of job were right.

    Args:
        only: what may happen; all of WHAT where it is empty.
    """
    fine = True
    for kind in kinds:
        one = Judge(kind, seed, only)
        begun = time.time()
        one.prepare()
        for number in range(count):
            one.round(number)
        shutil.rmtree(one.place)
        print(f"{kind}: {count} faults in {time.time() - begun:.0f} s")
        for name, number in sorted(one.counts.items()):
            print(f"  {number:4} {name}", flush=True)
        fine &= not any(name.startswith("WRONG") for name in one.counts)
    return fine


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=[*KINDS], action="append")
    parser.add_argument("--what", choices=sorted({*WHAT}), action="append", help="the faults that are drawn from (all)")
    parser.add_argument("--count", type=int, default=25)
    add_share(parser)
    given = parser.parse_args()
    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    forked: Forked | None = None
    try:
        code = int(not judge(given.kind or [*KINDS], -(-given.count // given.share), given.seed, given.what or ()))
    except Forked as request:
        forked = request
    if forked is None:
        raise SystemExit(code)
    number = os.open(forked.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(number, 1)
    os.dup2(number, 2)
    run(forked.request)
