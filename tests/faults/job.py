"""A rank of a job that trains for a few steps, saves every other one, and meets a fault."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

import shardplan
from shardplan.api.deciding import Asked
from shardplan.api.keywords import model_of
from shardplan.core import version
from shardplan.runtime.training.watch_ranks import RankWatch
from tests.faults.kinds import KINDS, Kind

STEPS, EVERY, BATCH, LENGTH = 4, 2, 8, 32
PATIENCE = 10.0  # seconds until a rank that gives no sign has ended
START = 20.0  # seconds in which all ranks begin
EXAMPLES = Path(__file__).parents[2] / "examples"
TEXT = Path(__file__).parents[2] / "demo/text.txt"

# What is called where a fault may come: (module, attribute).
PLACES: dict[str, tuple[tuple[str, str], ...]] = {
    "forward": (("torch.nn.functional", "linear"),),
    "backward": (("torch.autograd", "backward"),),
    "exchange": (
        ("shardplan.runtime.parallel.collectives", "_run"),
        *(("torch.distributed", name) for name in ("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor")),
    ),
    "hand-over": tuple(("torch.distributed", name) for name in ("recv", "broadcast_object_list", "batch_isend_irecv")),
    "save": (
        *(("os", name) for name in ("fsync", "mkdir", "rename")),
        *(("shardplan.weights.training_state", name) for name in ("all_or_none", "begin", "commit", "get_state_dict", "write_checksums")),
        ("torch.distributed.checkpoint", "save"),
    ),
    "load": (
        *(("shardplan.weights.training_state", name) for name in ("all_or_none", "check_checksums", "get_state_dict", "set_state_dict")),
        ("torch.distributed.checkpoint", "load"),
        ("torch", "load"),
    ),
}  # fmt: skip

MODULES = {module: importlib.import_module(module) for names in PLACES.values() for module, _ in names}


@dataclass(frozen=True)
class Fault:
    """What happens to one rank.

    Args:
        what: "kill", "terminate", "stop" (and continue), "halt" (stopped for good), "full" (a full disk), "read-only", or "another"
            (a plan, a seed, a batch size or a version).
        place: where: a key of PLACES, or "start", before there is a process group.
        hit: at which call there.
        amount: seconds of a stop, bytes of a disk, or what is another.
    """

    what: str
    rank: int
    place: str = ""
    hit: int = 0
    amount: Any = None


@dataclass
class Request:
    """A rank of a job."""

    kind: str
    rank: int
    port: int
    folder: str  # has `model`, and `run`, which is written to
    seed: int
    fault: Fault | None = None
    env: dict[str, str] = field(default_factory=dict)


class Meter:
    """Counts the calls of each place, and lets the fault happen at its call."""

    def __init__(self, request: Request):
        self.fault, self.folder, self.kind = request.fault, Path(request.folder), request.kind
        self.mine = self.fault is not None and self.fault.rank == request.rank
        self.hits: Counter[str] = Counter()
        self.within: str | None = None  # "save" and "load" are counted inside of their functions
        self.watch: RankWatch | None = None
        for place, names in PLACES.items():
            for module, name in names:
                owner = MODULES[module]
                setattr(owner, name, self._counted(place, getattr(owner, name)))
        for place, name in (
            ("save", "save_training_state"),
            ("load", "load_training_state"),
            ("load", "load_checkpoint"),
        ):
            setattr(shardplan, name, self._inside(place, getattr(shardplan, name)))

    def _counted(self, place: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            if place not in ("save", "load") or self.within == place:
                self.hit(place)
            return function(*args, **options)

        return counted

    def _inside(self, place: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def inside(*args: Any, **options: Any) -> Any:
            self.within = place
            try:
                return function(*args, **options)
            finally:
                self.within = None

        return inside

    def hit(self, place: str) -> None:
        self.hits[place] += 1
        if self.mine and self.fault is not None and (self.fault.place, self.fault.hit) == (place, self.hits[place]):
            self.happen(self.fault)

    def happen(self, fault: Fault) -> None:
        step = self.watch._sign.step if self.watch else ""
        (self.folder / "happened").write_text(json.dumps({"time": time.time(), "step": step}))
        if fault.what == "full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (fault.amount, fault.amount))
        elif fault.what == "read-only":
            for path in [self.folder / "run", *(self.folder / "run").rglob("*")]:
                if path.is_dir():
                    path.chmod(0o555)
            if os.geteuid() == 0:  # whom no mode stops
                os.seteuid(65534)
        else:
            if fault.what == "stop":
                subprocess.Popen(["sh", "-c", f"sleep {fault.amount}; kill -CONT {os.getpid()}"])
            number = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM}.get(fault.what, signal.SIGSTOP)
            os.kill(os.getpid(), number)


def run(request: Request) -> None:
    """The whole life of a rank. What it raises ends the process as it ends a script."""
    kind = KINDS[request.kind]
    os.environ |= {"RANK": str(request.rank), "WORLD_SIZE": str(kind.ranks), "LOCAL_RANK": str(request.rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(request.port), **request.env}
    torch.set_num_threads(1)
    meter = Meter(request)
    meter.hit("start")
    another = request.fault.amount if meter.mine and request.fault and request.fault.what == "another" else ""
    if another:
        (meter.folder / "happened").write_text(json.dumps({"time": time.time(), "step": None}))
    if another == "version":
        version.__version__ = shardplan.__version__ = "99.0"
    compiled = Compiled()
    patience = 6 * PATIENCE if request.fault is None else PATIENCE  # a plan that is compiled first may take longer
    with shardplan.watch_ranks("gloo", patience=patience, start=START) as watch:
        meter.watch = watch
        (_loop if kind.script == "loop" else _example)(kind, Path(request.folder), request.seed, another, watch)
    if request.fault is None:
        (meter.folder / f"hits-{request.rank}.json").write_text(json.dumps(meter.hits))
        (meter.folder / f"asked-{request.rank}.pickle").write_bytes(pickle.dumps(compiled.asked))


def _unproven(model: Any, mesh: Any, plan: Any, **options: Any) -> Any:
    return _apply(model, mesh, plan, prove=False, **options)


_apply, _compiled = shardplan.apply_plan, Asked.compiled


class Compiled:
    """Plans that were compiled before this process was forked: ranks begin in a second."""

    known: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        Asked.compiled = lambda asked, sizes, **options: self(asked, sizes, options)

    def __call__(self, asked: Asked, sizes: Any, options: dict[str, Any]) -> Any:
        key = (asked.plan, asked.changes, asked.seq_len, sizes)
        self.asked.append(key)
        return self.known.get(repr(key)) or _compiled(asked, sizes, **options)

    @classmethod
    def compile(cls, key: tuple[Any, ...], model: torch.nn.Module) -> None:
        plan, changes, seq_len, sizes = key
        cls.known[repr(key)] = Asked(model_of(model), plan, changes, seq_len).compiled(sizes)


def _example(kind: Kind, folder: Path, seed: int, another: str, watch: RankWatch) -> None:
    shardplan.apply_plan = _unproven
    script = ModuleType(kind.script)
    exec(compile((EXAMPLES / f"{kind.script}.py").read_text(), kind.script, "exec"), vars(script))
    words = ["--model", str(folder / "model"), "--text", str(TEXT), "--output", str(folder / "run")]
    words += [
        "--tp",
        str(kind.mesh["tp"]),
        "--steps",
        str(STEPS),
        "--batch",
        str(BATCH),
        "--seq-len",
        str(LENGTH),
        "--warmup",
        "2",
    ]
    words += [
        "--micro-batch",
        "1" if another == "batch" else "2",
        "--seed",
        str(seed + (another == "seed")),
        "--lr",
        "1e-2",
    ]
    words += [
        "--save-every",
        str(EVERY),
        "--keep",
        "2",
        *(["--plan", _other_plan(folder)] if another == "plan" else []),
    ]
    script.train(script.arguments(words), watch.steps)


def _other_plan(folder: Path) -> str:
    """The built-in plan with another rule."""
    path = folder / "other.yaml"
    path.write_text(
        "version: '1'\nname: other\nextends: llama\ntensor_parallel:\n  lm_head: {style: colwise_gather_output}\n"
    )
    return str(path)


def _loop(kind: Kind, folder: Path, seed: int, another: str, watch: RankWatch) -> None:
    """A loop as in the examples."""
    leave = torch.zeros(())
    signal.signal(signal.SIGTERM, lambda *_: leave.fill_(1))
    config = AutoConfig.from_pretrained(folder / "model")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    torch.manual_seed(seed + (another == "seed"))
    pipeline = {"pipeline": shardplan.PipelineOptions("1f1b", 4)} if kind.hands_over else {}
    mesh = shardplan.build_mesh(**kind.mesh, device_type="cpu")
    plan = _other_plan(folder) if another == "plan" else "auto"
    tensor_parallel = kind.mesh.get("tp", 1) > 1
    model = _unproven(model, mesh, plan, sequence_parallel=tensor_parallel, seq_len=LENGTH, **pipeline)
    shardplan.load_checkpoint(model, folder / "model", progress=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    same = kind.mesh.get("tp", 1) * kind.mesh.get("cp", 1)  # ranks with the same data
    parts = kind.mesh.get("dp_shard", 1)
    part = dist.get_rank() // same % parts
    output, first = folder / "run", dist.get_rank() == 0
    saves = sorted(output.glob("step-*"))
    done = shardplan.load_training_state(model, optimizer, saves[-1])["step"] if saves else 0
    text = torch.tensor(list(TEXT.read_bytes()))
    for step in watch.steps(range(done + 1, STEPS + 1)):
        draw = torch.Generator().manual_seed(seed + (another == "seed") + step)
        starts = torch.randint(len(text) - LENGTH, (BATCH // parts * parts,), generator=draw).tolist()
        ids = torch.stack([text[start : start + LENGTH] for start in starts]).chunk(parts)[part]
        if another == "batch":
            ids = ids[:-2]
        if kind.hands_over:
            loss = model.step(input_ids=ids, labels=ids)
        else:
            for batch, scale in shardplan.micro_batches(model, [{"input_ids": ids, "labels": ids}]):
                with shardplan.context_parallel(model, **batch) as inputs:
                    loss = model(**inputs, use_cache=False).loss * scale
                    loss.backward()
        shardplan.clip_grad_norm_(model if kind.hands_over else model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        leaving = leave.clone()
        dist.all_reduce(leaving, dist.ReduceOp.MAX)
        if first:
            with (folder / "run" / "losses.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, "loss": loss.item()}) + "\n")
        if step % EVERY == 0 or leaving:
            shardplan.save_training_state(
                model, optimizer, output / f"step-{step}", extra={"step": step}, overwrite=True
            )
        if leaving:
            return


def main(words: str) -> None:
    """One rank, for a process of its own."""
    given = json.loads(words)
    given["fault"] = Fault(**given["fault"]) if given["fault"] else None
    run(Request(**given))


def words(request: Request) -> str:
    return json.dumps(asdict(request))


if __name__ == "__main__":
    main(sys.argv[1])
