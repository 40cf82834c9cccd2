"""The rules of a program that can be exported: for each target project its words for them, and how its own code applies them."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from shardplan.compiler.lower import Program
from shardplan.core.by_key import by_key
from shardplan.core.diagnostics import Code, Diagnostic, Label, Severity
from shardplan.core.plan import Assignment, ResolvedPlan, stated_options
from shardplan.styles.block_inputs import BLOCK_INPUT

CANNOT_CROSS = Code("SP549")

# Options of rules that an export may leave out: the target's style computes the same without them.
SILENT = frozenset({"heads", "divides", "having", "fused"})
# A block input sums the gradient of several split matrices' input once; in the targets each matrix sums its own.
LEFT_OUT = (BLOCK_INPUT, "replicate", "none")
EXPERTS = "moe_tp_experts"
SUMMED = "replicated_with_grad_allreduce"


@dataclass(frozen=True, slots=True)
class Target:
    """A project that plans are exported to.

    Args:
        name: its name for `--to`.
        shown: its name in messages.
        words: our style -> its word, or the source text of its style.
        packed: whether its `packed_colwise` splits two equal parts.
        wildcards: whether its names have `*` for all elements of a list, which then must have one style.
        apply: (model, entries, size of tp) -> the model, sharded by the target's own code. Called on every rank.
        write: (entries, size of tp) -> the text of a file.
    """

    name: str
    shown: str
    words: Mapping[str, str]
    packed: bool
    wildcards: bool
    apply: Callable[[nn.Module, Mapping[str, str], int], nn.Module]
    write: Callable[[Mapping[str, str], int], str]


@dataclass
class Lowered:
    """Args:
    entries: names with `*` for list indices -> the target's words.
    findings: SP549: the rules that cannot cross.
    """

    entries: dict[str, str] = field(default_factory=dict)
    findings: list[Diagnostic] = field(default_factory=list)


def lower_to(target: Target, program: Program, own: Mapping[str, str]) -> Lowered:
    """The tensor-parallel rules of a program in the target's words; or the rules for which the target has no word.

    Args:
        own: the target's own plan for the model. Its entries stay in force where an export does not replace them.
    """
    resolved, made = program.resolved, Lowered()
    names_of_all = (*resolved.tree.modules, *resolved.tree.parameters)
    alike = by_key((resolved.tree.pattern(name), name) for name in names_of_all)
    regions = _regions(resolved)
    assigned = {one.name: one for each in resolved.assignments.values() for one in [_moving(each, resolved, regions)]}
    for pattern, names in alike.items():
        ruled = [a for name in names if (a := assigned.get(name)) is not None]
        words = {one.name: None if _in_region(one, regions) else _word(target, one, made) for one in ruled}
        found = {word for word in words.values() if word is not None}
        if not found:
            continue
        if len(found) == 1 and (len(words) == len(names) and None not in words.values()):
            made.entries[pattern] = next(iter(found))
        elif target.wildcards:
            shown = ", ".join(
                sorted(f"`{word}`" for word in {*found, *([] if len(words) == len(names) else ["no rule"])})
            )
            message = f"{target.shown} has one style for all of `{pattern}`, and here it is {shown}"
            made.findings.append(_refused(message, ruled[0]))
        else:
            made.entries |= {name: word for name, word in words.items() if word is not None}
    for region, experts in regions.items():
        if experts is not None and EXPERTS in target.words:
            made.entries[resolved.tree.pattern(experts)] = EXPERTS
        elif experts is not None:
            _none(target, assigned[region], made, "output")
    if target.name == "transformers":
        _on_owners(made, alike, resolved, assigned)
        _complete(made, alike, resolved.tree.parameters, own)
    if not made.entries and not made.findings:
        message = f"there is no tensor-parallel rule that {target.shown} would apply"
        made.findings.append(Diagnostic(CANNOT_CROSS, Severity.ERROR, message))
    return made


def _on_owners(
    made: Lowered, alike: Mapping[str, list[str]], resolved: ResolvedPlan, assigned: Mapping[str, Assignment]
) -> None:
    """Move entries of bare parameters with summed gradients to their modules: transformers sums the gradients of all parameters of a module."""
    tree = resolved.tree
    shared = [key for key in made.entries if made.entries[key] == SUMMED and alike[key][0] in tree.parameters]
    for pattern in shared:
        rule, owner = assigned[alike[pattern][0]], pattern.rpartition(".")[0]
        others = [
            name
            for name in tree.parameters
            if tree.pattern(name.rpartition(".")[0]) == owner and tree.pattern(name) not in shared
        ]
        if others or made.entries.get(owner, SUMMED) != SUMMED:
            what = f"`{others[0]}`" if others else f"`{owner}`"
            made.findings.append(
                _refused(f"transformers would add up the gradients of all parameters of `{owner}`, {what} too", rule)
            )
        else:
            made.entries[owner] = SUMMED
    for pattern in shared:
        del made.entries[pattern]


def _complete(
    made: Lowered, alike: Mapping[str, list[str]], parameters: Mapping[str, Any], own: Mapping[str, str]
) -> None:
    """Add entries for transformers: "local_params" for modules that run with shards of bare parameters, and "replicate" for
    what its own plan splits and ours leaves whole."""
    for pattern in [key for key in made.entries if alike[key][0] in parameters]:
        made.entries.setdefault(pattern.rpartition(".")[0], "local_params")
    made.entries |= {name: "replicate" for name in own if name not in made.entries and name in alike}


def _regions(resolved: ResolvedPlan) -> dict[str, str | None]:
    """Each module whose output the plan all-reduces -> the module in it with the stacked weights of experts; None if there is none. A target
    has no rule for such a module: its styles of experts and of matrices reduce their own outputs, and keep the rest (a router) whole."""
    modules = resolved.tree.modules
    stacks = {n.rpartition(".")[0] for n in resolved.parameters} - {n for n, m in modules.items() if m.kind == "linear"}
    summed = [n for n, a in resolved.modules.items() if (a.rule.style, a.rule.output) == (BLOCK_INPUT, "all_reduce")]
    inside = {name: [one for one in stacks if one == name or one.startswith(f"{name}.")] for name in summed}
    return {name: found[0] if found else None for name, found in inside.items() if len(found) < 2}


def _in_region(one: Assignment, regions: Mapping[str, str | None]) -> bool:
    """Whether a rule needs no word, because the targets' styles inside of a module of `_regions` already do what it says."""
    with_experts = tuple(f"{name}." for name, experts in regions.items() if experts is not None)
    router = one.rule.style == SUMMED and one.name.startswith(with_experts)
    return one.name in regions or router


