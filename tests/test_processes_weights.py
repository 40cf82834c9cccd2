"""Checkpoints in the Hugging Face layout: what a planned model reads and writes is what the unsharded one has."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from processes import RanksFailed, on_ranks
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_models import batch, meta_model, small_model, whole_state
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

import shardplan
from shardplan.proof.compare import TOLERANCE, relative_error
from shardplan.weights import all_ranks
from shardplan.weights.safetensors_folder import INDEX
from shardplan.weights.save import size_of

TWO_BY_TWO = {"dp_shard": 2, "tp": 2}


@dataclass(frozen=True)
class Case:
    """A small model and the mesh that it goes to."""

    name: str
    tied: bool = False
    mesh: dict[str, int] = field(default_factory=lambda: TWO_BY_TWO)
    settings: dict[str, Any] = field(default_factory=dict)
    shard_size: str = "60KB"  # of the files: several, and tensors that are larger than one
    dtype: torch.dtype | None = None

    @property
    def folder(self) -> str:
        return "_".join([self.name, "tied" if self.tied else "untied", *(f"{k}{v}" for k, v in self.mesh.items())])


FAMILIES = [Case("llama", tied=True, shard_size="1GB"), Case("phi3"), Case("mixtral")]
MORE_FAMILIES = [Case("llama"), Case("gpt2", tied=True), Case("gemma3_text", tied=True)]
# Copies of shards; shards that are uneven, and empty on some ranks; packed rows over four ranks.
MESHES = [
    Case("qwen3", tied=True, mesh={"dp_replicate": 2, "dp_shard": 2}),
    Case("phi3", mesh={"dp_replicate": 2, "dp_shard": 1, "tp": 2}),
    Case("mixtral", mesh={"dp_shard": 4}, settings={"num_local_experts": 3, "vocab_size": 133}),
    Case("phi3", mesh={"tp": 4}, dtype=torch.bfloat16),
]


def written(case: Case, folder: Path) -> nn.Module:
    """The model as transformers reads it from the folder that transformers wrote."""
    small_model(case.name, tied=case.tied, **case.settings).save_pretrained(
        folder / case.folder, max_shard_size=case.shard_size
    )
    model, report = AutoModelForCausalLM.from_pretrained(
        folder / case.folder, dtype=case.dtype, output_loading_info=True
    )
    assert not any(report.values()), report
    return model


def logits_of(model: nn.Module) -> Tensor:
    model.eval()
    with torch.no_grad():
        return model(input_ids=batch(5), use_cache=False).logits.float()


def planned(case: Case) -> nn.Module:
    mesh = init_device_mesh("cpu", tuple(case.mesh.values()), mesh_dim_names=tuple(case.mesh))
    model = meta_model(case.name, tied=case.tied, **case.settings)
    return shardplan.apply_plan(model, mesh, "auto", sequence_parallel=case.mesh.get("tp", 1) > 1, prove=False)


def local_bytes(model: nn.Module) -> int:
    held = [*model.parameters(), *(b for name, b in model.named_buffers() if name in model.state_dict())]
    return sum(x.to_local().nbytes if isinstance(x, DTensor) else x.nbytes for x in held)


def load_and_save(cases: list[Case], folder: Path) -> list[dict[str, Any]]:
    results = []
    for case in cases:
        model = planned(case)
        seen = []
        loaded = shardplan.load_checkpoint(model, folder / case.folder, dtype=case.dtype, progress=seen.append)
        assert loaded.missing == loaded.unexpected == ()
        assert (seen[-1].done, seen[-1].total) == (loaded.read, loaded.read)
        assert loaded.read == local_bytes(model)  # and nothing twice
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        results.append(
            {
                "state": whole_state(model),
                "buffers": buffers,
                "parameters": len(list(model.parameters())),
                "logits": logits_of(model),
            }
        )
        shardplan.save_checkpoint(model, folder / f"{case.folder}_saved", max_shard_size=case.shard_size)
    return results


def files(folder: Path) -> dict[Path, dict[str, list[int]]]:
    """The shapes of the tensors in each file of a checkpoint."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found[path] = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    return found


