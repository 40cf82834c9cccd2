"""Styles of convolutions."""

from shardplan.core.layout import V

from .style_record import DEPTHWISE, ParameterStyle, Style

CHANNELS = V(-2)  # [batch, channels, positions]

STYLES = (
    Style(
        name="depthwise",
        summary="A convolution of each channel by itself: its channels are split, as those of its input are.",
        kinds=DEPTHWISE,
        on_parameters=True,
        input_sources=(CHANNELS,),
        input_destination=CHANNELS,
        output_source=CHANNELS,
        weight=ParameterStyle("out", "V"),
    ),
    Style(
        name="packed_depthwise",
        summary="As depthwise, where the channels are several parts in one (x, B and C of a state space layer): each part is split.",
        kinds=DEPTHWISE,
        on_parameters=True,
        input_sources=(CHANNELS,),
        input_destination=CHANNELS,
        output_source=CHANNELS,
        weight=ParameterStyle("out", "V", packed=True),
    ),
)
