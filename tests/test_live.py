"""What a live model has besides its class and configuration is in its reduced model, or refused by name; the applied model
runs it."""

from __future__ import annotations

import copy
import types
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.nn.utils import parametrize
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

import shardplan
from shardplan import compile_plan, load_plan
from shardplan.compiler.layout import ModelLayouts
from shardplan.core.diagnostics import PlanError
from shardplan.model import find_any
from shardplan.model.rebinding import NotBound, copied
from shardplan.model.reduced.outcome import loss_of
from shardplan.model.reduced.reduced_model import make_reduced_model, unreached
from shardplan.runtime.apply.phases import apply_program
from shardplan.runtime.apply.plan_mesh import read_mesh
from tests.own_models import Decoder
from tests.proofs import assert_equal, collect, compare_results, fake_mesh, ranked, step, unsharded
from tests.simulation import simulated_mesh
from tests.small_models import small_model

GLOBAL = nn.Linear(2, 2)


def llama(layers: int = 2, **settings) -> LlamaForCausalLM:
    return small_model("llama", num_hidden_layers=layers, noise=0.1, **settings)


def reduced_of(model: nn.Module, **arguments) -> nn.Module:
    return make_reduced_model(find_any(model, **arguments), tp=2).build()


def codes(model: nn.Module, plan="llama", **arguments) -> set[str]:
    return {d.code for d in shardplan.validate(model, plan, {"tp": 2}, **arguments).diagnostics}


def broken(model: nn.Module, plan="llama") -> bool:
    """Whether the layout check has errors; without looking for what would fix them."""
    report = ModelLayouts(find_any(model), 2).check(load_plan(plan).file, help=False)
    return any(d.is_error for d in report.diagnostics)


def batch(model: nn.Module) -> dict[str, torch.Tensor]:
    ids = torch.randint(10, 130, (2, 16), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def real_rows(build, plan="llama", inputs=batch, call=step, **options):
    """The live model itself, applied on simulated ranks, against itself unsharded: every gradient."""
    whole = build()
    feed = inputs(whole)
    reference = unsharded(whole, copy.deepcopy(feed), call)
    model = build()
    program = compile_plan(model, {"tp": 2}, plan, **options)
    with simulated_mesh(2) as mesh:
        apply_program(model, read_mesh(mesh), program, src_data_rank=0)
        values = call(model, ranked(feed, 2))
        values["loss"].backward()
    return compare_results(reference, collect(model, values))


# Patches that are right under the plan `llama`.


def on_instances(model):
    def forward(self, x):
        return self.down_proj(F.gelu(self.gate_proj(x)) * self.up_proj(x) * 0.5)

    for layer in model.model.layers:
        layer.mlp.forward = types.MethodType(forward, layer.mlp)


def around_the_old_one(model):
    for layer in model.model.layers:
        old = layer.mlp.forward

        def forward(x, old=old):
            return 2 * old(x)

        layer.mlp.forward = forward


def over_a_closure(model):
    for layer in model.model.layers:
        mlp = layer.mlp
        mlp.forward = lambda x, mlp=mlp: mlp.down_proj(torch.tanh(mlp.gate_proj(x)) * mlp.up_proj(x))


def by_partial(model):
    def forward(scale, mlp, x):
        return mlp.down_proj(torch.tanh(mlp.gate_proj(x)) * mlp.up_proj(x)) * scale

    for i, layer in enumerate(model.model.layers):
        layer.mlp.forward = partial(forward, 1.0 + i, layer.mlp)


def with_hooks(model):
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda module, args, output: output * 1.5)
        layer.self_attn.o_proj.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))


def of_another_class(model):
    class Gelu(type(model.model.layers[0].mlp)):
        def forward(self, x):
            return self.down_proj(F.gelu(self.gate_proj(x)) * self.up_proj(x))

    for layer in model.model.layers:
        layer.mlp.__class__ = Gelu


def with_attributes(model):
    for i, layer in enumerate(model.model.layers):
        layer.self_attn.scaling = 0.1 + 0.1 * i