def shapes(folder: Path) -> dict[str, list[int]]:
    return {name: shape for tensors in files(folder).values() for name, shape in tensors.items()}


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(FAMILIES, id="families"),
        pytest.param(MORE_FAMILIES, id="more families", marks=pytest.mark.slow),
        pytest.param(MESHES, id="meshes", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_loading_and_saving_are_those_of_transformers(cases, tmp_path):
    expected = [written(case, tmp_path) for case in cases]
    runs = on_ranks(4, load_and_save, cases, tmp_path, seconds=300)
    for i, (case, model) in enumerate(zip(cases, expected, strict=True)):
        state, logits = dict(model.state_dict()), logits_of(model)
        limit = TOLERANCE[torch.float32] if case.dtype is None else 2e-2
        for rank, run in enumerate(runs):
            assert list(run[i]["state"]) == list(state)
            for name, value in {**state, **dict(model.named_buffers())}.items():
                found = {**run[i]["state"], **run[i]["buffers"]}[name]
                assert torch.equal(found, value) and found.dtype == value.dtype, (case, rank, name)
            assert run[i]["parameters"] == len(list(model.parameters()))
            assert relative_error(run[i]["logits"], logits) <= limit, (case, rank)
        again = tmp_path / f"{case.folder}_saved"
        assert shapes(again) == shapes(tmp_path / case.folder)
        sizes = [(len(tensors), path.stat().st_size) for path, tensors in files(again).items()]
        assert all(size < size_of(case.shard_size) + 4096 or count == 1 for count, size in sizes), sizes
        assert len(sizes) > 3 or case.shard_size == "1GB"
        read, report = AutoModelForCausalLM.from_pretrained(again, output_loading_info=True)
        assert not any(report.values()), report
        assert read.config.to_dict() == {**model.config.to_dict(), "_name_or_path": str(again)}
        assert list(read.state_dict()) == list(state)
        assert all(torch.equal(value, state[name]) for name, value in read.state_dict().items())
        assert torch.equal(logits_of(read), logits)


# What cannot be loaded


def damaged(folder: Path) -> dict[str, Path]:
    """Copies of a good checkpoint of several files, each damaged in another way."""
    good = folder / "good"
    small_model("llama").save_pretrained(good, max_shard_size="60KB")
    first, second = sorted(good.glob("*.safetensors"))[:2]
    # What old checkpoints hold and the model computes itself is not unexpected.
    held = {**load_file(first), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    save_file(held, first, metadata={"format": "pt"})
    index = json.loads((good / INDEX).read_text())
    places = index["weight_map"]
    some = next(name for name in held if name.endswith("embed_tokens.weight"))

    def rewritten(change: Callable[[dict[str, Tensor]], None]) -> Callable[[Path], None]:
        def damage(path: Path) -> None:
            tensors = load_file(path / first.name)
            change(tensors)
            save_file(tensors, path / first.name, metadata={"format": "pt"})
            new = {name: file for name, file in places.items() if file != first.name}
            new |= dict.fromkeys(tensors, first.name)
            (path / INDEX).write_text(json.dumps({"weight_map": new}))

        return damage

    def indexed(**changes: str) -> Callable[[Path], None]:
        return lambda path: (path / INDEX).write_text(json.dumps({"weight_map": {**places, **changes}})) and None

    def renamed(tensors: dict[str, Tensor]) -> None:
        tensors[some.replace("weight", "wieght")] = tensors.pop(some)

    damages: dict[str, Callable[[Path], None]] = {
        "cut off": lambda path: (path / first.name).write_bytes(first.read_bytes()[:-100]),
        "no header": lambda path: (path / first.name).write_bytes(b"\xff" * 64 + first.read_bytes()),
        "empty": lambda path: (path / second.name).write_bytes(b""),
        "missing": lambda path: (path / second.name).unlink(),
        "outside": indexed(**{some: f"../good/{first.name}"}),
        "absolute": indexed(**{some: str(first)}),
        "other index": indexed(**{"model.layers.7.mlp.up_proj.weight": second.name}),
        "broken index": lambda path: (path / INDEX).write_text("{"),
        "quantized": lambda path: (path / "config.json").write_text('{"quantization_config": {"bits": 4}}'),
        "names": rewritten(renamed),
        "shape": rewritten(lambda tensors: tensors.update({some: tensors[some][:-1].clone()})),
    }
    for name, damage in damages.items():
        copytree(good, folder / name)
        damage(folder / name)
    (folder / "old format").mkdir()
    (folder / "old format" / "pytorch_model.bin").write_bytes(b"x")
    return {name: folder / name for name in [*damages, "old format", "nothing"]}


SAID = {
    "cut off": "is not a complete safetensors file",
    "no header": "is not a complete safetensors file",
    "empty": "is not a complete safetensors file",
    "missing": "is missing, but model.safetensors.index.json names it",
    "outside": "outside the folder",
    "absolute": "outside the folder",
    "other index": "model.layers.7.mlp.up_proj.weight is not in the file",
    "broken index": "is not JSON",
    "quantized": "dequantize",
    "names": "the checkpoint lacks {some} (is it {other}?)",
    "shape": "{some} is (131, 64) in the checkpoint and (132, 64) in the model",
    "old format": "pytorch_model.bin is in an older format",
    "nothing": "is not a folder",
}


def error_of(call: Callable[[], Any]) -> tuple[str, str]:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "none", ""


def load_damaged(folders: dict[str, Path], good: Path, cut: Path) -> dict[str, tuple[str, str]]:
    model, rank = planned(Case("llama")), torch.distributed.get_rank()
    said = {name: error_of(lambda f=f: shardplan.load_checkpoint(model, f)) for name, f in folders.items()}
    said["one rank"] = error_of(lambda: shardplan.load_checkpoint(model, cut if rank == 2 else good))
    said["other arguments"] = error_of(lambda: shardplan.load_checkpoint(model, good, strict=rank != 1))
    tied = planned(Case("llama", tied=True))
    said["ties"] = error_of(lambda: shardplan.load_checkpoint(tied, good))
    assert all(parameter.is_meta for one in (model, tied) for parameter in one.parameters()), "nothing was touched"

    def fail(now: shardplan.Progress) -> None:
        if rank == 3 and now.done > now.total // 2:
            raise OSError("the disk is gone")

    said["half-way"] = error_of(lambda: shardplan.load_checkpoint(model, good, progress=fail))
    shardplan.load_checkpoint(model, good)
    with torch.no_grad():
        [parameter.to_local().zero_() for parameter in model.parameters()]
    logits_of(model)  # FSDP2 leaves parameters gathered, which are not to be loaded into
    shardplan.load_checkpoint(model, good)
    expected = small_model("llama").state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in whole_state(model).items())

    torch.manual_seed(rank)  # what is drawn must be the same on all ranks
    loose = planned(Case("llama"))
    said["random states"] = error_of(lambda: shardplan.load_checkpoint(loose, folders["names"], strict=False))
    torch.manual_seed(0)
    loaded = shardplan.load_checkpoint(loose, folders["names"], strict=False)
    (name,), state = loaded.missing, whole_state(loose)
    assert loaded.unexpected == (name.replace("weight", "wieght"),)
    assert all(torch.equal(value, expected[other]) for other, value in state.items() if other != name)
    assert 0.01 < state[name].std() < 0.04, "drawn as the model draws"
    return said


@pytest.mark.slow
def test_what_cannot_be_loaded_is_said_on_every_rank_and_touches_nothing(tmp_path):
    folders = damaged(tmp_path)
    (some,) = set(shapes(tmp_path / "good")) - set(shapes(tmp_path / "names"))
    words = {"some": some, "other": some.replace("weight", "wieght")}
    for rank, said in enumerate(on_ranks(4, load_damaged, folders, tmp_path / "good", tmp_path / "cut off")):
        for name, text in SAID.items():
            kind, message = said[name]
            assert kind in ("ValueError", "FileNotFoundError"), (name, kind, message)
            assert text.format(**words) in message, (name, message)
        assert said["one rank"][0] == ("ValueError" if rank == 2 else "RuntimeError")
        assert "is not a complete safetensors file" in said["one rank"][1]
        assert rank == 2 or "failed on rank 2" in said["one rank"][1]
        assert "rank 1 differs from rank 0" in said["other arguments"][1]
        assert "tie_word_embeddings=False" in said["ties"][1]
        assert said["half-way"][0] == ("OSError" if rank == 3 else "RuntimeError")
        assert "the disk is gone" in said["half-way"][1]
        assert "differ from rank" in said["random states"][1]


# What cannot be saved


@contextmanager
def full_disk(after: int) -> Iterator[None]:
    """No file of this process can grow beyond some bytes. The store of these processes is a file too, and must not be limited."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (after, before[1]))
    try:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(all_ranks, "_Called", lambda mesh, call: None)
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def train_a_step(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = batch(7)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    return optimizer


def whole_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state by name, whole, in the original order of rows."""
    state = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))["state"]
    return {f"{name} {key}": value for name, entries in state.items() for key, value in entries.items()}


