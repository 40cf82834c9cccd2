"""A style fits the kind of what its rule names: by structure, never by name."""

from __future__ import annotations

from collections.abc import Iterator

from shardplan.core.diagnostics import Code, Diagnostic, Label, Severity
from shardplan.core.plan import Assignment, Rule
from shardplan.core.tree import ModuleKind
from shardplan.styles import STYLES

from .check_words import join
from .facts import Facts

KIND = Code(
    code="SP310",
    title="a style that does not fit the module",
    text="""A style splits the weight of a certain kind of module: `colwise` and `rowwise` split a matrix
multiplication (`nn.Linear`, or GPT-2's `Conv1D` with its transposed weight), `embedding_rowwise` a look-up table,
`colwise_norm` a norm. A norm needs all of its features for its mean: on split features only `colwise_norm` sums the
mean over the ranks. A module's kind follows from its structure, not from its name.""",
    bad="""# shardplan validate llama-3.1-8b.json mine.yaml --tp 2
version: "1"
name: mine
tensor_parallel:
  model.layers.*.input_layernorm: colwise
  lm_head: colwise_gather_output
""",
    good="""# shardplan validate llama-3.1-8b.json mine.yaml --tp 2
version: "1"
name: mine
tensor_parallel:
  model.layers.*.input_layernorm: replicate
  lm_head: colwise_gather_output
""",
)

PARAMETER = Code(
    code="SP311",
    title="a style for modules on a parameter",
    text="""A rule may name a single parameter (`model.layers.*.mlp.experts.gate_up_proj`) if it only determines how
the parameter is stored: a parameter has no forward around which a value could be moved. Styles that move values, look
up ids or gather the sequence need the module.""",
    bad="""# shardplan validate llama-3.1-8b.json mine.yaml --tp 2
version: "1"
name: mine
tensor_parallel:
  model.embed_tokens.weight: embedding_rowwise
""",
    good="""# shardplan validate llama-3.1-8b.json mine.yaml --tp 2
version: "1"
name: mine
tensor_parallel:
  model.embed_tokens: embedding_rowwise
""",
)

DIMENSION = Code(
    code="SP312",
    title="a parameter without the dimension that the style splits",
    text="""`rowwise` splits input features. A bias, a norm's weight or any other one-dimensional parameter has only
output features, and a parameter without dimensions has no features.""",
    bad="""# shardplan validate mixtral-8x7b.json mine.yaml --tp 2
version: "1"
name: mine
tensor_parallel:
  model.norm.weight: rowwise
""",
    good="""# shardplan validate mixtral-8x7b.json mine.yaml --tp 2
version: "1"
name: mine
tensor_parallel:
  model.layers.*.mlp.experts.gate_up_proj: packed_colwise
  model.layers.*.mlp.experts.down_proj: rowwise
""",
)

CODES = (KIND, PARAMETER, DIMENSION)

WORDS: dict[ModuleKind, str] = {
    "linear": "a Linear",
    "conv1d": "a Conv1D",
    "depthwise": "a depthwise convolution",
    "embedding": "an Embedding",
    "norm": "a norm",
    "dropout": "a Dropout",
    "list": "a list of modules",
    "other": "",
}


def check(facts: Facts) -> Iterator[Diagnostic]:
    """One finding for each rule and reason."""
    groups: dict[tuple[int, str, str], tuple[Rule, list[str]]] = {}
    for name, assignment in facts.misfits.items():
        if name in facts.packed:
            continue
        code, what = _reason(facts, assignment)
        groups.setdefault((id(assignment.rule), code.code, what), (assignment.rule, []))[1].append(name)
    for (_, number, what), (rule, names) in groups.items():
        yield FINDINGS[number](facts, rule, what, tuple(names))


def _reason(facts: Facts, assignment: Assignment) -> tuple[Code, str]:
    """The code and what the named thing is."""
    if assignment.is_parameter:
        return (DIMENSION if facts.style(assignment).on_parameters else PARAMETER), ""
    module = facts.resolved.tree.modules[assignment.name]
    if module.kind in (facts.style(assignment).kinds or WORDS):
        return KIND, f"a {module.class_name} without a parameter `weight`"
    words = WORDS[module.kind] or f"of class {module.class_name}"
    return KIND, words if module.class_name in words else f"{words} ({module.class_name})"


def _kind(facts: Facts, rule: Rule, what: str, names: tuple[str, ...]) -> Diagnostic:
    style = STYLES[rule.style]
    kinds = join([words for kind, words in WORDS.items() if words and kind in (style.kinds or WORDS)], "or")
    kind = facts.resolved.tree.modules[names[0]].kind
    fitting = [s.name for s in STYLES.values() if s.owns_parameters and (s.kinds is None or kind in s.kinds)]
    return Diagnostic(
        code=KIND.code,
        severity=Severity.ERROR,
        message=f"`{style.name}` is for {kinds}, but {facts.resolved.tree.named(names)} is {what}",
        primary=Label(rule.location, f"names {what}" if WORDS[kind] else f"names a module {what}"),
        help=f"use a style for such a module, such as {join([f'`{name}`' for name in fitting[:4]], 'or')}",
        modules=names,
    )


def _parameter(facts: Facts, rule: Rule, what: str, names: tuple[str, ...]) -> Diagnostic:
    return Diagnostic(
        code=PARAMETER.code,
        severity=Severity.ERROR,
        message=f"`{rule.style}` is for modules, but `{rule.pattern}` names a parameter, {facts.resolved.tree.named(names)}",
        primary=Label(rule.location, "names a parameter"),
        help=f"name the module: `{facts.resolved.tree.named(map(facts.resolved.tree.owner, names))}: {rule.style}`",
        modules=names,
    )


def _dimension(facts: Facts, rule: Rule, what: str, names: tuple[str, ...]) -> Diagnostic:
    side = "output" if STYLES[rule.style].weight.shard == "out" else "input"
    shapes = dict.fromkeys(str(list(facts.resolved.tree.parameters[name][1].shape)) for name in names)
    return Diagnostic(
        code=DIMENSION.code,
        severity=Severity.ERROR,
        message=f"`{rule.style}` splits {side} features, but {facts.resolved.tree.named(names)} of shape "
        f"{join(list(shapes), 'or')} has none",
        primary=Label(rule.location, f"names a parameter without {side} features"),
        help="remove the rule, or keep the parameter whole with `replicate`",
        modules=names,
    )


FINDINGS = {KIND.code: _kind, PARAMETER.code: _parameter, DIMENSION.code: _dimension}
