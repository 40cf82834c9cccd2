"""What routers of distributed experts hand out of their layers: logits, and the auxiliary loss of them, whatever turns them on and when.
The unsharded model, a copy for each data-parallel rank, is the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
import transformers
from collective_counter import CollectiveCounter
from expert_runs import EXPERTS, OWN, Case, batch, build, of, plan_of, planned
from processes import on_ranks
from small_models import share_of, whole
from torch import Tensor, nn

import shardplan
from shardplan.proof.compare import TOLERANCE, relative_error

Flag = Literal["argument", "before", "after", "called before", "off again", "off", "own hook"]
FLAGS: tuple[Flag, ...] = ("argument", "before", "after", "called before", "off again", "off", "own hook")
WEIGHT = (("router_aux_loss_coef", 0.3),)
PADDING = 3
OWN["qwen2_moe"] = (
    transformers.Qwen2MoeForCausalLM,
    {
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 32,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 3,
        "num_key_value_heads": 4,
    },
)


def calls(model: nn.Module, flag: Flag, number: int) -> dict[str, Any]:
    """The arguments of a call: of the right and left rows some tokens are padding."""
    ids = batch(number)
    mask = torch.ones_like(ids)
    mask[0, -PADDING:], mask[1, : number + 1] = 0, 0
    wanted = (
        {"output_router_logits": True, "output_hidden_states": True} if flag in ("argument", "called before") else {}
    )
    return {"input_ids": ids, "labels": ids.where(mask > 0, -100), "attention_mask": mask, "use_cache": False, **wanted}


def tensors(output: Any) -> dict[str, Tensor]:
    found = {name: output[name] for name in ("loss", "aux_loss", "logits") if output.get(name) is not None}
    for name in ("router_logits", "hidden_states"):
        found |= {f"{name} {i}": x for i, x in enumerate(output.get(name) or ())}
    return {name: whole(x.detach()) for name, x in found.items() if isinstance(x, Tensor)}


def read_by_hooks(model: nn.Module) -> list[Tensor]:
    """What hooks of the user's read of the routers in the next call."""
    found: list[Tensor] = []

    def read(module: nn.Module, args: Any, output: tuple[Tensor, ...]) -> None:
        if module.training:
            found.append(output[0])

    for module in model.modules():
        if type(module).__name__.endswith("Router"):
            module.register_forward_hook(read)
    return found


def balance(logits: list[Tensor]) -> Tensor:
    """A loss of them that depends on their order."""
    return torch.stack(
        [(x.softmax(-1) * torch.linspace(0, 1, len(x)).unsqueeze(1)).mean(0).square().sum() for x in logits]
    ).sum()


def prepared(case: Case, flag: Flag) -> Case:
    return replace(case, settings=(*case.settings, ("output_router_logits", True))) if flag == "before" else case


def equal_with(case: Case, flags: tuple[Flag, ...]) -> None:
    for flag in flags:
        one = prepared(case, flag)
        mesh, model = shardplan.build_mesh(**dict(one.mesh)), build(one)
        if flag == "called before":  # recorders are hooks that come before the plan's
            model(**calls(model, flag, 0))
        read = read_by_hooks(model) if flag == "own hook" else []
        options = {"sequence_parallel": one.sequence_parallel, **dict(one.options)}
        shardplan.apply_plan(model, mesh, plan_of(one), **options, prove=False)
        own, data_ranks = share_of(mesh)
        if flag == "off again":
            with torch.no_grad():
                model(**calls(model, "argument", own))
        reference = build(one)
        if flag == "after":
            model.config.output_router_logits = reference.config.output_router_logits = True
        read.clear()  # of the runs of the reduced model
        output = model(**calls(model, flag, own))
        (output.loss + balance(read) if read else output.loss).backward()
        read_there = read_by_hooks(reference) if read else []
        expected = {}
        for number in range(data_ranks):
            outputs = reference(**calls(reference, flag, number))
            (outputs.loss + balance(read_there) if read else outputs.loss).backward()
            read_there.clear()
            expected[number] = tensors(outputs)
        found, limit = tensors(output), TOLERANCE[one.dtype]
        assert found.keys() == expected[own].keys(), (one, flag)
        assert ("aux_loss" in found) == (flag not in ("off", "off again", "own hook")) or one.model == "deepseek_v3"
        wrong = {n: e for n, x in found.items() if (e := relative_error(x, expected[own][n])) > limit}
        gradients = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        those = {n: p.grad / data_ranks for n, p in reference.named_parameters() if p.grad is not None}
        assert gradients.keys() == those.keys(), (one, flag)
        wrong |= {n: e for n, x in gradients.items() if (e := relative_error(x, those[n])) > limit}
        assert not wrong, (one, flag, wrong)


TWO = [replace(of(kind, sequence_parallel=True, tp=2, ep=2), settings=WEIGHT) for kind in ("mixtral", "gpt_oss")]


@pytest.mark.parametrize("case", TWO, ids=lambda case: case.model)
def test_the_auxiliary_loss_is_the_unsharded_models(case: Case) -> None:
    on_ranks(2, equal_with, case, FLAGS)


ON_SLICES = {"style": "sequence_parallel", "read_outside": [0], "override": True}


def test_a_router_whose_tokens_are_in_one_row_works_on_slices() -> None:
    """gpt_oss calls its router with [batch * sequence, hidden]."""
    case = replace(TWO[1], sliced=(("model.layers.*.mlp.router", ON_SLICES),))
    on_ranks(2, equal_with, case, ("argument", "off", "own hook"))


def gathers(case: Case) -> list[int]:
    """All-gathers of a forward that nobody asks for logits, of one that does, and of one that a hook reads."""
    model, counts = planned(case)[0], []
    for flag in ("off", "argument"):
        with CollectiveCounter() as counter:
            model(**calls(model, flag, 0))
        counts.append(counter.counts["all_gather"])
    return counts


def test_logits_that_nobody_reads_are_not_gathered() -> None:
    for silent, asked in on_ranks(2, gathers, TWO[0]):
        assert asked == silent + 2 + 1  # of each layer, and the last hidden state


FOUR = [
    replace(of(kind, sequence_parallel=parallel, **mesh), settings=WEIGHT)
    for kind, parallel, mesh in (
        ("mixtral", True, {"dp_shard": 2, "tp": 2, "ep": 4}),
        ("qwen3_moe", True, {"dp_shard": 2, "tp": 2, "ep": 2}),
        ("qwen3_moe", False, {"dp_shard": 2, "tp": 2, "ep": 4}),
        ("gpt_oss", False, {"dp_shard": 4, "ep": 4}),
        ("qwen2_moe", True, {"tp": 4, "ep": 2}),
        ("deepseek_v3", True, {"dp_shard": 2, "tp": 2, "ep": 4}),
    )
]


@pytest.mark.slow
@pytest.mark.parametrize("case", FOUR, ids=lambda case: "-".join(map(str, (case.model, *dict(case.mesh).items()))))
def test_so_on_meshes_of_several_axes(case: Case) -> None:
    on_ranks(4, equal_with, case, FLAGS[:4])
