"""Styles of norms over features that are split."""

from shardplan.core.layout import V

from .record import FeatureStyle, ParameterStyle, Style

STYLES = (
    Style(
        name="colwise_norm",
        summary="An RMS norm over features that are split (of the queries of all heads together): its weight is split as they "
        "are, and the mean of squares, a number for each token, is all-reduced.",
        kinds=frozenset({"norm"}),
        weight=ParameterStyle("out", "V"),
        takes=(V(-1),),
        inside=V(-1),
        computes=V(-1),
        features=FeatureStyle(means=True),
        source="arXiv 1910.07467",
    ),
)
