"""Style names: transformers' words. NeMo Automodel translates six of them to torch's styles."""

from __future__ import annotations

from difflib import get_close_matches

from shardplan.styles import ALIASES, NONE, STYLES, canonical_style

from .entries import NO_STYLE, Meaning, NotConvertible, Spread, quoted

# The words for torch's styles, with their layouts on a Linear or an Embedding: (split, source, destination).
TORCH: dict[str, tuple[str, Spread, Spread]] = {
    "colwise": ("colwise", "whole", "features"),
    "rowwise": ("rowwise", "features", "whole"),
    "colwise_rep": ("colwise", "whole", "whole"),
    "rowwise_rep": ("rowwise", "whole", "whole"),
}
# transformers' words for distributed experts: for their module, and for each of its parameters.
EXPERTS, STACK = "ep_dispatch_experts", "grouped_gemm"
LEFT = {
    "ep_router": "transformers has removed it; a router is whole on every rank here, and its ids are those of all experts",
}
# transformers' words, past or present, for what is not tensor parallelism.
REFUSED = {
    "gather": "it belongs to expert weights that each rank holds by itself",
    "local": "it belongs to expert weights that each rank holds by itself",
    "local_colwise": "it belongs to expert weights that each rank holds by itself",
    "local_rowwise": "it belongs to expert weights that each rank holds by itself",
    "local_packed_rowwise": "it belongs to expert weights that each rank holds by itself",
}


def meaning_of_name(name: object) -> Meaning:
    """The meaning of a style's name.

    Raises:
        NotConvertible: SP541.
    """
    if not isinstance(name, str):
        raise NotConvertible(
            NO_STYLE, "a style is a name here, not a list, a mapping or a number", help="write its name"
        )
    label = quoted(name)
    if name in REFUSED:
        raise NotConvertible(
            NO_STYLE, f"{label} has no counterpart: {REFUSED[name]}", help="split experts by `moe_tp_experts`"
        )
    if name == EXPERTS:
        return Meaning("experts", label, options={"style": "ep_dispatch"})
    if name == STACK:
        return Meaning("stack", label)
    if name in LEFT:
        return Meaning("nothing", label, why=LEFT[name])
    if name in TORCH:
        kind, source, destination = TORCH[name]
        return Meaning(kind, label, source, destination, unsure=name == "rowwise_rep")  # type: ignore[arg-type]
    if name == "sequence_parallel":
        return Meaning("sequence", label, "sequence", "sequence", dtensor=True)
    style = canonical_style(name)
    if style is None or style == NONE:
        near = get_close_matches(name.lower(), (*STYLES, *ALIASES), n=1, cutoff=0.75)
        help = f"did you mean `{near[0]}`?" if near else "docs/styles.md has the table of styles"
        raise NotConvertible(NO_STYLE, f"there is no style {label}", help=help)
    return Meaning("style", label, options={"style": style})