def _moving(one: Assignment, resolved: ResolvedPlan, regions: Mapping[str, str | None]) -> Assignment:
    """A rule of the weight of a linear layer in a module of `_regions`, as a rule of that layer; any other rule unchanged."""
    owner, _, name = one.name.rpartition(".")
    linear = owner in resolved.tree.modules and resolved.tree.modules[owner].kind == "linear"
    inside = owner.startswith(tuple(f"{region}." for region in regions))
    return replace(one, name=owner, is_parameter=False) if name == "weight" and linear and inside else one


def _word(target: Target, one: Assignment, made: Lowered) -> str | None:
    """The target's word for a rule. None if the rule needs none, or if the target has none, which is then a finding."""
    rule, options = one.rule, {name: value for name, value in stated_options(one.rule).items() if name not in SILENT}
    if rule.style in LEFT_OUT:
        return None if not options else _none(target, one, made, next(iter(options)))
    if rule.style not in target.words:
        return _none(target, one, made, None)
    if target.packed and rule.style == "packed_colwise" and str(options.get("packed", "2")) == "2":
        options.pop("packed", None)
    return target.words[rule.style] if not options else _none(target, one, made, next(iter(options)))


def _none(target: Target, one: Assignment, made: Lowered, option: str | None) -> str | None:
    """Note the finding that the target has no word for a rule or its option. Returns None, in place of the word."""
    what = f"the style `{one.rule.style}`" if option is None else f"the option `{option}` of `{one.rule.style}`"
    found = _refused(f"{target.shown} has no word for {what}", one)
    if found not in made.findings:
        made.findings.append(found)
    return None


