"""The demo: its parts, and in the slow tests all of it."""

import os
import re
import subprocess
import sys

import pytest

from demo import shell, training

ROOT = shell.ROOT


def test_curves_that_agree_and_curves_that_do_not():
    one = [5.0, 4.0, 3.0]
    assert training.worst(one, [5.0, 4.000004, 3.0]) == pytest.approx(1e-6)
    assert training.worst(one, [5.0, 4.0, 3.0 * (1 + 2 * training.TOLERANCE)]) > training.TOLERANCE
    with pytest.raises(ValueError):
        training.worst(one, one[:2])


def test_the_table_shows_both_curves():
    lines = training.table([5.0, 4.0, 3.0, 2.0], [5.0, 4.0, 3.0, 2.5], rows=2)
    assert [line.split()[0] for line in lines] == ["step", "1", "2", "4"]
    assert lines[-1].split() == ["4", "2.000000", "########", "2.500000", "##########", "5.0e-01"]


def test_an_exit_code_that_was_not_announced_is_told(capsys):
    assert shell.run("explain", "SP103", expect=0)
    assert not shell.run("explain", "SP103", expect=1)
    printed = capsys.readouterr().out
    assert "$ shardplan explain SP103" in printed
    assert "exit code 0, but 1 was announced" in printed


def test_what_a_failing_command_says_is_shown(capfd):
    code, output = shell.execute([sys.executable, "-c", "import sys; print('out'); sys.exit('went wrong')"])
    assert (code, output) == (1, "out\n")
    code, _ = shell.execute([sys.executable, "-c", "import sys; print('went wrong', file=sys.stderr); sys.exit(3)"])
    assert code == 3
    assert "went wrong" in capfd.readouterr().err


def test_the_text_is_plain_ascii_with_its_source_stated():
    text = (ROOT / "demo" / "text.txt").read_bytes()
    assert text.isascii() and len(text) > 10_000
    assert "public domain" in (ROOT / "demo" / "TEXT.md").read_text("utf-8")


@pytest.mark.slow
def test_the_demo_comes_out_as_announced():
    environment = {**os.environ, "NO_COLOR": "1"}
    result = subprocess.run(
        [sys.executable, "-m", "demo"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "all as announced" in result.stdout
    printed = {without_numbers(line) for line in result.stdout.splitlines()}
    shown = [line for line in readme_lines() if without_numbers(line) not in printed]
    assert not shown, "docs/demo.md shows what the demo does not print:\n" + "\n".join(shown)


def readme_lines():
    """What docs/demo.md shows of the demo's output, without the rows of the loss table."""
    block = (ROOT / "docs/demo.md").read_text("utf-8").partition("$ make demo\n")[2].partition("\n```")[0]
    return [line for line in block.splitlines() if line.strip() != "[...]" and "##" not in line]


def without_numbers(line):
    """Losses, rounding errors, ranks and seconds differ from machine to machine."""
    line = re.sub(r"worst \S+ at \S+", "worst", line)
    return re.sub(r"\d+(\.\d+)?(e[+-]\d+)?", "0", line).strip()


def test_the_comparison_with_the_readme_is_no_empty_one():
    assert len(readme_lines()) > 50
    assert without_numbers("q_proj 7.6e-07 rank 1 equal") == without_numbers("q_proj 1.0e-08 rank 0 equal")
    assert without_numbers("q_proj 7.6e-07 equal") != without_numbers("q_proj 7.6e-07 differs")


@pytest.mark.exhaustive
def test_a_run_that_fails_is_no_agreement(capfd):
    assert not training.compare(steps=2, plan="demo/wrong-qwen3.yaml")
    printed = capfd.readouterr()
    assert "a training run failed" in printed.out
    assert "error[SP310]" in printed.err
