"""examples/trainer.py and examples/accelerate_loop.py: other projects' loops around a planned model, on 4 processes."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import signal
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DataLoaderConfiguration
from processes import RanksFailed, on_ranks
from small_models import batch, small_model
from stopped_processes import Process, stopping
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, IterableDataset
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

import shardplan
from shardplan.compat import adopt
from shardplan.compat.trainer_saves import _IGNORED, _move_model, _remove_older
from shardplan.weights.folders import begin

ROOT = Path(__file__).parent.parent
STEPS = 4


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def given(name: str, folder: Path, *words: str) -> tuple[ModuleType, list[str]]:
    """The example and its arguments."""
    text = str(ROOT / "demo/text.txt")
    return example(name), ["--text", text, "--seq-len", "64", "--losses", str(folder / "losses"), *words]


def losses(name: str, folder: Path, *words: str) -> list[float]:
    """What the example logs, the losses in evaluation too."""
    script, arguments = given(name, folder, "--steps", str(STEPS), *words)
    script.train(script.arguments(arguments))
    file = folder / "losses"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [row.get("loss") or row["eval_loss"] for row in rows]


def as_torchrun() -> None:
    """What torchrun says to its processes, and no state of an earlier run."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    AcceleratorState._reset_state()
    PartialState._reset_state()


class Warned(logging.Handler):
    """What torch's collectives warn of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def on_this_rank(name: str, folder: str, *words: str) -> list[float]:
    as_torchrun()
    warned = Warned()
    logging.getLogger("torch.distributed").addHandler(warned)
    try:
        found = losses(name, Path(folder), *words)
    finally:
        logging.getLogger("torch.distributed").removeHandler(warned)
    assert warned.said == []
    return found


@pytest.mark.parametrize(
    ("name", "words"),
    [
        pytest.param("trainer", ("--tp", "2", "--sequence-parallel"), marks=pytest.mark.slow),
        ("accelerate_loop", ("--tp", "2", "--sequence-parallel")),
        pytest.param("trainer", ("--tp", "1"), marks=pytest.mark.exhaustive),
        pytest.param("accelerate_loop", ("--tp", "4"), marks=pytest.mark.exhaustive),
    ],
    ids=lambda value: value if isinstance(value, str) else "".join(value),
)
@pytest.mark.slow
def test_the_losses_are_those_of_the_unsharded_model(name, words, tmp_path):
    outputs = {
        one: ("--save-steps", "2", "--output", str(tmp_path / one)) if name == "trainer" else ()
        for one in ("sharded", "whole")
    }
    (tmp_path / "one").mkdir()
    found, *_ = on_ranks(4, on_this_rank, name, str(tmp_path), *words, *outputs["sharded"], seconds=240)
    wanted = losses(name, tmp_path / "one", *outputs["whole"])
    assert len(found) == STEPS + 2 * (name == "trainer") and found == pytest.approx(wanted, rel=2e-5)
    if name == "trainer":
        sharded, whole = (AutoModelForCausalLM.from_pretrained(tmp_path / one) for one in ("sharded", "whole"))
        for key, value in whole.state_dict().items():
            torch.testing.assert_close(sharded.state_dict()[key], value, rtol=1e-3, atol=1e-4)


class Killed(TrainerCallback):
    """The process ends without a word after a step."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.step:
            kill()


