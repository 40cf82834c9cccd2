"""`refit` and `full_parameters(names="checkpoint")`: an engine on any ranks gets what the trainer has, bit for bit, and no byte more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import on_ranks
from safetensors.torch import load_file, save_file
from small_models import CONFIGS, small_model
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import shardplan

Sizes = Mapping[str, int]


def emptied(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    return model


def on(ranks: list[int], sizes: Sizes) -> DeviceMesh:
    """A mesh on some ranks of the job; to be called on all."""
    return DeviceMesh("cpu", torch.tensor(ranks).reshape(*sizes.values()), mesh_dim_names=tuple(sizes))


class Sent:
    """The bytes that this rank gives the process group's all-to-alls for others, and for itself."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.bytes = self.largest = 0
        real = dist.all_to_all_single

        def counted(out: Tensor, given: Tensor, outs: list[int], ins: list[int], group: Any = None) -> None:
            assert not ins[dist.get_rank(group)], "nothing is sent to oneself"
            self.bytes += given.numel() * given.itemsize
            self.largest = max(self.largest, given.numel(), out.numel())
            real(out, given, outs, ins, group)

        monkeypatch.setattr(dist, "all_to_all_single", counted)


def places(model: nn.Module | None, whole: nn.Module) -> dict[str, set[int]]:
    """The places of each tensor's elements that this rank holds. The model's weights are lost."""
    if model is None:
        return {}
    model.double()
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape))
    model.load_state_dict(whole.state_dict())
    found = {}
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        found[name] = set(local.detach().flatten().long().tolist())
    return found


def moved(name: str, first: list[int], sizes: Sizes, others: Sizes) -> tuple[int, int, int, int]:
    """A trainer in float32 on the first ranks, an engine in bfloat16 on all. Returns bytes: sent, the least, told, the most at once."""
    mesh, engine_mesh = on(first, sizes), on([0, 1, 2, 3], others)
    tied = name == "gpt2"
    model = small_model(name, tied=tied)
    right = {key: value.detach().clone() for key, value in model.state_dict().items()}
    trained = {key for key, _ in model.named_parameters()}
    trainer = shardplan.apply_plan(model, mesh, "auto", prove=False) if dist.get_rank() in first else None
    engine = emptied(small_model(name, tied=tied)).bfloat16()
    shardplan.apply_plan(engine, engine_mesh, "auto", prove=False)
    with pytest.MonkeyPatch.context() as patch:
        refit, sent = shardplan.refit(trainer, engine, round_bytes=10_000), Sent(patch)
        for step in (1, 2):
            refit.run()
            for key, value in shardplan.full_parameters(engine):
                expected = right[key] * (step if key in trained else 1)
                assert torch.equal(value, expected.to(value.dtype)), (step, key)
            with torch.no_grad():
                for parameter in trainer.parameters() if trainer is not None else ():
                    parameter.mul_(2)
    kept = {key: parameter.dtype.itemsize for key, parameter in engine.named_parameters()}
    has, needs = (places(one, small_model(name, tied=tied).double()) for one in (trainer, engine))
    least = sum(len(needed - has.get(key, set())) * kept[key] for key, needed in needs.items())
    return sent.bytes // 2, least, refit.bytes, sent.largest


# The mesh of the trainer, and that of the engine.
FOUR = ({"dp_shard": 2, "tp": 2}, {"tp": 4})
TWO = ({"dp_shard": 2, "tp": 1}, {"dp_replicate": 2, "dp_shard": 1, "tp": 2})
OFTEN = ("phi3", "gpt2", "mixtral")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.exhaustive) for name in CONFIGS]
)
def test_an_engine_has_what_the_trainer_has(name):
    for first, (sizes, others) in (([0, 1, 2, 3], FOUR), ([0, 1], TWO)):
        if CONFIGS[name].get("num_key_value_heads", 4) < 4 or name in ("bamba", "mamba2", "falcon_h1", "codegen"):
            others = TWO[1]
        ranks = on_ranks(4, moved, name, first, sizes, others)
        sent, least = (sum(one[i] for one in ranks) for i in range(2))
        assert least <= sent <= 1.05 * least, (name, first, sent, least)
        assert sent == ranks[0][2]
        assert max(one[3] for one in ranks) <= 10_000


