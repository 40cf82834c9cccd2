"""State space and linear attention layers by heads, short convolutions by channels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from processes import on_ranks
from safetensors.torch import load_file
from sampling import sampled
from small_models import batch, meta_model, small_model, whole_state
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from training_runs import TWO_BY_TWO, Recipe, compare
from transformers.models.mamba import modeling_mamba
from transformers.models.mamba2 import modeling_mamba2

import shardplan
from shardplan import Model
from shardplan.core.module_program import FeatureMeans
from shardplan.model.build_tree import training_reads

CODESTRAL = {"num_heads": 128, "head_dim": 64, "n_groups": 8, "hidden_size": 4096, "state_size": 128}
FOUR_KEYS = {"linear_num_key_heads": 4, "linear_num_value_heads": 16}
TWO_KEYS = {"linear_num_key_heads": 2, "linear_num_value_heads": 8}
SIXTEEN_HEADS = {"num_attention_heads": 16, "num_key_value_heads": 16}
MIXER = "backbone.layers.0.mixer"


def child(extends: str, rules: dict[str, Any]) -> dict[str, Any]:
    """A plan with other rules than a built-in one."""
    return {"version": "1", "name": "mine", "extends": extends, "tensor_parallel": rules}


@pytest.mark.parametrize(
    ("name", "settings", "tp"),
    [
        ("mamba2", {"n_groups": 1}, 2),  # B and C on all ranks
        pytest.param("mamba2", {"n_groups": 2}, 4, marks=pytest.mark.slow),  # on two neighbouring ranks each
        pytest.param("mamba2", CODESTRAL, 16, marks=pytest.mark.exhaustive),
        pytest.param("mamba2", {"n_groups": 8, "use_bias": True}, 4, marks=pytest.mark.exhaustive),
        pytest.param("falcon_mamba", {}, 4, marks=pytest.mark.exhaustive),
        ("qwen3_5_text", {}, 2),
        pytest.param("qwen3_5_text", FOUR_KEYS, 8, marks=pytest.mark.exhaustive),  # of two ranks each
        pytest.param("qwen3_5_text", TWO_KEYS, 8, marks=pytest.mark.exhaustive),  # a value head on each rank
        pytest.param("qwen3_5_moe_text", FOUR_KEYS, 8, marks=pytest.mark.exhaustive),
        pytest.param("olmo_hybrid", {**FOUR_KEYS, **SIXTEEN_HEADS}, 8, marks=pytest.mark.exhaustive),
        pytest.param("qwen3_next", {}, 4, marks=pytest.mark.exhaustive),
        pytest.param("kimi_linear", {}, 4, marks=pytest.mark.exhaustive),
        pytest.param("recurrent_gemma", {}, 5, marks=pytest.mark.slow),
    ],
)
def test_it_is_proven_in_all_variants(name: str, settings: dict[str, Any], tp: int) -> None:
    report = shardplan.validate(Model(name, settings=settings), "auto", {"tp": tp})
    assert report.ok and report.proof is not None and report.proof.ok, report.diagnostics


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes", "settings"),
    [
        pytest.param("mamba", {"tp": 2}, {}, marks=pytest.mark.exhaustive),
        ("mamba2", {"tp": 4}, {"n_groups": 2}),
        pytest.param("mamba2", TWO_BY_TWO, {"n_groups": 1}, marks=pytest.mark.exhaustive),
        ("bamba", TWO_BY_TWO, {}),
        ("qwen3_5_text", TWO_BY_TWO, {}),
        pytest.param("recurrent_gemma", TWO_BY_TWO, {}, marks=pytest.mark.exhaustive),
        pytest.param("lfm2", {"tp": 4}, {}, marks=pytest.mark.exhaustive),
    ],
)
def test_it_trains_as_the_unsharded_model(name: str, sizes: dict[str, int], settings: dict[str, Any]) -> None:
    """Losses, norms, clipping, AdamW and every parameter, in real processes, with sequence parallelism."""
    compare(Recipe(name, sizes, True, settings=settings))


def test_the_program_says_what_each_rank_has() -> None:
    """Of the packed parts B and C, two ranks gather a group each of whose rows they store a half."""
    program = shardplan.compile_plan(Model("mamba2", settings=CODESTRAL), {"tp": 16}, "auto")
    mixer, conv, norm = (program.modules[name] for name in (MIXER, f"{MIXER}.conv1d", f"{MIXER}.norm"))
    assert dict(mixer.divide) == {"num_heads": 16, "intermediate_size": 16, "n_groups": 8}
    assert dict(mixer.settings) == {"conv_dim": 8192 // 16 + 2 * 128}
    assert dict(conv.settings) == {"groups": 8192 // 16 + 2 * 128}
    weight = next(p for p in conv.parameters if p.name == "weight")
    assert (weight.parts, weight.copies) == ((8192, 1024, 1024), (1, 2, 2))
    assert norm.means == FeatureMeans(1024, 2, grouped=True)  # a group's features are on two ranks
    assert dict(norm.divide) == {"group_size": 2}


def test_a_norm_of_whole_groups_needs_no_collective() -> None:
    program = shardplan.compile_plan(Model("mamba2", settings=CODESTRAL), {"tp": 8}, "auto")
    norm = program.modules[f"{MIXER}.norm"]
    assert norm.means is None and dict(norm.divide) == {"group_size": 1}


@pytest.mark.parametrize(
    "name",
    [
        "mamba2",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("bamba", "falcon_h1", "minimax", "mamba", "qwen3_5_text", "recurrent_gemma", "lfm2")
        ),
    ],
)
def test_decoding_with_split_states(name: str) -> None:
    """Caches hold the states of this rank's heads or channels; what is generated is the unsharded model's."""
    settings = {"n_groups": 2} if name == "mamba2" else {}
    prompt = batch(1, length=8)
    model = small_model(name, noise=0.1, **settings).eval()
    expected, states = _decoded(model, prompt)

    for tokens, shapes in on_ranks(2, decoded_on_a_rank, name, settings, prompt):
        assert torch.equal(tokens, expected)
        assert len(shapes) == len(states) and all(own[1] < all_[1] for own, all_ in zip(shapes, states, strict=True))


def decoded_on_a_rank(name: str, settings: dict[str, Any], prompt: Tensor) -> tuple[Tensor, list[torch.Size]]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    split = small_model(name, noise=0.1, **settings).eval()
    return _decoded(shardplan.apply_plan(split, mesh, "auto", prove=False), prompt)


def _decoded(model: nn.Module, prompt: Tensor) -> tuple[Tensor, list[torch.Size]]:
    tokens = model.generate(prompt, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    assert isinstance(tokens, Tensor)
    with torch.no_grad():
        cache = model(input_ids=prompt, use_cache=True)
    kept = cache.cache_params if "cache_params" in cache else cache.get("past_key_values")
    layer = kept.layers[0] if kept is not None else None  # RecurrentGemma's are on its modules
    states = (getattr(layer, name, None) for name in ("conv_states", "recurrent_states"))
    return tokens, [x[0].shape for x in states if x and x[0] is not None]


class Fused(nn.Module):
    """One kernel for the layer and what is below it, in training."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and x.is_cuda:
            return kernel(x, self.up.weight.to(x.dtype), down=self.down.weight)
        return self.down(self.up(x).relu())


