"""Pipeline stages: the section says which blocks they divide, every part stands in one stage, and the sizes fit."""

from __future__ import annotations

from collections.abc import Iterator

from shardplan.core.diagnostics import Code, Diagnostic, Severity
from shardplan.core.mesh import Axis
from shardplan.core.plan import ResolvedPlan
from shardplan.core.sections import PipelineParallel
from shardplan.core.tree import WITHOUT_FORWARD, ancestors, full_name, named, parent

from .facts import Facts
from .field_places import field_label

_CASE = '# shardplan validate llama-3.1-8b.json mine.yaml --pp 4\nversion: "1"\nname: mine\nextends: llama\n'

BLOCKS = Code(
    code="SP384",
    title="pipeline stages of something else than one list of blocks",
    text="""A pipeline divides blocks that run one after another: `layers` of the section `pipeline_parallel` matches elements of one
list of modules, and each stage gets some that follow one another. All that is outside of the list belongs to the first or the last
stage. Modules of several lists, or inside blocks, have no such order.""",
    bad=_CASE + "pipeline_parallel:\n  layers: model.layers.*.mlp\n",
    good=_CASE + "pipeline_parallel:\n  layers: model.layers.*\n",
)
FEWER = Code(
    code="SP385",
    title="fewer blocks than pipeline stages",
    text="""Each stage has at least one block. Use a mesh with a smaller axis `pp`.""",
    bad=_CASE.replace("--pp 4", "--pp 64") + "pipeline_parallel:\n  layers: model.layers.*\n",
    good=_CASE + "pipeline_parallel:\n  layers: model.layers.*\n",
)
SIZES = Code(
    code="SP386",
    title="sizes of pipeline stages that do not fit",
    text="""`sizes` gives the number of blocks of each stage, in the order in which a batch runs through them. Together they are all
blocks of the model, and there is one for each pp rank, or the same number of stages for each.""",
    bad=_CASE + "pipeline_parallel:\n  layers: model.layers.*\n  sizes: [9, 10, 10, 7]\n",
    good=_CASE + "pipeline_parallel:\n  layers: model.layers.*\n  sizes: [8, 9, 9, 6]\n",
)
TWICE = Code(
    code="SP387",
    title="a part of the model in two pipeline stages",
    text="""A module stands in one stage with everything inside it: in `first`, in `last`, or in a block. In two stages it would be two
modules, trained apart from each other. A parameter that several modules share is no such case: a tie is found by itself, and its
copies are kept equal.""",
    bad=_CASE
    + "pipeline_parallel:\n  layers: model.layers.*\n  first: [model.embed_tokens]\n  last: [model.embed_tokens, lm_head]\n",
    good=_CASE + "pipeline_parallel:\n  layers: model.layers.*\n  first: [model.embed_tokens]\n  last: [lm_head]\n",
)
ENCODER = Code(
    code="SP388",
    title="a pipeline through an encoder and a decoder",
    text="""The blocks of a decoder all read what the encoder returns, so it would be handed from stage to stage with its gradient, and
the stages of the encoder would have no work while the decoder's compute. Models with `is_encoder_decoder` cannot be cut into stages.
Use data and tensor parallelism.""",
    bad='# shardplan validate my_models:encoder_decoder mine.yaml --pp 2\nversion: "1"\nname: mine\n'
    "pipeline_parallel:\n  layers: model.layers.*\n",
    good='# shardplan validate my_models:encoder_decoder mine.yaml --dp-shard 2\nversion: "1"\nname: mine\n'
    "data_parallel:\n  units: [model.layers.*]\n",
)
CONTEXT = Code(
    code="SP389",
    title="pipeline stages together with a cp axis",
    text="""What the stages hand on would be chunks of the sequence, which is not supported yet. Use one of the two axes.""",
    bad=_CASE.replace("--pp 4", "--pp 4 --cp 2") + "pipeline_parallel:\n  layers: model.layers.*\n",
    good=_CASE + "pipeline_parallel:\n  layers: model.layers.*\n",
)
UNDECLARED = Code(
    code="SP430",
    title="a mesh with pipeline stages, and a plan that declares none",
    text="""With several ranks on the axis `pp` each has some of the model's blocks. The section `pipeline_parallel` says which modules
are the blocks. In most models one line does: everything else is found in a run of the reduced model.""",
    bad='# shardplan validate llama-3.1-8b.json mine.yaml --pp 2\nversion: "1"\nname: mine\n'
    "data_parallel:\n  units: [model.layers.*]\n",
    good='# shardplan validate llama-3.1-8b.json mine.yaml --pp 2\nversion: "1"\nname: mine\n'
    "data_parallel:\n  units: [model.layers.*]\npipeline_parallel:\n  layers: model.layers.*\n",
)

SHARED = Code(
    code="SP437",
    title="a module that stands in several blocks",
    text="""Some models have one module object in several blocks, such as a transformer block that every sixth layer of a state space
model runs. Pipeline stages would each have a copy of it, trained apart from the others. Use a mesh with pp 1.""",
    bad='# shardplan validate my_models:shared_block mine.yaml --pp 2\nversion: "1"\nname: mine\n'
    "pipeline_parallel:\n  layers: model.layers.*\n",
    good='# shardplan validate my_models:shared_block mine.yaml --dp-shard 2\nversion: "1"\nname: mine\n'
    "data_parallel:\n  units: [model.layers.*]\n",
)

CODES = (BLOCKS, FEWER, SIZES, TWICE, ENCODER, CONTEXT, UNDECLARED, SHARED)