# Stages


def of_stages(name: str, others: Sizes) -> tuple[int, int, int]:
    """A trainer of two stages on tp 2, an engine in bfloat16; then an engine of stages. Returns bytes: sent, the least, told."""
    tied = name == "gpt2"
    model = small_model(name, tied=tied, num_hidden_layers=4)
    right = {key: value.detach().clone() for key, value in model.state_dict().items()}
    stages = shardplan.build_mesh(pp=2, tp=2)
    options = shardplan.PipelineOptions("1f1b", 2)

    def staged(one: nn.Module) -> shardplan.Pipeline:
        return shardplan.apply_plan(one, stages, "auto", pipeline=options, prove=False)

    trainer = staged(model)
    engine = emptied(small_model(name, tied=tied, num_hidden_layers=4)).bfloat16()
    shardplan.apply_plan(engine, on([0, 1, 2, 3], others), "auto", prove=False)
    with pytest.MonkeyPatch.context() as patch:
        refit, sent = shardplan.refit(trainer, engine, round_bytes=10_000), Sent(patch)
        refit.run()
    for key, value in shardplan.full_parameters(engine):
        assert torch.equal(value, right[key].to(value.dtype)), key
    assert not tied or engine.lm_head.weight is engine.get_input_embeddings().weight
    back = staged(emptied(small_model(name, tied=tied, num_hidden_layers=4)))  # and the other way: an engine of stages
    shardplan.refit(engine, back).run()
    values = dict(shardplan.full_parameters(back))
    assert values and all(torch.equal(value, right[key].bfloat16().float()) for key, value in values.items())
    return sent.bytes, refit.bound, refit.bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["phi3", "gpt2", "mixtral"])
def test_stages_give_an_engine_what_they_have(name):
    for others in (TWO[1],) if name == "phi3" else (FOUR[1], TWO[1]):
        ranks = on_ranks(4, of_stages, name, others)
        assert sum(one[0] for one in ranks) == ranks[0][2] <= 1.05 * ranks[0][1], (name, ranks)


# Two classes


def module_of(shapes: Mapping[str, tuple[int, ...]]) -> nn.Module:
    """A model of somebody's own that has parameters of these names."""
    outer = nn.Module()
    for name, shape in shapes.items():
        inner = outer
        *path, leaf = name.split(".")
        for word in path:
            if not hasattr(inner, word):
                inner.add_module(word, nn.Module())
            inner = getattr(inner, word)
        inner.register_parameter(leaf, nn.Parameter(torch.zeros(shape)))
    return outer


