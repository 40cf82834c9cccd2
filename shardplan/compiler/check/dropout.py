"""Dropout and jitter under tensor parallelism: refused until their random numbers are managed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shardplan.core.diagnostics import Code, Diagnostic, Severity
from shardplan.core.tree import named

from .check_words import join
from .facts import Facts

DROPOUT = Code(
    code="SP370",
    title="dropout above 0 with tp above 1",
    text="""Dropout, and the jitter of a router, draw random numbers. Dropout on split heads must differ between the
tp ranks; dropout on whole values must be the same on all of them (without sequence parallelism). One seed for all
ranks gives neither. Until random numbers are managed, dropout above 0 is refused everywhere in the model, also in
parts that the plan leaves whole: ranks with different seeds would compute different values there, which the plan
treats as equal. A model in evaluation mode is refused too: plans are proven for training, and `from_pretrained`
returns models in evaluation mode. Most models are trained without dropout; set it to 0 in the configuration.""",
    bad="""# shardplan validate gpt2.json mine.yaml --tp 2
version: "1"
name: mine
tensor_parallel:
  transformer.h.*.mlp.c_fc: colwise
  transformer.h.*.mlp.c_proj: rowwise
""",
    good="""# shardplan validate gpt2-no-dropout.json mine.yaml --tp 2
version: "1"
name: mine
tensor_parallel:
  transformer.h.*.mlp.c_fc: colwise
  transformer.h.*.mlp.c_proj: rowwise
""",
)

CODES = (DROPOUT,)

WORDS = ("drop", "jitter")  # in the names of attributes that are probabilities, or widths of noise


def check(facts: Facts) -> Iterator[Diagnostic]:
    """One finding for the model."""
    tree = facts.resolved.tree
    if facts.tp in (None, 1):
        return
    active = {name: found for name, m in tree.modules.items() if (found := _probabilities(m.kind, m.numbers))}
    if not active:
        return
    values = {p for found in active.values() for p in found.values()}
    fields = {name: p for name, p in _probabilities("other", tree.numbers).items() if p in values}
    attributes = [name if attribute == "p" else f"{name}.{attribute}" for name in active for attribute in active[name]]
    yield Diagnostic(
        code=DROPOUT.code,
        severity=Severity.ERROR,
        message=f"dropout is {join([str(p) for p in sorted(values)], 'and')} in {named(attributes)}, "
        f"but its random numbers are not managed across tp={facts.tp}",
        notes=tuple(f"config: {name} is {p}" for name, p in fields.items()),
        help=f"set {join(list(fields), 'and')} to 0 in the config" if fields else "set these attributes to 0",
        modules=tuple(active),
    )


def _probabilities(kind: str, numbers: Mapping[str, int | float]) -> dict[str, float]:
    """The dropout probabilities above 0: `p` of an nn.Dropout, any float in (0, 1] whose name speaks of dropping or of a
    router's jitter."""
    return {
        name: value
        for name, value in numbers.items()
        if isinstance(value, float)
        and 0 < value <= 1
        and ((kind == "dropout" and name == "p") or any(word in name.rpartition(".")[2] for word in WORDS))
    }
