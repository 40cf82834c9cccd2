"""`lint` of folders, annotations for GitHub, and the schema for editors."""

import json
import re

import pytest

from shardplan.cli.editor_settings import SCHEMA, schema_line, with_schema
from shardplan.cli.main import main
from shardplan.language import json_schema


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "plans/a.yaml": 'version: "1"\nextends: llama\n',
        "plans/deep/b.json": '{"version": "1", "extends": "llama"}',
        "plans/.hidden/c.yaml": "nonsense",
        "plans/notes.txt": "nonsense",
        "empty/notes.txt": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_folder_is_all_plans_in_it(folder, capsys):
    assert main(["lint", "plans"]) == 0
    assert capsys.readouterr().out == "no findings in 2 files\n"
    assert main(["lint", "plans", "plans/a.yaml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plans"] == ["plans/a.yaml", "plans/deep/b.json"]
    (folder / "plans/deep/d.yml").write_text('version: "1"\ntensor_parallel: {a: colwyse}\n')
    assert main(["lint", "plans"]) == 1
    assert capsys.readouterr().out.endswith("1 error in 3 files\n")


def test_a_folder_without_plans_is_a_wrong_command(folder, capsys):
    assert main(["lint", "empty"]) == 2
    assert "empty has no file that ends with .yaml, .yml, .json" in capsys.readouterr().err


def test_annotations_stand_at_the_lines(folder, capsys):
    (folder / "a,b.yaml").write_text('version: "1"\ntensor_parallel:\n  "x%:y": colwyse\n')
    assert main(["lint", "a,b.yaml", "--github"]) == 1
    line, *rest = capsys.readouterr().out.splitlines()
    match = re.fullmatch(r"::error title=(\w+),line=3,endLine=3,col=11,endColumn=18,file=a%2Cb.yaml::(.*)", line)
    match = match or re.fullmatch(
        r"::error title=(\w+),file=a%2Cb.yaml,line=3,endLine=3,col=11,endColumn=18::(.*)", line
    )
    assert match and match[1] == "SP106" and "%0Ahelp: did you mean `colwise`?" in match[2]
    assert any("error[SP106]" in text for text in rest)
    assert main(["lint", "a,b.yaml", "--github", "--json"]) == 2


class TestSchema:
    def test_it_has_a_name_with_its_version(self):
        assert json_schema()["$id"] == "urn:shardplan:plan:1" and "-1." in SCHEMA

    def test_it_is_installed_and_other_settings_stay(self, folder):
        place = folder / ".vscode"
        place.mkdir()
        (place / "settings.json").write_text('{"editor.rulers": [110], "yaml.schemas": {"other.json": ["x"]}}')
        assert main(["editor", "schema", "--install"]) == 0
        settings = json.loads((place / "settings.json").read_text())
        assert settings["editor.rulers"] == [110] and settings["yaml.schemas"]["other.json"] == ["x"]
        (mine,) = (name for name in settings["yaml.schemas"] if SCHEMA in name)
        assert json.loads((folder / mine).read_text()) == json_schema()
        before = (place / "settings.json").read_text()
        assert main(["editor", "schema", "--install", "."]) == 0
        assert (place / "settings.json").read_text() == before

    def test_settings_with_comments_are_not_rewritten(self, folder, capsys):
        (folder / ".vscode").mkdir()
        (folder / ".vscode/settings.json").write_text("{} // mine")
        assert main(["editor", "schema", "--install"]) == 2
        assert "add {" in capsys.readouterr().err
        assert (folder / ".vscode/settings.json").read_text() == "{} // mine"
        assert main(["editor", "schema", "--install", "no-such-folder"]) == 2
        assert main(["editor", "schema", "--install", "--report"]) == 2

    def test_globs_that_somebody_chose_stay(self):
        chosen = json.dumps({"yaml.schemas": {f"./.vscode/{SCHEMA}": ["mine/*.yaml"]}})
        assert json.loads(with_schema(chosen)) == json.loads(chosen)

    def test_the_line_leads_to_the_installed_schema(self, folder):
        assert schema_line(folder / "plans" / "new.yaml") == ""
        main(["editor", "schema", "--install"])
        line = schema_line(folder / "plans" / "new.yaml")
        assert line == f"# yaml-language-server: $schema=../.vscode/{SCHEMA}\n"