def on_a_linear(model):
    for layer in model.model.layers:
        layer.mlp.down_proj.forward = types.MethodType(
            lambda self, x: F.linear(x * 0.5, self.weight), layer.mlp.down_proj
        )


RIGHT = (
    on_instances,
    around_the_old_one,
    over_a_closure,
    by_partial,
    with_hooks,
    of_another_class,
    with_attributes,
    on_a_linear,
)


LATER = (by_partial, with_attributes, on_a_linear, over_a_closure)  # the ways of the others, put on otherwise


@pytest.mark.parametrize(
    "patch",
    [pytest.param(patch, id=patch.__name__, marks=pytest.mark.slow if patch in LATER else ()) for patch in RIGHT],
)
def test_patched_models_train_right(patch):
    sp = RIGHT.index(patch) % 2 == 0

    def build():
        model = llama()
        patch(model)
        return model

    plain, patched = llama(), build()
    assert plain(**batch(plain)).loss != patched(**batch(patched)).loss
    small = make_reduced_model(find_any(plain), tp=2)
    feed = small.inputs()
    assert small.build()(**feed).loss != reduced_of(patched)(**feed).loss, "the reduced model has the patch"
    assert not codes(patched, sequence_parallel=sp)
    assert_equal(real_rows(build, sequence_parallel=sp))


def normalising(self, x):
    hidden = self.gate_proj(x)
    return self.down_proj(hidden / hidden.norm(dim=-1, keepdim=True))  # over this rank's features alone


def test_a_patched_forward_that_the_plan_breaks_is_refused():
    model = llama()
    for layer in model.model.layers:
        layer.mlp.forward = types.MethodType(normalising, layer.mlp)
    assert broken(model)


WHOLE_STREAM = {
    "self_attn.{q,k,v}_proj": "colwise",
    "self_attn.o_proj": "rowwise",
    "mlp.{gate,up}_proj": "colwise",
    "mlp.down_proj": "rowwise",
}


class Keeper:
    """Hooks that keep what a module returns, and add it to another's."""

    def __init__(self) -> None:
        self.kept = None

    def keep(self, module: nn.Module, args: Any, output: Any) -> None:
        self.kept = output

    def add(self, module: nn.Module, args: Any, output: Any) -> Any:
        return output + self.kept


def by_methods() -> tuple[Any, Any]:
    keeper = Keeper()
    return keeper.keep, keeper.add


def by_a_variable() -> tuple[Any, Any]:
    kept = None

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal kept
        kept = output

    return keep, lambda module, args, output: output + kept


def by_a_list() -> tuple[Any, Any]:
    kept = [None]

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        kept[0] = output

    return keep, lambda module, args, output: output + kept[0]


@pytest.mark.parametrize("hooks", [by_methods, by_a_variable, by_a_list])
def test_hooks_of_several_modules_share_what_one_keeps(hooks: Any):
    """An embedding that a later layer adds, in the reduced model and in its copies; with `inputs_embeds` there is none."""
    model = llama()
    keep, add = hooks()
    model.model.embed_tokens.register_forward_hook(keep)
    model.model.layers[1].register_forward_hook(add)
    rules = {f"model.layers.*.{name}": style for name, style in WHOLE_STREAM.items()}
    plan = {"version": "1", "name": "mine", "tensor_parallel": rules}
    report = shardplan.validate(model, plan, {"tp": 2})
    assert report.ok and report.proven, report
    assert "backward through the graph a second time" in report.proof.calls[0].left_out["inputs_embeds"]


def test_a_hook_that_the_plan_breaks_is_refused():
    model = llama()
    for layer in model.model.layers:  # over this rank's features alone
        layer.mlp.gate_proj.register_forward_hook(
            lambda module, args, output: output / output.norm(dim=-1, keepdim=True)
        )
    assert broken(model)


def test_a_patch_of_one_layer_is_kept():
    model = llama(5)
    model.model.layers[3].mlp.forward = types.MethodType(normalising, model.model.layers[3].mlp)
    reduced_model = make_reduced_model(find_any(model), tp=2)
    assert 3 in reduced_model.layers
    small = reduced_model.build()
    assert ["forward" in vars(layer.mlp) for layer in small.model.layers] == [i == 3 for i in reduced_model.layers]
    assert broken(model)


