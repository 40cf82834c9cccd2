"""A style fits the kind of module or parameter that its rule names: by structure, never by name."""

from __future__ import annotations

from collections.abc import Iterator

from shardplan.core.by_key import by_key
from shardplan.core.diagnostics import Code, Diagnostic, Label, Severity
from shardplan.core.plan import Assignment, Rule
from shardplan.core.tree import ModuleKind, full_name
from shardplan.styles import STYLES

from .check_words import join
from .facts import Facts

KIND = Code("SP310")
PARAMETER = Code("SP311")
DIMENSION = Code("SP312")

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
    misfits = (((a.rule, *_reason(facts, a)), name) for name, a in facts.misfits.items() if name not in facts.packed)
    for (rule, code, what), names in by_key(misfits).items():
        yield FINDINGS[code](facts, rule, what, tuple(names))


def _reason(facts: Facts, assignment: Assignment) -> tuple[Code, str]:
    """The code, and the kind of the named module or parameter."""
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
    help = f"use a style for such a module, such as {join([f'`{name}`' for name in fitting[:4]], 'or')}"
    if kind in (style.kinds or WORDS):
        help = _computed_weight(facts, rule, names)
    return Diagnostic(
        code=KIND,
        severity=Severity.ERROR,
        message=f"`{style.name}` is for {kinds}, but {facts.resolved.tree.named(names)} is {what}",
        primary=Label(rule.location, f"names {what}" if WORDS[kind] else f"names a module {what}"),
        help=help,
        modules=names,
    )


def _computed_weight(facts: Facts, rule: Rule, names: tuple[str, ...]) -> str:
    """The remedy for modules of a fitting kind whose forward computes the weight from other parameters."""
    modules = facts.resolved.tree.modules
    remove = "remove_weight_norm(module)"
    if full_name(names[0], "parametrizations") in modules:
        remove = "parametrize.remove_parametrizations(module, 'weight')"
    elif any(one.short == "weight_orig" for one in modules[names[0]].parameters):
        # Both keep the original and a buffer: the mask of pruned weights, or the vector of the spectral norm.
        masked = "weight_mask" in modules[names[0]].buffers
        remove = "prune.remove(module, 'weight')" if masked else "remove_spectral_norm(module)"
    return (
        f"keep it whole with `{rule.pattern}: replicate`, or make its weight a parameter before the plan is applied: "
        f"`torch.nn.utils.{remove}`"
    )


def _parameter(facts: Facts, rule: Rule, what: str, names: tuple[str, ...]) -> Diagnostic:
    return Diagnostic(
        code=PARAMETER,
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
        code=DIMENSION,
        severity=Severity.ERROR,
        message=f"`{rule.style}` splits {side} features, but {facts.resolved.tree.named(names)} of shape "
        f"{join(list(shapes), 'or')} has none",
        primary=Label(rule.location, f"names a parameter without {side} features"),
        help="remove the rule, or keep the parameter whole with `replicate`",
        modules=names,
    )


FINDINGS = {KIND: _kind, PARAMETER: _parameter, DIMENSION: _dimension}
