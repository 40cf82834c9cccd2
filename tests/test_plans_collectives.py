"""The collectives that really run, one rank of a group: the number that the program expects, and the minimum.

The minimum is computed here from the model's configuration alone, by another rule than the library's. B is the number
of block boundaries, places where a sharded region's partial sums must be reduced: two for each layer (attention, MLP).

|                     | forward                              | backward                              |
|---------------------|--------------------------------------|---------------------------------------|
| tensor parallel     | B + 1 all-reduces                    | B + 1 all-reduces                     |
| sequence parallel   | B + 1 reduce-scatters, all-gathers   | B + 1 reduce-scatters, all-gathers    |
| replicated logits   | + 1 all-gather                       | -                                     |
| vocabulary loss     | + 2 all-reduces of numbers per token | -                                     |
| small gradients     | -                                    | + 1 all-reduce for each owner of some |

(Megatron-LM, arXiv 1909.08053 and 2205.05198.)
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from shardplan import applied
from shardplan.compiler.lower.expected_collectives import expected_collectives
from shardplan.runtime.apply import without_sequence_parallel
from tests.collective_counter import CollectiveCounter
from tests.proofs import PLANS, fake_mesh, optimised, plan_like, reduced_model, step
from tests.proofs import planned as apply

TP = 2
# Parameters whose gradient is a partial sum in tensor parallelism too, one group for each layer: norms over this rank's
# heads, a router in front of split experts.
PARTIAL_IN_EVERY_LAYER = {"qwen3", "gemma3", "gemma3_text", "mixtral", "qwen3_moe"}
# Image features are scattered into the embedded tokens, so these must be complete before the first block: their
# reduction cannot be merged with the split of the sequence. An all-reduce in place of a reduce-scatter forward; the
# split's backward is the all-gather that the merged one would need, too.
COMPLETE_EMBEDDING = {"gemma3", "llava"}


def minimum(plan: str, layers: int, *, sp: bool, logits: str) -> dict[str, Counter]:
    boundaries = 2 * layers
    merged = plan not in COMPLETE_EMBEDDING
    forward, backward = Counter(), Counter()
    if sp:
        forward["all_gather"] = backward["all_gather"] = backward["reduce_scatter"] = boundaries + 1
        forward["reduce_scatter"] = boundaries + merged
        forward["all_reduce"] = 1 - merged
        backward["all_reduce"] = layers + 1  # norms: of each block, and the final one
    else:
        forward["all_reduce"] = boundaries + 1
        backward["all_reduce"] = boundaries + 1 + (layers if plan in PARTIAL_IN_EVERY_LAYER else 0)
    if logits == "replicated":
        forward["all_gather"] += 1
    else:
        forward["all_reduce"] += 2
    return {"forward": +forward, "backward": +backward}


def short_inputs(plan: str) -> dict:
    """One sequence of one token per rank: activations are far smaller than any matrix."""
    return {name: value[:1, -TP:] for name, value in reduced_model(plan, TP).inputs().items()}


def seen(model, inputs) -> set[str]:
    """The modules that a step runs: a tower of images runs in none of text alone."""
    found: set[str] = set()
    hooks = [m.register_forward_pre_hook(lambda *_, name=name: found.add(name)) for name, m in model.named_modules()]
    step(model, inputs)
    for hook in hooks:
        hook.remove()
    return found


def count(model, inputs) -> tuple[CollectiveCounter, CollectiveCounter]:
    with CollectiveCounter() as forward:
        loss = step(model, inputs)["loss"]
    with CollectiveCounter() as backward:
        loss.backward()
    return forward, backward


def counted(model, inputs) -> dict[str, Counter]:
    forward, backward = count(model, inputs)
    return {"forward": forward.counts, "backward": backward.counts}


@pytest.fixture(scope="module", autouse=True)
def mesh():
    with fake_mesh(TP) as mesh:
        yield mesh


def planned(plan: str, mesh, **options):
    return apply(reduced_model(plan, TP).build(), mesh, plan, **options)


def expected_with_loss(model, logits: str, inputs) -> dict[str, Counter]:
    """What the program expects of the modules that run, and the two all-reduces of the loss on split logits."""
    modules = applied(model).program.modules
    assert expected_collectives(modules) == applied(model).collectives
    ran = seen(model, inputs)
    expected = expected_collectives({name: module for name, module in modules.items() if name in ran})
    return {**expected, "forward": expected["forward"] + Counter(all_reduce=2 * (logits == "sharded"))}


@pytest.mark.parametrize("logits", ["replicated", "sharded"])
@pytest.mark.parametrize("sp", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("plan", PLANS)
def test_the_collectives_of_a_step_are_the_minimum(plan, sp, logits, mesh):
    model = planned(plan, mesh, sequence_parallel=sp, logits=logits)
    found = counted(model, short_inputs(plan))
    layers = model.config.get_text_config().num_hidden_layers
    assert found == minimum(plan, layers, sp=sp, logits=logits)
    assert found == expected_with_loss(model, logits, short_inputs(plan))


@pytest.mark.parametrize("sp", [False, True], ids=["tp", "sp"])
def test_parallel_attention_and_mlp_are_one_boundary(sp, mesh):
    """Cohere's block adds both to the residual, and both read one norm: B is one for each layer."""
    model = optimised(reduced_model("cohere", TP).build(), mesh, "cohere", sequence_parallel=sp, logits="sharded")
    layers = model.config.num_hidden_layers
    found = counted(model, short_inputs("cohere"))
    forward = {"reduce_scatter": layers + 1, "all_gather": layers + 1} if sp else {"all_reduce": layers + 1}
    backward = {"reduce_scatter": layers + 1, "all_gather": layers + 1, "all_reduce": layers + 1}
    loss = Counter(all_reduce=2)
    assert found["forward"] == Counter(forward) + loss
    assert found["backward"] == Counter(backward if sp else forward)
    assert found == expected_with_loss(model, "sharded", short_inputs("cohere"))