class Gate(nn.Module):
    """Another feed-forward network, with sizes of the model and its own parameter and buffer."""

    def __init__(self, config):
        super().__init__()
        self.width = config.hidden_size
        self.first = nn.Linear(config.hidden_size, config.intermediate_size)
        self.second = nn.Linear(config.intermediate_size, config.hidden_size)
        self.scale = nn.Parameter(torch.ones(config.hidden_size))
        self.register_buffer("two", torch.tensor(2.0))

    def forward(self, x):
        assert x.shape[-1] == self.width
        return self.second(self.first(x).relu()) * self.scale * self.two


def gated():
    model = llama()
    torch.manual_seed(3)
    for layer in model.model.layers:
        layer.mlp = Gate(model.config)
    return model


def test_exchanged_modules_are_in_the_reduced_model():
    model = gated()
    small = reduced_of(model)
    mlp = small.model.layers[1].mlp
    assert type(mlp) is Gate and mlp.width == small.config.hidden_size
    assert mlp.first.weight.shape == (small.config.intermediate_size, small.config.hidden_size)
    names = [[n for n, _ in one.named_parameters()] for one in (mlp, model.model.layers[0].mlp)]
    assert mlp.two == 2 and names[0] == names[1]
    assert "SP524" not in codes(model)


def test_added_parameters_and_parametrizations():
    model = llama()
    for layer in model.model.layers:
        layer.mlp.gain = nn.Parameter(torch.ones(model.config.hidden_size))
        layer.mlp.forward = types.MethodType(lambda self, x: self.down_proj(self.up_proj(x)) * self.gain, layer.mlp)
    assert reduced_of(model).model.layers[0].mlp.gain.shape == (reduced_of(model).config.hidden_size,)

    class Doubled(nn.Module):
        def forward(self, weight):
            return 2 * weight

    model = llama()
    parametrize.register_parametrization(model.lm_head, "weight", Doubled())
    small = reduced_of(model)
    assert torch.equal(small.lm_head.weight, 2 * small.lm_head.parametrizations.weight.original)


def captured_parameter(model):
    weight = model.model.layers[0].mlp.up_proj.weight
    model.model.layers[0].mlp.forward = lambda x: x + F.linear(x, weight).sum()


def global_name(model):
    global GLOBAL
    GLOBAL = model

    def forward(x):
        return GLOBAL.model.norm(x)

    model.model.layers[0].mlp.forward = forward


def another_layer(model):
    other = model.model.layers[4].mlp
    model.model.layers[0].mlp.forward = lambda x: other.down_proj(other.up_proj(x))


def shared_module(model):
    model.model.layers[1].mlp = model.model.layers[0].mlp


def shared_layer(model):
    model.model.layers[1] = model.model.layers[0]


def foreign_parameters(model):
    foreign = nn.Linear(64, 64)
    model.model.layers[0].mlp.forward = lambda x: foreign(x)


def fewer_layers(model):
    model.model.layers = model.model.layers[:3]


def tensor_attribute(model):
    model.model.layers[0].mlp.table = model.lm_head.weight.sum(1)


def own_configuration(model):
    model.model.layers[0].self_attn.config = copy.deepcopy(model.config)
    model.model.layers[0].self_attn.config.num_attention_heads = 2


REFUSED = (
    (captured_parameter, "model.layers.0.mlp: uses the parameter model.layers.0.mlp.up_proj.weight"),
    (global_name, "model.layers.0.mlp: reads the model through the global name 'GLOBAL'"),
    (another_layer, "model.layers.0.mlp: uses model.layers.4.mlp"),
    (shared_module, "model.layers.1.mlp: is the same module object as model.layers.0.mlp"),
    (shared_layer, "model.layers.1: is the same module object as model.layers.0"),
    (foreign_parameters, "model.layers.0.mlp: uses a Linear with parameters that are not the model's"),
    (fewer_layers, "model.layers: has 3 modules, but 6 by class and configuration"),
    (tensor_attribute, "model.layers.0.mlp: the attribute table is a tensor"),
    (own_configuration, "LlamaAttention has a configuration that is not the model's"),
)


