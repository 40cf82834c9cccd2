"""A plan for a model on a mesh as one page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shardplan.compiler.lower import Program
from shardplan.compiler.lower.expected_collectives import COLLECTIVES, expected_collectives
from shardplan.core.estimates import CATEGORIES, Estimate
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import Variant, variant_words
from shardplan.core.report import NumericProof, Report, count_text
from shardplan.core.sources import SourceMap
from shardplan.core.stages import PipelineCut

from .estimate_text import bytes_text, mesh_text, peak_place, seconds_text
from .html_parts import chip, color, hue, page, table, text
from .html_tree import flow_svg, mesh_table, styles_of, tree_html
from .proof_text import fold_rows
from .short_names import fold_names
from .text import proof_lines
from .text import text as findings_text

Flow = tuple[str, tuple[tuple[str, int], ...]]
CLASS = {"equal": "good", "differs": "bad", "unproven": "warn"}


def html_report(
    plan: str,
    model: str,
    sizes: MeshSizes,
    report: Report,
    programs: Mapping[Variant, Program],
    estimates: Mapping[Variant, Estimate],
    flow: Flow,
    pipeline: PipelineCut | None = None,
) -> str:
    """The page: the verdict and the findings; for each variant the tree of modules, the flow of a block, memory and communication;
    the proof. It fetches nothing, and has no script.

    Args:
        plan, model: their names.
        sizes: those of the mesh.
        report: that of `validate`.
        programs, estimates: by variant; empty where there are errors.
        flow: a block, and its modules in the order in which they run, with their depth.
        pipeline: its stages, with several pp ranks.
    """
    parts = [_head(plan, model, sizes, report), _findings(report)]
    if pipeline is not None:
        parts.append(_stages(pipeline, sizes.pp))
    for section, program in programs.items():
        parts.append(_variant(section, program, report.sources, estimates.get(section), flow, pipeline))
    if report.proof is not None:
        parts.append(_proof(report.proof))
    return page(f"{plan} for {model}", "\n".join(parts))


def _head(plan: str, model: str, sizes: MeshSizes, report: Report) -> str:
    state = "bad" if not report.ok else "warn" if report.diagnostics else "good"
    lines = [f'<p class="{state}"><strong>{text(count_text(report.diagnostics))}</strong></p>']
    lines += [f"<p>{text(line)}</p>" for line in (*report.tp_lines, *proof_lines(report))]
    mesh = mesh_text(sizes) if sizes.world_size > 1 else "one device"
    return f"<h1>{text(plan)} for {text(model)}</h1><p>{text(mesh)}, {sizes.world_size:,} devices</p>{mesh_table(sizes)}{''.join(lines)}"


def _findings(report: Report) -> str:
    if not report.diagnostics:
        return ""
    shown = (findings_text([d], report.sources, color=False) for d in report.diagnostics)
    return "<h2>Findings</h2>" + "".join(f"<pre>{text_lines(one)}</pre>" for one in shown)


def _stages(cut: PipelineCut, pp: int) -> str:
    rows = []
    for stage in range(cut.stages):
        blocks = cut.blocks_of(stage)
        besides = (name for name in cut.roots_of(stage) if name not in blocks)
        numbers = (str(stage), str(stage % pp), str(len(blocks)))
        rows.append((*numbers, text(", ".join(fold_names(blocks))), text(", ".join(besides))))
    header = ("stage", "pp rank", "blocks", "", "besides")
    return f"<h2>Pipeline</h2>{table(header, rows, frozenset({0, 1, 2}))}"


def text_lines(block: str) -> str:
    """Several lines, escaped."""
    return "\n".join(text(line) for line in block.splitlines())


def _variant(
    section: Variant,
    program: Program,
    sources: SourceMap,
    estimate: Estimate | None,
    flow: Flow,
    cut: PipelineCut | None,
) -> str:
    styles = " ".join(chip(style) for style in styles_of(program, sources))
    parts = [
        f"<h2>{text(variant_words(section).capitalize())}</h2>",
        (
            f"<h3>Modules</h3><p>{styles}</p><p class=dim>Bytes are what a rank stores before data parallelism. "
            "Point at a module, or tap it, for its shapes, moves and rules.</p>"
        ),
        tree_html(program, sources, cut),
        (
            "<h3>The flow of one block</h3><p class=dim>From top to bottom as it runs. I: whole, complete gradient; "
            "R: whole, partial gradient; V(d): split in dim d; P: partial sum.</p>"
        ),
        flow_svg(program, *flow),
        f"<h3>Collectives of a step on tp</h3>{_collectives(program)}",
    ]
    if estimate is not None:
        parts += [_memory(estimate), _traffic(estimate)]
    return "".join(parts)


def _collectives(program: Program) -> str:
    counts = expected_collectives(program.modules) if (program.resolved.sizes.tp or 1) > 1 else {}
    rows = [(when, *(f"{counter[op]:,}" for op in COLLECTIVES)) for when, counter in counts.items()]
    header = ("", *(op.replace("_", "-") for op in COLLECTIVES))
    return table(header, rows, frozenset(range(1, 4))) if rows else "<p>none</p>"


def _memory(estimate: Estimate) -> str:
    memory = estimate.memory
    device = estimate.device
    scale = max(memory.total, device.memory if device else 0) or 1
    peak = [(category, memory.peak.get(category, 0)) for category in CATEGORIES if memory.peak.get(category)]
    bars = "".join(
        f'<span style="width:{100 * size / scale:.2f}%;background:{hue(CATEGORIES.index(category))}" title="{text(category)}: '
        f'{text(bytes_text(size))}"></span>'
        for category, size in peak
    )
    legend = "".join(
        f'<span><i style="background:{hue(CATEGORIES.index(category))}"></i>{text(category)} {text(bytes_text(size))}</span>'
        for category, size in peak
    )
    fits = ""
    if device is not None:
        word = "fits" if estimate.fits else "does not fit"
        share = f"{memory.total / device.memory:.0%} of {bytes_text(device.memory)}"
        fits = f' <span class="{"good" if estimate.fits else "bad"}">{word} {text(device.name)} ({text(share)})</span>'
    bound = ""
    if estimate.bound is not None:
        every = [*estimate.bound.terms.items(), ("waiting for collectives", estimate.bound.waiting)]
        terms = ", ".join(f"{term} {seconds_text(seconds)}" for term, seconds in every)
        least = f"{seconds_text(estimate.bound.seconds)}, bounded by {estimate.bound.by}"
        bound = f"<p>A step takes at least {text(least)} <span class=dim>({text(terms)})</span></p>"
    rows = [
        (text(c), text(bytes_text(memory.peak.get(c, 0))), text(bytes_text(memory.most[c])))
        for c in CATEGORIES
        if memory.most.get(c)
    ]
    return (
        f"<h3>Memory of a rank</h3><p>{text(bytes_text(memory.total))} at the peak, in the {text(peak_place(memory))}{fits}</p>"
        f'<div class="bar">{bars}</div><p class="legend">{legend}</p>'
        f"{table(('', 'at the peak', 'at most'), rows, frozenset({1, 2}))}{bound}"
    )


def _traffic(estimate: Estimate) -> str:
    if not estimate.traffic:
        return "<h3>Communication</h3><p>none</p>"
    most = max(one.bytes for one in estimate.traffic) or 1
    rows = [
        (
            text(one.axis),
            text(one.collective),
            f"{one.calls:,}",
            text(bytes_text(one.bytes)),
            (
                f'<div class="bar" style="width:10rem;height:.8rem"><span style="width:{100 * one.bytes / most:.2f}%;'
                f'background:{color(str(one.axis))}"></span></div>'
            ),
        )
        for one in estimate.traffic
    ]
    header = ("axis", "collective", "calls", "sent by a rank", "")
    return f"<h3>Communication of a step</h3>{table(header, rows, frozenset({2, 3}))}"


def _proof(proof: NumericProof) -> str:
    return "<h2>Proof</h2>" + "".join(_proofs(proof))


def _proofs(proof: NumericProof) -> Iterator[str]:
    for one in proof.variants:
        rows = [
            (
                text(row.name),
                text(row.kind),
                f"{row.error:.1e}",
                text(row.where),
                f'<span class="{CLASS[row.verdict]}">{text(row.verdict)}</span>',
            )
            for row in fold_rows(one.rows)
        ]
        share = f"{one.sharded_share:.0%} of {one.parameters:,} parameters of the reduced model are split"
        yield f"<h3>{text(variant_words(one.variant).capitalize())}</h3><p class=dim>{text(share)}</p>"
        yield table(("tensor", "", "worst error", "where", "verdict"), rows, frozenset({2}))
