"""Styles that move a value at a module's boundary and leave its parameters to other rules."""

from shardplan.core.layout import SEQ, I, P, R, V

from .style_record import NORM, OTHER, Options, Style, Trial

# Where I becomes R: at what a block reads, and at the result of a module.
BLOCK_INPUT, RESULT = "input_with_grad_allreduce", "output_with_grad_allreduce"

STYLES = (
    Style(
        name="gather_seq_input",
        summary="The input of a block under sequence parallelism: the argument is gathered along the sequence once for "
        "all that read it.",
        owns_parameters=False,
        on_cp=True,
        input_sources=(V(SEQ),),
        input_destination=R,
        options=Options(output=("all_reduce", "reduce_scatter"), grad=True),
        comment="The input of a block is gathered along the sequence, once for all that read it.",
        trials=(
            Trial(on=OTHER, sliced=1),
            Trial(on=OTHER, sliced=11, output="reduce_scatter"),
            Trial(on=OTHER, sliced=16, output="all_reduce"),
        ),
        source="arXiv 2205.05198",
    ),
    Style(
        name=BLOCK_INPUT,
        summary="The input of a block under tensor parallelism: the argument's gradient is all-reduced once for all "
        "that read it.",
        owns_parameters=False,
        input_sources=(I,),
        input_destination=R,
        options=Options(output=("all_reduce", "reduce_scatter")),
        comment="The input of a block: one all-reduce of the gradient for all that read it.",
        trials=(
            Trial(on=OTHER, whole=1, sliced=15),
            Trial(on=OTHER, whole=11, output="all_reduce"),
        ),
        source="arXiv 1909.08053, the operator f",
    ),
    Style(
        name=RESULT,
        summary="The same after a module: the gradient of its output is all-reduced once for all that read it (a norm before "
        "parallel attention and MLP).",
        owns_parameters=False,
        output_source=I,
        output_destination=R,
        trials=(Trial(on=NORM, whole=13),),
        source="arXiv 1909.08053, the operator f",
    ),
    Style(
        name="split_seq_input",
        summary="The entry into the sequence-parallel region: the argument is split along the sequence; partial sums "
        "from an embedding are reduced on the way.",
        owns_parameters=False,
        on_cp=True,
        input_sources=(I, P),
        input_destination=V(SEQ),
        options=Options(output=("gather",), grad=True),
        trials=(Trial(on=OTHER, sliced=2),),
        source="arXiv 2205.05198",
    ),
    Style(
        name="gather_seq_output",
        summary="The exit from the sequence-parallel region: the output of the module around the blocks, a slice of the "
        "sequence, is gathered.",
        owns_parameters=False,
        on_cp=True,
        output_source=V(SEQ),
        output_destination=R,
        options=Options(grad=True),
        comment="What the blocks output is gathered along the sequence, once for all that read it.",
        trials=(Trial(on=OTHER, sliced=17),),
        source="arXiv 2205.05198",
    ),
    Style(
        name="reduce_seq_input",
        summary="A module inside a block (a norm) that reads a partial sum which the block's code adds up (experts and shared "
        "experts): it is reduced and split along the sequence.",
        owns_parameters=False,
        input_sources=(P,),
        input_destination=V(SEQ),
        source="arXiv 2205.05198",
    ),
    Style(
        name="reduce_input",
        summary="A module inside a block (a norm) that reads a partial sum which the block's code adds up (experts and shared "
        "experts): it is reduced once, where `all_reduce` at each of them would reduce each.",
        owns_parameters=False,
        input_sources=(P,),
        input_destination=I,
        source="arXiv 1909.08053, the operator g",
    ),
    Style(
        name="replicate_seq",
        summary="A block that stays whole under sequence parallelism: the argument is gathered along the sequence, every "
        "rank computes the same, and each outputs its slice.",
        owns_parameters=False,
        on_cp=True,
        input_sources=(V(SEQ),),
        input_destination=I,
        output_source=I,
        output_destination=V(SEQ),
        comment="Needs the whole sequence and stays whole: every rank computes the same.",
        trials=(Trial(on=OTHER, sliced=13),),
    ),
    Style(
        name="exchange_heads",
        summary="On the axis cp, a block that needs the whole sequence: each rank computes it for its share of heads or channels, as the "
        "rules of `tensor_parallel` below it say; projections work on a rank's own tokens, and all-to-alls exchange tokens for heads.",
        owns_parameters=False,
        on_cp=True,
        exchanges_heads=True,
        input_sources=(V(SEQ),),
        input_destination=R,
        comment="Each rank has all tokens and its share of the heads.",
        source="arXiv 2309.14509",
    ),
    Style(
        name="all_reduce",
        summary="The module's output is a partial sum: all-reduce it.",
        owns_parameters=False,
        output_source=P,
        output_destination=I,
        trials=(Trial(on=OTHER, whole=13),),
    ),
    Style(
        name="reduce_scatter",
        summary="The module's output is a partial sum: reduce it and split it along the sequence.",
        owns_parameters=False,
        output_source=P,
        output_destination=V(SEQ),
        trials=(Trial(on=OTHER, sliced=12),),
        source="arXiv 2205.05198",
    ),
)
