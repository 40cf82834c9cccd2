"""The findings of this room."""

from shardplan.core.diagnostics import Code

NOT_TRACED = Code(
    "SP560",
    "a model that cannot run without tensor values",
    "`estimate` runs a training step on tensors that have shapes and no values. The model's code asks for a value (how "
    "many tokens an expert gets, whether a mask is all ones), or fails for another reason, which the note shows. Where "
    "the model has several implementations of a part, choose one whose shapes do not depend on values.",
    bad="$ shardplan estimate my_models:loops_over_experts my-plan.yaml --mesh tp=8 --seq-len 4096",
    good="$ shardplan estimate my_models:grouped_experts my-plan.yaml --mesh tp=8 --seq-len 4096",
)

CODES = (NOT_TRACED,)
