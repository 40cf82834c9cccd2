"""The findings of this room, as pages."""

from shardplan.core.diagnostics import Code

from . import stage_codes

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
    title="a partial gradient treated as complete",
    text="""Every rank has a value whole (a norm's weight, a router's weight, an activation), and an operation
combines it with slices or with a partial sum. Each rank then computes only its slice's share of the gradient. The
loss is right; the gradient is wrong, and differs between the ranks. Nothing is repaired silently. Declare that the
parameter's gradient is a partial sum (`replicated_with_grad_allreduce`, or `sequence_parallel` on a slice of the
sequence), or put a block input before the block that reads the activation (`input_with_grad_allreduce`,
`gather_seq_input`).""",
    bad=_QWEN3.format(parent="qwen3", style="none"),
    good=_QWEN3.format(parent="qwen3", style="replicated_with_grad_allreduce"),
)
MISFIT = Code(
    code="SP402",
    title="a value whose layout the style does not accept",
    text="""A style determines which input layouts its module accepts and which layout the module computes. Here a
value has another layout, and no move leads from the one to the other: a row-wise matrix needs this rank's slice of
the features, an all-reduce needs a partial sum, a norm on a slice of the sequence needs that slice. Change this rule,
or the rule of the module that the value comes from.""",
    bad=_LLAMA + "tensor_parallel:\n  model.layers.*.mlp.{gate,up}_proj: none\n",
    good=_LLAMA,
)
SUM = Code(
    code="SP403",
    title="an operation on a partial sum that does not add up",
    text="""A matrix whose input features are split gives every rank a summand of the result. Until the summands are
reduced, only linear operations are right: multiplying by a number, adding another partial sum. A nonlinear function
of the summands, or a whole value added on every rank, does not add up to the right result. Reduce first (`rowwise`,
`all_reduce`). A small number or a gate of zero hides nothing: if a result seems whole although an operand is a
partial sum, the operation runs again with that operand changed. If the result does not change (`0 * x`, a mask),
nothing is wrong.""",
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
    title="an operation whose result is not a slice of the whole",
    text="""Every rank computes with its slices, but the result is neither a slice of the unsharded result nor a
summand of it. Either slices of different features are combined, or a split dimension is reduced or normalised, or
packed matrices (q, k and v in one) are split as if they were one, or a module divides by a number that counts the
heads of all ranks. Split all operands in the same way, or declare `packed` or `divide`.""",
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
    title="a result of the model that differs from the unsharded one",
    text="""Callers of the model expect its results - a loss, logits of the whole vocabulary, every other tensor in a
tuple, a mapping or a dataclass - to be equal on all ranks and to have a complete gradient. (A cache object belongs to
its rank.) Here every rank returns a slice, a partial sum, or a value whose gradient would be a partial sum. Gather at
the output head (`colwise_gather_output`), or declare logits that stay split (`colwise_vocab`).""",
    bad=_LLAMA + "tensor_parallel:\n  lm_head: {style: colwise, override: true}\n",
    good=_LLAMA + "tensor_parallel:\n  lm_head: colwise_vocab\n",
)
COMPLETE = Code(
    code="SP406",
    title="a complete gradient declared partial",
    text="""The rule declares that the gradient of this parameter is a partial sum, so the ranks would sum it. But
every rank already has the complete gradient: the sum would be tp times too large. Use `replicate`, or no rule.""",
    bad=_LLAMA + "tensor_parallel:\n  model.norm: replicated_with_grad_allreduce\n",
    good=_LLAMA,
)
UNTYPED = Code(
    code="SP407",
    title="an operation whose layout cannot be determined",
    text="""The sharded model runs other operations here than the unsharded one, or runs them in another order. Its
values then cannot be compared, and their operands do not determine their layout. The plan may be right; `shardplan
verify` decides.""",
    bad="if hidden_states.shape[-1] == config.hidden_size:  # another way on a slice",
    good="$ shardplan verify my_models:small my-plan.yaml --tp 2",
)
CRASH = Code(
    code="SP408",
    title="the sharded model raises",
    text="""With this plan the model's own code raises an exception: a shape does not fit where slices meet whole
values, or a module reads a number (of heads, a split size) that must be divided by tp. The line shown is the model's
own. Often a rule that splits the other operand is missing, or a `divide`.""",
    bad=_LLAMA + "tensor_parallel:\n  model.layers.*.self_attn.q_proj: none\n",
    good=_LLAMA,
)
MEETING = Code(
    code="SP409",
    title="a complete and a partial gradient meet",
    text="""An operation combines a value whose gradient is complete with one whose gradient is a partial sum, and its
result is whole. Either gradient of the result is wrong for one of the two. If a value is read inside a block next to
slices, and also outside, where every rank computes everything (router logits and an auxiliary loss), declare it with
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
    text="""Every parameter of a planned model is a DTensor. The forward of its own module reads it as a local tensor,
and so does the code of an enclosing module that uses the parameter itself (`self.conv.weight`, not `self.conv(x)`).
Here the code belongs to a module beside it; or the parameter is a stack of experts that are distributed; or FSDP2 shards the owner as a unit of its own and gathers its parameters
only while the owner runs.""",
    bad="""data_parallel: {backend: fsdp2, units: [layers.*.mixer.conv]}  # layers.*.mixer reads self.conv.weight
""",
    good="""data_parallel: {backend: fsdp2, units: [layers.*]}
""",
)

CHUNKS = Code(
    code="SP411",
    title="context parallelism of a model whose tokens meet outside causal attention",
    text="""With a cp axis each rank has a chunk of the sequence. Keys and values are gathered inside torch's
`scaled_dot_product_attention`, which must be causal and without a mask. A reduced model was run whole and in chunks to see whether
tokens meet in another way (attention that is written out, a sliding window, a convolution or a recurrence over the
sequence), and whether the model reads `position_ids`, which give the position of a chunk. Load the model with
`attn_implementation="sdpa"`, build it without a window (`sliding_window=None`) where no sequence is longer, or use a mesh without
a cp axis.""",
)
DROPOUT = Code(
    code="SP370",
    title="dropout that tp ranks cannot draw alike",
    text="""Dropout draws random numbers. Under tensor parallelism a module that drops elements of a whole value draws the same
numbers on all tp ranks; one that drops elements of a split value (heads, a slice of the sequence) draws numbers of its
rank's own. The layout check finds out which is which, for each module, on a run of the reduced model. It refuses, in
evaluation mode too, as `.train()` may follow: a module whose own forward drops elements of both kinds of values;
dropout in code that runs only where its probability is above 0 (stochastic depth); other random numbers (a router's jitter, dropped labels) in code
that sees split values or partial sums too: where all that it sees is whole, all tp ranks draw the same; dropout of whole features of a split value; a probability that the reduced model does not have; a plan that could not be
proven; a compiled module that drops elements of both kinds of values, as its graph begins with one state of the generator.""",
    bad="""# shardplan validate gpt2.json mine.yaml --tp 2
version: "1"
name: mine
tensor_parallel:
  transformer.h.*.mlp.c_fc: colwise
  transformer.h.*.mlp.c_proj: rowwise
compile:
  modules: [transformer.h.*]
""",
    good="""# shardplan validate gpt2.json mine.yaml --tp 2
version: "1"
name: mine
tensor_parallel:
  transformer.h.*.mlp.c_fc: colwise
  transformer.h.*.mlp.c_proj: rowwise
""",
)

RANDOM = Code(
    code="SP371",
    title="random numbers drawn in forward with tp above 1",
    text="""The model's code draws random numbers in training mode, and they change its result: `F.dropout` with a
probability that no attribute names, `torch.randn_like`, `torch.bernoulli`, a Gumbel sample, `scaled_dot_product_attention`
with `dropout_p`. On a value that every rank has whole, the draws must agree between the tp ranks; on a slice they must
differ. One seed gives neither, and neither the loss nor an error shows it. Random numbers are managed for dropout whose
probability is an attribute or a field of the configuration (SP370), as the layouts are found with it at 0. Others are
refused, in evaluation mode too: plans are proven for training. A draw that changes no result (dropout
of probability 0) is not refused. Name the probability, switch the noise off, or draw the numbers outside of the model, where all tp
ranks draw the same, and hand them in as an input.""",
    bad="""def forward(self, x):
    return F.dropout(self.down(x), 0.2, self.training)
""",
    good="""def forward(self, x):
    return F.dropout(self.down(x), self.config.dropout, self.training)
""",
)

UNSUMMED = Code(
    code="SP412",
    title="`sum_outputs` of outputs that are not only added up",
    text="""`sum_outputs` declares that a block adds up the outputs of these modules and does nothing else with them
(a parallel residual, x + attention(norm(x)) + mlp(norm(x))). Each rank then adds their partial sums, and the sum is
reduced once, at the last module; the block's code gets zeros from the others. Here the code does something else with
one of the outputs (a norm, a second reader, an active dropout), runs the modules in another order, or does not run
the last one. Without `sum_outputs` each output is reduced by itself.""",
    bad=_LLAMA + "tensor_parallel:\n  model.layers.*: {sum_outputs: [self_attn.o_proj, mlp.down_proj]}\n",
    good=_LLAMA,
)

TOKENS = Code(
    code="SP413",
    title="experts that cannot be distributed",
    text="""With expert parallelism a module of experts runs on the tokens that other ranks send it, with some of its experts. Its
call must have just tokens [T, H], the ids [T, k] of each token's experts and their weights [T, k]; each id must have a part of its
stacks; and each token must be computed by itself, as the sum over its experts of what each adds. A module that drops tokens beyond
a capacity, takes a mean over tokens, or returns something else cannot be distributed. Use tensor parallelism for its stacks.""",
    bad="""expert_parallel:
  model.layers.*.mlp.experts: ep_dispatch  # experts whose code drops tokens beyond a capacity
""",
    good="""tensor_parallel:
  model.layers.*.mlp.experts: moe_tp_experts
""",
)


CODES = (
    PARTIAL,
    MISFIT,
    SUM,
    SLICES,
    OUTPUT,
    COMPLETE,
    UNTYPED,
    CRASH,
    MEETING,
    OUTSIDE,
    CHUNKS,
    UNSUMMED,
    DROPOUT,
    RANDOM,
    TOKENS,
    *stage_codes.CODES,
)