def save_in_vain(good: Path, folder: Path) -> dict[str, Any]:
    """Saves that fail, and leave what is there; then saves that do not."""
    rank, said = torch.distributed.get_rank(), {}
    case = Case("phi3")
    model = planned(case)
    torch.manual_seed(0)
    said["meta"] = error_of(lambda: shardplan.save_checkpoint(model, folder / "weights"))
    shardplan.load_checkpoint(model, good, progress=False)
    save = partial(shardplan.save_checkpoint, model, folder / "weights", max_shard_size="60KB")
    said["exists"] = error_of(save)
    said["foreign"] = error_of(lambda: shardplan.save_checkpoint(model, folder / "notes", overwrite=True))
    said["size"] = error_of(lambda: shardplan.save_checkpoint(model, folder / "new", max_shard_size="5 apples"))
    with full_disk(50_000) if rank == 0 else nullcontext():
        said["full"] = error_of(partial(save, overwrite=True))

    optimizer = train_a_step(model)
    logits_of(model)  # FSDP2 leaves parameters gathered, which the optimizer does not hold
    step = {"step": 1, "losses": [1.5, torch.tensor(2.0)]}
    store = partial(shardplan.save_training_state, model, optimizer, folder / "training")
    store(extra=step)
    torch.distributed.barrier()
    before = content(folder / "training")
    torch.distributed.barrier()
    said["training exists"] = error_of(store)
    with full_disk(10_000) if rank == 1 else nullcontext():
        said["training full"] = error_of(partial(store, overwrite=True))
    torch.distributed.barrier()
    assert content(folder / "training") == before
    torch.distributed.barrier()
    assert {path.name for path in folder.iterdir()} == {"weights", "notes", "training"}, "nothing is left"
    torch.distributed.barrier()

    store(overwrite=True, extra=step)
    expected = whole_state(model), whole_moments(model, optimizer)
    other = shardplan.load_checkpoint(again := planned(Case("phi3", mesh={"tp": 4})), good) and again
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=1e-2)
    if rank == 0:
        copytree(folder / "training", folder / "cut")
        largest = max((folder / "cut").glob("*.distcp"), key=lambda path: path.stat().st_size)
        largest.write_bytes(largest.read_bytes()[:-50])
        copytree(folder / "training", folder / "lost")
        next((folder / "lost").glob("*.distcp")).unlink()
    torch.distributed.barrier()
    for name in ("cut", "lost", "weights"):
        said[name] = error_of(lambda n=name: shardplan.load_training_state(other, other_optimizer, folder / n))
    assert not other_optimizer.state, "nothing was touched"
    extra = shardplan.load_training_state(other, other_optimizer, folder / "training")
    assert extra["step"] == 1 and extra["losses"][1] == 2
    for left, right in zip(expected, (whole_state(other), whole_moments(other, other_optimizer)), strict=True):
        assert left.keys() == right.keys() and len(left) > 10
        assert all(torch.equal(value, right[name]) for name, value in left.items())
    save(overwrite=True)
    said["state"] = expected[0]
    return said


