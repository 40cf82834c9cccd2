"""The JSON Schema: up to date, valid, and of one mind with the library about every case file."""

import copy
import functools
import json
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardplan.language import json_schema, parse_plan, parse_text
from shardplan.language.nodes import to_data
from shardplan.language.plan_files import CannotRead, decode
from shardplan.language.reader import read_document
from shardplan.styles import ALIASES, STYLES
from tests.case_tree import CASES, ROOT, cases, read, unpack
from tests.code_pages import codes_in
from tests.sampling import examples

VALIDATOR = jsonschema.Draft202012Validator(json_schema())

# Codes about the form of one document: the schema refuses exactly where the library gives one of these.
FORM = {"SP104", "SP105", "SP106", "SP107", "SP114", "SP115"}
# The others, and why no schema can give them.
NOT_FORM = {
    "SP101": "the text is no text, or there is none",
    "SP102": "an editor's parser has refused the text before a schema is looked at",
    "SP103": "the second of two equal keys is gone before a schema is looked at",
    "SP108": "it depends on which files there are",
    "SP109": "it depends on what other files say",
    "SP110": "links are seen on disk; a separator in `extends` is refused by both",
    "SP111": "sizes of the text, of what aliases repeat and of what patterns stand for; a long pattern by both",
    "SP112": "braces nest, which no regular expression can tell; an empty pattern is refused by both",
    "SP113": "parentheses nest, which no regular expression can tell",
    "SP116": "what patterns stand for is compared",
    "SP117": "what patterns stand for is compared",
    "SP118": "allowed, and only warned of",
}
SEEN_IN_PART = {"SP108", "SP110", "SP111", "SP112"}  # "" for a parent or a pattern, a separator, a long pattern


def content(name: str, data: bytes) -> object:
    """The document as an editor hands it to the schema; None where its text cannot be read."""
    try:
        text = decode(data)
    except CannotRead:
        return None
    document = read_document(text, name, "json" if name.endswith(".json") else "yaml")
    return None if document.root is None else to_data(document.root)


def test_every_code_is_about_the_form_or_has_a_reason() -> None:
    assert FORM | set(NOT_FORM) == set(codes_in("language"))
    assert not FORM & set(NOT_FORM)


def disagreement(data: object, found: set[str]) -> str | None:
    """Where the schema does not refuse what the library gives a form code for, or refuses something else: both verdicts."""
    errors = [error.message for error in VALIDATOR.iter_errors(data)]
    if found & FORM:
        return None if errors else f"the library finds {sorted(found & FORM)}, the schema nothing"
    return f"the schema finds {errors}, the library {sorted(found)}" if errors and not found & SEEN_IN_PART else None


def verdicts_apart(path: Path) -> str | None:
    """The disagreement about a file; of one whose text cannot be read, whether the library says so."""
    found = {d.code for d in parse_plan(path).diagnostics if d.primary.location.file == str(path)}
    data = content(path.name, path.read_bytes())
    if data is not None:
        return disagreement(data, found)
    return (
        None if found & {"SP101", "SP102", "SP111"} else f"nothing can be read, and the library finds {sorted(found)}"
    )


@pytest.mark.slow
def test_schema_and_library_give_the_same_verdict_on_every_case_and_plan(tmp_path: Path) -> None:
    files = sorted((ROOT / "plans").iterdir())
    for case in cases():
        folder = tmp_path / case.name
        folder.mkdir(parents=True)
        unpack(case, folder)
        files += [folder / name for name in case.files]
    apart = {str(path): why for path in files if (why := verdicts_apart(path))}
    assert not apart, "\n".join(f"{path}: {why}" for path, why in apart.items())
    read_ones = [data for path in files if (data := content(path.name, path.read_bytes())) is not None]
    verdicts = [VALIDATOR.is_valid(data) for data in read_ones]
    assert verdicts.count(True) > 10 and verdicts.count(False) > 10, "there are cases of both kinds"


WHOLE = content("plan.yaml", read(CASES / "ok" / "SP1-whole.case").files["plan.yaml"])
ODD = (
    None,
    True,
    0,
    1,
    2.0,
    2.5,
    -1,
    "",
    "1",
    "none",
    "colwise",
    "packed_colwise",
    "gather",
    "a b",
    "x",
    [],
    [1],
    {},
    {"style": "none"},
)
WORDS = (
    "style",
    "output",
    "grad",
    "packed",
    "argument",
    "arguments",
    "read_outside",
    "seq_dim",
    "divides",
    "optional",
    "units",
    "x.y",
)


def places(data: object, path: tuple = ()) -> list[tuple]:
    inner = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [path, *(place for key, value in inner for place in places(value, (*path, key)))]


@st.composite
def edited(draw: st.DrawFn) -> object:
    """A valid plan with one to three values changed, removed or added."""
    data = copy.deepcopy(WHOLE)
    for _ in range(draw(st.integers(1, 3))):
        found = [place for place in places(data) if place]
        if not found:  # all of it is removed
            break
        *path, last = draw(st.sampled_from(found))
        parent = functools.reduce(lambda inner, step: inner[step], path, data)
        match draw(st.sampled_from(["change", "remove", "add"])):
            case "change":
                parent[last] = copy.deepcopy(draw(st.sampled_from(ODD)))
            case "remove":
                del parent[last]
            case "add" if isinstance(parent, dict):
                parent[draw(st.sampled_from(WORDS))] = copy.deepcopy(draw(st.sampled_from(ODD)))
    return data


@settings(max_examples=examples(80), deadline=None)
@given(edited())
def test_schema_and_library_agree_on_edits_of_a_plan(data: object) -> None:
    found = {d.code for d in parse_text(json.dumps(data), format="json").diagnostics}
    assert disagreement(data, found) is None


def test_the_schema_is_valid_and_editors_have_it() -> None:
    jsonschema.Draft202012Validator.check_schema(json_schema())
    assert json.loads((ROOT / "schemas" / "plan.schema.json").read_text("utf-8")) == json_schema()


def objects(schema: object, path: str = "#"):
    """(path, name, schema) of every field in a schema."""
    if isinstance(schema, dict):
        if "description" in schema or "additionalProperties" in schema:
            for name, field in schema.get("properties", {}).items():
                yield f"{path}/{name}", field
        for key, value in schema.items():
            yield from objects(value, f"{path}/{key}")
    elif isinstance(schema, list):
        for i, value in enumerate(schema):
            yield from objects(value, f"{path}/{i}")


def test_every_field_has_a_text_and_examples_that_are_valid() -> None:
    schema = json_schema()
    fields = dict(objects(schema))
    assert len(fields) > 30
    wrong = []
    for path, field in fields.items():
        described = field.get("description") or schema["$defs"][field["$ref"].split("/")[-1]].get("description")
        if not described or not described.endswith("."):
            wrong.append(f"{path}: its text is {described!r}, no sentence")
        if not field.get("examples"):
            wrong.append(f"{path}: no examples")
        validator = VALIDATOR.evolve(schema={**field, "$defs": schema["$defs"]})
        wrong += [f"{path}: {one!r} is not valid" for one in field.get("examples", ()) if not validator.is_valid(one)]
    assert not wrong, "\n".join(wrong)


def test_every_style_has_the_text_of_its_record() -> None:
    choices = {one["const"]: one["description"] for one in json_schema()["$defs"]["StyleName"]["oneOf"]}
    assert set(choices) == {*STYLES, *ALIASES, "none"}
    assert all(choices[style.name] == style.summary for style in STYLES.values())