QKV = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def fused_names(names: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with the rows of QKV together."""
    made = dict(names)
    for whole, parts in QKV.items():
        for name in [name for name in made if f".{parts[0]}." in name]:
            made[name.replace(parts[0], whole)] = torch.cat([made.pop(name.replace(parts[0], part)) for part in parts])
    return made


def across(folder: str) -> dict[str, int]:
    """A trainer on the first rank, and engines of other classes on the second."""
    mesh, second = on([0], {"tp": 1}), dist.get_rank() == 1
    sizes = {}
    for name, fuse in (("llama", True), ("mixtral", False), ("phi3", False)):
        right = load_file(f"{folder}/{name}/model.safetensors")
        if fuse:
            right = fused_names(right)
        elif name == "phi3":  # the engine has apart what the trainer has fused
            right = load_file(f"{folder}/apart.safetensors")
        trainer = None if second else shardplan.apply_plan(small_model(name), mesh, "auto", prove=False)
        engine = module_of({key: tuple(value.shape) for key, value in right.items()}) if second else None
        refit = shardplan.refit(trainer, engine, fused=QKV, round_bytes=5_000)
        refit.run()
        for key, value in right.items() if engine is not None else ():
            assert torch.equal(engine.get_parameter(key), value), (name, key)
        assert refit.bytes == refit.bound == sum(value.nbytes for value in right.values())
        assert refit.unused == ()
        sizes[name] = refit.bytes
    return sizes


def test_a_trainer_and_an_engine_of_two_classes(tmp_path):
    for name in ("llama", "mixtral", "phi3"):
        small_model(name).save_pretrained(tmp_path / name)
    apart = {}
    for name, value in load_file(tmp_path / "phi3" / "model.safetensors").items():
        whole = next((word for word in QKV if f".{word}." in name), None)
        rows = [64, 32, 32] if whole == "qkv_proj" else [96, 96]
        apart |= (
            {name: value}
            if whole is None
            else {
                name.replace(whole, part): one.clone() for part, one in zip(QKV[whole], value.split(rows), strict=True)
            }
        )
    save_file(apart, tmp_path / "apart.safetensors")
    assert all(on_ranks(2, across, str(tmp_path)))


# Wrong calls


def said(trainer: nn.Module | None, engine: nn.Module | None, **options: Any) -> str:
    with pytest.raises((ValueError, TypeError, RuntimeError)) as error:
        shardplan.refit(trainer, engine, **options)
    return str(error.value)


def refused() -> list[str]:
    llama, tied = small_model("llama"), small_model("llama", tied=True)
    other = small_model("llama", num_hidden_layers=1)
    wide = small_model("llama", intermediate_size=128)
    changed = small_model("llama")
    moved = shardplan.refit(llama, changed)
    assert moved.bytes == 0, "each rank has all"
    moved.run()
    assert torch.equal(changed.lm_head.weight, llama.lm_head.weight)
    changed.bfloat16()
    with pytest.raises(ValueError, match=r"of the engine has changed .* write moved = refit\(trainer, engine\) again"):
        moved.run()
    return [
        said(None, llama),
        said(llama, None),
        said(llama, "engine"),
        said(llama, small_model("llama").to("meta")),
        said(other, llama),
        said(llama, wide),
        said(llama, tied),
        said(llama, tied, round_bytes=0),
        said(llama, tied, fused={"qkv_proj": "q_proj"}),
    ]


def test_wrong_calls_say_what_to_write():
    with pytest.raises(ValueError, match="init_process_group"):
        shardplan.refit(nn.Linear(2, 2), nn.Linear(2, 2))
    expected = (
        "no rank has the trainer: write refit(trainer, engine)",
        "no rank has the engine",
        "must be a model, a Pipeline or None, not str",
        "materialize(model, device)",
        "the trainer lacks tensors of the engine: model.layers.1",
        "build both models from one configuration",
        "tie_word_embeddings=False",
        "round_bytes must be a positive number",
        "fused must be as in",
    )
    for texts in on_ranks(2, refused):
        for text, words in zip(texts, expected, strict=True):
            assert words in text


def test_names_and_ranks_of_full_parameters_are_checked():
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match='without names="checkpoint"'):
        shardplan.full_parameters(model, True, names="checkpoint")
    with pytest.raises(ValueError, match="ranks= needs"):
        shardplan.full_parameters(model, ranks=[0])
    with pytest.raises(ValueError, match="no plan was applied"):
        shardplan.full_parameters(model, names="checkpoint")


# Told before


def sent_in_a_run(sizes: Sizes) -> dict[str, int]:
    trainer = shardplan.apply_plan(small_model("mixtral"), shardplan.build_mesh(**FOUR[0]), "auto", prove=False)
    engine = shardplan.apply_plan(small_model("mixtral").bfloat16(), shardplan.build_mesh(**sizes), "auto", prove=False)
    refit = shardplan.refit(trainer, engine)
    return {"bytes": refit.bytes, "busiest": refit.busiest}


@pytest.mark.slow
def test_estimate_tells_what_a_run_sends():
    config = small_model("mixtral").config
    step = shardplan.TrainingStep(16, precision="fp32", optimizer="none")
    for sizes in (FOUR[1], TWO[1]):
        engine = shardplan.EngineRanks("auto", sizes)
        told = shardplan.estimate(shardplan.Model(config), "auto", FOUR[0], step, device="h100", engine=engine).refit
        for run in on_ranks(4, sent_in_a_run, sizes):
            assert run["bytes"] == told.bytes
            assert run["busiest"] == told.busiest
        assert told.seconds == told.busiest / 450e9, "eight devices are a node"