class Evaluating(Fused):
    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return kernel(x, self.up.weight, down=self.down.weight)
        return self.down(self.up(x).relu())


def kernel(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return nn.functional.linear(nn.functional.linear(x, up).relu(), down)


@pytest.mark.parametrize(("cls", "found"), [(Fused, ("down", "up")), (Evaluating, ()), (nn.Linear, ())])
def test_what_a_branch_for_training_reads(cls: type, found: tuple[str, ...]) -> None:
    assert training_reads(cls) == found


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        ("input_with_grad_allreduce", "SP315"),
        ({"style": "input_with_grad_allreduce", "fused": False}, ""),
        (None, "SP315"),  # with a block input at each matrix
    ],
)
def test_a_plan_that_leaves_a_kernel_its_branch_is_refused(rule: Any, code: str) -> None:
    """Also where the branch is not taken, as here."""
    plan = {
        "version": "1",
        "tensor_parallel": {"0.up": "colwise", "0.down": "rowwise", **({"0": rule} if rule else {})},
    }
    report = shardplan.validate(
        shardplan.Model(nn.Sequential(Fused()), inputs=lambda seed: {"input": torch.randn(2, 4, 16)}), plan, {"tp": 2}
    )
    assert {one.code for one in report.diagnostics if one.is_error} == ({code} if code else set())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings"), sampled([("mamba2", {"n_groups": 1}), ("recurrent_gemma", {})], 1))
