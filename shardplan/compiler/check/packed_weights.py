"""Weights that are stored in another form than their module computes with: quantised ones, several values in one element."""

from __future__ import annotations

from collections.abc import Iterator

from shardplan.core.diagnostics import Code, Diagnostic, Label, Severity

from .facts import Facts

PACKED = Code(
    code="SP366",
    title="the weight of a linear module is stored in packed form",
    text="""The weight of a linear module has as many elements as output times input features, in two dimensions. A
quantised base (4-bit weights of bitsandbytes, of shape [n, 1]) stores several values in one element, and the scales of its blocks
elsewhere: its rows and columns cannot be split, and a slice of its elements is no slice of the matrix. Load the model in a
floating-point dtype, or dequantise it; `apply_plan` takes no quantised weights. Linear layers of torchao's
float8 training keep their weights in a floating-point dtype: convert the model first, then apply the plan.""",
    bad="""# shardplan validate my_models:llama_in_4_bits mine.yaml --tp 2
version: "1"
name: mine
tensor_parallel:
  model.layers.*.mlp.{gate,up}_proj: colwise
  model.layers.*.mlp.down_proj: rowwise
""",
    good="""# shardplan validate llama-3.1-8b.json mine.yaml --tp 2
version: "1"
name: mine
tensor_parallel:
  model.layers.*.mlp.{gate,up}_proj: colwise
  model.layers.*.mlp.down_proj: rowwise
""",
)

CODES = (PACKED,)


def check(facts: Facts) -> Iterator[Diagnostic]:
    """One finding for the model."""
    found = tuple(facts.packed)
    if found:
        module = facts.resolved.tree.modules[found[0]]
        weight = module.parameter("weight")
        assert weight is not None
        sizes = module.numbers
        rule = facts.packed[found[0]].rule
        yield Diagnostic(
            code=PACKED.code,
            severity=Severity.ERROR,
            message=f"{facts.resolved.tree.named(found)} have weights in packed form ({list(weight.shape)}, {weight.dtype}, for "
            f"{sizes['out_features']} x {sizes['in_features']} features), which cannot be split",
            primary=Label(rule.location, "splits it"),
            help="load the model in a floating-point dtype (without `quantization_config`), or dequantise it",
            modules=found,
        )
