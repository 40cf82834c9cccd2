"""Styles of norms over split features."""

from shardplan.core.layout import V

from .style_record import NORM, FeatureStyle, ParameterStyle, Style, Trial

STYLES = (
    Style(
        name="colwise_norm",
        summary="An RMS norm over features that are split (of the queries of all heads together): its weight is split as they "
        "are, and the mean of squares, a number for each token, is all-reduced.",
        kinds=NORM,
        weight=ParameterStyle("out", "V"),
        input_sources=(V(-1),),
        input_destination=V(-1),
        output_source=V(-1),
        features=FeatureStyle(means=True),
        trials=(Trial(on=NORM, whole=12, sliced=12),),
        source="arXiv 1910.07467",
    ),
)