@pytest.mark.slow
def test_a_save_that_fails_leaves_the_old_checkpoint_whole(tmp_path):
    small_model("phi3").save_pretrained(tmp_path / "good")
    folder = tmp_path / "saved"
    copytree(tmp_path / "good", folder / "weights")
    (folder / "weights" / "tokenizer.json").write_text("{}")
    (folder / "notes").mkdir()
    (folder / "notes" / "today.txt").write_text("not a checkpoint")
    for rank, said in enumerate(on_ranks(4, save_in_vain, tmp_path / "good", folder)):
        assert "there is nothing to save" in said["meta"][1]
        assert "pass overwrite=True" in said["exists"][1] and "pass overwrite=True" in said["training exists"][1]
        assert "is not a checkpoint, so it is not overwritten" in said["foreign"][1]
        assert "5 apples" in said["size"][1]
        assert said["full"][0] == ("OSError" if rank == 0 else "RuntimeError")
        assert "File too large" in said["full"][1] and "File too large" in said["training full"][1]
        assert "were written: it is damaged" in said["cut"][1] and "is missing" in said["lost"][1]
        assert "save_training_state did not write it" in said["weights"][1]
    assert (folder / "weights" / "tokenizer.json").read_text() == "{}"
    assert not (folder / "weights" / "model.safetensors").exists() and (folder / "weights" / INDEX).exists()
    again = AutoModelForCausalLM.from_pretrained(folder / "weights").state_dict()
    assert all(torch.equal(value, said["state"][name]) for name, value in again.items())


