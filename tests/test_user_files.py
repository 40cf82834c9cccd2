"""Files that users name: only regular ones are read, up to a bound; what is written is whole, and keeps the form of what was there."""

from __future__ import annotations

import ast
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from shardplan.cli.main import main
from shardplan.core.user_files import CannotRead, in_form_of, read_bytes, write_whole

PACKAGE = Path(__file__).parents[1] / "shardplan"
UGLY = 'version: "1"\ntensor_parallel:\n    a.b:   colwise\n'
PRETTY = 'version: "1"\n\ntensor_parallel:\n  a.b: colwise\n'
# Files that a command line names, by what they are for.
NAMED = {
    "plan": ["lint", "{}.yaml"],
    "plan of a model": ["validate", "llama", "{}.yaml", "--quick"],
    "formatted plan": ["fmt", "{}.yaml"],
    "lock": ["diff", "--against", "{}"],
    "device": ["fit", "llama", "--gpus", "8", "--global-batch", "8", "--seq-len", "8", "--device", "{}.json"],
    "model": ["list", "{}.json"],
    "foreign plan": ["convert", "{}.json"],
}


class TestReading:
    @pytest.mark.parametrize("name", NAMED)
    @pytest.mark.parametrize("kind", ["pipe", "endless", "folder", "missing", "a loop of links", "large"])
    def test_no_command_waits_or_reads_without_end(self, name, kind, tmp_path, capsys):
        path = tmp_path / "it"
        words = [word.format(path) for word in NAMED[name]]
        file = next(word for word in words if word.startswith(str(path)))
        match kind:
            case "pipe":
                os.mkfifo(file)
            case "endless":
                os.symlink("/dev/zero", file)
            case "folder":
                os.mkdir(file)
            case "a loop of links":
                os.symlink(file, file)
            case "large":
                with open(file, "wb") as made:
                    made.truncate(2**40)  # it takes no room
        if kind == "folder" and name in ("plan", "formatted plan", "model"):
            pytest.skip("a folder is what this command takes")
        assert main(words) in (1, 2)
        shown = capsys.readouterr()
        assert Path(file).name in shown.out + shown.err

    def test_no_more_than_the_bound_is_read(self, tmp_path):
        (tmp_path / "a").write_bytes(b"x" * 10)
        assert read_bytes(tmp_path / "a", 10) == b"x" * 10
        with pytest.raises(CannotRead, match="is larger than 9 bytes"):
            read_bytes(tmp_path / "a", 9)
        with pytest.raises(CannotRead, match="null"):
            read_bytes("a\0b", 9)


class TestWriting:
    def test_mode_link_and_content(self, tmp_path):
        file, link = tmp_path / "folder" / "file", tmp_path / "link"
        file.parent.mkdir()
        file.write_text("old")
        file.chmod(0o640)
        link.symlink_to(Path("folder", "file"))
        write_whole(link, "new\r\n")
        assert link.is_symlink() and file.read_bytes() == b"new\r\n" and stat.S_IMODE(file.stat().st_mode) == 0o640
        assert sorted(os.listdir(tmp_path)) == ["folder", "link"] and os.listdir(file.parent) == ["file"]

    def test_a_new_file_has_the_mode_of_new_files(self, tmp_path):
        (tmp_path / "usual").touch()
        write_whole(tmp_path / "new", b"x")
        assert (tmp_path / "new").stat().st_mode == (tmp_path / "usual").stat().st_mode
        (tmp_path / "dangling").symlink_to("target")
        write_whole(tmp_path / "dangling", b"y")
        assert (tmp_path / "target").read_bytes() == b"y"

    @pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives files away")
    def test_the_owner_stays(self, tmp_path):
        (tmp_path / "a").touch()
        os.chown(tmp_path / "a", 1234, 1235)
        write_whole(tmp_path / "a", b"x")
        assert ((tmp_path / "a").stat().st_uid, (tmp_path / "a").stat().st_gid) == (1234, 1235)

    def test_a_pipe_is_written_as_it_is(self, tmp_path):
        os.mkfifo(tmp_path / "pipe")
        with subprocess.Popen(["cat", tmp_path / "pipe"], stdout=subprocess.PIPE) as reader:
            write_whole(tmp_path / "pipe", "through")
            assert reader.communicate()[0] == b"through"
        assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)

    def test_standard_output_is_written_as_it_is(self, tmp_path):
        code = "from shardplan.core.user_files import write_whole; write_whole('/dev/stdout', 'x')"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=PACKAGE.parent, check=True)
        assert done.stdout == b"x"

    def test_what_cannot_be_written_is_an_error(self, tmp_path):
        for wrong in (tmp_path, tmp_path / "no" / "folder", "a\0b", "/dev/full"):
            with pytest.raises(OSError):
                write_whole(wrong, b"x")
        assert os.listdir(tmp_path) == []

    def test_on_a_full_disk_the_old_file_is_whole(self, tmp_path):
        """A process that may write files of 16 bytes at most meets the error of a full disk in the same place."""
        plan = tmp_path / "plan.yaml"
        plan.write_text(UGLY)
        code = (
            "import resource, signal, sys\n"
            "from shardplan.cli.main import main\n"
            "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (16, 16))\n"
            "sys.exit(main(['fmt', sys.argv[1]]))\n"
        )
        words = [sys.executable, "-B", "-c", code, str(plan)]
        done = subprocess.run(words, capture_output=True, text=True, cwd=PACKAGE.parent, check=False)
        assert done.returncode == 2 and f"cannot write {plan}" in done.stderr
        assert plan.read_text() == UGLY and os.listdir(tmp_path) == ["plan.yaml"]

    def test_killed_at_any_moment_the_old_file_or_the_new_one_is_there(self, tmp_path, monkeypatch):
        plan = tmp_path / "plan.yaml"
        for name in ("fsync", "replace", "chmod"):
            plan.write_text(UGLY)

            def stop(*words, name=name):
                raise KeyboardInterrupt(name)

            with monkeypatch.context() as patch:
                patch.setattr(os, name, stop)
                assert main(["fmt", str(plan)]) == 130
            assert plan.read_text() == UGLY and os.listdir(tmp_path) == ["plan.yaml"]


