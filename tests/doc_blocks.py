"""The code blocks of README.md and docs/: each carries a mark that says how it is held to be true.

The mark is an HTML comment before the block:

    <!-- run -->               console: each `$` line is run, what it prints must be what follows it; python: is run
    <!-- run on 4 ranks -->    python: all such blocks of the file, in order, on 4 real processes
    <!-- file NAME -->         the block is written to NAME, for the blocks after it
    <!-- wrong file NAME -->   the same; it is a plan with an error
    <!-- same as PATH -->      the block is the project's file PATH
    <!-- plan -->              yaml: sections of a plan, which has no findings with `version: "1"` put before it
    <!-- wrong plan -->        the same, but it has an error
    <!-- not run: REASON -->   nothing can be checked here, for the reason that is given

A comment `<!-- setup ... -->` is Python that is run on the ranks too, but not shown; `<!-- setup of PATH -->` is the first
block of another page that is run on ranks. The blocks of a file share one
folder, in which the project's demo, examples and plans are, and one namespace.

`python tests/doc_blocks.py FILE...` writes what the commands print into the files: read the difference before you commit it.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import tests.unbounded  # noqa: E402, F401
from tests.case_tree import without_operation  # noqa: E402

LINKED = ("demo", "examples", "plans", "schemas")
CHECKED = {"console", "python", "yaml", "json"}  # languages of blocks that must have a mark

MARK = re.compile(
    r"^(?P<indent> *)<!-- (?P<mark>run|run on \d+ ranks|(?:wrong )?file \S+|same as \S+|plan|wrong plan|not run: .+) -->$"
)
SETUP_OF = re.compile(r"^<!-- setup of (\S+) -->$")
FENCE = re.compile(r"^ *```(?P<language>\w*)$")
# What may differ from machine to machine: rounding errors, and where the largest of them is.
ROUNDING = (
    (re.compile(r"\d\.\de[+-]\d\d"), "<error>"),
    (re.compile(r"(worst <error> at) \S+"), r"\1 <name>"),
    (re.compile(r"\brank \d\b"), "<rank>"),
)


@dataclass(frozen=True)
class Block:
    """A code block.

    Args:
        line: of the opening fence, from 1.
        language: after the fence; "setup" for a setup comment.
        mark: what its comment says, or None.
        text: without the fences.
    """

    line: int
    language: str
    mark: str | None
    text: str

    @property
    def file(self) -> str | None:
        """What the block is written to."""
        found = re.fullmatch(r"(?:wrong )?file (\S+)", self.mark or "")
        return found and found[1]


def documents() -> list[str]:
    """The files whose blocks are checked, relative to the project's root. Generated ones have their own tests."""
    written = [path for folder in ("docs", "docs/guides", "reports") for path in (ROOT / folder).glob("*.md")]
    names = sorted(
        str(p.relative_to(ROOT))
        for p in written
        if p.name not in {"api.md", "cli.md", "diagnostics.md", "combinations.md"}
    )
    return ["README.md", "CONTRIBUTING.md", *names]


def blocks(text: str) -> Iterator[Block]:
    """The blocks of a document in order."""
    lines = text.splitlines()
    mark, i = None, 0
    while i < len(lines):
        if lines[i].strip() == "<!-- setup":
            end = lines.index("-->", i)
            yield Block(i + 1, "setup", None, "\n".join(lines[i + 1 : end]))
            i = end
        elif found := SETUP_OF.match(lines[i]):
            first = next(
                b for b in blocks((ROOT / found[1]).read_text("utf-8")) if (b.mark or "").startswith("run on ")
            )
            yield Block(i + 1, "setup", None, first.text)
        elif found := MARK.match(lines[i]):
            mark = found["mark"]
        elif found := FENCE.match(lines[i]):
            end = next(j for j in range(i + 1, len(lines)) if lines[j].strip() == "```")
            yield Block(i + 1, found["language"], mark, "\n".join(lines[i + 1 : end]))
            mark, i = None, end
        elif lines[i].strip():
            mark = None
        i += 1


def commands(text: str) -> Iterator[tuple[str, str]]:
    """(command, what it prints) of a console block."""
    command, output = None, []
    for line in text.splitlines():
        if line.startswith("$ "):
            if command is not None:
                yield command, "\n".join(output).rstrip()
            command, output = line[2:], []
        else:
            output.append(line)
    if command is not None:
        yield command, "\n".join(output).rstrip()