def kill(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def life(folder: str, killed: str) -> None:
    """Six steps with dropout, an evaluation and a save after each two; the first is the best. An epoch has four."""
    as_torchrun()
    script, arguments = given("trainer", Path(folder), "--tp", "2", "--sequence-parallel", "--steps", "6")

    def adopt_and_kill(trainer, model):
        adopt(trainer, model)
        trainer.args.greater_is_better = True  # the loss is, and it falls
        if killed == "after a step":
            trainer.add_callback(Killed(3))
        if killed == "while it saves" and dist.get_rank() == 1:
            trainer._save_rng_state = kill

    script.adopt = adopt_and_kill
    output = str(Path(folder, "run"))
    arguments += [
        "--seq-len",
        "512",
        "--model",
        str(Path(folder, "config.json")),
        "--save-steps",
        "2",
        "--keep",
        "2",
        "--output",
        output,
    ]
    script.train(script.arguments(arguments))


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a folder, as far as equal runs write them equal."""
    files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    other = (".metadata", "checksums.json", "args.bin")  # an identity of each save, and the name of the folder
    named = {name: path.read_bytes() for name, path in files.items() if not name.endswith(other)}
    for name in [name for name in named if name.endswith("trainer_state.json")]:
        state = json.loads(named[name])
        del state["best_model_checkpoint"]
        state["log_history"] = [
            {key: value for key, value in row.items() if "runtime" not in key and "second" not in key}
            for row in state["log_history"]
        ]
        named[name] = json.dumps(state).encode()
    return named


@pytest.mark.exhaustive  # four runs of four processes
def test_a_run_that_is_killed_ends_like_one_that_was_not(tmp_path):
    config = json.loads((ROOT / "examples/tiny-qwen3.json").read_text())
    config |= {"num_hidden_layers": 2, "attention_dropout": 0.2}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
    on_ranks(4, life, str(whole), "never", seconds=240)
    with pytest.raises(RanksFailed, match="exit code -9"):
        on_ranks(4, life, str(killed), "after a step", seconds=240)
    assert [path.name for path in (killed / "run").iterdir()] == ["checkpoint-2"]
    with pytest.raises(RanksFailed, match="exit code -9"):
        on_ranks(4, life, str(killed), "while it saves", seconds=240)
    # the other ranks may end in order, and then remove the hidden folder: either way nothing half written has the name of a checkpoint
    assert {path.name for path in (killed / "run").iterdir()} - {".checkpoint-4.saves"} == {"checkpoint-2"}
    on_ranks(4, life, str(killed), "never", seconds=240)

    assert {path.name for path in (killed / "run").iterdir() if path.is_dir()} == {"checkpoint-2", "checkpoint-6"}
    found, wanted = contents(killed / "run"), contents(whole / "run")
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if found[name] != wanted[name]] == []
    best, best_saved, last = (
        AutoModelForCausalLM.from_pretrained(killed / "run" / name).lm_head.weight
        for name in ("", "checkpoint-2", "checkpoint-6")
    )
    assert torch.equal(best, best_saved) and not torch.equal(best, last)


@pytest.mark.slow
def test_a_loop_with_accelerate_is_resumed(tmp_path):
    words = ("--tp", "2", "--checkpoint", str(tmp_path / "saved"))
    whole, *_ = on_ranks(4, on_this_rank, "accelerate_loop", str(tmp_path), *words, seconds=240)
    on_ranks(4, on_this_rank, "accelerate_loop", str(tmp_path), *words, "--steps", "2", seconds=240)
    resumed = ("--resume", str(tmp_path / "saved"))
    second, *_ = on_ranks(4, on_this_rank, "accelerate_loop", str(tmp_path), *words, *resumed, seconds=240)
    assert second == whole[2:]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(8))


def each_sample_once() -> list[int]:
    as_torchrun()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    accelerator = Accelerator(cpu=True)
    adopt(accelerator, shardplan.apply_plan(small_model("llama"), mesh, "auto", prove=False))
    loaders = accelerator.prepare(DataLoader(torch.arange(7), batch_size=2), DataLoader(Stream(), batch_size=2))
    with pytest.raises(TypeError):
        accelerator.gather_for_metrics(["text"])
    with pytest.raises(ValueError, match="leave use_gather_object off"):
        accelerator.gather_for_metrics(torch.ones(1), use_gather_object=True)
    return [torch.cat([accelerator.gather_for_metrics(batch) for batch in one]).tolist() for one in loaders]


def test_metrics_have_each_sample_once():
    assert on_ranks(4, each_sample_once) == [[list(range(7)), list(range(8))]] * 4


def test_the_newest_and_the_best_checkpoint_are_kept(tmp_path):
    def left(newest: int, limit: int | None, best: int) -> set[str]:
        for number in (2, 4, 6, 10):
            (tmp_path / f"checkpoint-{number}").mkdir(exist_ok=True)
        for number in (3, 8, 12):
            begin(tmp_path / f"checkpoint-{number}", overwrite=True, marks=())  # and the process died
        (tmp_path / "checkpoint-mine").mkdir(exist_ok=True)
        _remove_older(tmp_path / f"checkpoint-{newest}", limit, str(tmp_path / f"checkpoint-{best}"))
        dead = {int(path.parent.name[12:-6]) for path in tmp_path.glob(".checkpoint-*.saves/*.new")}
        assert dead == {number for number in (3, 8, 12) if number > newest}, "later ones may be another job's"
        return {path.name.removeprefix("checkpoint-") for path in tmp_path.glob("checkpoint-*")} - {"mine"}

    assert left(10, None, 4) == {"2", "4", "6", "10"}
    assert left(10, 3, 10) == {"4", "6", "10"}
    assert left(10, 2, 2) == left(10, 1, 2) == {"2", "10"}
    assert left(4, 2, 4) == {"4", "6", "10"}


def test_a_model_that_two_jobs_export_is_of_one(tmp_path, monkeypatch):
    """One job is stopped anywhere while it moves its files, and the other exports."""
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json")
    ends = set()
    with stopping(monkeypatch):
        for step in range(1, 40):
            folder = tmp_path / str(step)
            hidden = {job: folder / f".saved-model-{job}" for job in "ab"}
            for place in hidden.values():
                place.mkdir(parents=True)
                for name in names:
                    (place / name).write_text(place.name[-1])
            one = Process(lambda folder=folder, hidden=hidden: _move_model(hidden["a"], folder))
            more = one.steps(step)
            _move_model(hidden["b"], folder) if hidden["b"].exists() else None
            one.to_end()
            found = {path.name: path.read_text() for path in folder.iterdir()}
            ends.add(found.get(names[-1]))
            assert found.keys() == set(names) and len(set(found.values())) == 1
            if not more:
                break
    assert ends == {"a", "b"}


def refuse(folder: str) -> None:
    as_torchrun()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))
    model = shardplan.apply_plan(small_model("llama"), mesh, "auto", prove=False)
    accelerator = Accelerator(cpu=True)
    with pytest.raises(TypeError, match="not a Linear"):
        adopt(torch.nn.Linear(1, 1), model)
    with pytest.raises(ValueError, match="no plan was applied"):
        adopt(accelerator, small_model("llama"))
    with pytest.raises(ValueError, match="does not know the mesh axis 'data'"):
        adopt(accelerator, shardplan.apply_plan(small_model("llama"), other, "auto", prove=False))
    part = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("other", "dp_shard", "tp"))["dp_shard"]
    with pytest.raises(ValueError, match="the mesh must be all of them"):
        adopt(accelerator, shardplan.apply_plan(small_model("llama"), part, "auto", prove=False))

    def trainer(model: torch.nn.Module, **settings: object) -> Trainer:
        arguments = {"output_dir": folder, "use_cpu": True, "report_to": [], **settings}
        return Trainer(model, TrainingArguments(**arguments))

    with pytest.raises(ValueError, match="made with another model"):
        adopt(trainer(small_model("llama")), model)
    for setting in _IGNORED:
        late = trainer(model)
        setattr(late.args, setting, True)  # push_to_hub would ask the network for a repository
        with pytest.raises(ValueError, match=f"cannot do {setting} with a planned model"):
            adopt(late, model)
    late = trainer(model)
    late.model_init = lambda: small_model("llama")
    with pytest.raises(ValueError, match="model_init would replace the planned model"):
        adopt(late, model)
    late = trainer(model)
    late.optimizer = torch.optim.SGD(small_model("llama").parameters())
    with pytest.raises(ValueError, match="not parameters of the model"):
        adopt(late, model)
    split = shardplan.apply_plan(small_model("llama"), mesh, "auto", logits="sharded", prove=False)
    late = trainer(split)
    late.compute_metrics = len
    with pytest.raises(ValueError, match="compute_metrics needs whole logits"):
        adopt(late, split)
    late = trainer(model)
    late.num_generations, late.args.steps_per_generation = 3, 4  # as TRL's trainers of groups of completions have them
    with pytest.raises(ValueError, match="is 32, which num_generations=3 does not divide"):
        adopt(late, model)
    late.num_generations = 4
    settings = {
        "scale_rewards": "batch",
        "normalize_advantages": True,
        "multi_objective_aggregation": "normalize_then_sum",
    }
    for name, value in settings.items():
        setattr(late.args, name, value)
        with pytest.raises(ValueError, match="rewards that are scaled over a batch"):
            adopt(late, model)
        delattr(late.args, name)
    late = trainer(model, save_only_model=True)
    adopt(late, model)
    late.save_model(f"{folder}/checkpoint-1")
    with pytest.raises(ValueError, match="cannot be resumed from .* has no training_state"):
        late.train(resume_from_checkpoint=f"{folder}/checkpoint-1")
    with pytest.raises(ValueError, match="accelerate's save_model .* call shardplan.save_checkpoint"):
        late.accelerator.save_model(folder)
    with pytest.raises(ValueError, match="one optimizer is saved with a planned model, and 0 were prepared"):
        late.accelerator.save_state(folder)
    AcceleratorState._reset_state()
    with pytest.raises(ValueError, match="would not autocast a planned model to bf16"):
        adopt(Accelerator(cpu=True, mixed_precision="bf16"), model)
    AcceleratorState._reset_state()
    with pytest.raises(ValueError, match="dispatch_batches would give all ranks one batch"):
        adopt(Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True)), model)
    AcceleratorState._reset_state()
    with pytest.raises(ValueError, match="would not compile a planned model"):
        adopt(Accelerator(cpu=True, dynamo_backend="inductor"), model)


def test_what_does_not_fit_is_refused(tmp_path):
    on_ranks(4, refuse, str(tmp_path))


def rates(tp: int) -> list[float]:
    """The learning rate after each of four micro-batches; two are a step."""
    as_torchrun()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    mesh = init_device_mesh("cpu", (2 // tp, tp), mesh_dim_names=("dp_shard", "tp"))
    model = shardplan.apply_plan(small_model("llama"), mesh, "auto", prove=False, check_inputs=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 10)
    early = accelerator.prepare_scheduler(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1))
    with pytest.raises(ValueError, match=r"prepared a scheduler.* before accelerator.prepare"):
        adopt(accelerator, model)
    accelerator._schedulers.remove(early)
    adopt(accelerator, model)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    found = []
    for number in range(4):
        with accelerator.accumulate(model):
            ids = batch(number)
            accelerator.backward(model(input_ids=ids, labels=ids, use_cache=False).loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            found.append(schedule.get_last_lr()[0])
    assert accelerator.num_processes == 2
    return found


def test_a_prepared_scheduler_steps_once_for_each_data_parallel_rank():
    """As accelerate's own does for each process, where each has batches of its own."""
    assert on_ranks(2, rates, 2) == [pytest.approx([1, 0.9, 0.9, 0.8])] * 2
    assert on_ranks(2, rates, 1) == [pytest.approx([1, 0.8, 0.8, 0.6])] * 2


class Count:
    """A registered object."""

    value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def accelerated(folder: str) -> None:
    """Two steps, a save, two more; a new model reads the save and does the same two, bit for bit."""

    def steps(accelerator: Accelerator, prepared: tuple, count: Count, number: int) -> list[torch.Tensor]:
        model, optimizer, schedule = prepared
        found = []
        for _ in range(number):
            ids = torch.randint(64, (2, 16))  # from the process's own generator
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            count.value += 1
            found.append(loss.detach())
        return [*found, *(p.to_local().clone() for p in model.parameters())]

    def made(tp: int) -> tuple[Accelerator, tuple, Count]:
        as_torchrun()
        accelerator, count = Accelerator(cpu=True), Count()
        mesh = init_device_mesh("cpu", (4 // tp, tp), mesh_dim_names=("dp_shard", "tp"))
        model = shardplan.apply_plan(small_model("llama"), mesh, "auto", prove=False, check_inputs=False)
        adopt(accelerator, model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        accelerator.register_for_checkpointing(count)
        return accelerator, accelerator.prepare(model, optimizer, schedule), count

    torch.manual_seed(dist.get_rank() // 2)  # the ranks of a tp group have one batch
    accelerator, prepared, count = made(2)
    steps(accelerator, prepared, count, 2)
    accelerator.save_state(folder)
    saved = [(name, value.clone()) for name, value in shardplan.full_parameters(prepared[0])]
    wanted = steps(accelerator, prepared, count, 2)

    torch.manual_seed(99)
    again, fresh, counted = made(2)
    again.load_state(folder)
    assert counted.value == 2
    found = steps(again, fresh, counted, 2)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))

    wide, other, _ = made(4)
    wide.load_state(folder)  # on another mesh
    for (name, value), (saved_name, saved_value) in zip(shardplan.full_parameters(other[0]), saved, strict=True):
        assert name == saved_name and torch.equal(value, saved_value)
    if dist.get_rank() == 0:
        (Path(folder) / "training_state").rename(Path(folder) / "gone")
    dist.barrier()
    with pytest.raises(ValueError, match="was not written by save_state with a planned model"):
        again.load_state(folder)


@pytest.mark.slow
def test_accelerates_own_states_are_saved_and_resumed(tmp_path):
    on_ranks(4, accelerated, str(tmp_path / "state"))
