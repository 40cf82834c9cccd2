"""Findings with every feature that a renderer has to show."""

from shardplan.core.diagnostics import Diagnostic, Label, Location, Severity, Span
from shardplan.core.sources import SourceFile, SourceMap

LINES = (
    'version: "1"',
    "tensor_parallel:",
    "  model.layers.*.self_attn.{q,k,v}_proj: colwise",
    "  模型.layers:\tcolwise",
    "",
    "x: " + "y" * 200 + "Z" * 5 + "w" * 100,
    "  a: b",
)
QKV = ("tensor_parallel", "model.layers.*.self_attn.{q,k,v}_proj")

SOURCES = SourceMap(
    {
        "my.yaml": SourceFile("my.yaml", LINES, {(QKV, "key"): Span(3, 3, 3, 40), (QKV, "value"): Span(3, 42, 3, 49)}),
        "parent.yaml": SourceFile("parent.yaml", LINES, {(("a",), "value"): Span(7, 6, 7, 7)}),
        "<dict>": SourceFile("<dict>"),
    }
)


def at(line: int, column: int, end_line: int, end_column: int, text: str = "") -> Label:
    """A label at an exact place of my.yaml."""
    return Label(Location("my.yaml", span=Span(line, column, end_line, end_column)), text)


PARTIAL = Diagnostic(
    "SP301",
    Severity.ERROR,
    "num_key_value_heads is 4, which tp=3 does not divide",
    primary=Label(Location("my.yaml", QKV), "splits the heads"),
    related=(
        Label(Location("my.yaml", QKV, "value"), "this style"),
        Label(Location("parent.yaml", ("a",), "value"), "inherited from here"),
    ),
    notes=("model.layers.0.self_attn: num_key_value_heads is 4",),
    help="use a tp of 1, 2 or 4",
    modules=tuple(f"model.layers.{i}.self_attn.{p}_proj" for i in range(32) for p in "qkv"),
)
IN_DICT = Diagnostic(
    "SP201",
    Severity.WARNING,
    "the key \x1b[31mred\x1b[0m matches nothing",
    primary=Label(Location("<dict>", ("tensor_parallel", "red", 0)), "no such module"),
)
NO_PLACE = Diagnostic("SP501", Severity.ERROR, "there is no model here", help="name one\nor another")
