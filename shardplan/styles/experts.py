"""Styles of mixture-of-experts modules: split expert weights (tensor parallelism), and distributed whole experts
(expert parallelism)."""

from shardplan.core.layout import I, P, R
from shardplan.core.mesh import Axis

from .style_record import OTHER, WHOLE_AS_INPUT, ExpertStyle, Options, ParameterStyle, Style, Trial

STYLES = (
    Style(
        name="ep_experts",
        kinds=OTHER,
        summary="Experts are distributed whole over tp (ep is tp): all ranks have all tokens, each runs its own experts on the tokens that "
        "are routed to them, and the output is a partial sum.",
        weight=ParameterStyle("expert", "V"),
        input_sources=(R, I),
        input_destination=R,
        output_source=P,
        argument="floats",
        options=Options(output=("all_reduce", "reduce_scatter")),
        experts=ExpertStyle(exchanged=False),
        comment="Every rank has some of the experts, whole, and runs them on the tokens that are routed to them.",
        source="GShard, arXiv 2006.16668",
    ),
    Style(
        name="ep_dispatch",
        kinds=OTHER,
        summary="Experts are distributed whole over ep: each rank sends its own tokens to the ranks of their experts, and gets the results "
        "back.",
        weight=ParameterStyle("expert", "V", axis=Axis.EP),
        experts=ExpertStyle(exchanged=True),
        comment="Every rank has some of the experts, whole; tokens are sent to the ranks of their experts.",
        source="GShard, arXiv 2006.16668",
    ),
    Style(
        name="token_wise",
        summary="A module that works token by token (a router), whole on every rank, on tokens as they come: the gradient is complete where every rank has all of them, and a "
        "partial sum where they are split.",
        weight=WHOLE_AS_INPUT,
        on_cp=True,
        comment="Whole, on the tokens that each rank has.",
    ),
    Style(
        name="moe_tp_experts",
        summary="A module of experts whose weights are split by other rules: every floating-point argument (tokens, "
        "routing weights) enters with an all-reduced gradient, the output is all-reduced.",
        owns_parameters=False,
        input_sources=(R, I),
        input_destination=R,
        output_source=P,
        output_destination=I,
        argument="floats",
        options=Options(output=("reduce_scatter",)),
        trials=(Trial(on=OTHER, whole=14),),
        source="transformers `distributed/tensor_parallel.py`, MoeExpertsParallel",
    ),
    Style(
        name="moe_identity_expert",
        summary="An expert that returns its input: each rank contributes 1/tp of it to the sum over ranks.",
        owns_parameters=False,
        input_sources=(R, I),
        input_destination=P,
        output_source=P,
        source="transformers `distributed/tensor_parallel.py`, MoeIdentityParallel",
    ),
    Style(
        name="local_params",
        summary="The module's own forward reads its parameters, which other rules split, as this rank's shards.",
        owns_parameters=False,
        source="transformers `distributed/tensor_parallel.py`, LocalParamsParallel",
    ),
)