class Session:
    """The blocks of one file are run one after the other in a folder."""

    def __init__(self, folder: Path):
        self.folder, self.code = folder, 0
        self.namespace: dict[str, object] = {"__name__": "__docs__"}
        for name in LINKED:
            (folder / name).symlink_to(ROOT / name)

    def python(self, block: Block) -> None:
        with self._inside():
            exec(compile("\n" * block.line + block.text, "<block>", "exec"), self.namespace)

    def write(self, name: str, block: Block) -> None:
        (self.folder / name).write_text(block.text + "\n", encoding="utf-8")

    def command(self, line: str) -> str:
        """What a command prints."""
        words = shlex.split(line)
        if words == ["echo", "$?"]:
            return str(self.code)
        assert words[0] == "shardplan", f"only shardplan commands are run: {line}"
        from shardplan.cli.main import main

        printed = io.StringIO()
        with self._inside(), redirect_stdout(printed):
            self.code = main([word for part in words[1:] for word in self._expanded(part)])
        return printed.getvalue().rstrip()

    def _expanded(self, word: str) -> list[str]:
        """A glob as a shell expands it; keys of plans are not given on command lines."""
        if "*" not in word:
            return [word]
        return sorted(str(p.relative_to(self.folder)) for p in self.folder.glob(word)) or [word]

    @contextmanager
    def _inside(self) -> Iterator[None]:
        before, path, modules = dict(os.environ), list(sys.path), set(sys.modules)
        os.environ["NO_COLOR"] = "1"
        sys.path.insert(0, str(self.folder))
        try:
            with chdir(self.folder):
                yield
        finally:
            sys.path[:] = path
            os.environ.clear()
            os.environ.update(before)
            for name in set(sys.modules) - modules:
                if str(self.folder) in str(getattr(sys.modules[name], "__file__", "")):
                    del sys.modules[name]  # another document may have a module of that name


def plain(text: str) -> str:
    """The text without what differs from machine to machine."""
    text = without_operation(text)
    for pattern, word in ROUNDING:
        text = pattern.sub(word, text)
    return "\n".join(line.rstrip() for line in text.splitlines()).rstrip()


def lint(text: str) -> tuple[str, bool]:
    """The findings of sections of a plan, and whether there is an error among them."""
    from shardplan.language import parse_text
    from shardplan.report import text as rendered

    head = "" if text.lstrip().startswith(("version:", "# yaml-language-server")) else 'version: "1"\n'
    parsed = parse_text(head + text, file="<block>", folder=ROOT / "plans")
    return rendered(parsed.diagnostics, parsed.sources, color=False), any(d.is_error for d in parsed.diagnostics)


def run_text(code: str, folder: str) -> bool:
    """Run the code of a document on one rank, in a folder and a namespace of its own."""
    with chdir(folder):
        exec(compile(code, "<document>", "exec"), {"__name__": "__docs__"})
    return True


def rewrite(name: str, folder: Path) -> str:
    """The document with what its commands print now."""
    text = (ROOT / name).read_text("utf-8")
    lines, session, shift = text.splitlines(), Session(folder), 0
    for block in list(blocks(text)):
        if block.file:
            session.write(block.file, block)
        elif block.mark and block.mark.startswith("same as "):
            new = (ROOT / block.mark.removeprefix("same as ")).read_text("utf-8").splitlines()
            start = block.line + shift
            old = len(block.text.splitlines())
            lines[start : start + old] = new
            shift += len(new) - old
        elif block.mark == "run" and block.language == "python":
            session.python(block)
        elif block.mark == "run" and block.language == "console":
            new = []
            for command, _ in commands(block.text):
                new += [f"$ {command}", *session.command(command).splitlines()]
            start = block.line + shift
            old = len(block.text.splitlines())
            lines[start : start + old] = [line.rstrip() for line in new]
            shift += len(new) - old
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    import tempfile

    for document in sys.argv[1:] or documents():
        with tempfile.TemporaryDirectory() as scratch:
            written = rewrite(document, Path(scratch).resolve())
        if written != (ROOT / document).read_text("utf-8"):
            (ROOT / document).write_text(written, "utf-8")
            print(f"wrote {document}")