def die_while_saving(good: Path, folder: Path, dying: int) -> None:
    """A script: what it does not catch ends the process, as a launcher would."""
    rank = torch.distributed.get_rank()
    model = planned(Case("llama"))
    shardplan.load_checkpoint(model, good)

    def die(now: shardplan.Progress) -> None:
        if rank == dying and now.done > now.total // 2:
            os._exit(9)

    said = error_of(
        lambda: shardplan.save_checkpoint(model, folder, overwrite=True, max_shard_size="60KB", progress=die)
    )
    (folder.parent / f"{rank}.txt").write_text(" ".join(said))
    os._exit(3)


@pytest.mark.slow
@pytest.mark.parametrize("dying", [0, 2])
def test_a_rank_that_dies_while_saving_leaves_the_old_checkpoint_whole(dying, tmp_path):
    good, folder = tmp_path / "good", tmp_path / "saved" / "weights"
    small_model("llama").save_pretrained(good)
    copytree(good, folder)
    with pytest.raises(RanksFailed) as failed:
        on_ranks(4, die_while_saving, good, folder, dying)
    codes = {rank: f"died with exit code {9 if rank == dying else 3}" for rank in range(4)}
    assert failed.value.errors == codes, "none waits for a dead one"
    said = {path.name: path.read_text() for path in folder.parent.glob("*.txt")}
    assert len(said) == 3 and not any(text.startswith("none") for text in said.values()), said
    assert content(folder) == content(good)


# Other models


