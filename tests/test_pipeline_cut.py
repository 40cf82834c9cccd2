"""Pipeline stages of a model: stubs, the values that cross a cut, and the numeric proof; mutants that must not pass."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardplan
from shardplan.compiler.layout.model import ModelLayouts
from shardplan.compiler.layout.stage_plan import StagedPlan, staged_plan, with_stages
from shardplan.compiler.pipeline_cut import even_sizes, pipeline_cut
from shardplan.compiler.user_inputs import Model, find_model, read_plan
from shardplan.core.diagnostics import PlanError
from shardplan.core.stages import HandedOn, PipelineCut
from shardplan.core.tree import full_name
from shardplan.model.stage_stubs import is_stub, stage_of
from shardplan.proof.prove_stages import prove_pipeline, reduced_cut
from shardplan.proof.stage import Question

PLAN = {"version": "1", "name": "mine", "pipeline_parallel": {"layers": "blocks.*"}}


class Block(nn.Module):
    def __init__(self, width: int = 8):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.linear(hidden).tanh()


class Stack(nn.Module):
    """Blocks in a row; what subclasses change is `between`."""

    def __init__(self, blocks: int = 3, width: int = 8, block: Callable[[], nn.Module] = Block):
        super().__init__()
        self.embed = nn.Embedding(32, width)
        self.blocks = nn.ModuleList(block() for _ in range(blocks))
        self.head = nn.Linear(width, 32)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = self.between(block, hidden, input_ids)
        return self.head(hidden)

    def between(self, block: nn.Module, hidden: Tensor, ids: Tensor) -> Tensor:
        return block(hidden)


def staged(model: Any, plan: Any = PLAN, **section: Any) -> StagedPlan:
    """What the recorded run of a model says of its stages."""
    found, about = find_model(Model(model))
    assert found is not None, about
    if section:
        plan = {**plan, "pipeline_parallel": {**plan["pipeline_parallel"], **section}}
    read = read_plan(plan, found)
    assert read.plan is not None, read.findings
    return staged_plan(read.plan, ModelLayouts(found, 1))


def test_everything_outside_of_the_blocks_is_found():
    found = staged(Stack())
    assert found.ok and found.resolved is not None
    assert (found.resolved.pp_first, found.resolved.pp_last) == (("embed",), ("head",))


def test_stages_have_their_own_parameters_under_the_names_of_the_whole_model():
    cut = PipelineCut(("blocks.0", "blocks.1", "blocks.2"), (1, 1, 1), ("embed",), ("head",))
    whole = {name for name, _ in Stack().named_parameters()}
    parts = [stage_of(Stack(), cut, index).model for index in range(3)]
    names = [{name for name, _ in part.named_parameters()} for part in parts]
    assert set.union(*names) == whole and sum(map(len, names)) == len(whole)
    assert names[1] == {"blocks.1.linear.weight", "blocks.1.linear.bias"}
    assert [is_stub(block) for block in parts[1].blocks] == [True, False, True]
    assert isinstance(parts[1].blocks[0], Block) and not is_stub(parts[1])
    assert all(not [*m.parameters(), *m.buffers()] for part in parts for m in part.modules() if is_stub(m))


def test_a_stub_that_the_code_calls_raises():
    cut = PipelineCut(("blocks.0", "blocks.1", "blocks.2"), (1, 2), ("embed",), ("head",))
    model = stage_of(Stack(), cut, 1).model
    with pytest.raises(RuntimeError, match="blocks.0.linear, which another pipeline stage has"):
        model.blocks[0].linear(torch.zeros(1, 8))


class Scaled(Stack):
    """Code between the blocks: it runs once, in the stage that receives."""

    def between(self, block: nn.Module, hidden: Tensor, ids: Tensor) -> Tensor:
        return block(hidden) * 0.5 + ids.unsqueeze(-1) / 32


class Twice(Block):
    def forward(self, hidden: Tensor) -> Any:
        return super().forward(hidden), None


class Tuples(Stack):
    """Blocks that return a tuple."""

    def between(self, block: nn.Module, hidden: Tensor, ids: Tensor) -> Tensor:
        return block(hidden)[0]


class Skips(Stack):
    """Every block reads the embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.skip = nn.Embedding(32, 8)

    def forward(self, input_ids: Tensor) -> Tensor:
        skipped, hidden = self.skip(input_ids), self.embed(input_ids)
        for block in self.blocks:
            hidden = block(hidden + skipped)
        return self.head(hidden)


