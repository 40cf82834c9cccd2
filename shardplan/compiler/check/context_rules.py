"""The rules for the axis cp move values along the sequence, and something splits it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardplan.core.by_key import by_key
from shardplan.core.diagnostics import Code, Diagnostic, Label, Location, Severity
from shardplan.core.layout import P
from shardplan.core.mesh import Axis
from shardplan.core.plan import PLAIN, ResolvedPlan, Rule
from shardplan.core.tree import ancestors
from shardplan.styles import STYLES
from shardplan.styles.backends import BACKENDS
from shardplan.styles.boundary import boundary

from .backend import COMBINED
from .check_words import field_label
from .facts import Facts
from .sequence import LENGTH

STYLE = Code("SP367")
UNSPLIT = Code("SP368")
NO_SECTION = Code("SP372")

OPTIONS = frozenset({"argument", "arguments", "seq_dim", "regather", "read_outside", "having"})  # of rules for cp


def check(facts: Facts) -> Iterator[Diagnostic]:
    """Checks nothing without several ranks of cp."""
    resolved = facts.resolved
    if resolved.sizes.cp > 1 == resolved.sizes.pp and not resolved.plan.has_context:
        yield Diagnostic(
            code=NO_SECTION,
            severity=Severity.ERROR,
            message=f"the mesh has cp {resolved.sizes.cp}, but the plan has no section `context_parallel`",
            help="add the section: it says where sequences are split and how tokens meet (such as `model.layers.0: split_seq_input` and "
            "`model.layers.*.self_attn: exchange_heads`). `shardplan init MODEL --context-parallel` writes it, and the plan `auto` "
            "derives it",
        )
    on_cp = resolved.on_cp
    if on_cp is None:
        return
    wrong = by_key(
        ((a.rule, why), name)
        for name, a in on_cp.assignments.items()
        if a.section == "context_parallel" and (why := _misfit(a.rule, is_parameter=a.is_parameter))
    )
    for (rule, why), names in wrong.items():
        yield _style(facts, rule, why, tuple(names))
    if facts.resolved.compile is not None:
        yield from _hollow(facts, on_cp)
    yield from _scattering(facts, on_cp)
    if not wrong:
        yield from _unsplit(facts)
    yield from _length(facts)
    section = facts.resolved.data_parallel
    if section is not None and not BACKENDS[section.backend].fully_shard:
        yield Diagnostic(
            code=COMBINED,
            severity=Severity.ERROR,
            message=f"the backend {section.backend} does not work with context parallelism",
            primary=field_label(section, "backend"),
            help="use `backend: fsdp2`, or use a mesh without cp",
        )


def _misfit(rule: Rule, *, is_parameter: bool) -> str | None:
    """Why a rule cannot be a rule for cp."""
    if is_parameter:
        return "a parameter is whole over cp"
    if not STYLES[rule.style].on_cp:
        return f"`{rule.style}` splits features or parameters, which are whole over cp"
    given = (name for name, value in rule.options.items() if value != getattr(PLAIN, name) and name not in OPTIONS)
    option = next(given, None)
    return f"`{option}` says nothing about the sequence over cp" if option is not None else None


def _style(facts: Facts, rule: Rule, why: str, names: tuple[str, ...]) -> Diagnostic:
    fitting = ", ".join(f"`{style.name}`" for style in STYLES.values() if style.on_cp)
    return Diagnostic(
        code=STYLE,
        severity=Severity.ERROR,
        message=f"`{rule.pattern}` cannot have this rule under `context_parallel`: {why}",
        primary=Label(rule.location, f"declares `{rule.style}`"),
        help=f"the styles of the section are {fitting}",
        modules=names,
    )


def _hollow(facts: Facts, on_cp: ResolvedPlan) -> Iterator[Diagnostic]:
    """torch.compile does not trace a tensor without values."""
    exchanging = ((a.rule, name) for name, a in on_cp.modules.items() if STYLES[a.rule.style].exchanges_heads)
    for rule, modules in by_key(exchanging).items():
        finding = _style(facts, rule, "`compile` does not trace its hollow argument", tuple(modules))
        yield replace(finding, help="leave `compile` out, or write `replicate_seq` in its place")


def scattering(on_cp: ResolvedPlan) -> dict[str, str]:
    """Module whose heads are exchanged -> a module below it whose rule for tp scatters sums. Over cp, its sums are those of a rank's own tokens."""
    found: dict[str, str] = {}
    for name, a in on_cp.modules.items():
        output = boundary(a.rule).output
        if a.section != "context_parallel" and output and (output.source, output.destination.kind) == (P, "V"):
            mixers = (n for n in ancestors(name) if n in on_cp.modules)
            found |= {n: name for n in mixers if STYLES[on_cp.modules[n].rule.style].exchanges_heads}
    return found


def _scattering(facts: Facts, on_cp: ResolvedPlan) -> Iterator[Diagnostic]:
    rules = {name: a.rule for name, a in on_cp.modules.items()}
    both = (((rules[mixer], rules[name]), mixer) for mixer, name in scattering(on_cp).items())
    for (rule, below), mixers in by_key(both).items():
        why = f"`{below.pattern}` below it scatters its sums over the heads, and cp has no move for that"
        finding = _style(facts, rule, why, tuple(mixers))
        yield replace(
            finding,
            related=(Label(below.location, "scatters"),),
            help=f"write `{rule.pattern}: replicate_seq` in its place",
        )


def _unsplit(facts: Facts) -> Iterator[Diagnostic]:
    resolved = facts.resolved
    assert resolved.on_cp is not None
    crossings = (boundary(a.rule) for a in resolved.on_cp.modules.values())
    if any(move.destination.kind == "V" for one in crossings for move in one.inputs):
        return
    own = next(one for one in reversed(resolved.plan.lineage) if one.context_parallel)
    yield Diagnostic(
        code=UNSPLIT,
        severity=Severity.ERROR,
        message="no rule of `context_parallel` splits the sequence: every rank of cp would compute all of it",
        primary=Label(Location(own.file, ("context_parallel",), "key")),
        help="add a `split_seq_input` rule for the first block",
    )


def _length(facts: Facts) -> Iterator[Diagnostic]:
    sizes = facts.resolved.sizes
    ranks = sizes.cp * ((facts.tp or 1) if facts.resolved.sequence_parallel else 1)
    if facts.seq_len is not None and facts.seq_len % ranks:
        padded = -(-facts.seq_len // ranks) * ranks
        over = sizes.text((Axis.CP,)) + (f" x tp {facts.tp}" if ranks > sizes.cp else "")
        yield Diagnostic(
            code=LENGTH,
            severity=Severity.ERROR,
            message=f"the sequence length is {facts.seq_len}, which {over} does not divide",
            help=f"pad the sequences to {padded} tokens",
        )
