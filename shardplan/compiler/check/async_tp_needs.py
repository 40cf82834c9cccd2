"""Asynchronous tensor parallelism has what it needs."""

from __future__ import annotations

from collections.abc import Iterator

from shardplan.core.diagnostics import Code, Diagnostic, Severity

from .facts import Facts
from .field_places import field_label

NEEDS = Code(
    code="SP383",
    title="asynchronous tensor parallelism without what it needs",
    text="""torch.compile hides the gathers and scatters of sequence parallelism behind the matrix products beside
them. It finds them in the graphs of compiled modules, so it needs sequence parallelism, the backend `inductor`, and
modules to compile. On one tp rank there is no communication to hide.""",
    bad="""# shardplan validate llama-3.1-8b.json mine.yaml --tp 2
version: "1"
name: mine
tensor_parallel:
  lm_head: colwise_gather_output
compile:
  modules: [model.layers.*]
  async_tensor_parallel: true
""",
    good="""# shardplan validate llama-3.1-8b.json mine.yaml --tp 2
version: "1"
name: mine
tensor_parallel:
  lm_head: colwise_gather_output
compile:
  modules: [model.layers.*]
""",
)

CODES = (NEEDS,)


def check(facts: Facts) -> Iterator[Diagnostic]:
    """One finding, with all that is missing."""
    section, resolved = facts.resolved.compile, facts.resolved
    if section is None or not section.async_tensor_parallel:
        return
    missing = {
        "tp above 1": (facts.tp or 1) > 1,
        "sequence parallelism": resolved.sequence_parallel,
        "the backend inductor": section.backend == "inductor",
        "modules to compile": bool(resolved.compile_modules),
    }
    lacking = [what for what, there in missing.items() if not there]
    if lacking:
        yield Diagnostic(
            code=NEEDS.code,
            severity=Severity.ERROR,
            message=f"async_tensor_parallel needs {' and '.join(lacking)}",
            primary=field_label(section, "async_tensor_parallel"),
            help="switch sequence parallelism on, or remove `async_tensor_parallel`"
            if lacking == ["sequence parallelism"]
            else "remove `async_tensor_parallel`, or give it what it needs",
        )
