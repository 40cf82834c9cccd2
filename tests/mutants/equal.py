"""Mutants that change no number of a step that a plan runs."""

from __future__ import annotations

from .sites import ROOT, Site

# File, function, operator and a part of the line that the change takes away; "" is any -> why. What differs between ranks only after a user's mistake is made different
# by tests of their own, which these name.
REASONS = {
    ("same_weights.py", "", "", ""): "compares what ranks have loaded, which is the same here",
    ("same_inputs.py", "", "", ""): "compares what ranks are fed, which is the same here (test_same_inputs)",
    (
        "tied_copies.py",
        "compare_copies",
        "",
        "",
    ): "compares what stages have, the same here (test_processes_pipeline_steps)",
    ("agreement.py", "", "", ""): "tells ranks that another one failed, and none fails here",
    ("failed_steps.py", "", "", ""): "tells ranks that another one failed, and none fails here",
    ("expert_units.py", "place", "dim", ""): "FSDP2 cuts stacks of experts along another dim: the whole is the same",
    ("fsdp2.py", "_options", "group", ""): "of this mesh only the kind of device is read",
    (
        "apply_stages.py",
        "",
        "argument",
        "place=",
    ): "the place of a stage among random streams, and a proof draws no numbers",
    (
        "own_experts.py",
        "__call__",
        "argument",
        "size=number",
    ): "the number of tokens divides by tp here; where it does not, the move raises",
    (
        "shared_reads.py",
        "read",
        "",
        "return move(x, mesh, I, R)",
    ): "no gradient is recorded: a value in I and in R is the same",
    ("plan_mesh.py", "data_parallel_ranks", "factor", "sizes.cp"): "context parallelism is not proven",
}


def reason(site: Site) -> str:
    """ "" where the proof must see a change."""
    line = (ROOT / site.path).read_text().splitlines()[site.lines[0] - 1].strip()
    for (name, function, operator, code), why in REASONS.items():
        here = site.path.endswith(f"/{name}") and function in ("", site.function) and operator in ("", site.operator)
        if here and (not code or ((code == line or code in site.before) and code not in site.after)):
            return why
    return ""