class Tied(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 32, bias=False)
        self.head.weight = self.embed.weight


class Counts(Stack):
    """A buffer outside of the blocks that every forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def between(self, block: nn.Module, hidden: Tensor, ids: Tensor) -> Tensor:
        return block(hidden)

    def forward(self, input_ids: Tensor) -> Tensor:
        self.steps += 1
        return super().forward(input_ids) * self.steps


class Sees(Stack):
    """A convolution whose result has another shape than its input; the code reads the dtype of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 8, 2, stride=2)
        self.place = nn.Parameter(torch.randn(4, 8))

    def forward(self, input_ids: Tensor) -> Tensor:
        picture = input_ids[:, :16].view(-1, 1, 4, 4).to(self.patches.weight.dtype) / 32
        seen = self.patches(picture).flatten(2).transpose(1, 2) + self.place
        hidden = self.embed(input_ids) + seen.mean(1, keepdim=True)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class Scales(Stack):
    """Parameters of the model itself, read before the blocks and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.entry, self.exit = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(32))

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids) * self.entry
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden) * self.exit


class Clips(Stack):
    """Code between the blocks puts a hook on what the block hands on: the gradient passes it once."""

    def between(self, block: nn.Module, hidden: Tensor, ids: Tensor) -> Tensor:
        hidden = block(hidden)
        if self.training:
            hidden.register_hook(lambda gradient: gradient * 0.5)
        return hidden


def halve(*gradients: Any) -> tuple[Tensor | None, ...]:
    return tuple(None if one is None else one * 0.5 for one in gradients)


class Hooked(Stack):
    """Backward hooks of every kind on each block, and on a module that hands its output on."""

    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__(block=block)
        for block in self.blocks:
            block.register_full_backward_hook(lambda module, inputs, outputs: halve(*inputs))
            block.register_full_backward_pre_hook(lambda module, outputs: halve(*outputs))
            block.register_forward_hook(self.on_tensors)
        self.embed.register_full_backward_pre_hook(lambda module, outputs: halve(*outputs))

    def on_tensors(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.training:
            (output[0] if isinstance(output, tuple) else output).register_hook(lambda gradient: gradient * 3)

    def between(self, block: nn.Module, hidden: Tensor, ids: Tensor) -> Tensor:
        output = block(hidden)
        return output[0] if isinstance(output, tuple) else output


@pytest.mark.parametrize(
    ("model", "section"),
    [
        (Stack(), {}),
        (Clips(), {}),
        (Hooked(), {}),
        (Hooked(block=Twice), {}),
        (Scaled(), {}),
        (Tuples(block=Twice), {}),
        (Skips(), {"carry": ["skip"]}),
        (Tied(), {}),
        (Counts(), {}),
        (Scales(), {}),
        (Sees(), {}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_stages_compute_what_the_whole_model_computes(model: nn.Module, section: dict[str, Any]):
    report = shardplan.verify(model, {**PLAN, "pipeline_parallel": {"layers": "blocks.*", **section}}, {"pp": 3})
    assert report.proven and report.proof is not None, report
    stages = report.proof.pipeline
    assert stages is not None
    assert stages.sizes == (1, 1, 1)
    gradients = {row.name for row in stages.rows if row.kind == "gradient"}
    assert gradients == {name for name, _ in model.named_parameters(remove_duplicate=False)}
    assert all(row.verdict == "equal" for row in stages.rows)


# What cannot be cut, or not so


class Reads(Stack):
    """A parameter of a block is read outside of it, by code that no stub can stand for."""

    def between(self, block: Any, hidden: Tensor, ids: Tensor) -> Tensor:
        return block(hidden) * block.linear.bias.mean()


class Again(Stack):
    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        for block in (*self.blocks, *self.blocks):
            hidden = block(hidden)
        return self.head(hidden)


class Backwards(Stack):
    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        for block in reversed(self.blocks):
            hidden = block(hidden)
        return self.head(hidden)


class Heads(Stack):
    """Blocks that all read the same value."""

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        return self.head(torch.stack([block(hidden) for block in self.blocks]).sum(0))


class Dicts(Stack):
    def between(self, block: nn.Module, hidden: Tensor, ids: Tensor) -> Tensor:
        return block(hidden)["hidden"]


class Named(Block):
    def forward(self, hidden: Tensor) -> Any:
        return {"hidden": super().forward(hidden)}


class Looks(Stack):
    """The embedding is read before the blocks and after them, by its parameter."""

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = nn.functional.embedding(input_ids, self.embed.weight)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden @ self.embed.weight.T + 0 * self.head(hidden)


class Shares(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].linear = self.blocks[0].linear


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Again(), "SP433"),
        (Backwards(), "SP433"),
        (Skips(), "SP431"),
        (Heads(), "SP431"),
        (Dicts(block=Named), "SP434"),
        (Looks(), "SP432"),
        (Reads(), "SP431"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else value,
)
def test_what_cannot_be_cut_is_refused(model: nn.Module, expected: str):
    found = staged(model)
    assert not found.ok and expected in [d.code for d in found.findings]
    assert expected in [d.code for d in shardplan.verify(model, PLAN, {"pp": 2}).errors]


def test_a_module_in_two_blocks_is_refused():
    report = shardplan.validate(Shares(), PLAN, {"pp": 2})
    assert "SP437" in [d.code for d in report.errors]


def test_a_table_whose_rows_a_look_up_shortens_is_read_in_the_first_stage():
    model = Stack()
    model.embed.max_norm = 1.0
    found = staged(model)
    assert found.ok and not found.findings and found.resolved.pp_first == ("embed",)


class Apart(Stack):
    """Blocks that take turns on two values: the next one does not read the result of the one before it."""

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        return self.head(self.blocks[0](hidden) + self.blocks[1](hidden) + self.blocks[2](hidden))


def test_blocks_side_by_side_are_refused():
    found = staged(Apart(), carry=["embed", "blocks.0", "blocks.1"])
    assert [d.code for d in found.findings] == ["SP435"]


def test_the_finding_names_the_value_where_it_is_made_and_where_it_is_read():
    (finding,) = staged(Skips()).findings
    assert finding.message.startswith("blocks.*") or finding.message.startswith("the model")
    assert any("made by skip" in note and "test_pipeline_cut.py" in note for note in finding.notes)
    assert any("read by" in note for note in finding.notes)
    assert finding.help == "add `carry: [skip]`"


# Mutants: each is a wrong cut of a model for which the right one is proven.


def question(model: Any) -> Question:
    """A model's stages, as a plan without anything else says."""
    found, _ = find_model(Model(model))
    assert found is not None
    plan = read_plan(PLAN, found).plan
    assert plan is not None
    return Question(ModelLayouts(found, 1), Model(model), plan)


