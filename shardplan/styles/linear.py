"""Styles of matrix multiplications (Megatron-LM's column and row parallel linear layers, arXiv 1909.08053)."""

from shardplan.core.layout import SEQ, I, P, R, V
from shardplan.core.tree import ModuleKind

from .record import FeatureStyle, ParameterStyle, Style

MATMUL: frozenset[ModuleKind] = frozenset({"linear", "conv1d"})
OUT = ParameterStyle("out", "V")
IN = ParameterStyle("in", "V")

STYLES = (
    Style(
        name="colwise",
        summary="Split the output features; the value that arrives is whole, what is handed on is split in its last dim.",
        kinds=MATMUL,
        on_parameters=True,
        weight=OUT,
        takes=(R, I),
        inside=R,
        computes=V(-1),
    ),
    Style(
        name="colwise_seq",
        summary="As colwise, for a value split along the sequence: it is gathered first.",
        kinds=MATMUL,
        weight=OUT,
        takes=(V(SEQ),),
        inside=R,
        computes=V(-1),
        source="arXiv 2205.05198",
    ),
    Style(
        name="colwise_gather_output",
        aliases=("colwise_rep",),
        summary="As colwise, and the output is gathered: every rank has it whole (an output head with whole logits).",
        kinds=MATMUL,
        on_parameters=True,
        weight=OUT,
        takes=(R, I),
        inside=R,
        computes=V(-1),
        hands=I,
    ),
    Style(
        name="colwise_seq_gather_output",
        summary="As colwise_gather_output, for a value split along the sequence: it is gathered first (an output head "
        "without a norm in front of it).",
        kinds=MATMUL,
        weight=OUT,
        takes=(V(SEQ),),
        inside=R,
        computes=V(-1),
        hands=I,
        source="arXiv 2205.05198",
    ),
    Style(
        name="colwise_vocab",
        summary="An output head whose logits stay split over the vocabulary, handed on as a DTensor of the full shape.",
        kinds=frozenset({"linear"}),
        weight=OUT,
        takes=(R, I),
        inside=R,
        computes=V(-1),
        features=FeatureStyle(dtensor=True),
    ),
    Style(
        name="rowwise",
        summary="Split the input features; what arrives is split in its last dim, the partial sums are all-reduced; "
        "a bias is added once, after the reduction.",
        kinds=MATMUL,
        on_parameters=True,
        weight=IN,
        bias=ParameterStyle(None, "I"),
        takes=(V(-1),),
        inside=V(-1),
        computes=P,
        hands=I,
    ),
    Style(
        name="rowwise_seq",
        summary="As rowwise, but the partial sums are reduce-scattered along the sequence.",
        kinds=MATMUL,
        weight=IN,
        bias=ParameterStyle(None, "R"),
        takes=(V(-1),),
        inside=V(-1),
        computes=P,
        hands=V(SEQ),
        source="arXiv 2205.05198",
    ),
    Style(
        name="rowwise_split_input",
        aliases=("rowwise_rep",),
        summary="As rowwise, for a value that arrives whole: each rank takes its slice of the last dim.",
        kinds=MATMUL,
        on_parameters=True,
        weight=IN,
        bias=ParameterStyle(None, "I"),
        takes=(I,),
        inside=V(-1),
        computes=P,
        hands=I,
    ),
    Style(
        name="packed_colwise",
        summary="As colwise, for several matrices stored as one (q, k and v; gate and up): each part is split, so that "
        "every rank holds its share of each.",
        on_parameters=True,
        kinds=MATMUL,
        weight=ParameterStyle("out", "V", packed=True),
        takes=(R, I),
        inside=R,
        computes=V(-1),
    ),
    Style(
        name="packed_rowwise",
        summary="As rowwise, for a matrix whose input features are several parts stored as one: each part is split.",
        on_parameters=True,
        kinds=MATMUL,
        weight=ParameterStyle("in", "V", packed=True),
        bias=ParameterStyle(None, "I"),
        takes=(V(-1),),
        inside=V(-1),
        computes=P,
        hands=I,
    ),
    Style(
        name="mla_kv_a_proj",
        summary="The whole down-projection of multi-head latent attention; the gradient of its rotary tail, which "
        "every rank's heads read, is all-reduced.",
        kinds=MATMUL,
        features=FeatureStyle(tail="qk_rope_head_dim"),
        source="transformers `distributed/tensor_parallel.py`, MlaKvAProjParallel",
    ),
)
