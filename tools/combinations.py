"""docs/combinations.md: which sets of axes and features are proven together, read off the marks of the tests in real processes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
# In the order of the table: axes, how data parallelism wraps, and what is done to layers.
WORDS = ("tp", "sp", "cp", "tokens", "ep", "pp", "fsdp2", "hsdp", "ddp", "checkpointing", "compile", "lora")
HEAD = """# What is proven together

- [Pairs](#pairs), [sets](#sets), [refused](#refused), [right, and refused](#right-and-refused)

Made from the marks of the tests; do not edit. Each test runs real processes (gloo, CPU) and compares the loss, every gradient and the
norm or the optimizer's steps with the unsharded model, on every rank. They run in `make test`, `make test-all` and `make exhaustive`. `sp` is sequence parallelism; `tokens` says that
each rank of cp has the logits and the loss of its own tokens, where it has those of the whole sequence without the word; `hsdp` is FSDP2 with replicas,
and `fsdp2` means both where a set has `hsdp`.

## Pairs

The number of sets that have both; "refused": a call with both raises before the model is touched; empty: no test has both.
"""

SOME_RIGHT = """What `validate` and `apply_plan` refuse though it would train right. `validate` without a variant looks at each that a plan has: where the plan is wrong
without its expert-parallel section, it is refused on meshes with ep too. Where the model's code compares a length, a width, a count or a dtype, a plan that is wrong in
one of its branches is refused (SP420), whichever of them training takes. Random numbers that the model's code or a hook draws itself in training, on several tp ranks, are
refused (SP371) also where all ranks happen to draw the same."""
# By code; `python -m tests.adversaries.generated` takes these for no mistakes.
RIGHT_AND_REFUSED = {
    "SP413": "experts that look at several of their tokens (a mean, a sort), with ep not above tp: there they get the tokens of one batch. With more "
    "data-parallel ranks in the ep axis the same experts train wrong, so they are refused on every mesh. Where the ranks of ep are those of cp, "
    "the finding is SP404 of the rules for cp",
}


class Mark(NamedTuple):
    """A test's `@pytest.mark.proves("tp sp fsdp2")` or `refuses`."""

    kind: str
    words: frozenset[str]
    test: str


@cache
def marks() -> tuple[Mark, ...]:
    return tuple(mark for path in sorted((ROOT / "tests").glob("test_*.py")) for mark in _of(path))


def _of(path: Path) -> Iterator[Mark]:
    for node in ast.parse(path.read_text("utf-8")).body:
        if not isinstance(node, ast.FunctionDef):
            continue
        for decorator in node.decorator_list:
            if not (isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Attribute)):
                continue
            if decorator.func.attr not in {"proves", "refuses"}:
                continue
            for argument in decorator.args:
                words = str(ast.literal_eval(argument)).split()
                unknown = set(words) - set(WORDS)
                assert not unknown, (
                    f"{path.name}: {node.name} proves {unknown}, which are no words of tools/combinations.py"
                )
                yield Mark(decorator.func.attr, frozenset(words), f"{path.name}::{node.name}")


def combinations_document() -> str:
    proven = [mark for mark in marks() if mark.kind == "proves"]
    refused = [mark.words for mark in marks() if mark.kind == "refuses"]
    sets = sorted({_whole(mark.words) for mark in proven}, key=lambda words: [word not in words for word in WORDS])
    lines = [HEAD, "| | " + " | ".join(WORDS) + " |", "|---" * (len(WORDS) + 1) + "|"]
    for row in WORDS:
        cells = []
        for column in WORDS:
            count = sum({row, column} <= words for words in sets)
            no = any(words == {row, column} for words in refused)
            cells.append(str(count) if count else "refused" if no else "")
        lines.append(f"| **{row}** | " + " | ".join(cells) + " |")
    lines += ["", "## Sets", "", "| set | tests |", "|---|---|"]
    for words in sets:
        tests = sorted({mark.test for mark in proven if _whole(mark.words) == words})
        shown = "<br>".join(f"`{test}`" for test in tests)
        lines.append(f"| {' '.join(word for word in WORDS if word in words)} | {shown} |")
    lines += ["", "## Refused", "", "| set | tests |", "|---|---|"]
    for mark in sorted((mark for mark in marks() if mark.kind == "refuses"), key=lambda mark: sorted(mark.words)):
        lines.append(f"| {' '.join(word for word in WORDS if word in mark.words)} | `{mark.test}` |")
    lines += ["", "## Right, and refused", "", SOME_RIGHT, "", "| code | what is right |", "|---|---|"]
    lines += [f"| [{code}](diagnostics/{code}.md) | {what} |" for code, what in RIGHT_AND_REFUSED.items()]
    return "\n".join(lines) + "\n"


def _whole(words: frozenset[str]) -> frozenset[str]:
    return words | {"fsdp2"} if "hsdp" in words else words
