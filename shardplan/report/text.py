"""Findings for people, like rustc's: the message, the plan's lines, the notes, the help."""

from __future__ import annotations

from collections.abc import Iterable

from shardplan.core.diagnostics import Diagnostic, Label, Location, Severity
from shardplan.core.mesh import AXES, Axis
from shardplan.core.report import NumericProof, Report, count_text, ordered
from shardplan.core.sources import SourceMap

from .color import Paint, Role
from .short_names import brace_names, fold_names
from .snippet import Mark, gutter_width, snippet
from .width import printable

ROLES: dict[Severity, Role] = {Severity.ERROR: "error", Severity.WARNING: "warning"}
MOST_NAMES = 4  # folded module names printed with a finding; JSON has all names


def report_text(report: Report, *, color: bool, verbose: bool = False) -> str:
    """The findings and their number; for a plan against a model, also the allowed tp sizes and what is proven.

    Args:
        verbose: also print findings that follow from others; else they are only counted.
    """
    paint = Paint(color)
    total = count_text(report.diagnostics)
    if report.model is None and len(report.plans) > 1:
        total += f" in {len(report.plans)} files"
    if report.secondary:
        total += f", and {len(report.secondary)} that follow{'s' if len(report.secondary) == 1 else ''} from them"
        total += "" if verbose else " (--verbose)"
    role: Role = "error" if not report.ok else "warning" if report.diagnostics else "good"
    parts = [text(report.diagnostics, report.sources, color=color)]
    if report.secondary and verbose:
        parts += ["What follows:", text(report.secondary, report.sources, color=color)]
    parts.append(paint(role, total))
    body = "\n\n".join(part for part in parts if part)
    if report.derived is not None:
        body += "".join(f"\n{line}" for line in report.derived.lines)
    body += "".join(f"\n{line}" for line in report.tp_lines)
    if report.checked_tp == 1 and report.sizes is not None and report.sizes.ep > 1:
        body += f"\n{_distributed(report)}" if report.ok else ""
    elif report.checked_tp == 1 and report.sizes is not None and report.sizes.pp > 1:
        body += "\nat tp 1 no layer is split; each pipeline stage has some of the layers"
    elif report.checked_tp == 1 and any("context_parallel" in variant for variant in report.variants):
        body += "\nat tp 1 no layer is split; the sequence is split over cp"
    elif report.checked_tp == 1:
        body += "\ndata parallel only: at tp 1 nothing is split, and no layout is checked"
    body += "".join(f"\n{line}" for line in proof_lines(report))
    if report.step is not None and report.sizes is not None:
        body += f"\n{printable(report.step)}: three steps on {report.sizes.shown} give the same state as on one process"
        if report.step_apart:
            body += f"; values that differ between ranks by design are not compared: {printable(', '.join(report.step_apart))}"
    if report.stages[-1] == "names":
        body += "\nchecked: the plan, and the names and sizes in the checkpoint's files; not checked: the model's structure and layouts"
    return body


def _distributed(report: Report) -> str:
    """The words about experts that are distributed over ranks that split nothing else."""
    tried = "" if "layouts" in report.stages else ", which was not tried"
    return f"at tp 1 no layer is split; experts are distributed{tried}"


def proof_lines(report: Report) -> list[str]:
    """The lines on proven and unreached parts, for a report whose layouts were checked and have no errors."""
    if not report.ok:
        return []
    staged = report.proof.pipeline if report.proof is not None else None
    lines = []
    if staged is not None:
        equal = sum(row.verdict == "equal" for row in staged.rows)
        lines = [f"proven in {len(staged.sizes)} pipeline stages: {equal} tensors are the whole model's"]
    split = (report.sizes is not None and report.sizes.ep > 1) or any(
        "context_parallel" in on for on in report.variants
    )
    if "layouts" not in report.stages or (report.checked_tp == 1 and not split):
        return lines
    if report.proof is None:
        return ["not proven: the numeric proof was not run"]
    equal = min(sum(row.verdict == "equal" for row in proof.rows) for proof in report.proof.variants)
    sizes = report.proof.sizes
    mesh = ", ".join(f"{axis}={sizes.of(axis)}" for axis in AXES if sizes.of(axis) > 1 and axis is not Axis.PP)
    lines.append(f"proven at {mesh}: {equal} tensors are the unsharded model's")
    lines += filter(None, [proven_on(report.proof)])
    if any(proof.own_tokens for proof in report.proof.variants):
        lines.append("over cp each rank returns the logits of its own tokens: give the labels to context_parallel")
    missed = set.intersection(*(set(proof.unreached) for proof in report.proof.variants))
    if missed:
        names = [name for name in report.proof.variants[0].unreached if name in missed]
        lines.append(f"not reached, and not split: {named_few(names)} ({len(names)} in all)")
    return lines


def named_few(names: Iterable[str]) -> str:
    """The first few names, folded over layers."""
    folded = brace_names(fold_names(names))
    return ", ".join((*folded[:MOST_NAMES], *(["..."] if len(folded) > MOST_NAMES else [])))


def text(diagnostics: Iterable[Diagnostic], sources: SourceMap, *, color: bool) -> str:
    """The findings in the order of the plan's lines, with an empty line between them and no newline at the end."""
    paint = Paint(color)
    return "\n\n".join("\n".join(_finding(d, sources, paint)) for d in ordered(diagnostics, sources))


