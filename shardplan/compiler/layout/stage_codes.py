"""The codes of pipeline cuts that do not fit what the model's code does."""

from __future__ import annotations

from shardplan.core.diagnostics import Code

_CASE = '# shardplan validate {} mine.yaml --pp 2\nversion: "1"\nname: mine\npipeline_parallel:\n  layers: {}\n'

CROSSING = Code(
    code="SP431",
    title="a value crosses a pipeline cut undeclared",
    text="""Between two stages the first result of a block is handed on, and what `carry` names. A later stage reads another value
too: one that an earlier block or the first stage computes, such as a router's logits for an auxiliary loss, or embeddings that
every block adds. There the stage would compute with zeros. Add the module that returns the value to `carry`; it is then handed from
stage to stage, and its gradient back. A value that no module returns by itself cannot be handed on: it needs a cut elsewhere, by
`sizes`, or a mesh with pp 1.

The finding says where the value is made and where it is read. It is found in one recorded run of the reduced model.""",
    bad=_CASE.format("qwen3-30b-a3b.json", "model.layers.*").replace(
        " mine.yaml", " mine.yaml --set output_router_logits=true"
    ),
    good=_CASE.format("qwen3-30b-a3b.json", "model.layers.*").replace(
        " mine.yaml", " mine.yaml --set output_router_logits=true"
    )
    + "  carry: [model.layers.*.mlp.gate]\n",
)
NOWHERE = Code(
    code="SP432",
    title="a parameter of no pipeline stage, or of two",
    text="""Each parameter outside of the blocks belongs to the first or the last stage: the run of the reduced model shows whether it
is read before the blocks or after them. One that nothing reads must be named in `first` or `last`. One that is read before and after
them, or while a block runs, would be needed in several stages, where it is no parameter of several names (a tie): a model whose
code reads it so cannot be cut.""",
    bad=_CASE.format("fuyu", "model.language_model.layers.*"),
    good=_CASE.format("fuyu", "model.language_model.layers.*") + "  first: [model.vision_embed_tokens]\n",
)
ORDER = Code(
    code="SP433",
    title="blocks that do not run one after another",
    text="""Each block must run once in a forward, in the order of the list, and no module of one may run inside another. Here blocks
run several times (a recurrent model), in another order, or share a module. A pipeline of stages has no place for that; use a mesh
with pp 1.""",
    bad=_CASE.format("hrm_text", "model.L_module.layers.*"),
    good=_CASE.format("llama", "model.layers.*"),
)
APART = Code(
    code="SP435",
    title="a block that does not read the result of the one before it",
    text="""The first result of a block is handed to the stage that has the next one. Here the next block does not read it: the blocks
do not run in a row, or what they pass on is another of their results.""",
    bad="pipeline_parallel:\n  layers: heads.*  # heads that all read the same hidden state\n",
    good="pipeline_parallel:\n  layers: model.layers.*\n",
)
UNNAMED = Code(
    code="SP434",
    title="a module whose output cannot be handed on",
    text="""What crosses a cut is a tensor, or some tensors of a tuple: the result of each block, and of each module in `carry`. A block
that returns a dictionary or an object, or blocks of which some return a tensor and some a tuple, cannot be replaced by stubs in other
stages.""",
    bad="pipeline_parallel:\n  layers: model.layers.*  # blocks that return a dictionary\n",
    good="pipeline_parallel:\n  layers: model.layers.*  # blocks that return a tensor, or a tuple with the hidden state first\n",
)

CODES = (CROSSING, NOWHERE, ORDER, UNNAMED, APART)
