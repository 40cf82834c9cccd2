"""The findings of this room, as pages."""

from shardplan.core.diagnostics import Code

DIFFERS = Code(
    code="SP420",
    title="the sharded model computes something else",
    text="""The last stage of `validate` runs two training steps of the reduced model on every rank, forward and backward,
and compares every output, every gradient and every buffer with the same steps unsharded. They differ here, though every
layout fits: a backward that is not linear in the gradient (clipping, normalising), a buffer that a forward updates from this
rank's slice of the sequence, a hook, the body of a `torch.autograd.Function`. The finding names what differs, and the rule
that is next to it. `shardplan verify` prints every tensor.""",
    bad="""def forward(self, hidden):  # under sequence parallelism, where a rank has a slice of the tokens
    self.running_mean.lerp_(hidden.detach().mean((0, 1)), 0.1)
""",
    good="""sequence_parallel:
  model.layers.*.mlp: {style: gather_seq_input, output: reduce_scatter}  # it reads every token
""",
)

UNREACHED = Code(
    code="SP421",
    title="a part that the plan splits, and that no run reaches",
    text="""The proof runs the reduced model on each kind of input that it takes. Nothing of that reached these parameters or
modules: an expert that got no token, a branch for another kind of input, a head that is not called. Where the plan splits them,
or they lie in a block that the plan moves values in, the plan is not proven, and may be wrong. Give `inputs` that reach them
(`--inputs module:callable`), leave them whole, or accept the risk (`--allow-unproven`), which the report then lists. What the plan
neither splits nor touches is counted in the report and is no finding.""",
    bad="$ shardplan validate my_models:two_branches plan.yaml --tp 2   # forward(x, image=None)",
    good="$ shardplan validate my_models:two_branches plan.yaml --tp 2 --inputs my_models:with_images",
)

RAISES = Code(
    code="SP422",
    title="the sharded model raises",
    text="""The sharded reduced model raises where the unsharded one does not: a sequence whose length tp does not divide, a
checkpoint that computes a block input again from a copy of its input, an operation that torch does not have for what a rank has. The
note has what was raised. Loss of the process that ran the proof (a signal) is this finding too.""",
    bad="inputs = lambda seed: {'x': torch.randn(2, 17, 64)}   # 17 tokens, tp 2, sequence parallelism",
    good="inputs = lambda seed: {'x': torch.randn(2, 18, 64)}",
)

CODES = (DIFFERS, UNREACHED, RAISES)