def _refused(message: str, one: Assignment) -> Diagnostic:
    help = f"`{one.rule.pattern}` stays with shardplan: apply_plan carries it out"
    return Diagnostic(CANNOT_CROSS, Severity.ERROR, message, Label(one.rule.location), help=help)


def _transformers(model: nn.Module, entries: Mapping[str, str], tp: int) -> nn.Module:
    """Save the model's weights to a folder, and load them with `from_pretrained`, as users of transformers do."""
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.utils import logging

    logging.disable_progress_bar()

    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the ranks are on the CPU; transformers asks torch for GPUs
    config = DistributedConfig(tp_size=tp, tp_plan=dict(entries))
    made: Any = model
    with tempfile.TemporaryDirectory() as mine:
        folder = [mine]
        dist.broadcast_object_list(folder)
        made.save_pretrained(folder[0])
        dist.barrier()
        loaded = type(made).from_pretrained(folder[0], config=made.config, dtype=made.dtype, distributed_config=config)
        dist.barrier()
    if made.dtype == torch.float64:
        _as_built(loaded, dict(model.named_buffers()))
    return loaded.train(model.training)


def _as_built(loaded: nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
    """Make buffers equal that differ only by rounding. Buffers that are in no file are computed in the dtype that is loaded; those of the
    unsharded model were computed in float32 and cast."""
    for name, buffer in loaded.named_buffers():
        if (other := buffers.get(name)) is not None and other.shape == buffer.shape and buffer.is_floating_point():
            if torch.allclose(buffer.to(other.dtype), other, rtol=1e-6, atol=0.0):
                buffer.data = other.detach().clone()


def _torch(model: nn.Module, entries: Mapping[str, str], tp: int) -> nn.Module:
    styles = {name: STYLES[text]() for name, text in entries.items()}
    return parallelize_module(model, init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",))["tp"], styles)


def _config(entries: Mapping[str, str], tp: int) -> str:
    return json.dumps({"tp_size": tp, "tp_plan": dict(entries)}, indent=2) + "\n"


def _module(entries: Mapping[str, str], tp: int) -> str:
    lines = "".join(f"    {json.dumps(name)}: {text},\n" for name, text in entries.items())
    return (
        "from torch.distributed.tensor import Replicate, Shard\n"
        "from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel\n\n"
        f"# For parallelize_module(model, mesh, PLAN) on a mesh of one axis.\nPLAN = {{\n{lines}}}\n"
    )


SAME = (
    *("colwise", "rowwise", "colwise_gather_output", "rowwise_split_input", "embedding_rowwise", "embedding_colwise"),
    *(
        "packed_colwise",
        SUMMED,
        "mla_kv_a_proj",
        EXPERTS,
        "moe_identity_expert",
        "local_params",
    ),
)
WHOLE_INPUT = "RowwiseParallel(input_layouts=Replicate())"
WHOLE_OUTPUT = "ColwiseParallel(output_layouts=Replicate())"
WORDS = {
    "colwise": "ColwiseParallel()",
    "rowwise": "RowwiseParallel()",
    "colwise_gather_output": WHOLE_OUTPUT,
    "rowwise_split_input": WHOLE_INPUT,
    "embedding_rowwise": WHOLE_INPUT,
    "embedding_colwise": WHOLE_OUTPUT,
    "colwise_vocab": "ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)",
}
# The same texts -> the styles that they make in torch.
STYLES: Mapping[str, Callable[[], ParallelStyle]] = {
    "ColwiseParallel()": ColwiseParallel,
    "RowwiseParallel()": RowwiseParallel,
    WHOLE_OUTPUT: lambda: ColwiseParallel(output_layouts=Replicate()),
    WHOLE_INPUT: lambda: RowwiseParallel(input_layouts=Replicate()),
    WORDS["colwise_vocab"]: lambda: ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
}
TARGETS: Mapping[str, Target] = {
    one.name: one
    for one in (
        Target("transformers", "transformers", {word: word for word in SAME}, True, True, _transformers, _config),
        Target("torch", "torch's parallelize_module", WORDS, False, False, _torch, _module),
    )
}
