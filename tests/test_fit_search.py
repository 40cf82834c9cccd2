"""What `fit` leaves out of its traces changes no number of theirs."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from shardplan.api import fit_programs
from shardplan.api.fit_programs import Programs
from shardplan.compiler.user_inputs import FoundOnce, Model
from shardplan.core.estimates import Question, TrainingStep
from shardplan.core.mesh import MeshSizes
from shardplan.cost import traced_step
from shardplan.cost.depth import cut, depths_of
from shardplan.cost.traced_parts import PartNames
from shardplan.cost.traced_step import step_ledger
from shardplan.torchlib.fakes import FakeTensors
from shardplan.torchlib.private import private
from tests.test_fit import EXPERTS, SEQ, SETTINGS

LAYERS = {"num_hidden_layers": 9}
MODELS = {"llama": SETTINGS | LAYERS, "mixtral": EXPERTS | LAYERS}


def programs_of(model):
    asked = Question(model, "auto", False, TrainingStep(SEQ))
    return Programs(Model(model, MODELS[model]), "auto", asked, {}, lambda text: None, derive=False)


def ledger_of(made, sizes, *, optimizer, gathers, bare, depth=None):
    """The ledger of one rank, traced as an estimate traces it, or as `fit` traces its tables."""
    compiled = made.compiled(sizes.tp)
    found, _ = compiled.given.both
    resolved = replace(compiled.program.resolved, sizes=sizes)
    if bare:
        resolved = replace(resolved, data_parallel=None, dp_units=(), dp_parts=(), dp_experts=())
    program = replace(compiled.program, resolved=resolved)
    depths = depths_of(found, program, gathers=gathers)
    asked = replace(made.asked, step=TrainingStep(SEQ, optimizer=optimizer))
    names = PartNames.of(resolved) if resolved.pp_blocks else None
    shorten = partial(cut, depths=depths, depth=depth or depths.traced[-1])
    return depths, step_ledger(found, program, asked, shorten=shorten, names=names, unwrapped=bare)


@pytest.mark.parametrize(
    ("model", "sizes", "optimizer"),
    [
        ("llama", MeshSizes(tp=2, dp_shard=3), "adamw"),
        pytest.param("mixtral", MeshSizes(tp=2, dp_shard=2, dp_replicate=2), "sgd", marks=pytest.mark.slow),
        ("mixtral", MeshSizes(tp=2), "none"),
    ],
)
def test_the_first_step_is_as_the_second(model, sizes, optimizer, monkeypatch):
    """What the first step makes and later ones find is not measured. dp_shard 3 divides no dim: FSDP2 pads."""
    made, run = programs_of(model), traced_step.run_step
    bare = optimizer == "none"
    _, first = ledger_of(made, sizes, optimizer=optimizer, gathers=True, bare=bare)

    def twice(model, inputs, updates, meter, *rest, **options):
        run(model, inputs, updates, meter, *rest, **options)
        meter.start()
        run(model, inputs, updates, meter, *rest, **options)

    monkeypatch.setattr(traced_step, "run_step", twice)
    _, second = ledger_of(made, sizes, optimizer=optimizer, gathers=True, bare=bare)
    assert first == second and len(first.parts) > 3


def test_results_without_memory_are_as_torch_makes_them():
    """What is made at once has the fields, the storage and the history of what torch makes."""

    def seen(mode):
        with mode:
            x = torch.ones(4, 6, requires_grad=True)
            made = []
            for _ in range(2):  # the second time results are known
                y = (x @ x.t()).to(torch.bfloat16)
                parts = torch.split(y.view(2, 8), 4, dim=1)
                made += [y, y.t(), y[1:], *parts, y.detach().clone().mul_(2), (y * 2).sum(), torch.arange(3)]
            views = [one.untyped_storage()._cdata == y.untyped_storage()._cdata for one in made]
            y.float().sum().backward()
            made.append(x.grad)
        told = [
            (one.shape, one.stride(), one.dtype, one.device, one.requires_grad, one.storage_offset()) for one in made
        ]
        fields = [{name: value for name, value in vars(one).items() if name != "fake_mode"} for one in made]
        return told, views, fields, [type(one.grad_fn).__name__ for one in made]

    assert seen(FakeTensors()) == seen(private("FakeTensorMode")())


@pytest.mark.parametrize("model", MODELS)
def test_one_layer_fewer_has_the_same_costs(model):
    made = programs_of(model)
    few, short = ledger_of(made, MeshSizes(tp=2), optimizer="none", gathers=False, bare=True)
    many, long = ledger_of(made, MeshSizes(tp=2), optimizer="none", gathers=True, bare=True)
    assert few.traced[-1] < many.traced[-1] < few.count
    blocks = [f"{few.lists[0]}.{i}" for i in range(few.count)]
    assert [short.parts[few.like(name)] for name in blocks] == [long.parts[many.like(name)] for name in blocks]
    rest = short.parts.keys() - {few.like(name) for name in blocks}
    assert rest and all(short.parts[name] == long.parts[name] for name in rest)
    _, one = ledger_of(made, MeshSizes(tp=2), optimizer="none", gathers=False, bare=True, depth=1)
    assert all(one.parts[name] == long.parts[name] for name in rest)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("sizes", [MeshSizes(tp=2, dp_shard=3), MeshSizes(tp=1, dp_shard=2, dp_replicate=2)])
def test_an_optimizer_of_local_tensors_makes_what_one_of_dtensors_makes(optimizer, sizes, monkeypatch):
    """dp_shard 3 divides no dim: FSDP2 pads."""
    made = programs_of("llama")
    _, own = ledger_of(made, sizes, optimizer=optimizer, gathers=True, bare=False)
    monkeypatch.setattr(traced_step, "_as_placed", lambda parameter: False)
    _, other = ledger_of(made, sizes, optimizer=optimizer, gathers=True, bare=False)
    assert own.moments == other.moments and own.touched == other.touched and own.calls == other.calls
    assert {part: costs.stored for part, costs in own.parts.items()} == {
        part: costs.stored for part, costs in other.parts.items()
    }


def test_a_model_is_looked_for_once(monkeypatch):
    seen = []
    find = Model.find
    monkeypatch.setattr(Model, "find", lambda self: (seen.append(self.name), find(self))[1])
    made = programs_of("llama")
    made.compiled(1)
    made.compiled(2)
    assert seen == ["llama"] and FoundOnce("llama").shown == "llama"


def test_experts_are_looked_for_with_stages_or_without(monkeypatch):
    """A plan without experts has none in stages either."""
    tried = []
    compiled = Programs._compile

    def counted(self, sizes, overlay):
        tried.append(sizes.pp)
        return compiled(self, sizes, overlay)

    monkeypatch.setattr(Programs, "_compile", counted)
    with pytest.raises(fit_programs.PlanError) as raised:
        programs_of("llama").compiled(1, ep=2)
    assert fit_programs.no_experts(raised.value) and tried == [2]