def proven_rows(model: Any, cut: Callable[[PipelineCut], PipelineCut]) -> Sequence[Any]:
    found = staged(model, **({"carry": ["skip"]} if isinstance(model, Skips) else {}))
    assert found.ok
    right = reduced_cut(found, 3)
    assert prove_pipeline(question(model), right).ok
    return prove_pipeline(question(model), cut(right)).rows


MUTANTS: dict[str, tuple[type[Stack], Callable[[PipelineCut], PipelineCut]]] = {
    "the head in the first stage": (Stack, lambda cut: replace(cut, first=("embed", "head"), last=())),
    "the embedding in the last stage": (Stack, lambda cut: replace(cut, first=(), last=("embed", "head"))),
    "an untied copy": (Tied, lambda cut: replace(cut, ties=())),
    "a carry left out": (Skips, lambda cut: replace(cut, handed=())),
    "blocks in another order": (Stack, lambda cut: replace(cut, blocks=("blocks.1", "blocks.0", "blocks.2"))),
    "results in a tuple": (Stack, lambda cut: replace(cut, results=2)),
    "a used module as a stub": (Skips, lambda cut: replace(cut, first=("embed", "skip"), handed=())),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_proof_catches(mutant: str):
    model, change = MUTANTS[mutant]
    try:
        rows = proven_rows(model(), change)
    except PlanError as error:  # a stage raises
        assert [d.code for d in error.diagnostics] == ["SP436"]
    else:
        assert any(row.verdict == "differs" for row in rows)


def test_the_proof_catches_a_block_in_two_stages(monkeypatch: pytest.MonkeyPatch):
    """A stage keeps a block of the one before it."""
    own = PipelineCut.absent_from
    monkeypatch.setattr(
        PipelineCut,
        "absent_from",
        lambda cut, stage: tuple(n for n in own(cut, stage) if (stage, n) != (1, "blocks.0")),
    )
    found = staged(Stack())
    with pytest.raises(PlanError, match="SP436"):
        rows = prove_pipeline(question(Stack()), reduced_cut(found, 3)).rows
        if any(row.verdict == "differs" for row in rows):
            raise PlanError((), "SP436: differs")


@pytest.mark.parametrize("by", [-1, 1])
def test_the_proof_catches_an_inlet_one_block_off(by: int, monkeypatch: pytest.MonkeyPatch):
    own = PipelineCut.blocks_of

    def shifted(cut: PipelineCut, stage: int) -> tuple[str, ...]:
        found = own(cut, stage)
        if stage != 1:
            return found
        at = cut.blocks.index(found[0]) + by
        return cut.blocks[at : at + len(found)]

    found = staged(Stack(blocks=5))
    assert found.resolved is not None
    cut = pipeline_cut(found.resolved, (2, 1, 2))
    monkeypatch.setattr(PipelineCut, "blocks_of", shifted)
    try:
        rows = prove_pipeline(question(Stack(blocks=5)), cut).rows
    except PlanError as error:
        assert [d.code for d in error.diagnostics] == ["SP436"]
    else:
        assert any(row.verdict == "differs" for row in rows)


class Writes(Stack):
    """The code changes in place what an embedding returns."""

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        hidden *= 2.0
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def test_what_is_changed_in_place_has_memory_in_other_stages():
    found = staged(Writes())
    assert found.ok and reduced_cut(found, 2).written == ("embed",)
    assert reduced_cut(staged(Stack()), 2).written == ()
    assert shardplan.verify(Writes(), PLAN, {"pp": 2}).ok


def test_a_model_that_raises_in_a_stage_is_a_finding():
    """The code looks at a parameter of another stage's block, without an operation of torch."""

    class Looks(Stack):
        def between(self, block: Any, hidden: Tensor, ids: Tensor) -> Tensor:
            return block(hidden) * len(block.linear.weight)

    report = shardplan.validate(Looks(), PLAN, {"pp": 2})
    assert [d.code for d in report.errors] == ["SP436"] and not report.proven


def test_without_a_run_what_the_plan_does_not_name_has_no_stage():
    class NoInputs(Stack):
        def forward(self, input_ids: Any, other: Any) -> Tensor:
            return super().forward(input_ids) + other.unknown

    refused = shardplan.validate(NoInputs(), PLAN, {"pp": 2}, allow_unproven=True)
    assert [d.code for d in refused.errors] == ["SP432"]
    named = {**PLAN, "pipeline_parallel": {"layers": "blocks.*", "first": ["embed"], "last": ["head"]}}
    assert shardplan.validate(NoInputs(), named, {"pp": 2}, allow_unproven=True).ok


# The model itself


def test_the_cut_of_the_model_itself_has_every_parameter_once():
    found, _ = find_model(Model("llama"))
    assert found is not None
    plan = read_plan({"version": "1", "pipeline_parallel": {"layers": "model.layers.*"}}, found).plan
    assert plan is not None
    from shardplan.compiler.bind import bind
    from shardplan.core.mesh import MeshSizes

    resolved, _ = bind(plan, found.tree, MeshSizes(tp=1, pp=4))
    resolved, about = with_stages(resolved, staged_plan(plan, ModelLayouts(found, 1)))
    assert not about
    cut = pipeline_cut(resolved, even_sizes(32, 4))
    assert (cut.first, cut.last) == (("model.embed_tokens",), ("model.norm", "lm_head"))
    for name in found.tree.parameters:
        own = [s for s in range(4) if any(name.startswith(full_name(root, "")) for root in cut.roots_of(s))]
        assert own == [cut.stage_of(name)]


def test_a_tie_of_the_model_is_a_tie_of_the_cut():
    found = staged("gpt2", {"version": "1", "pipeline_parallel": {"layers": "transformer.h.*"}})
    assert reduced_cut(found, 2).ties == (("transformer.wte.weight", "lm_head.weight"),)


def test_a_routers_logits_are_handed_on():
    plan = {"version": "1", "pipeline_parallel": {"layers": "model.layers.*", "carry": ["model.layers.*.mlp.gate"]}}
    report = shardplan.verify(shardplan.Model("qwen3_moe", settings={"output_router_logits": True}), plan, {"pp": 2})
    assert report.proven and report.proof is not None
    stages = report.proof.pipeline
    assert stages is not None
    assert stages.carried == tuple(f"model.layers.{i}.mlp.gate" for i in range(len(stages.sizes) - 1))
    quiet = shardplan.verify("qwen3_moe", plan, {"pp": 2})
    assert quiet.proven and quiet.proof is not None and quiet.proof.pipeline is not None
    assert not quiet.proof.pipeline.carried


@pytest.mark.parametrize(
    ("blocks", "stages", "expected"), [(7, 3, (2, 3, 2)), (5, 4, (1, 2, 1, 1)), (4, 4, (1, 1, 1, 1)), (3, 2, (2, 1))]
)
def test_even_sizes(blocks: int, stages: int, expected: tuple[int, ...]):
    assert even_sizes(blocks, stages) == expected


def test_fewer_blocks_than_stages_have_no_sizes():
    with pytest.raises(ValueError, match="3 blocks cannot be cut into 4 stages"):
        even_sizes(3, 4)


def test_what_a_stage_hands_on_counts_up():
    cut = PipelineCut(("b.0", "b.1", "b.2"), (1, 1, 1), ("embed",), (), (HandedOn("b.1"), HandedOn("embed")))
    assert [[one.module for one in cut.handed_at(stage)] for stage in range(3)] == [
        ["embed"],
        ["b.1", "embed"],
        ["b.1", "embed"],
    ]


def test_a_carried_module_that_a_batch_does_not_run_hands_on_nothing():
    class Sometimes(Skips):
        def forward(self, input_ids: Tensor) -> Tensor:
            skipped = self.skip(input_ids) if input_ids.shape[1] > 4 else 0.0
            hidden = self.embed(input_ids)
            for block in self.blocks:
                hidden = block(hidden + skipped)
            return self.head(hidden)

    whole = Sometimes()
    cut = PipelineCut(
        tuple(f"blocks.{i}" for i in range(3)), (1, 1, 1), ("embed", "skip"), ("head",), (HandedOn("skip"),)
    )
    stages = [stage_of(copy.deepcopy(whole), cut, index) for index in range(3)]
    for stage in stages:
        stage.watch()
    for length in (8, 4):
        ids, handed = torch.randint(32, (2, length)), ()
        for stage in stages:
            handed = stage.run(handed, stage.model, input_ids=ids)
        assert torch.equal(handed, whole(ids))
    sent = stages[0].run((), stages[0].model, input_ids=ids)
    assert [x.numel() for x in sent] == [2 * 4 * 8, 0]


@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_a_backward_hook_that_comes_later_is_an_error_where_a_stage_ends(kind: str):
    whole = Stack()
    before = whole.blocks[0].register_full_backward_hook(lambda module, inputs, outputs: halve(*inputs))
    cut = PipelineCut(tuple(f"blocks.{i}" for i in range(3)), (2, 1), ("embed",), ("head",))
    stage = stage_of(whole, cut, 0)
    stage.watch()
    before.remove()
    for block in (0, 1):
        getattr(stage.model.blocks[block], kind)(print)
        ids = torch.randint(32, (2, 4))
        if block:  # the last one
            with pytest.raises(RuntimeError, match=r"blocks\.1 got a backward hook after apply_plan"):
                stage.run((), stage.model, input_ids=ids)
        else:
            stage.run((), stage.model, input_ids=ids)


def test_a_model_whose_code_divides_heads_has_enough_of_them_at_tp_1():
    quiet = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0)
    assert shardplan.verify(shardplan.Model("codegen", settings=quiet), "auto", {"pp": 2}).ok
