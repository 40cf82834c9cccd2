"""README.md and docs/ say what is true: their blocks are run, their tables and copies compared with the source."""

import re
import subprocess
import sys

import pytest
from doc_blocks import CHECKED, ROOT, Session, blocks, commands, documents, lint, plain, run_text
from processes import on_ranks
from torch.distributed.fsdp import FSDPModule

from tools import style_table

DOCUMENTS = documents()
TEXTS = {name: (ROOT / name).read_text("utf-8") for name in DOCUMENTS}
BLOCKS = {name: list(blocks(text)) for name, text in TEXTS.items()}
ON_RANKS = [name for name in DOCUMENTS if any((b.mark or "").startswith("run on ") for b in BLOCKS[name])]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_block_says_how_it_is_checked(name):
    unmarked = [f"{name}:{b.line}" for b in BLOCKS[name] if b.language in CHECKED and b.mark is None]
    assert not unmarked, f"put a mark before the block (tests/doc_blocks.py lists them): {', '.join(unmarked)}"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_blocks_do_what_they_show(name, tmp_path):
    session = Session(tmp_path.resolve())
    for block in BLOCKS[name]:
        where = f"{name}:{block.line}"
        if block.file:
            session.write(block.file, block)
        elif block.mark == "run" and block.language == "python":
            session.python(block)
        elif block.mark == "run":
            assert block.language == "console", f"{where}: a block of {block.language} cannot be run"
            for command, expected in commands(block.text):
                printed = session.command(command)
                assert plain(printed) == plain(expected), (
                    f"{where}: $ {command}\n(python tests/doc_blocks.py {name} writes it anew)"
                )


CATCHES = pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"),
    reason="FSDP2 before torch 2.13 cannot go on after a forward that raised",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=CATCHES) if one == "docs/generation.md" else one for one in ON_RANKS]
)
def test_blocks_run_on_ranks(name, tmp_path):
    chosen = [b for b in BLOCKS[name] if (b.mark or "").startswith("run on ") or b.language == "setup"]
    (ranks,) = {int(b.mark.split()[2]) for b in chosen if b.language == "python"}
    code = "\n".join(b.text for b in chosen)
    assert on_ranks(ranks, run_text, code, str(tmp_path), seconds=300) == [True] * ranks


@pytest.mark.parametrize("name", DOCUMENTS)
def test_plans_in_the_text_are_plans(name):
    for block in BLOCKS[name]:
        if (block.file and block.language == "yaml") or block.mark in ("plan", "wrong plan"):
            findings, wrong = lint(block.text)
            assert wrong == (block.mark or "").startswith("wrong "), f"{name}:{block.line}\n{findings}"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_copies_are_equal(name):
    for block in BLOCKS[name]:
        if block.mark and block.mark.startswith("same as "):
            path = block.mark.removeprefix("same as ")
            assert block.text + "\n" == (ROOT / path).read_text("utf-8"), (
                f"{name}:{block.line} is not {path}: python tests/doc_blocks.py {name} writes it anew"
            )


