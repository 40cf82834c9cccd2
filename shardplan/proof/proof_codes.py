"""The findings of this room, as pages."""

from shardplan.core.diagnostics import Code

DIFFERS = Code(
    code="SP420",
    title="the sharded model computes different values",
    text="""The last stage of `validate` runs two training steps of the reduced model on every rank, forward and backward,
and compares every output, every gradient and every buffer with the same steps unsharded. They differ here, although every
layout is consistent. Common causes: a backward that is not linear in the gradient (clipping, normalising), a buffer that a forward updates from this
rank's slice of the sequence, a hook, the body of a `torch.autograd.Function`. The finding names what differs, and the nearest
rule. `shardplan verify` prints every tensor.""",
    bad="""def forward(self, hidden):  # under sequence parallelism, where a rank has a slice of the tokens
    self.running_mean.lerp_(hidden.detach().mean((0, 1)), 0.1)
""",
    good="""sequence_parallel:
  model.layers.*.mlp: {style: gather_seq_input, output: reduce_scatter}  # it reads every token
""",
)

UNREACHED = Code(
    code="SP421",
    title="a part that the plan splits and no run reaches",
    text="""The proof runs the reduced model on each kind of input that it accepts. None of these runs reached these parameters or
modules: an expert that received no token, a branch for another kind of input, a head that is not called. If the plan splits them,
or moves values in the block around them, the plan is not proven and may be wrong. Pass `inputs` that reach them
(`--inputs module:callable`), leave them whole, or accept the risk (`--allow-unproven`), which the report then lists. Unreached parts
that the plan does not touch are counted in the report and are no finding.""",
    bad="$ shardplan validate my_models:two_branches plan.yaml --tp 2   # forward(x, image=None)",
    good="$ shardplan validate my_models:two_branches plan.yaml --tp 2 --inputs my_models:with_images",
)

RAISES = Code(
    code="SP422",
    title="the sharded model raises",
    text="""The sharded reduced model raises, but the unsharded one does not. Common causes: a sequence whose length tp does not divide, a
checkpoint that computes a block input again from a copy of its input, an operation that torch does not support on a rank's part. The
note shows the exception. If a signal ends the process that runs the proof, the finding is the same.""",
    bad="inputs = lambda seed: {'x': torch.randn(2, 17, 64)}   # 17 tokens, tp 2, sequence parallelism",
    good="inputs = lambda seed: {'x': torch.randn(2, 18, 64)}",
)

STAGES = Code(
    code="SP436",
    title="the stages of a pipeline compute different values",
    text="""With several pp ranks the reduced model is cut into stages as the plan declares, and they run one after the other in one
process, forward and backward, two steps. Every output, every gradient and every buffer is compared with the whole model's. Here
they differ, or a stage raises: the model's code outside of the blocks does something that stubs of absent modules cannot stand for (it
reads a parameter of a block, or changes in place what an embedding returns). The note names it. Such a model cannot be cut; use a
mesh with pp 1.""",
    bad="""def forward(self, ids):
    hidden = self.embed(ids)
    for block in self.blocks:
        hidden = block(hidden) * block.scale.weight  # a parameter of another stage's block
""",
    good="""def forward(self, ids):
    hidden = self.embed(ids)
    for block in self.blocks:
        hidden = block(hidden)  # the block multiplies
""",
)

NO_ROWS = Code(
    code="SP438",
    title="inputs that cannot be divided into micro-batches",
    text="""`shardplan verify --pp N --processes` runs a pipeline's schedule, whose micro-batches are rows of a batch: the first dim of each
tensor that the model is called with must be the batch. The reduced model takes no such inputs (patches of all images in one dim,
positions with another first dim). Without `--processes` the stages run one after the other on the whole batch.""",
    bad="inputs = lambda seed: {'input_ids': torch.ones(2, 16, dtype=torch.long), 'position_ids': torch.zeros(3, 2, 16)}",
    good="inputs = lambda seed: {'input_ids': torch.ones(2, 16, dtype=torch.long)}",
)

CODES = (DIFFERS, UNREACHED, RAISES, STAGES, NO_ROWS)