@pytest.mark.parametrize("sp", [False, True], ids=["tp", "sp"])
def test_images_cost_no_collective(sp, mesh):
    """LLaVA's vision tower is whole: its features and their gradients are complete on every rank."""
    model = planned("llava", mesh, sequence_parallel=sp)
    found = counted(model, reduced_model("llava", TP).inputs(kind="image"))
    assert found == minimum("llava", 2, sp=sp, logits="replicated")


@pytest.mark.parametrize("sp", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("plan", PLANS)
def test_no_collective_has_the_size_of_a_matrix(plan, sp, mesh):
    model, inputs = planned(plan, mesh, sequence_parallel=sp, logits="sharded"), short_inputs(plan)
    forward, backward = count(model, inputs)
    tokens = inputs["input_ids"].numel()
    activation = tokens * model.config.get_text_config().hidden_size
    program = applied(model).program
    groups = {
        sum(
            model.get_submodule(f"{name}.{owner}".strip("."))._parameters[leaf].numel()
            for owner, leaf in (module.group.parameters if module.group is not None else ())
        )
        for name, module in program.modules.items()
    }
    smallest = min(
        model.get_submodule(name)._parameters[p.name].to_local().numel()
        for name, module in program.modules.items()
        for p in module.parameters
        if p.dim is not None and model.get_submodule(name)._parameters[p.name].ndim >= 2
    )
    sizes = {call.elements for call in (*forward.calls, *backward.calls)}
    assert sizes <= {activation, activation // TP, tokens, 2 * tokens} | groups
    assert activation < smallest


def test_without_sequence_parallel_the_collectives_are_those_of_tensor_parallelism(mesh):
    model = planned("qwen3", mesh, sequence_parallel=True)
    with without_sequence_parallel(model):
        assert counted(model, short_inputs("qwen3")) == minimum("qwen3", 2, sp=False, logits="replicated")
        assert counted(model, short_inputs("qwen3")) == applied(model).collectives
    assert counted(model, short_inputs("qwen3")) == minimum("qwen3", 2, sp=True, logits="replicated")


@pytest.mark.parametrize("plan", ["llama", "gpt2", "qwen3", "gemma3_text"])
def test_checkpointing_repeats_a_blocks_forward_collectives_and_not_its_doors(plan, mesh):
    """Each layer is run again up to the last value that backward needs, which comes before the last reduction; what
    stands before the first block (the embedding's reduction and split) is not run again."""
    model = planned(plan, mesh, sequence_parallel=True, activation_checkpointing={"mode": "full"})
    found = counted(model, short_inputs(plan))
    layers = model.config.get_text_config().num_hidden_layers
    once = minimum(plan, layers, sp=True, logits="replicated")
    assert found["forward"] == once["forward"]
    # Gemma's layers end with a norm, which needs the last reduction's result.
    reductions = 2 if plan == "gemma3_text" else 1
    again = Counter(all_gather=2 * layers, reduce_scatter=reductions * layers)
    assert found["backward"] == once["backward"] + again


class Recomputed(torch.nn.Module):
    """A checkpoint around a whole module, its hooks included."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return torch.utils.checkpoint.checkpoint(self.inner, *args, use_reentrant=False, **kwargs)


def test_a_checkpoint_around_the_door_would_repeat_its_collective(mesh):
    """The pitfall itself, so that the test above is known to see it."""
    model = planned("llama", mesh, sequence_parallel=True)
    model.model.layers[0] = Recomputed(model.model.layers[0])
    found = counted(model, short_inputs("llama"))["backward"]["reduce_scatter"]
    inside = planned("llama", mesh, sequence_parallel=True, activation_checkpointing={"modules": ["model.layers.0"]})
    assert found == counted(inside, short_inputs("llama"))["backward"]["reduce_scatter"] + 1


def test_a_plan_without_doors_costs_no_more_all_reduces(mesh):
    """Without them q, k and v, and gate and up, would each reduce their own input gradient (5L + 1); they read one value (2L + 1)."""
    plan = plan_like("llama", {"model.layers.*.self_attn": "none", "model.layers.*.mlp": "none"})
    model = apply(reduced_model("llama", TP).build(), mesh, plan)
    assert counted(model, short_inputs("llama"))["backward"]["all_reduce"] == 2 * 2 + 1


def test_the_counter_sees_every_kind_of_collective(mesh):
    import torch.distributed as dist
    import torch.distributed.nn.functional

    x = torch.ones(4)
    with CollectiveCounter() as counter:
        dist.all_reduce(x)
        dist.all_gather_into_tensor(torch.empty(8), x)
        dist.all_gather([torch.empty(4), torch.empty(4)], x)
        dist.reduce_scatter_tensor(torch.empty(2), x)
        dist.broadcast(x, 0)
        dist.all_to_all_single(torch.empty(4), x)
    assert counter.counts == {
        "all_reduce": 1, "all_gather": 2, "reduce_scatter": 1, "broadcast": 1, "all_to_all": 1
    }  # fmt: skip
    assert {call.elements for call in counter.calls} == {4, 8}
