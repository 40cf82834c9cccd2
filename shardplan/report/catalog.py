"""Every diagnostic code, gathered from the rooms that emit them, and the pages made from it."""

from __future__ import annotations

from functools import cache
from textwrap import dedent

from shardplan.core.diagnostics import Code

FAMILIES = {
    "SP1": "The file",
    "SP2": "Binding a plan to a model",
    "SP3": "Structure",
    "SP4": "Layout",
    "SP5": "Environment, models and applying",
}

LANGUAGES = {
    "$ ": "console",
    "shardplan ": "console",
    "hf ": "console",
    "{": "json",
    "def ": "python",
    "apply_plan(": "python",
}


@cache
def catalog() -> dict[str, Code]:
    """The page of each code, in the order of the codes. A code that two rooms claim is a bug."""
    from shardplan import cost, language, model, proof
    from shardplan.authoring import convert, init
    from shardplan.compiler import bind, check, layout
    from shardplan.model import reduced

    rooms = (language, bind, check, layout, proof, model, reduced, init, convert, cost)
    pages = [page for room in rooms for page in room.CODES]
    by_code = {page.code: page for page in pages}
    assert len(by_code) == len(pages), "a diagnostic code is defined twice"
    return dict(sorted(by_code.items()))


def page(code: Code) -> str:
    """The page of one code as Markdown, without a heading mark."""
    parts = [f"{code.code}: {code.title}", dedent(code.text).strip()]
    parts += [f"{word}:\n\n{fenced(text)}" for word, text in (("Wrong", code.bad), ("Right", code.good)) if text]
    return "\n\n".join(parts)


def diagnostics_document() -> str:
    """docs/diagnostics.md: every code, by family, with its page in docs/diagnostics/."""
    lines = [
        "# Diagnostics",
        "",
        "Every finding has a code that never changes its meaning. Each code has a page; `shardplan explain CODE` prints it.",
        "Errors refuse the plan, warnings do not, unless `--strict` is given.",
    ]
    for prefix, title in FAMILIES.items():
        codes = [code for code in catalog().values() if code.code.startswith(prefix)]
        if codes:
            lines += ["", f"## {title}", "", "| code | |", "|---|---|"]
        lines += [f"| [{code.code}](diagnostics/{code.code}.md) | {code.title} |" for code in codes]
    return "\n".join(lines) + "\n"


def fenced(text: str) -> str:
    """The text as a Markdown code block; its language follows from how it starts."""
    text = dedent(text).strip("\n")
    language = next((language for start, language in LANGUAGES.items() if text.startswith(start)), "yaml")
    return f"```{language}\n{text}\n```"
