"""The findings about plans of other projects: entries without a counterpart in our plans."""

from shardplan.core.diagnostics import Code

NO_FORM = Code(
    "SP540",
    "a source that is not a plan of a known form",
    "`convert` reads a mapping from names to style names (transformers, NeMo Automodel, NeMo-RL), a DeepSpeed config or its "
    "`partition_config`, and the word `hf` for the plan that transformers has for a model. `ParallelStyle` objects are in "
    "no file: `--import module:name` imports them. What a file leaves to another project's own tables (a preset of "
    "DeepSpeed) is not in it, and cannot be converted.",
    bad='{"tensor_parallel": {"autotp_size": 4, "preset_model": "llama"}}',
    good='{"layer_specs": [{"patterns": [".*\\\\.o_proj\\\\.weight$"], "partition_type": "row"}]}',
)
NO_STYLE = Code(
    "SP541",
    "a style without a counterpart",
    "The entry names a style, or holds an object of a class, whose meaning is not known. A subclass of torch's styles runs "
    "code of its own, which its layouts do not tell; those of NeMo Automodel and NeMo-RL are known by their names. Experts are "
    "distributed by their module (`ep_dispatch_experts`), which takes its stacks (`grouped_gemm`) with it; these alone have no "
    "counterpart.",
    bad='{"model.layers.*.mlp.experts": "local_colwise"}',
    good='{"model.layers.*.mlp.experts": "ep_dispatch_experts"}',
)
NO_LAYOUTS = Code(
    "SP542",
    "layouts that no style has",
    "A style has an input layout and an output layout: whole, or in slices. No style of ours has the pair of layouts "
    "of this entry; the message names both. The nearest style is not chosen, because it would be "
    "another computation.",
    bad='{"layer_specs": [{"patterns": [".*\\\\.down_proj\\\\.weight$"], "partition_type": "row", "partition_dim": 0}]}',
    good='{"layer_specs": [{"patterns": [".*\\\\.down_proj\\\\.weight$"], "partition_type": "row"}]}',
)
NO_GLOB = Code(
    "SP543",
    "a pattern without a glob",
    "A plan names modules by globs. These parts of regular expressions have a counterpart: plain characters, `\\.`, `.`, "
    "`.*`, `[^.]+`, `\\d`, `\\d+`, sets such as `[qkv]`, alternatives in parentheses, `?` behind one of these, and the "
    "anchors. Others (counts, look-around, references) have none. Keys of the other forms are globs already, but braces, "
    "commas and the empty key, which torch reads as plain text, are not.",
    bad='{"layer_specs": [{"patterns": [".*(?<!cross)attn\\\\.o_proj\\\\.weight$"], "partition_type": "row"}]}',
    good='{"layer_specs": [{"patterns": [".*\\\\.self_attn\\\\.o_proj\\\\.weight$"], "partition_type": "row"}]}',
)
NEEDS_MODEL = Code(
    "SP544",
    "an entry that only the model explains",
    "The same name means different things for different modules: a row-wise style with a whole input splits the "
    "vocabulary of an embedding, and the input features of a linear layer. Only the model shows which one is meant.",
    bad="$ shardplan convert automodel.json",
    good="$ shardplan convert automodel.json --model llama",
)
LEFT_OUT = Code(
    "SP545",
    "an entry that is left out",
    "The plan does not need the entry: it matches nothing in this model, or it undoes something that does not "
    "happen here. Positions and rotary tables are computed from the whole sequence, so that `RotaryEmbedParallel` is not "
    "needed.",
    bad='{"model.layers.*.self_attn.qkv_proj": "colwise"}',
    good='{"model.layers.*.self_attn.q_proj": "colwise"}',
)
IMPLIED = Code(
    "SP546",
    "a move that the source leaves to DTensor",
    "The source passes a DTensor that is split along the sequence to modules that read the whole value, and DTensor's own "
    "propagation gathers it at run time. A plan declares where each value is gathered: at the module around its readers, or at "
    "the norm in front of the head. A DTensor that is split over its features is gathered where the code cuts it into parts "
    "(gate and up in one matrix); a plan splits each part by itself, and gathers nothing. The layouts are proven like those "
    "of any plan.",
    bad='{"model.layers.*.input_layernorm": "sequence_parallel", "model.layers.*.self_attn.q_proj": "colwise"}',
    good="""
    sequence_parallel:
      model.layers.*.input_layernorm: sequence_parallel
      model.layers.*.self_attn: gather_seq_input
    """,
)
NO_IMPORT = Code(
    "SP547",
    "an import without styles",
    "`--import module:name` imports a module and runs its code; nothing else does. The name must be a dictionary from "
    "names to styles, or a function that returns one. A function may have the parameters `model` and `sequence_parallel`; with the second it is called "
    "without and with sequence parallelism then.",
    bad="$ shardplan convert --import my_plans:llama_plam",
    good="$ shardplan convert --import my_plans:llama_plan",
)

TWO = Code(
    "SP548",
    "two entries for one module",
    "Two entries of the source match the same modules with different styles. torch would apply both, one after the "
    "other; a plan has one rule for a module. Where one is meant to be an exception, write the other's pattern so that it "
    "does not match there.",
    bad='{"layers.*.mlp.*_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}',
    good='{"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}',
)

CODES = (NO_FORM, NO_STYLE, NO_LAYOUTS, NO_GLOB, NEEDS_MODEL, LEFT_OUT, IMPLIED, NO_IMPORT, TWO)
