"""Styles of parameters that every rank holds whole."""

from shardplan.core.layout import SEQ, V

from .record import WHOLE, WHOLE_PARTIAL, Options, ParameterStyle, Style

STYLES = (
    Style(
        name="sequence_parallel",
        summary="A token-wise module (a norm) on a slice of the sequence: its parameters are whole, their gradients "
        "partial sums that are reduced once per block. `output: gather` hands the whole sequence on.",
        weight=WHOLE_PARTIAL,
        takes=(V(SEQ),),
        inside=V(SEQ),
        computes=V(SEQ),
        options=Options(output=("gather",), grad=True),
        source="arXiv 2205.05198",
    ),
    Style(
        name="replicate",
        summary="Whole on every rank, on what arrives; its gradient is complete.",
        on_parameters=True,
        weight=WHOLE,
    ),
    Style(
        name="replicated_with_grad_allreduce",
        summary="Whole on every rank, on a value of which each rank has a part (a q/k norm over this rank's heads, a "
        "router in front of split experts): its gradient is a partial sum, reduced once per block.",
        on_parameters=True,
        weight=WHOLE_PARTIAL,
        options=Options(output=("all_reduce", "reduce_scatter")),
    ),
    Style(
        name="replicated_divided",
        summary="Whole on every rank, each of which reads 1/tp of it: what is added to a partial sum (a bias behind experts "
        "that are split by their input features).",
        on_parameters=True,
        weight=ParameterStyle(None, "P"),
    ),
)
