"""The findings of this room: what of a model cannot be split, and of other projects' plans not be said."""

from shardplan.core.diagnostics import Code

NOTHING = Code(
    "SP530",
    "a model of which nothing can be split",
    "`init` looks for matrices whose result stays inside a block until another one sums it up, and for the embedding and "
    "the head. Of this model none can be split at this tp size; the notes say what stands against each.",
    bad="$ shardplan init my_models:one_head --tp 2",
    good="$ shardplan init my_models:eight_heads --tp 2",
)
NO_OVERLAY = Code(
    "SP531",
    "a model for which no sequence-parallel overlay is found",
    "Under sequence parallelism each rank holds a slice of the sequence between the blocks. What stands between the "
    "blocks of this model needs all of it, or the model has no list of blocks. Without the option a plan is written "
    "that splits the tensors alone.",
    bad="$ shardplan init ./model -o plan.yaml --sequence-parallel",
    good="$ shardplan init ./model -o plan.yaml",
)
WHOLE = Code(
    "SP532",
    "a part of the model that stays whole",
    "No rules were found that split these matrices and are right. Every rank holds them whole and computes the same with "
    "them: right, at the price of their memory and time on every rank. The reason is what is said against the rules "
    "that came furthest, on the reduced model on which rules are tried.",
    bad="$ shardplan init falcon",
    good="$ shardplan init falcon --set num_attention_heads=64",
)

CODES = (NOTHING, NO_OVERLAY, WHOLE)
