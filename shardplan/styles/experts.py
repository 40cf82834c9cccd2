"""Styles of mixture-of-experts modules whose expert weights are split, not distributed (tensor parallelism)."""

from shardplan.core.layout import I, P, R

from .style_record import OTHER, Style, Trial

STYLES = (
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
