"""The findings of this room, as pages."""

from shardplan.core.diagnostics import Code

_LLAMA = """# shardplan validate llama-3.2-1b.json mine.yaml --tp 2
version: "1"
name: mine
extends: llama
"""
_QWEN3 = """# shardplan validate qwen3-0.6b.json mine.yaml --tp 2
version: "1"
name: mine
extends: {parent}
tensor_parallel:
  model.layers.*.self_attn.{{q,k}}_norm: {style}
"""

PARTIAL = Code(
    code="SP401",
    title="a partial gradient taken as complete",
    text="""A value that every rank has whole (a norm's weight, a router's weight, an activation) is combined with
slices, or with a partial sum: each rank computes only its slice's share of the gradient. The loss is right, and the
gradient is wrong on every rank, in another way on each. Nothing is repaired in silence: say that the parameter's
gradient is a partial sum (`replicated_with_grad_allreduce`, on a slice of the sequence `sequence_parallel`), or put a
block input in front of the block that reads the activation (`input_with_grad_allreduce`, `gather_seq_input`).""",
    bad=_QWEN3.format(parent="qwen3", style="none"),
    good=_QWEN3.format(parent="qwen3", style="replicated_with_grad_allreduce"),
)
MISFIT = Code(
    code="SP402",
    title="a value in another layout than the style takes",
    text="""A style says in which layout a value may arrive at its module, and in which the module computes its result.
Here another one arrives or is computed, and there is no move from one to the other: a row-wise matrix wants this rank's
slice of the features, an all-reduce a partial sum, a norm on a slice of the sequence that slice. Change this rule, or the
rule of the module that the value comes from.""",
    bad=_LLAMA + "tensor_parallel:\n  model.layers.*.mlp.{gate,up}_proj: none\n",
    good=_LLAMA,
)
SUM = Code(
    code="SP403",
    title="an operation on a partial sum that does not add up",
    text="""A matrix whose input features are split gives every rank a summand. Only what is linear may be done to it
before it is reduced: multiplying by a number, adding another partial sum. A nonlinear function of the summands, or a
whole value added on every rank, does not add up to the right result. Reduce it first (`rowwise`, `all_reduce`).
A small number or a gate that is zero hides nothing: where a result seems whole although a partial sum is among the operands,
the operation is run again with that operand changed. If the result does not change (`0 * x`, a mask), nothing is wrong.""",
    bad="""tensor_parallel:
  model.layers.*.mlp.gate_proj: colwise
  model.layers.*.mlp.up_proj.weight: rowwise
""",
    good="""tensor_parallel:
  model.layers.*.mlp.{gate,up}_proj: colwise
  model.layers.*.mlp.down_proj: rowwise
""",
)
SLICES = Code(
    code="SP404",
    title="an operation whose result is no slice of the whole",
    text="""Every rank computes with its slices, but what comes out is neither a slice of the unsharded result nor a
summand of it: slices of different features meet, a dimension that is split is reduced or normalised, packed matrices (q,
k and v in one) are split as if they were one, or a module divides by a number that counts the heads of all ranks. Split
what meets in the same way, say `packed`, or `divide`.""",
    bad="""tensor_parallel:
  model.layers.*.mlp.gate_up_proj: colwise
  model.layers.*.mlp.down_proj: rowwise
""",
    good="""tensor_parallel:
  model.layers.*.mlp.gate_up_proj: {style: packed_colwise, packed: 2}
  model.layers.*.mlp.down_proj: rowwise
""",
)
OUTPUT = Code(
    code="SP405",
    title="the model's result is not what its callers get without a plan",
    text="""Callers of the model read its results - a loss, logits of the whole vocabulary, every other tensor in a tuple, a
mapping or a dataclass - equal on all ranks and with a complete gradient. (A cache object is a rank's own.) Here every
rank hands on a slice, a partial sum, or a value whose gradient would be a partial sum.
Gather at the output head (`colwise_gather_output`), or declare logits that stay split (`colwise_vocab`).""",
    bad=_LLAMA + "tensor_parallel:\n  lm_head: {style: colwise, override: true}\n",
    good=_LLAMA + "tensor_parallel:\n  lm_head: colwise_vocab\n",
)
COMPLETE = Code(
    code="SP406",
    title="a complete gradient declared partial",
    text="""The rule says that the gradient of this parameter is a partial sum, so it would be summed over the ranks; but
every rank has it complete already. It would come out tp times too large. `replicate`, or no rule, is right here.""",
    bad=_LLAMA + "tensor_parallel:\n  model.norm: replicated_with_grad_allreduce\n",
    good=_LLAMA,
)
UNTYPED = Code(
    code="SP407",
    title="an operation whose layout cannot be told",
    text="""The sharded model does something else here than the unsharded one (other operations, or in another order), so
that its values cannot be compared, and what they are made from does not tell their layout. The plan may be right;
`shardplan verify` decides.""",
    bad="if hidden_states.shape[-1] == config.hidden_size:  # another way on a slice",
    good="$ shardplan verify my_models:small my-plan.yaml --tp 2",
)
CRASH = Code(
    code="SP408",
    title="the sharded model raises",
    text="""With this plan the model's own code raises an exception: a shape does not fit where slices meet whole values, or
a module reads a number (of heads, a split size) that must be divided on it. The line is the model's own. Often a rule is
missing that splits the other operand, or a `divide`.""",
    bad=_LLAMA + "tensor_parallel:\n  model.layers.*.self_attn.q_proj: none\n",
    good=_LLAMA,
)
MEETING = Code(
    code="SP409",
    title="a complete and a partial gradient meet",
    text="""A value whose gradient is complete on every rank, and one whose gradient is a partial sum, are combined into a
whole result. Whatever its gradient is, it is wrong for one of the two. A value that is read both inside a block, next to
slices, and outside, where every rank computes all (router logits and an auxiliary loss), is declared with
`read_outside`.""",
    bad="""tensor_parallel:
  model.layers.*.mlp: {style: input_with_grad_allreduce, output: all_reduce}
  model.layers.*.mlp.gate: replicated_with_grad_allreduce
""",
    good="""tensor_parallel:
  model.layers.*.mlp: {style: input_with_grad_allreduce, output: all_reduce}
  model.layers.*.mlp.gate: {style: replicated_with_grad_allreduce, read_outside: [0]}
""",
)
OUTSIDE = Code(
    code="SP410",
    title="a parameter read by another module than its own",
    text="""Every parameter of a planned model is a DTensor, which its own module's forward reads as a local tensor, and so
does the code of a module around it that takes the parameter itself (`self.conv.weight`, not `self.conv(x)`). Here that
code belongs to a module beside it, or FSDP2 shards the owner as a unit of its own and gathers its parameters only while
it runs itself.""",
    bad="""data_parallel: {backend: fsdp2, units: [layers.*.mixer.conv]}  # layers.*.mixer reads self.conv.weight
""",
    good="""data_parallel: {backend: fsdp2, units: [layers.*]}
""",
)

