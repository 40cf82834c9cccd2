"""Files made from the code are what the code says."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools.generate import COMMAND, GENERATED, ROOT


@pytest.mark.parametrize("name", GENERATED)
def test_a_generated_file_is_up_to_date(name):
    path = ROOT / name
    current = path.read_text("utf-8") if path.exists() else None
    assert current == GENERATED[name](), f"{name} is stale: run `{COMMAND}` and commit the result"


def test_check_says_what_to_type(tmp_path):
    copy = tmp_path / "copy"
    for folder in ("shardplan", "plans", "tests", "tools", "docs", "schemas"):
        _link_or_copy(ROOT / folder, copy / folder)
    check = [sys.executable, "tools/generate.py", "--check"]
    (copy / "docs" / "cli.md").write_text("stale", "utf-8")
    page = copy / "docs" / "diagnostics" / "SP401.md"
    page.write_text(page.read_text("utf-8").replace("$ shardplan validate", "$ shardplan check"), "utf-8")
    result = subprocess.run(check, cwd=copy, capture_output=True, text=True)
    assert result.returncode == 1
    assert (
        result.stdout
        == f"docs/diagnostics/SP401.md, docs/cli.md: not what the code says. Run `{COMMAND}` and commit the result.\n"
    )
    assert subprocess.run(check[:-1], cwd=copy, capture_output=True).returncode == 0
    for name in ("docs/cli.md", "docs/diagnostics/SP401.md"):
        assert (copy / name).read_text("utf-8") == (ROOT / name).read_text("utf-8")


def _link_or_copy(source: Path, target: Path) -> None:
    """What is generated is copied, the rest linked; tools is copied, for it finds the root by its own
    place."""
    target.parent.mkdir(exist_ok=True)
    if source.name in {"shardplan", "plans", "tests"}:
        target.symlink_to(source)
        return
    target.mkdir()
    for path in source.iterdir():
        if path.is_dir():
            _link_or_copy(path, target / path.name)
        else:
            (target / path.name).write_bytes(path.read_bytes())