def check(facts: Facts) -> Iterator[Diagnostic]:
    """The size of the axis pp is looked at where it is above 1."""
    resolved = facts.resolved
    section, stages = resolved.pipeline_parallel, resolved.sizes.of(Axis.PP)
    if stages > 1:
        yield from _mesh(resolved, stages)
    if section is None:
        return
    wrong = [*_blocks(resolved, section), *_shared(resolved, section)]
    yield from wrong
    yield from _twice(resolved, section)
    if stages > 1 and not wrong:
        yield from _sizes(resolved, section, stages)


def _mesh(resolved: ResolvedPlan, stages: int) -> Iterator[Diagnostic]:
    if resolved.pipeline_parallel is None:
        yield Diagnostic(
            code=UNDECLARED.code,
            severity=Severity.ERROR,
            message=f"the mesh has pp {stages}, but the plan has no section `pipeline_parallel`",
            help="add `pipeline_parallel: {layers: ...}` with a pattern of the model's blocks",
        )
    if resolved.sizes.cp > 1:
        yield Diagnostic(
            code=CONTEXT.code,
            severity=Severity.ERROR,
            message=f"the mesh has pp {stages} and cp {resolved.sizes.cp}: pipeline stages of chunks of the sequence are not "
            "supported",
            help="use a mesh with one of the two axes",
        )
    if resolved.tree.numbers.get("is_encoder_decoder"):
        yield Diagnostic(
            code=ENCODER.code,
            severity=Severity.ERROR,
            message="the model has an encoder and a decoder, which cannot be cut into pipeline stages",
            primary=field_label(resolved.pipeline_parallel, "layers"),
            help="use a mesh with pp 1",
        )


def _blocks(resolved: ResolvedPlan, section: PipelineParallel) -> Iterator[Diagnostic]:
    tree, blocks = resolved.tree, resolved.pp_blocks
    if section.layers is None:
        yield Diagnostic(
            code=BLOCKS.code,
            severity=Severity.ERROR,
            message="`pipeline_parallel` names no blocks",
            primary=field_label(section, "layers"),
            help="add `layers` with a pattern of the model's blocks",
        )
        return
    if not blocks:  # a pattern that matches nothing is a finding of its own
        return
    homes = tuple(dict.fromkeys(map(parent, blocks)))
    lists = [name for name in homes if tree.modules[name].class_name in (*WITHOUT_FORWARD, "Sequential")]
    if len(homes) > 1 or not lists:
        what = f"elements of {len(homes)} modules" if len(homes) > 1 else "no elements of a list"
        yield Diagnostic(
            code=BLOCKS.code,
            severity=Severity.ERROR,
            message=f"`layers` of pipeline_parallel must match the elements of one list of modules, but {tree.named(blocks)} are {what}",
            primary=field_label(section, "layers"),
            help="name the blocks that run one after another",
            modules=blocks,
        )


def _shared(resolved: ResolvedPlan, section: PipelineParallel) -> Iterator[Diagnostic]:
    """Modules with parameters that stand in several blocks, or in one and outside."""
    blocks = frozenset(resolved.pp_blocks)
    for group in resolved.tree.shared:
        homes = [next((one for one in (name, *ancestors(name)) if one in blocks), "") for name in group]
        if len(set(homes)) > 1:
            yield Diagnostic(
                code=SHARED.code,
                severity=Severity.ERROR if resolved.sizes.pp > 1 else Severity.WARNING,
                message=f"{group[0]} is a part of {len(set(homes))} blocks: pipeline stages would each train a copy of it",
                primary=field_label(section, "layers"),
                help="use a mesh with pp 1",
                modules=group,
            )


def _twice(resolved: ResolvedPlan, section: PipelineParallel) -> Iterator[Diagnostic]:
    places = {
        "first": resolved.pp_first,
        "last": resolved.pp_last,
    }
    for field, others, what in (
        ("last", resolved.pp_first, "the first stage"),
        ("first", resolved.pp_blocks, "a block"),
        ("last", resolved.pp_blocks, "a block"),
    ):
        both = tuple(name for name in places[field] if any(_overlap(name, other) for other in others))
        if both:
            yield Diagnostic(
                code=TWICE.code,
                severity=Severity.ERROR,
                message=f"{named(both)} is in the {field} stage, and in {what} too",
                primary=field_label(section, field),
                help="name each module once",
                modules=both,
            )


def _overlap(name: str, other: str) -> bool:
    """Whether they are one, or one is inside the other."""
    return full_name(name, "").startswith(full_name(other, "")) or full_name(other, "").startswith(full_name(name, ""))


def _sizes(resolved: ResolvedPlan, section: PipelineParallel, stages: int) -> Iterator[Diagnostic]:
    blocks = len(resolved.pp_blocks)
    if 0 < blocks < stages:
        yield Diagnostic(
            code=FEWER.code,
            severity=Severity.ERROR,
            message=f"the model has {blocks} blocks, fewer than the {stages} pipeline stages of the mesh",
            primary=field_label(section, "layers"),
            help=f"use a mesh with pp {blocks} or less",
        )
    sizes = section.sizes
    if sizes is None or not blocks:
        return
    wrong = []
    if sum(sizes) != blocks:
        wrong.append(f"they add up to {sum(sizes)}, and the model has {blocks} blocks")
    if len(sizes) % stages:
        wrong.append(f"there are {len(sizes)}, no multiple of pp {stages}")
    if wrong:
        yield Diagnostic(
            code=SIZES.code,
            severity=Severity.ERROR,
            message=f"the sizes of the pipeline stages do not fit: {'; '.join(wrong)}",
            primary=field_label(section, "sizes"),
            help="give a number for each stage, or leave `sizes` out: `balance` chooses them",
        )