@pytest.mark.parametrize("name", style_table.TABLES)
def test_tables_of_styles_are_what_the_records_say(name):
    assert TEXTS[name] == style_table.with_table(name), f"run `{style_table.COMMAND}` and commit the result"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name):
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```|`[^`\n]*`", "", TEXTS[name], flags=re.DOTALL)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / name).parent / path if path else ROOT / name
        assert file.exists(), f"{name}: {target}"
        if anchor:
            assert anchor in anchors(file.read_text("utf-8")), f"{name}: {target} has no such heading"


def anchors(text):
    """GitHub's anchors of the headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_a_wrong_output_is_noticed(tmp_path):
    session = Session(tmp_path.resolve())
    assert plain(session.command("shardplan explain SP103")) != plain("SP103: something else")


def test_a_style_table_that_is_stale_says_what_to_type(tmp_path):
    (tmp_path / "shardplan").symlink_to(ROOT / "shardplan")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "layouts.md").symlink_to(ROOT / "docs" / "layouts.md")
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "style_table.py").write_text((ROOT / "tools" / "style_table.py").read_text())
    (tmp_path / "docs" / "styles.md").write_text(TEXTS["docs/styles.md"].replace("| `colwise` |", "| `colwyse` |"))
    check = subprocess.run(
        [sys.executable, "tools/style_table.py", "--check"], cwd=tmp_path, capture_output=True, text=True
    )
    assert (check.returncode, "python tools/style_table.py" in check.stdout) == (1, True)


def test_the_table_of_rooms_has_every_room():
    rooms = {p.name for p in (ROOT / "shardplan").iterdir() if p.is_dir() and any(p.glob("*.py"))} | {"api"}
    section = TEXTS["docs/architecture.md"].partition("\n## Rooms\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE)) == rooms


def test_every_fault_has_a_test():
    """But for those that nothing sees, which say so in bold."""
    text = TEXTS["docs/faults.md"] + TEXTS["docs/hostile-files.md"]
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    faults = [row for row in rows if row[0] != "| fault" and not row[0].startswith("| **")]
    assert len(faults) > 15
    for *_, tests in faults:
        for name in tests.strip(" |").split(", "):
            assert (ROOT / "tests" / f"{name}.py").is_file(), name


def test_every_decision_is_listed():
    listed = re.findall(r"\]\((\d{4}-[^)]+)\) \| (.+) \|", (ROOT / "docs/decisions/README.md").read_text("utf-8"))
    files = sorted((ROOT / "docs" / "decisions").glob("0*.md"))
    titles = [re.sub(r"^# \d+[.:] ", "", path.read_text("utf-8").partition("\n")[0]) for path in files]
    assert listed == [(path.name, title) for path, title in zip(files, titles, strict=True)]


def test_decisions_stay_few_and_short():
    """At most 25, each at most a page: another one is merged into the story that it continues."""
    words = {path.name: len(path.read_text("utf-8").split()) for path in (ROOT / "docs/decisions").glob("0*.md")}
    assert 0 < len(words) <= 25, sorted(words)
    assert {name: count for name, count in words.items() if count > 500} == {}


def test_the_page_of_reports_says_what_they_say():
    row = r"^\|[^|]+\| \[[^]]+\]\(\.\./(reports/\S+)\)[^|]*\| ([^|]*) \|"
    said = dict(re.findall(row, TEXTS["docs/reports.md"], flags=re.MULTILINE))
    assert set(said) == {str(path.relative_to(ROOT)) for path in (ROOT / "reports").glob("*.md")}
    for name in said:
        report = (ROOT / name).read_text("utf-8")
        if total := re.search(r"^\| \*\*all\*\* \| (\d+) \| (\d+) \| \d+ \| (\d+)", report, flags=re.MULTILINE):
            assert said[name] == "{} edits, {} of them wrong: {} missed".format(*total.groups())
        elif name == "reports/diffusion-types.md":
            assert not re.search(r"^\| [A-Z]\w+( \(\w+\))? \| [^|]+ \| (?!right \| right)", report, flags=re.MULTILINE)
        else:
            assert said[name] in report, name


def test_the_readme_is_read_in_ten_minutes():
    assert len(TEXTS["README.md"].splitlines()) <= 180
    assert TEXTS["README.md"].count("](") <= 12, "docs/index.md has the others"


@pytest.mark.parametrize("name", [name for name in DOCUMENTS if not name.startswith("reports/")])
def test_a_page_answers_one_question(name):
    """Without what is generated into it: what commands print, and the tables between two markers."""
    written = re.sub(
        r"<!-- (styles: begin|[a-z_]+) -->\n(?!```).*?<!-- (styles: end|end of \w+) -->",
        "",
        TEXTS[name],
        flags=re.DOTALL,
    )
    written = re.sub(r"^```console\n.*?^```$", "", written, flags=re.DOTALL | re.MULTILINE)
    assert len(written.split()) <= 2_500, f"{name}: cut it, or divide it by question (docs/index.md, mkdocs.yml)"