def test_weights_from_a_meta_model(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """Drawn alike with and without tp, though the initialisation counts heads; read from a file, and written to one."""
    source = small_model(name, **settings)
    source.save_pretrained(tmp_path / "source")
    for split, whole in on_ranks(4, read_and_written, name, settings, tmp_path):
        assert split.keys() == whole.keys() and all(torch.equal(split[key], whole[key]) for key in split)
    written = load_file(tmp_path / "written" / "model.safetensors")
    assert all(torch.equal(tensor, source.state_dict()[key]) for key, tensor in written.items())


def read_and_written(name: str, settings: dict[str, Any], folder: Path) -> list[dict[str, Tensor]]:
    def planned(tp: int) -> nn.Module:
        mesh = shardplan.build_mesh(tp=tp, dp_shard=4 // tp, device_type="cpu")
        return shardplan.apply_plan(meta_model(name, **settings), mesh, "auto", prove=False)

    drawn = []
    for tp in (2, 1):
        torch.manual_seed(7)
        drawn.append(whole_state(shardplan.materialize(planned(tp), "cpu")))
    model = planned(2)
    shardplan.load_checkpoint(model, folder / "source")
    shardplan.save_checkpoint(model, folder / "written")
    return drawn


@pytest.mark.usefixtures("no_repairs")
@pytest.mark.parametrize(
    ("rule", "code"),
    [
        ({"style": "packed_depthwise", "packed": 3}, "SP304"),  # x, B and C are not of one length
        ("depthwise", "SP404"),  # cut through the parts
        ("none", "SP404"),  # whole: its input is not
    ],
)
def test_a_convolution_that_is_split_otherwise_is_refused(rule: Any, code: str) -> None:
    plan = child("mamba2", {"backbone.layers.*.mixer.conv1d": rule})
    report = shardplan.validate(Model("mamba2", settings={"n_groups": 2}), plan, {"tp": 2}, proof=False)
    assert not report.ok and code in {one.code for one in report.diagnostics}, report.diagnostics


@pytest.mark.parametrize("expression", ["intermediate_size // (n_groups - 2)", "1 // (n_groups - 1) + conv_dim - 1"])
def test_a_number_that_a_rank_has_no_value_for_is_a_finding(expression: str) -> None:
    """The second has a value where nothing is divided."""
    mixer = {
        "style": "input_with_grad_allreduce",
        "output": "all_reduce",
        "shares": ["num_heads", "intermediate_size", "n_groups", {"conv_dim": expression}],
        "fused": False,
    }
    plan = child("mamba2", {"backbone.layers.*.mixer": mixer})
    report = shardplan.validate(Model("mamba2", settings={"n_groups": 2}), plan, {"tp": 2}, proof=False)
    assert {one.code for one in report.diagnostics} == {"SP314"}, report.diagnostics


@pytest.mark.usefixtures("no_repairs")
def test_heads_that_are_not_declared_are_refused() -> None:
    """Without `heads`, the one group would be cut in two."""
    rule = {
        "style": "packed_depthwise",
        "packed": ["num_heads * head_dim", "n_groups * state_size", "n_groups * state_size"],
    }
    plan = child("mamba2", {"backbone.layers.*.mixer.conv1d": rule})
    report = shardplan.validate(Model("mamba2", settings={"n_groups": 1}), plan, {"tp": 2}, proof=False)
    assert not report.ok


@pytest.mark.usefixtures("no_repairs")
def test_a_mean_that_is_this_ranks_alone_is_refused() -> None:
    """The weight split without the mean: right for whole groups, wrong where a group is on two ranks."""
    plan = child(
        "mamba2",
        {
            "backbone.layers.*.mixer.norm": "none",
            "backbone.layers.*.mixer.norm.weight": "colwise",
        },
    )
    assert shardplan.validate(Model("mamba2", settings={"n_groups": 2}), plan, {"tp": 2}, proof=False).ok
    assert not shardplan.validate(Model("mamba2", settings={"n_groups": 1}), plan, {"tp": 2}, proof=False).ok


def test_kernels_get_this_ranks_arguments() -> None:
    """Where fused kernels are installed, transformers calls them in place of these functions."""
    seen = on_ranks(2, kernels_called)[1]
    channels = 128 // 2 + 2 * 16
    assert seen["causal_conv1d_fn"][:2] == [torch.Size([2, channels, 16]), torch.Size([channels, 4])]
    assert seen["mamba2_chunk_scan"][:5] == [
        torch.Size([2, 16, 4, 16]),
        torch.Size([2, 16, 4]),
        torch.Size([4]),
        torch.Size([2, 16, 1, 16]),
        torch.Size([2, 16, 1, 16]),
    ]


def kernels_called() -> dict[str, list[torch.Size]]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = shardplan.apply_plan(small_model("mamba2", n_groups=2), mesh, "auto", prove=False)
    seen: dict[str, list[torch.Size]] = {}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("causal_conv1d_fn", "mamba2_chunk_scan"):
            patch.setattr(modeling_mamba2, name, _noting(getattr(modeling_mamba2, name), seen, name))
        model(input_ids=batch(1)).logits.sum().backward()
    return seen


@pytest.mark.parametrize("name", ["mamba2", pytest.param("mamba", marks=pytest.mark.slow)])
def test_no_kernel_skips_the_moves_below(name: str) -> None:
    """It would read the weight of out_proj, whose partial sums nothing adds up then."""
    expected = small_model(name)(input_ids=batch(1)).logits
    for logits, training in on_ranks(2, with_a_kernel_for_the_layer, name):
        assert torch.allclose(logits, expected, atol=1e-5) and training


def with_a_kernel_for_the_layer(name: str) -> tuple[Tensor, bool]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = shardplan.apply_plan(small_model(name), mesh, "auto", prove=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_mamba2, "mamba2_split_conv1d_scan_combined", _whole_layer)
        patch.setattr(modeling_mamba, "mamba_inner_fn", _whole_layer)
        logits = model(input_ids=batch(1)).logits
    return logits.detach(), all(module.training for module in model.modules())


def _whole_layer(*args: Any, **kwargs: Any) -> Tensor:
    raise AssertionError("a kernel computes the whole layer")


def _noting(function: Any, seen: dict[str, list[torch.Size]], name: str) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        assert all(type(x) in (Tensor, nn.Parameter) for x in tensors), [type(x) for x in tensors]
        seen.setdefault(name, [x.shape for x in tensors])
        return function(*args, **kwargs)

    return call


@pytest.mark.usefixtures("no_repairs")
def test_packed_parts_of_one_head_each_are_a_finding() -> None:
    """Four parts of one key-value head each, for four ranks: the queries for each of them are no multiple of that."""
    plan = child(
        "qwen3",
        {
            "model.layers.*.self_attn.q_proj": {"style": "packed_colwise", "override": True},
            "model.layers.*.self_attn.k_proj": {"style": "packed_colwise", "packed": 4, "override": True},
            "model.layers.*.self_attn.{v}_proj": "colwise",
        },
    )
    model = Model("qwen3", settings={"num_attention_heads": 8, "num_key_value_heads": 4})
    assert not shardplan.validate(model, plan, {"tp": 4}, proof=False).ok


def test_heads_that_tp_does_not_divide_have_another_plan() -> None:
    refused = shardplan.validate("olmo_hybrid", "auto", {"tp": 4}, layouts=False)
    assert {d.code for d in refused.diagnostics} == {"SP301"}, refused
    report = shardplan.validate("olmo_hybrid", "olmo_hybrid_gathered", {"tp": 4})
    assert report.ok and report.proven and len(report.variants) == 2, report


def test_key_heads_that_are_packed_with_their_value_heads_are_on_one_rank_each() -> None:
    """Refused before anything runs, with the sizes that work."""
    report = shardplan.validate(
        Model("qwen3_next", settings={"linear_num_key_heads": 4}), "auto", {"tp": 8}, layouts=False
    )
    found = {one for one in report.diagnostics if one.is_error}
    assert {one.code for one in found} == {"SP305"}, report
    assert all("linear_num_key_heads is 4" in one.message and one.help and "tp 2 or 4" in one.help for one in found)
