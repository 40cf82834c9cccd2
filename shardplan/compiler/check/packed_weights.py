"""Weights stored in another form than their module computes with: quantised ones, several values in one element."""

from __future__ import annotations

from collections.abc import Iterator

from shardplan.core.diagnostics import Code, Diagnostic, Label, Severity

from .facts import Facts

PACKED = Code("SP366")


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
            code=PACKED,
            severity=Severity.ERROR,
            message=f"{facts.resolved.tree.named(found)} have weights in packed form ({list(weight.shape)}, {weight.dtype}, for "
            f"{sizes['out_features']} x {sizes['in_features']} features), which cannot be split",
            primary=Label(rule.location, "splits it"),
            help="load the model in a floating-point dtype (without `quantization_config`), or dequantise it",
            modules=found,
        )