CHUNKS = Code(
    code="SP411",
    title="context parallelism of a model whose tokens meet outside of causal attention",
    text="""With a cp axis each rank has a chunk of the sequence. Keys and values are gathered inside torch's
`scaled_dot_product_attention`, which must be causal and without a mask. A reduced model was run to see whether
tokens meet in another way: attention that is written out, a sliding window, a convolution or a recurrence over the sequence;
and whether the model heeds `position_ids`, which say where a chunk stands.
Load the model with `attn_implementation="sdpa"`, or use a mesh without a cp axis.""",
)
RANDOM = Code(
    code="SP371",
    title="random numbers drawn in forward with tp above 1",
    text="""The model's code draws random numbers in training mode, and they change its result: `F.dropout` with a
probability that no attribute names, `torch.randn_like`, `torch.bernoulli`, a Gumbel sample, `scaled_dot_product_attention`
with `dropout_p`. On a value that every rank has whole, the draws must agree between the tp ranks; on a slice they must
differ. One seed gives neither, and neither the loss nor an error shows it. Until the random numbers are managed, such a model
is refused, also one that is handed in evaluation mode: plans are proven for training. A draw that changes no result (dropout
of probability 0) is not refused. Switch the noise off, or draw the numbers outside of the model, where all tp ranks draw the
same, and hand them in as an input.""",
    bad="""def forward(self, x):
    return F.dropout(self.down(x), 0.2, self.training)
""",
    good="""def forward(self, x):
    return F.dropout(self.down(x), self.config.dropout, self.training)  # 0.0 in the configuration
""",
)

UNSUMMED = Code(
    code="SP412",
    title="`sum_outputs` of what is not just added up",
    text="""`sum_outputs` says that a block adds up the outputs of these modules and does nothing else with them (a parallel
residual, x + attention(norm(x)) + mlp(norm(x))). Their partial sums are then added on each rank and reduced once, at the
last of them; in place of the others the block's code gets zeros. Here the code does something else with one of them (a
norm, a second reader, a dropout that acts), runs them in another order, or does not run the last one. Each is reduced by
itself without that line.""",
    bad=_LLAMA + "tensor_parallel:\n  model.layers.*: {sum_outputs: [self_attn.o_proj, mlp.down_proj]}\n",
    good=_LLAMA,
)

CODES = (PARTIAL, MISFIT, SUM, SLICES, OUTPUT, COMPLETE, UNTYPED, CRASH, MEETING, OUTSIDE, CHUNKS, UNSUMMED, RANDOM)