@pytest.mark.parametrize(("patch", "said"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_what_cannot_be_carried_over_is_refused_by_name(patch, said):
    model = llama(6)
    patch(model)
    with pytest.raises(PlanError) as caught:
        reduced_of(model)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "SP524" and said in diagnostic.message
    assert "SP524" in codes(model)


def test_a_model_of_a_callable_may_be_patched_too(tmp_path, monkeypatch):
    (tmp_path / "patched_models.py").write_text(
        "import types\nfrom tests.test_live import llama, normalising\n"
        "def build():\n    model = llama()\n    for layer in model.model.layers:\n"
        "        layer.mlp.forward = types.MethodType(normalising, layer.mlp)\n    return model\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert broken("patched_models:build")


# Modules of one's own.


class Block(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Own(Decoder):
    def __init__(self, block=Block, layers=2):
        torch.manual_seed(0)
        super().__init__(block, layers)


OWN = {
    "version": "1",
    "name": "own",
    "tensor_parallel": {"layers.*.up": "colwise", "layers.*.down": "rowwise"},
}


def own_batch(model):
    return {"ids": torch.randint(32, (2, 16), generator=torch.Generator().manual_seed(0))}


def squared(model, inputs):
    logits = model(**inputs)
    return {"loss": logits.square().mean(), "logits": logits}


def own_rows(build, plan=OWN, **options):
    return real_rows(build, plan, own_batch, squared, **options)


def hooked_own():
    model = Own()
    for layer in model.layers:
        old, up = layer.forward, layer.up
        layer.forward = lambda x, old=old: old(x) * 0.5
        layer.register_forward_hook(lambda module, args, output, up=up: output * up.in_features / 8)
    return model


def test_functions_of_own_modules_are_bound_to_the_copy():
    model = hooked_own()
    twice = copied(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert twice(**own_batch(None)).abs().sum() > 0
    assert_equal(own_rows(hooked_own))


def test_own_modules_whose_functions_cannot_be_bound_are_refused():
    model = Own()
    weight = model.layers[0].up.weight
    model.layers[0].forward = lambda x: x + F.linear(x, weight).sum()
    with pytest.raises(NotBound, match="uses the parameter layers.0.up.weight"):
        copied(model)
    assert "SP524" in codes(model, OWN)


def test_a_layer_that_is_called_twice():
    class Twice(Own):
        def forward(self, ids):
            x = self.embed(ids)
            for layer in (*self.layers, *self.layers):
                x = layer(x)
            return self.head(x)

    assert not codes(Twice(), OWN)
    assert_equal(own_rows(Twice))


def test_a_layer_object_that_stands_twice():
    class Shared(Own):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([self.layers[0]] * 2)

    assert not codes(Shared(), OWN)
    assert_equal(own_rows(Shared))
    split = {
        "embed": "embedding_rowwise_seq",
        "layers.0": "split_seq_input",
        "layers.*.norm": {"style": "sequence_parallel", "output": "gather"},
        "layers.*.down": "rowwise_seq",
        "head": {"style": "gather_seq_input", "grad": "complete"},
    }
    plan = {**OWN, "sequence_parallel": split}
    assert not codes(Own(), plan, sequence_parallel=True)
    found = codes(Shared(), plan, sequence_parallel=True)  # its first call would take what is whole, its second a slice
    assert "SP402" in found


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "olmoe"])
def test_every_expert_gets_tokens(name):
    reduced_model = make_reduced_model(find_any(AutoConfig.for_model(name)), tp=2, experts_implementation="eager")
    counts = {p.shape[0] for n, p in reduced_model.build().named_parameters() if "experts." in n and p.ndim == 3}
    assert counts and unreached(reduced_model.build(), reduced_model.inputs(), counts) == 0


@pytest.mark.parametrize(
    ("name", "kind"),
    [("T5ForConditionalGeneration", "seq2seq"), ("WhisperForConditionalGeneration", "audio"), ("ViTModel", "picture")],
)
def test_inputs_that_are_not_text_are_made(name, kind):
    cls = getattr(transformers, name)
    config = cls.config_class(architectures=[name])
    reduced_model = make_reduced_model(find_any(config), tp=2)
    assert reduced_model.kinds == (kind,)
    model = reduced_model.build()
    loss_of(model(**reduced_model.inputs())).backward()
    inside = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None and ".layer" in n]
    assert not inside, "every layer of both sides gets a gradient"


# Hooks on parameters.


def test_hooks_on_replaced_parameters_are_refused():
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        model = llama()
        getattr(model.model.layers[1].mlp.up_proj.weight, register)(lambda grad: None)
        report = shardplan.validate(model, "llama", {"tp": 2})
        (finding,) = [d for d in report.diagnostics if d.code == "SP525"]
        assert finding.is_error and "model.layers.1.mlp.up_proj.weight" in finding.message
        assert "after apply_plan" in finding.help
        with pytest.raises(PlanError):
            compile_plan(model, {"tp": 2}, "llama")
        fsdp = {"backend": "fsdp2", "units": ["model.layers.*"]}
        with pytest.raises(PlanError):
            compile_plan(model, {"tp": 1, "dp_shard": 2}, "llama", data_parallel=fsdp)
        program = compile_plan(model, {"tp": 1}, "llama", data_parallel=fsdp)
        with fake_mesh(1, 1, names=("dp_shard", "tp")) as mesh, pytest.raises(PlanError):  # FSDP2 of one rank
            apply_program(model, read_mesh(mesh), program, src_data_rank=None)


def test_hooks_on_parameters_that_stay_are_called():
    model = llama()
    called = []
    model.lm_head.weight.register_post_accumulate_grad_hook(lambda parameter: called.append(parameter))
    with fake_mesh(1) as mesh:
        shardplan.apply_plan(model, mesh, "llama")
        model(**batch(model)).loss.backward()
    assert called == [model.lm_head.weight]


# Inputs, dtypes, sizes, gates.


def small_own(layers=1):
    return Own(layers=layers)


class Narrow(Own):
    pass


def test_a_model_too_large_is_proven_on_the_one_that_is_named(monkeypatch):
    monkeypatch.setattr("shardplan.model.reduced.own_copies.MOST_BYTES", 20_000)
    large = Own(layers=6)
    with pytest.raises(PlanError) as caught:
        reduced_of(large)
    assert caught.value.diagnostics[0].code == "SP521" and "reduced" in caught.value.diagnostics[0].help
    assert len(reduced_of(large, reduced=small_own).layers) == 1
    assert len(reduced_of(large, reduced="tests.test_live:small_own").layers) == 1


def test_a_transformers_model_on_the_one_that_is_named():
    model = llama(6)
    another_layer(model)
    found = find_any(model, reduced=lambda: llama(3))
    reduced_model = make_reduced_model(found, tp=2, experts_implementation="eager")
    assert len(reduced_model.build().model.layers) == 3 and reduced_model.kinds == ("text",)
    assert reduced_model.build()(**reduced_model.inputs()).loss.isfinite()


@pytest.mark.parametrize(
    ("reduced", "said"),
    [
        (lambda: Narrow(), "the model: class is Narrow, but Own in the original"),
        (lambda: Own(nn.Identity), "layers.*: class is Identity, but Block in the original"),
        (lambda: 3, "returned a int"),
        (lambda: 1 / 0, "ZeroDivisionError"),
        (lambda: Own(partial(Biasless)), "layers.*.down.bias: missing"),
    ],
)
def test_another_model_than_the_original_is_refused(reduced, said):
    with pytest.raises(PlanError) as caught:
        reduced_of(Own(), reduced=reduced)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "SP526"
    assert any(said in text for text in (diagnostic.message, *diagnostic.notes))


class Biasless(Block):
    def __init__(self):
        super().__init__()
        self.down = nn.Linear(64, 16, bias=False)


Biasless.__name__ = "Block"


class Half(Own):
    """Casts to its weights' dtype by name."""

    def __init__(self):
        super().__init__()
        self.layers.to(torch.bfloat16)
        self.head.half()

    def forward(self, ids):
        x = self.embed(ids).to(torch.bfloat16)
        for layer in self.layers:
            x = layer(x.bfloat16())
        return self.head(x.half()).float()


def test_a_model_with_dtypes_of_its_own_is_proven():
    reduced_model = make_reduced_model(Half(), tp=2)
    model = reduced_model.build()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model(**reduced_model.inputs()).dtype == torch.float32
    report = shardplan.validate(Half(), OWN, {"tp": 2})
    assert report.ok and {d.code for d in report.diagnostics} <= {"SP332"}
    assert shardplan.verify(Half(), OWN, {"tp": 2}).ok
    wrong = {**OWN, "tensor_parallel": {"layers.*.up": "colwise"}}
    assert broken(Half(), wrong)


def test_complex_buffers_stay_complex():
    class Rotary(Own):
        def __init__(self):
            super().__init__()
            self.register_buffer("turns", torch.polar(torch.ones(8), torch.arange(8.0)), persistent=False)

        def forward(self, ids):
            x = torch.view_as_complex(self.embed(ids).unflatten(-1, (8, 2))) * self.turns
            return self.head(torch.view_as_real(x).flatten(-2))

    reduced_model = make_reduced_model(Rotary(), tp=2)
    assert reduced_model.build().turns.is_complex() and reduced_model.build()(**reduced_model.inputs()).isfinite().all()


def test_buffers_that_are_zero_are_drawn():
    class Gated(Own):
        def __init__(self):
            super().__init__()
            self.register_buffer("gate", torch.zeros(1))
            self.register_buffer("shift", torch.zeros(16), persistent=False)

        def forward(self, ids):
            return super().forward(ids) * self.gate + self.shift.sum()

    first, second = reduced_of(Gated()), reduced_of(Gated())
    for name in ("gate", "shift"):
        assert (getattr(first, name) > 0).all() and torch.equal(getattr(first, name), getattr(second, name))


def test_transformers_models_take_inputs():
    def inputs(seed, config):
        ids = torch.randint(0, 100_000, (2, 16), generator=torch.Generator().manual_seed(seed))
        labels = ids.clone()
        labels[0, :4] = -100
        assert config.hidden_size < 4096
        return {"input_ids": ids, "labels": labels}

    reduced_model = make_reduced_model(find_any(LlamaConfig(), inputs=inputs), tp=2)
    assert reduced_model.kinds == ("own",)
    made = reduced_model.inputs(0)
    assert made["input_ids"].max() < reduced_model.config.vocab_size and made["labels"].min() == -100
    assert reduced_model.build()(**made).loss.isfinite()
    plain = make_reduced_model(
        find_any(LlamaConfig(), inputs=lambda seed: inputs(seed, LlamaConfig(hidden_size=64))), tp=2
    )
    assert torch.equal(plain.inputs(0)["input_ids"], made["input_ids"])


class Table(nn.Module):
    """A buffer outside the state dict, that `reset_parameters` computes."""

    def __init__(self, known: bool) -> None:
        super().__init__()
        self.known = known
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.register_buffer("scale", torch.empty(8), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.known:
            self.scale.copy_(torch.linspace(1, 2, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x * self.scale)))


class Weighed(nn.Module):
    """The same, with a buffer that the model's `_init_weights` computes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Table(known=False)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Table):
            module.scale.copy_(torch.linspace(1, 2, 8))
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.1)
            nn.init.zeros_(module.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


@pytest.mark.parametrize("how", ["reset_parameters", "_init_weights", "neither"])
def test_buffers_on_the_meta_device_that_an_initialisation_makes(how: str) -> None:
    with torch.device("meta"):
        model = Weighed() if how == "_init_weights" else Table(known=how == "reset_parameters")
    at = "inner." if how == "_init_weights" else ""
    plan = {"version": "1", "tensor_parallel": {f"{at}up": "colwise", f"{at}down": "rowwise"}}
    named = shardplan.Model(model, inputs=lambda seed: {"x": torch.randn(2, 4, 8)})
    report = shardplan.validate(named, plan, {"tp": 2})
    if how == "neither":
        assert [one.code for one in report.diagnostics] == ["SP520"]
        assert "reset_parameters()" in (report.diagnostics[0].help or "")
    else:
        assert report.proven