class Own(nn.Module):
    """No transformers model: its names are those of its state dict. One buffer is saved, one computed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 8)
        self.first, self.second = nn.Linear(8, 12), nn.Linear(12, 8)
        self.norm = nn.BatchNorm1d(8)
        self.scale = Scale()

    def forward(self, ids: Tensor) -> Tensor:
        return self.scale(self.norm(self.second(self.first(self.embed(ids)).relu())))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.full((8,), 3.0), persistent=False)

    def reset_parameters(self) -> None:
        self.factor.fill_(3.0)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


OWN_PLAN = {
    "version": "1",
    "name": "own",
    "tensor_parallel": {"embed": "embedding_rowwise", "first": "colwise", "second": "rowwise"},
    "data_parallel": {"backend": "fsdp2", "units": ["first", "second"]},
}


def own() -> nn.Module:
    torch.manual_seed(3)
    model = Own()
    model(torch.arange(30))  # statistics of the norm
    return model


def load_others(good: Path, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    with torch.device("meta"):
        model = Own()
    shardplan.apply_plan(shardplan.Model(model, inputs=lambda seed: {"ids": torch.randperm(30)}), mesh, OWN_PLAN)
    shardplan.load_checkpoint(model, folder)
    expected = own()
    # What another process computed may differ in its last bit.
    expected.load_state_dict(load_file(folder / "model.safetensors"))
    state, buffers = whole_state(model), dict(model.named_buffers())
    assert all(torch.equal(state[name], value) for name, value in expected.state_dict().items())
    assert all(torch.equal(buffers[name], value) for name, value in expected.named_buffers())
    shardplan.save_checkpoint(model, folder.with_name("again"))

    replicas = init_device_mesh("cpu", (4,), mesh_dim_names=("dp_replicate",))
    wrapped = shardplan.apply_plan(
        small_model("llama", noise=0.5), replicas, "auto", data_parallel={"backend": "ddp"}, prove=False
    )
    shardplan.load_checkpoint(wrapped, good)
    llama = small_model("llama").state_dict()
    assert all(torch.equal(value, llama[name]) for name, value in wrapped.module.state_dict().items())
    shardplan.save_checkpoint(wrapped, folder.with_name("ddp"))

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(good))
    shardplan.apply_plan(model, mesh, "auto", data_parallel={"cpu_offload": True}, prove=False)
    shardplan.load_checkpoint(model, good, dtype=torch.float64)
    assert all(torch.equal(value, llama[name].double()) for name, value in whole_state(model).items())


@pytest.mark.slow
def test_models_of_ones_own_wrapped_ones_and_those_on_the_cpu(tmp_path):
    good, folder = tmp_path / "good", tmp_path / "own"
    small_model("llama").save_pretrained(good)
    folder.mkdir()
    save_file(own().state_dict(), folder / "model.safetensors")
    on_ranks(4, load_others, good, folder)
    again, expected = (load_file(path / "model.safetensors") for path in (tmp_path / "again", folder))
    assert again.keys() == expected.keys() and all(torch.equal(again[name], expected[name]) for name in expected)
    assert [path.name for path in (tmp_path / "again").iterdir()] == ["model.safetensors"]
    assert load_file(tmp_path / "ddp" / "model.safetensors").keys() == load_file(good / "model.safetensors").keys()


def exchange_states(folder: Path) -> None:
    """A training state of DDP goes to FSDP2 over another tp, and back."""
    replicas = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_replicate",))
    shards = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "tp"))
    ddp = {"backend": "ddp"}
    first = shardplan.apply_plan(small_model("phi3", noise=0.5), replicas, "auto", data_parallel=ddp, prove=False)
    optimizer = train_a_step(first)
    shardplan.save_training_state(first, optimizer, folder / "ddp")
    expected = whole_state(first), whole_moments(first, optimizer)
    for name, mesh, changes in (("fsdp2", shards, {}), ("ddp again", replicas, {"data_parallel": ddp})):
        model = shardplan.apply_plan(small_model("phi3"), mesh, "auto", prove=False, **changes)
        other = train_a_step(model)
        shardplan.load_training_state(model, other, folder / ("ddp" if name == "fsdp2" else "fsdp2"))
        for left, right in zip(expected, (whole_state(model), whole_moments(model, other)), strict=True):
            right = {key.removeprefix("module."): value for key, value in right.items()}
            assert {key.removeprefix("module.") for key in left} == right.keys() and len(right) > 10
            assert all(torch.equal(value, right[key.removeprefix("module.")]) for key, value in left.items()), name
        shardplan.save_training_state(model, other, folder / name)


@pytest.mark.slow
def test_training_states_of_ddp_and_fsdp2_are_exchanged(tmp_path):
    on_ranks(2, exchange_states, tmp_path)
