"""The styles: one record each. To add a style, add its record to one of the tables here. Importing this file refuses an
incomplete record."""

from . import block_inputs, convolutions, embedding, experts, linear, norms, whole
from .sound import missing
from .style_record import ParameterStyle, Style, feature_dim

NONE = "none"  # not a style: a child plan's way to remove an inherited rule

STYLES: dict[str, Style] = {
    style.name: style
    for table in (linear, convolutions, embedding, norms, whole, block_inputs, experts)
    for style in table.STYLES
}
ALIASES: dict[str, str] = {alias: style.name for style in STYLES.values() for alias in style.aliases}

for _style in STYLES.values():
    if (_reason := missing(_style)) is not None:
        raise TypeError(f"style {_style.name}: {_reason}")


def canonical_style(name: str) -> str | None:
    """The canonical name for a style's name or alias (or "none"); None where there is no such style."""
    return name if name in STYLES or name == NONE else ALIASES.get(name)


__all__ = ["ALIASES", "NONE", "STYLES", "ParameterStyle", "Style", "canonical_style", "feature_dim"]