def _finding(diagnostic: Diagnostic, sources: SourceMap, paint: Paint) -> list[str]:
    role = ROLES[diagnostic.severity]
    head = paint(role, f"{diagnostic.severity}[{diagnostic.code}]")
    lines = [head + paint("strong", f": {printable(diagnostic.message)}")]
    here, elsewhere = _split_labels(diagnostic, sources)
    marks = _marks(here, sources, role)
    width = gutter_width(marks)
    if diagnostic.primary is not None:
        lines += _place(diagnostic.primary.location, here, marks, width, sources, paint)
    equals = " " * width + " " + paint("gutter", "=") + " "
    for note in (*diagnostic.notes, *_where(diagnostic)):
        lines += [equals + printable(line) for line in note.splitlines()]
    if diagnostic.help:
        first, *rest = map(printable, diagnostic.help.splitlines())
        lines.append(f"{equals}{paint('help', 'help')}: {first}")
        lines += [" " * (width + 9) + line for line in rest]
    for label in elsewhere:
        lines += _note(label, sources, paint)
    return lines


def _split_labels(diagnostic: Diagnostic, sources: SourceMap) -> tuple[list[Label], list[Label]]:
    """The labels that share a snippet with the primary label (it comes first), and those that need a
    snippet of their own."""
    if diagnostic.primary is None:
        return [], list(diagnostic.related)
    here: list[Label] = [diagnostic.primary]
    elsewhere: list[Label] = []
    for label in diagnostic.related:
        same = label.location.file == diagnostic.primary.location.file
        shown = sources.span(label.location) is not None and sources.span(diagnostic.primary.location) is not None
        (here if same and shown else elsewhere).append(label)
    return here, elsewhere


def _marks(labels: Iterable[Label], sources: SourceMap, role: Role) -> list[Mark]:
    """The labels as marks, the first one primary; labels without a span get no mark."""
    return [
        Mark(span, label.text, primary=i == 0, role=role if i == 0 else "note")
        for i, label in enumerate(labels)
        if (span := sources.span(label.location)) is not None
    ]


def _place(
    location: Location,
    labels: Iterable[Label],
    marks: list[Mark],
    width: int,
    sources: SourceMap,
    paint: Paint,
) -> list[str]:
    """`--> file:line:column` and the marked lines; for a document without text, the path into it and
    the labels."""
    arrow = " " * (width - 2) + paint("gutter", "-->")
    lines = [f"{arrow} {printable(place_text(location, sources))}"]
    source = sources.files.get(location.file)
    if marks and source is not None and source.lines:
        return lines + snippet(source, marks, width, paint)
    equals = " " * width + " " + paint("gutter", "=") + " "
    return lines + [equals + printable(label.text) for label in labels if label.text]


def _note(label: Label, sources: SourceMap, paint: Paint) -> list[str]:
    """A label in another document, as a note of its own."""
    place = [Label(label.location)]
    marks = _marks(place, sources, "note")
    return [
        f"{paint('note', 'note')}: {printable(label.text or 'see also')}",
        *_place(label.location, place, marks, gutter_width(marks), sources, paint),
    ]


def place_text(location: Location, sources: SourceMap) -> str:
    """`file:line:column`, or `<dict>["tensor_parallel"]["lm_head"]` for a document without text."""
    span = sources.span(location)
    if span is not None:
        return f"{location.file}:{span.line}:{span.column}"
    keys = (f'["{key}"]' if isinstance(key, str) else f"[{key}]" for key in location.path)
    return location.file + "".join(keys)


def _where(diagnostic: Diagnostic) -> tuple[str, ...]:
    """The folded names of the finding's modules, unless the message already names the only one."""
    said = (diagnostic.message, *diagnostic.notes)
    if not diagnostic.modules or (len(diagnostic.modules) == 1 and any(diagnostic.modules[0] in s for s in said)):
        return ()
    count = f" ({len(diagnostic.modules)} in all)" if len(diagnostic.modules) > 1 else ""
    return (f"where: {named_few(diagnostic.modules)}{count}",)


# The cases of a proof, in one line.
def proven_on(proof: NumericProof) -> str:
    """The cases of a proof, in one line: the meshes, the inputs, the steps, the further arguments of calls, and those
    left out. Empty where there were no calls."""
    if not proof.calls:
        return ""
    inputs = [f"{one.kind} {list(next(iter(one.shapes.values()), ()))}" for one in proof.calls]
    dtypes = " and ".join(dict.fromkeys(("float32", *(row.dtype for row in proof.rows))))
    dtypes += f", once in {proof.once_in}" if proof.once_in else ""
    told = dict.fromkeys(word for one in proof.calls for word in (*one.switched, *one.replaced))
    untold = dict.fromkeys(word for one in proof.calls for word in one.left_out if word not in told)
    steps = f"{max(one.steps for one in proof.calls)} steps in train mode"
    parts = [
        f"on {' and '.join(mesh.shown for mesh in proof.meshes)}: {', '.join(inputs)}, {steps}, {dtypes}",
        *([f"with {', '.join(told)}"] if told else []),
        *([f"not with {', '.join(untold)}"] if untold else []),
    ]
    return printable("; ".join(parts))
