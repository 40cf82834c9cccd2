"""The findings of `init`: what of a model cannot be split."""

from shardplan.core.diagnostics import Code

NOTHING = Code(
    "SP530",
    "a model in which nothing can be split",
    "`init` looks for matrices whose result stays inside a block until another matrix sums it up, and for the embedding and "
    "the head. In this model none of them can be split at this tp size; the notes give the reason for each.",
    bad="$ shardplan init my_models:one_head --tp 2",
    good="$ shardplan init my_models:eight_heads --tp 2",
)
NO_OVERLAY = Code(
    "SP531",
    "a model for which no sequence-parallel overlay is found",
    "Under sequence parallelism each rank has a slice of the sequence between the blocks. The code between the "
    "blocks of this model needs the whole sequence, or the model has no list of blocks. Without the option `init` writes a plan "
    "that splits the tensors alone.",
    bad="$ shardplan init ./model -o plan.yaml --sequence-parallel",
    good="$ shardplan init ./model -o plan.yaml",
)
WHOLE = Code(
    "SP532",
    "a part of the model that stays whole",
    "No correct rules were found that split these matrices. Every rank stores them whole and computes the same with "
    "them. That is correct, but costs their memory and time on every rank. The note gives the reason against the rules "
    "that came closest, on the reduced model on which rules are tried. Matrices of less than half a percent of their blocks' parameters "
    "stay whole too: to reduce their results costs a step more than they are worth.",
    bad="$ shardplan init falcon",
    good="$ shardplan init falcon --set num_attention_heads=64",
)
NO_EXPERTS_FOUND = Code(
    "SP533",
    "a model whose experts `init` cannot distribute",
    "Expert parallelism is for modules whose parameters are stacks of experts. This model has none, or the layout "
    "check has a reason against the rules that distribute them; the note gives it. Without the option `init` writes a plan "
    "that splits each expert.",
    bad="$ shardplan init llama --expert-parallel",
    good="$ shardplan init mixtral --expert-parallel",
)

GATHERED = Code(
    "SP534",
    "what is computed whole between split matrices",
    "Rules were found that split these matrices, but none that split what the code computes between them. The results are "
    "gathered, every rank computes the same, and the last matrix reads its share. That is correct and saves memory, but not "
    "the time of what is between (attention, for example). The note names the line that forbids more, and the help what to "
    "write there.",
    bad="$ shardplan init my_models:fixed_heads      # q.view(b, n, 8, head_dim)",
    good="$ shardplan init my_models:any_heads      # q.view(b, n, -1, head_dim)",
)

CODES = (NOTHING, NO_OVERLAY, WHOLE, NO_EXPERTS_FOUND, GATHERED)
