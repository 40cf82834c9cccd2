"""Gathering again in backward: nothing changes but what is kept, and one all-gather for each block input."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef

from shardplan import applied, compile_plan
from shardplan.proof.threads import on_threads
from shardplan.runtime.parallel import boundaries, regather
from tests.proofs import assert_equal, case, fake_mesh, plan_like, planned, reduced_model, step
from tests.test_plans_collectives import counted, minimum, short_inputs

DOORS = 4  # two layers, two blocks each


@pytest.mark.parametrize("plan", ["llama", "qwen3_moe", "gpt2", "gemma3_text", "phi3"])
def test_every_gradient_is_the_unsharded_models(plan):
    assert_equal(case(plan, sp=True, regather=True).rows())


@pytest.mark.parametrize("plan", ["llama", "qwen3"])
def test_it_costs_one_all_gather_for_each_door(plan):
    with fake_mesh(2) as mesh:
        model = planned(reduced_model(plan, 2).build(), mesh, plan, sequence_parallel=True, regather=True)
        once = minimum(plan, 2, sp=True, logits="replicated")
        found = counted(model, short_inputs(plan))
        assert found["forward"] == once["forward"]
        assert found["backward"] == once["backward"] + Counter(all_gather=DOORS)
        assert found == applied(model).collectives


def gathered_and_kept(monkeypatch, mesh) -> tuple[int, int]:
    """How many values the block inputs gathered, and how many of them the graph of a forward keeps."""
    storages, real = [], regather.note

    def note(wholes, gather):
        storages.extend(StorageWeakRef(whole.untyped_storage()) for whole in wholes)
        real(wholes, gather)

    monkeypatch.setattr(boundaries, "note", note)
    model = planned(reduced_model("llama", 2).build(), mesh, "llama", sequence_parallel=True, regather=True)
    loss = step(model, short_inputs("llama"))["loss"]
    kept = sum(not storage.expired() for storage in storages)
    loss.backward()
    return len(storages), kept


def test_no_gathered_value_is_kept(monkeypatch):
    with fake_mesh(2) as mesh:
        assert gathered_and_kept(monkeypatch, mesh) == (DOORS, 0)
        monkeypatch.setattr(regather.Regather, "__call__", lambda self, forward, module, args, kw: forward(*args, **kw))
        assert gathered_and_kept(monkeypatch, mesh) == (DOORS, DOORS)


def twice(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = planned(reduced_model("llama", 2).build(), mesh, "llama", sequence_parallel=True, regather=True)
    loss = step(model, short_inputs("llama"))["loss"]
    loss.backward(retain_graph=True)
    first = {name: p.grad.to_local().clone() for name, p in model.named_parameters()}
    model.zero_grad()
    loss.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad.to_local(), first[name], rtol=0, atol=0)


def test_a_graph_may_be_run_backward_twice():
    on_threads(2, twice)


def test_under_a_checkpoint_its_second_run_gathers():
    """What a checkpoint lets go of is computed again as a whole: nothing is gathered a third time."""
    with fake_mesh(2) as mesh:
        options = {"sequence_parallel": True, "activation_checkpointing": {"mode": "full"}}
        plain = planned(reduced_model("llama", 2).build(), mesh, "llama", **options)
        again = planned(reduced_model("llama", 2).build(), mesh, "llama", regather=True, **options)
        assert counted(plain, short_inputs("llama")) == counted(again, short_inputs("llama"))


class InPlace(nn.Linear):
    def forward(self, x):
        return super().forward(x.mul_(2))


def test_a_module_that_changes_the_gathered_value_is_refused():
    with fake_mesh(2) as mesh:
        model = reduced_model("llama", 2).build()
        model.model.layers[0].mlp.gate_proj.__class__ = InPlace
        planned(model, mesh, "llama", sequence_parallel=True, regather=True)
        with pytest.raises(RuntimeError, match="in place: remove `regather`"):
            model(**short_inputs("llama"))


def doors_of(model: nn.Module, plan: object, **options: object) -> dict[str, bool]:
    program = compile_plan(model, {"tp": 2}, plan, sequence_parallel=True, **options)
    return {name: move.regather for name, m in program.modules.items() for move in m.enter if move.src.kind == "V"}


def test_a_plan_says_it_for_single_doors_and_an_argument_for_all():
    model = reduced_model("llama", 2).build()
    plan = plan_like("llama", {}, {"model.layers.*.mlp": {"style": "gather_seq_input", "regather": True}})
    said = doors_of(model, plan)
    assert {name: on for name, on in said.items() if "layers" in name} == {
        f"model.layers.{i}.{part}": part == "mlp" for i in range(2) for part in ("self_attn", "mlp")
    }
    assert all(doors_of(model, plan, regather=True).values())
    assert not any(doors_of(model, plan, regather=False).values())
    with pytest.raises(TypeError, match="regather must be"):
        doors_of(model, plan, regather=1)
