"""The tables of styles in docs/styles.md and docs/layouts.md, made from the style records.

`python tools/style_table.py` writes them; with `--check`, only says which are stale.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from shardplan.compiler.lower.describe import GRADIENTS

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from shardplan.styles import STYLES, ParameterStyle, Style  # noqa: E402

COMMAND = "python tools/style_table.py"
BEGIN, END = "<!-- styles: begin -->", "<!-- styles: end -->"


def short_table() -> str:
    """Name and meaning."""
    rows = [f"| `{style.name}` | {style.summary} |" for style in STYLES.values()]
    return "\n".join(["| style | what it does |", "|---|---|", *rows])


def full_table() -> str:
    """Name, other spellings, what it fits, how parameters are stored, input and output layouts, options."""
    head = "| style | for | parameters (gradient) | input | output | options |\n|---|---|---|---|---|---|"
    return "\n".join([head, *(_row(style) for style in STYLES.values())])


def _row(style: Style) -> str:
    names = ", ".join(f"`{name}`" for name in (style.name, *style.aliases))
    cells = (names, _fits(style), _parameters(style), _takes(style), _hands(style), ", ".join(_options(style)) or "-")
    return f"| {' | '.join(cells)} |"


def _fits(style: Style) -> str:
    kinds = {
        "linear": "Linear",
        "conv1d": "Conv1D",
        "depthwise": "depthwise Conv1d",
        "embedding": "Embedding",
        "norm": "norms",
        "other": "modules of their own",
    }
    modules = ["any module"] if style.kinds is None else [kinds[kind] for kind in sorted(style.kinds, reverse=True)]
    return ", ".join([*modules, "single parameters"] if style.on_parameters else modules)


def _parameters(style: Style) -> str:
    if not style.owns_parameters:
        return "left to other rules"
    weight = _held(style.weight)
    if style.lookup is not None and style.shards_parameters:
        return "split by rows (the vocabulary)" if style.weight.shard == "in" else "split by columns"
    return weight if style.bias is None or style.bias == style.weight else f"{weight}; bias {_held(style.bias)}"


def _held(style: ParameterStyle) -> str:
    if style.shard == "expert":
        return f"whole experts, over {style.axis}"
    if style.as_input:
        return "whole (complete for I, partial for R and slices)"
    if style.shard is None:
        return f"whole ({GRADIENTS[style.computed]})"
    if style.shard == "head":
        return "split by heads (the first dim longer than 1)"
    return f"split by {style.shard}put features" + (" of each part" if style.packed else "")


def _takes(style: Style) -> str:
    if style.lookup is not None:
        return "token ids"
    taken = " or ".join(str(layout) for layout in style.input_sources) or "as it comes"
    return f"{taken}, moved to {style.input_destination}" if style.is_block_input and style.input_destination else taken


def _hands(style: Style) -> str:
    layout = style.output_destination or style.output_source
    if style.features.dtensor:
        return f"{layout} as a DTensor"
    if style.until_block_input:
        return "P, until the block input"
    if layout is not None:
        return str(layout)
    return "as computed"


def _options(style: Style) -> list[str]:
    said = [
        (style.argument_option, "argument, arguments"),
        (style.options.grad, "grad"),
        (bool(style.options.output), f"output ({', '.join(style.options.output)})"),
        (style.packed_option, "packed"),
        (style.heads_option, "heads"),
        (style.features.means, "shares (groups)"),
        (style.seq_option, "seq_dim"),
        (style.read_outside_option, "read_outside"),
        (style.regather_option, "regather"),
    ]
    return [name for has, name in said if has]


TABLES: dict[str, Callable[[], str]] = {"docs/styles.md": short_table, "docs/layouts.md": full_table}


def with_table(name: str) -> str:
    """The document with its table as the records have it."""
    before, _, rest = (ROOT / name).read_text("utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    assert end, f"{name} has no {BEGIN} ... {END}"
    return f"{before}{BEGIN}\n{TABLES[name]()}\n{END}{after}"


def stale() -> list[str]:
    """The documents whose table is not what the records say."""
    return [name for name in TABLES if (ROOT / name).read_text("utf-8") != with_table(name)]


def main(words: list[str]) -> int:
    if words not in ([], ["--check"]):
        print(f"usage: {COMMAND} [--check]", file=sys.stderr)
        return 2
    names = stale()
    if words:
        if names:
            print(f"{', '.join(names)}: the table of styles is not what the records say. Run `{COMMAND}`.")
        return 1 if names else 0
    for name in names:
        (ROOT / name).write_text(with_table(name), "utf-8")
        print(f"wrote {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
