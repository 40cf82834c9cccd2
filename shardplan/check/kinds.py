"""A style fits the kind of what its rule names: by structure, never by name."""

from __future__ import annotations

from collections.abc import Iterator

from shardplan.core.diagnostics import Code, Diagnostic, Label, Severity
from shardplan.core.plan import Assignment, Rule
from shardplan.core.tree import ModuleKind, named
from shardplan.styles import STYLES, Style

from .facts import Facts
from .words import join

KIND = Code(
    code="SP310",
    title="a style that does not fit the module",
    text="""A style splits the weight of a certain kind of module: `colwise` and `rowwise` a matrix multiplication
(`nn.Linear`, or the transposed `Conv1D` of GPT-2, whose orientation is taken care of), `embedding_rowwise` a look-up
table. A norm has no features to split apart: it needs all of them for its mean. What the model calls a module plays
no part, only what it is.""",
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
    title="a style that works on modules only, on a parameter",
    text="""A rule may name a single parameter (`model.layers.*.mlp.experts.gate_up_proj`) where only its storage is to
be said: then there is no forward around which a value could be moved. Styles that move values, look up ids or start
from the sequence need the module.""",
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
    text="""`rowwise` splits input features. A bias, a norm's weight or any other one-dimensional parameter has output
features only, and a parameter without dimensions has none.""",
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
    "embedding": "an Embedding",
    "norm": "a norm",
    "dropout": "a Dropout",
    "list": "a list of modules",
    "other": "none of these",
}


def check(facts: Facts) -> Iterator[Diagnostic]:
    """One finding for each rule and reason."""
    groups: dict[tuple[int, str, str], tuple[Rule, list[str]]] = {}
    for name, assignment in facts.misfits.items():
        code, what = _reason(facts, assignment)
        groups.setdefault((id(assignment.rule), code, what), (assignment.rule, []))[1].append(name)
    for (_, code, what), (rule, names) in groups.items():
        yield _finding(rule, code, what, tuple(names))


def _reason(facts: Facts, assignment: Assignment) -> tuple[str, str]:
    """The code and what the named thing is."""
    tree = facts.resolved.tree
    if assignment.is_parameter:
        shape = list(tree.parameters[assignment.name][1].shape)
        misplaced = facts.style(assignment).on_parameters
        return (DIMENSION.code, f"shape {shape}") if misplaced else (PARAMETER.code, "a parameter")
    module = tree.modules[assignment.name]
    if facts.style(assignment).kinds is not None and module.kind not in (facts.style(assignment).kinds or ()):
        return KIND.code, f"{WORDS[module.kind]} ({module.class_name})"
    return KIND.code, f"without a parameter `weight` ({module.class_name})"


def _finding(rule: Rule, code: str, what: str, names: tuple[str, ...]) -> Diagnostic:
    style, what_is = STYLES[rule.style], named(names)
    if code == KIND.code:
        message = f"`{style.name}` is for {_kinds(style)}, but {what_is} is {what}"
        help = f"use a style for this kind of module, such as {_alternatives(what)}"
    elif code == PARAMETER.code:
        message = f"`{style.name}` is for modules, but {what_is} is a parameter"
        help = f"name the module: `{named(n.rpartition('.')[0] for n in names)}: {style.name}`"
    else:
        side = "output" if style.weight.shard == "out" else "input"
        message = f"`{style.name}` splits {side} features, but {what_is} has none: {what}"
        help = "remove the rule, or keep the parameter whole with `replicate`"
    return Diagnostic(
        code=code,
        severity=Severity.ERROR,
        message=message,
        primary=Label(rule.location, f"names {what}" if code != DIMENSION.code else what),
        help=help,
        modules=names,
    )


def _kinds(style: Style) -> str:
    return join([WORDS[kind] for kind in WORDS if kind in (style.kinds or WORDS)], "or")


def _alternatives(what: str) -> str:
    """The styles that hold parameters of a module of the kind that `what` begins with."""
    kind = next((kind for kind, words in WORDS.items() if what.startswith(words)), "other")
    fitting = [s.name for s in STYLES.values() if s.owns_parameters and (s.kinds is None or kind in s.kinds)]
    return join([f"`{name}`" for name in fitting[:4]], "or")