class TestForm:
    @pytest.mark.parametrize("end", ["\n", "\r\n", "\r"], ids=["unix", "windows", "mac"])
    @pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "marked"])
    def test_formatting_keeps_line_ends_and_the_mark(self, end, mark, tmp_path, capsys):
        plan = tmp_path / "plan.yaml"

        def encoded(text):
            return (mark + text.replace("\n", end)).encode()

        plan.write_bytes(encoded(UGLY))
        assert main(["fmt", str(plan), "--check"]) == 1
        assert main(["fmt", str(plan)]) == 0
        assert plan.read_bytes() == encoded(PRETTY)
        assert main(["fmt", str(plan), "--check"]) == 0
        assert plan.read_bytes() == encoded(PRETTY)

    def test_of_several_line_ends_the_most_frequent(self):
        assert in_form_of(b"a\r\nb\r\nc\n", "x\ny\n") == "x\r\ny\r\n"
        assert in_form_of(b"", "x\ny\n") == "x\ny\n"

    @pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "marked"])
    def test_findings_are_at_the_same_place(self, mark, tmp_path, capsys):
        plan = tmp_path / "plan.yaml"
        wrong = 'version: "1"\ntensor_parallel:\n  a.b: colwize\n'
        places = []
        for end in ("\n", "\r\n"):
            for text in (wrong, wrong.replace("version", "versoin")):  # on the first line too
                plan.write_bytes((mark + text.replace("\n", end)).encode())
                assert main(["lint", str(plan)]) == 1
                places.append(capsys.readouterr().out)
        assert places[:2] == places[2:] and "plan.yaml:3:8" in places[0] and "plan.yaml:1:1" in places[1]

    def test_settings_of_an_editor(self, tmp_path):
        settings = tmp_path / ".vscode" / "settings.json"
        settings.parent.mkdir()
        settings.write_bytes(b'{\r\n  "a": 1\r\n}\r\n')
        assert main(["editor", "schema", "--install", str(tmp_path)]) == 0
        text = settings.read_bytes()
        assert text.count(b"\r\n") == text.count(b"\n") and b'"a": 1' in text


# Rooms and files that write what no user wrote: checkpoints by a protocol of their own, a file between two processes of ours.
OTHERS = {"weights", "proof/processes.py", "compat/trainer_saves.py"}


def test_no_other_place_of_the_package_writes_a_file():
    found = []
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE)
        if str(name) in OTHERS or name.parts[0] in OTHERS or str(name) == "core/user_files.py":
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and _writes(node):
                found.append(f"{name}:{node.lineno}")
    assert found == []


def _writes(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    modes = [word.value for word in (*call.args, *(k.value for k in call.keywords)) if isinstance(word, ast.Constant)]
    opens = name == "open" and any(
        isinstance(mode, str) and set(mode) & set("wax+") and len(mode) < 4 for mode in modes
    )
    return opens or (name in ("write_text", "write_bytes", "savefig", "rename", "mkstemp") and not _to_memory(call))


def _to_memory(call: ast.Call) -> bool:
    return bool(call.args) and isinstance(call.args[0], ast.Name) and call.args[0].id == "drawn"


def test_no_command_reads_a_file_by_itself():
    wrong = []
    for path in (PACKAGE / "cli").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            name = getattr(node, "attr", "") if isinstance(node, ast.Attribute) else getattr(node, "id", "")
            if name in ("read_text", "open"):
                wrong.append(f"{path.name}:{node.lineno}")
    assert wrong == []
