"""Styles of parameters that every rank stores whole."""

from shardplan.core.layout import SEQ, V

from .style_record import NORM, OTHER, PARAMETER, WHOLE, WHOLE_PARTIAL, Options, ParameterStyle, Style, Trial

STYLES = (
    Style(
        name="sequence_parallel",
        summary="A token-wise module (a norm) on a slice of the sequence: its parameters are whole, their gradients "
        "partial sums that are reduced once per block. `output: gather` outputs the whole sequence.",
        weight=WHOLE_PARTIAL,
        input_sources=(V(SEQ),),
        input_destination=V(SEQ),
        output_source=V(SEQ),
        options=Options(output=("gather",), grad=True),
        comment="Works token by token, on a slice of the sequence.",
        trials=(
            Trial(on=NORM, sliced=1),
            Trial(on=NORM, sliced=3, output="gather"),
            Trial(on=OTHER, sliced=14),
        ),
        source="arXiv 2205.05198",
    ),
    Style(
        name="replicate",
        summary="Whole on every rank, on any input; its gradient is complete.",
        on_parameters=True,
        weight=WHOLE,
        comment="Whole on purpose.",
        trials=(Trial(on=OTHER, whole=15),),
    ),
    Style(
        name="replicated_with_grad_allreduce",
        summary="Whole on every rank, applied to a rank's part of a value (a q/k norm over this rank's heads, a router in front of split "
        "experts): its gradient is a partial sum, reduced once per block.",
        on_parameters=True,
        weight=WHOLE_PARTIAL,
        options=Options(output=("all_reduce", "reduce_scatter")),
        comment="Whole, but applied to a rank's own part: the gradient is a partial sum.",
        trials=(
            Trial(on=frozenset({"linear"}), whole=11, sliced=11),
            Trial(on=NORM, whole=11, sliced=2),
            Trial(on=OTHER, whole=2, sliced=3),
            Trial(on=OTHER, whole=12, output="all_reduce"),
            Trial(on=PARAMETER, whole=7, sliced=7),
        ),
    ),
    Style(
        name="replicated_divided",
        summary="Whole on every rank; each rank reads 1/tp of it, as a summand of a partial sum (a bias after experts that are split by "
        "their input features).",
        on_parameters=True,
        weight=ParameterStyle(None, "P"),
        comment="Added to a partial sum: each rank adds 1/tp of it.",
        trials=(Trial(on=PARAMETER, whole=11, sliced=11),),
    ),
)
