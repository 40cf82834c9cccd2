"""A model that a plan was applied to stays the one that was proven, or its next forward says what changed and what to write."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_full_backward_hook,
    register_module_full_backward_pre_hook,
)
from torch.utils.module_tracker import ModuleTracker

from shardplan import Model, apply_plan
from tests.proofs import fake_mesh
from tests.small_models import small_model

IDS = torch.ones(2, 8, dtype=torch.long)
Change = Callable[[nn.Module], Any]
FROZEN = ("model.embed_tokens.weight", "model.layers.0.input_layernorm.weight", "model.layers.1.mlp.up_proj.weight")


def frozen(model: nn.Module) -> nn.Module:
    for name in FROZEN:
        model.get_parameter(name).requires_grad_(False)
    return model


MESHES = ("tp", "sp", "tp and dp_shard")


@pytest.fixture(params=MESHES)
def model(request: pytest.FixtureRequest, compiled_once: None) -> Iterator[nn.Module]:
    sizes, names = ((2, 2), ("dp_shard", "tp")) if "dp" in request.param else ((2,), ("tp",))
    with fake_mesh(*sizes, names=names) as mesh:
        options = {"sequence_parallel": request.param == "sp", "src_data_rank": None, "prove": False}
        yield apply_plan(frozen(small_model("llama")), mesh, "llama", **options)


def run(model: nn.Module) -> None:
    model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()


def at(name: str, change: Callable[[nn.Module], Any]) -> Change:
    return lambda model: change(model.get_submodule(name))


def doubled(module: nn.Module, args: Any, output: Any) -> Any:
    return output * 2


def own_forward(module: nn.Module) -> None:
    module.forward = types.MethodType(lambda self, x: x * 2, module)


def replaced(name: str, by: Callable[[nn.Module], nn.Module]) -> Change:
    def change(model: nn.Module) -> None:
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, by(model.get_submodule(name)))

    return change


def another(leaf: str) -> Change:
    def change(module: nn.Module) -> None:
        setattr(module, leaf, nn.Parameter(torch.ones(getattr(module, leaf).shape)))

    return change


# What would be wrong without a word, with words of what is said.
WRONG: Mapping[str, tuple[Change, str]] = {
    "a frozen norm is trained": (
        lambda m: m.get_parameter(FROZEN[1]).requires_grad_(True),
        "input_layernorm.weight is trained now",
    ),
    "all is trained": (lambda m: m.requires_grad_(True), r"\(3 in all\).*requires_grad_\(True\) before apply_plan"),
    "a hook where columns are split": (
        at("model.layers.0.self_attn.q_proj", lambda m: m.register_forward_hook(doubled)),
        "got a forward hook .doubled.",
    ),
    "a hook where rows are": (
        at("model.layers.1.mlp.down_proj", lambda m: m.register_forward_pre_hook(lambda *_: None)),
        "got a forward pre-hook",
    ),
    "a hook between them": (
        at("model.layers.1.mlp.act_fn", lambda m: m.register_forward_hook(doubled)),
        "mlp.act_fn got a forward hook",
    ),
    "another class": (
        at("model.layers.0.mlp.act_fn", lambda m: setattr(m, "__class__", nn.GELU)),
        "act_fn is a GELU now",
    ),
    "another class of a whole module": (
        at("model.norm", lambda m: setattr(m, "__class__", nn.Identity)),
        "model.norm is a Identity now",
    ),
    "a forward of a module's own": (at("model.layers.1.mlp.up_proj", own_forward), "up_proj got a forward of its own"),
    "a forward of a whole module": (at("model.norm", own_forward), "model.norm got a forward of its own"),
    "another module": (
        replaced("model.layers.1.mlp", lambda m: nn.Linear(64, 64)),
        "layers.1.mlp was replaced by a Linear",
    ),
    "a module around, with more": (
        replaced("model.layers.1.mlp", lambda m: nn.Sequential(m, nn.ReLU())),
        "was replaced by a Sequential",
    ),
    "a module less": (lambda m: m.model.layers[1]._modules.__setitem__("mlp", None), "layers.1.mlp was removed"),
    "a layer less": (lambda m: m.model.layers.__delitem__(1), "model.layers.1 was removed"),
    "another parameter": (at("model.layers.0.self_attn.o_proj", another("weight")), "o_proj.weight was replaced"),
    "another whole parameter": (
        at("model.layers.0.post_attention_layernorm", another("weight")),
        "layernorm.weight was replaced",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_change_is_told_at_the_next_forward(model: nn.Module, what: str) -> None:
    change, words = WRONG[what]
    run(model)
    change(model)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=words):
            run(model)
    if not what.endswith("less"):
        with pytest.raises(RuntimeError, match=words):
            model.model(input_ids=IDS, use_cache=False)  # a part that is called by itself


@pytest.mark.parametrize("model", ["sp"], indirect=True)
@pytest.mark.parametrize(
    "register",
    [
        register_module_forward_pre_hook,
        register_module_forward_hook,
        register_module_full_backward_pre_hook,
        register_module_full_backward_hook,
    ],
)
def test_a_hook_of_all_modules_is_told_at_the_next_forward(model: nn.Module, register: Callable[..., Any]) -> None:
    run(model)
    handle = register(lambda *values: None)
    try:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="every module got a .*hook .*Register it before apply_plan"):
                run(model)
    finally:
        handle.remove()
    with ModuleTracker():  # torch's own, which notes where a forward is
        run(model)


def checkpointed(model: nn.Module) -> None:
    apply_activation_checkpointing(model, check_fn=lambda m: m is model.model.layers[1].mlp)


def put_alike(model: nn.Module) -> None:
    norm = model.model.layers[0].post_attention_layernorm
    norm.weight = nn.Parameter(norm.weight.detach().clone())


def frozen_and_trained(model: nn.Module) -> None:
    model.lm_head.weight.requires_grad_(False)
    run(model)
    model.lm_head.weight.requires_grad_(True)


# What is right.
RIGHT: Mapping[str, Change] = {
    "nothing": lambda m: None,
    "more is frozen": lambda m: m.model.layers[1].requires_grad_(False),
    "frozen and trained again": frozen_and_trained,
    "a hook of the model": lambda m: m.register_forward_hook(lambda module, args, output: None),
    "a hook of the embedding": at("model.embed_tokens", lambda m: m.register_forward_hook(doubled)),
    "hidden states are recorded": lambda m: m(input_ids=IDS, output_hidden_states=True),
    "a hook of a parameter": lambda m: m.model.norm.weight.register_post_accumulate_grad_hook(lambda p: None),
    "a checkpoint around a module": checkpointed,
    "the same class": at("model.norm", lambda m: setattr(m, "__class__", type(m))),
    "without gradients": lambda m: torch.no_grad()(lambda: m(input_ids=IDS))(),
    "a forward of the model": lambda m: setattr(m, "forward", m.forward),
}


@pytest.mark.parametrize("what", RIGHT)
def test_what_is_right_passes(model: nn.Module, what: str) -> None:
    run(model)
    RIGHT[what](model)
    for _ in range(2):
        run(model)


def test_a_parameter_that_is_stored_alike(model: nn.Module) -> None:
    """FSDP2 takes it over in its first forward; afterwards it would compute with the earlier one."""
    put_alike(model)
    run(model)
    put_alike(model)
    managed = isinstance(model, FSDPModule)
    with pytest.raises(RuntimeError, match="FSDP2 would compute with its own") if managed else nullcontext():
        run(model)


@pytest.mark.parametrize(
    "model", [pytest.param(mesh, marks=() if mesh == "sp" else pytest.mark.slow) for mesh in MESHES], indirect=True
)
def test_a_compiled_module_passes(model: nn.Module) -> None:
    run(model)
    replaced("model.layers.1", lambda m: torch.compile(m, backend="eager"))(model)
    for _ in range(2):
        run(model)


def test_hooks_where_values_are_whole_pass() -> None:
    """Without sequence parallelism these are all blocks."""
    with fake_mesh(2, names=("tp",)) as mesh:
        model = apply_plan(
            small_model("llama"), mesh, "llama", sequence_parallel=False, src_data_rank=None, prove=False
        )
        for name in (
            "model",
            "model.layers.0",
            "model.layers.0.mlp",
            "model.layers.1.self_attn",
            "model.layers.1.input_layernorm",
        ):
            model.get_submodule(name).register_forward_hook(lambda *_: None)
        run(model)


def test_adapters_take_turns() -> None:
    base = get_peft_model(small_model("llama"), LoraConfig(target_modules=["q_proj", "down_proj"]))
    base.add_adapter("second", LoraConfig(target_modules=["q_proj", "o_proj"]))
    with fake_mesh(2, names=("tp",)) as mesh:
        model = apply_plan(base, mesh, "llama", sequence_parallel=False, src_data_rank=None, prove=False)
        run(model)
        model.set_adapter("second")
        run(model)
        model.base_model.model.model.norm.weight.requires_grad_(True)
        with pytest.raises(RuntimeError, match="norm.weight is trained now"):
            run(model)


@pytest.mark.parametrize("backend", ["fsdp2", "ddp"])
def test_data_parallelism_alone(backend: str) -> None:
    """FSDP2 reduces what it shards; DistributedDataParallel what was trained when it wrapped the model."""
    names = ("dp_shard",) if backend == "fsdp2" else ("dp_replicate",)
    with fake_mesh(2, names=names) as mesh:
        model = apply_plan(frozen(small_model("llama")), mesh, "llama", prove=False, data_parallel={"backend": backend})
        inner = model.module if backend == "ddp" else model
        inner.model.norm.register_forward_hook(doubled)
        model(input_ids=IDS)
        inner.requires_grad_(True)
        if backend == "fsdp2":
            run(model)
        else:
            with pytest.raises(RuntimeError, match="embed_tokens.weight is trained now"):
                model(input_ids=IDS)


def test_fsdp2_that_comes_later_is_no_stranger() -> None:
    with fake_mesh(2, 2, names=("dp_shard", "tp")) as mesh:
        options = {"src_data_rank": None, "prove": False, "data_parallel": False, "sequence_parallel": False}
        model = apply_plan(small_model("llama"), mesh["tp"], "llama", **options)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["dp_shard"])
        fully_shard(model, mesh=mesh["dp_shard"])
        run(model)
        assert isinstance(model.model.layers[0].mlp.up_proj.weight, DTensor)
        run(model)


class Gated(nn.Module):
    """A flag that others may set, one that its code sets, and a number."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 32), nn.Linear(32, width)
        self.gated, self.seen, self.scale = False, False, 1.0

    def forward(self, x: Tensor) -> Tensor:
        h, self.seen = torch.relu(self.up(x)) * self.scale, not self.seen
        return self.down(h / h.norm() if self.gated else h)


def test_a_flag_that_is_set_later() -> None:
    plan = {"version": "1", "name": "mlp", "tensor_parallel": {"up": "colwise", "down": "rowwise"}}
    with fake_mesh(2, names=("tp",)) as mesh:
        given = Model(Gated(), inputs=lambda seed: {"x": torch.ones(2, 16)})
        model = apply_plan(given, mesh, plan, src_data_rank=None, prove=False)
        for scale in (0.5, 0.0):  # numbers may follow a schedule
            vars(model).update(scale=scale)
            model(torch.ones(2, 16))
        vars(model).update(gated=True)
        model(torch.ones(2, 16))  # the third forward, which does not look
        with pytest.raises(RuntimeError, match="^gated is True now, and was False .* before apply_plan"):
            model(torch.ones(2, 16))
