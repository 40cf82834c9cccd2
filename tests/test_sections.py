"""A field of a section is written once: what is added to its dataclass is in the schema, read, inherited and checked."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from pydantic import ValidationError

from shardplan.compiler.overrides import overriding_document, with_parent
from shardplan.core.options import option, options
from shardplan.core.plan import PlanFile
from shardplan.core.sections import Compile, DataParallel, Glob, Section, Sections
from shardplan.language import parse_plan
from shardplan.language.build_plan import read_section
from shardplan.language.document.section_models import glob_lists, model_of
from shardplan.language.inherit import effective_sections


@dataclass(frozen=True, slots=True)
class MoreOptions(Section):
    """Options of a section inside a section."""

    width: int | None = option(None, "How wide.", 4, least=2, most=8)
    kind: bool | int = option(False, "Which.", 3, least=1, number="a number of parts")


@dataclass(frozen=True, slots=True)
class MoreCompile(Compile):
    """A section with more fields."""

    dynamic: bool = option(False, "Lengths may change.")
    passes: int = option(1, "How often.", 2, least=1, most=9)
    skipped: tuple[Glob, ...] = option((), "Modules that are left alone.", ["model.layers.0"])
    more: MoreOptions | None = option(None, "More options.", {"width": 4})


@dataclass(frozen=True, slots=True)
class MoreSections(Sections):
    compile: MoreCompile | None = option(None, "Modules that are compiled.", {"dynamic": True})


MODEL = model_of(MoreCompile)


def read(document: dict[str, object]) -> MoreCompile:
    """As a plan's section is read."""
    section = read_section(MoreCompile, MODEL.model_validate(document), ("compile",), "plan.yaml")
    assert isinstance(section, MoreCompile)
    return section


def test_a_new_field_is_in_the_schema() -> None:
    schema = MODEL.model_json_schema()
    fields = schema["properties"]
    assert list(fields) == list(options(MoreCompile)) == [*options(Compile), "dynamic", "passes", "skipped", "more"]
    assert schema["description"] == MoreCompile.__doc__
    assert {"default": False, "description": "Lengths may change.", "examples": [True]}.items() <= fields[
        "dynamic"
    ].items()
    assert (fields["passes"]["minimum"], fields["passes"]["maximum"]) == (1, 9)
    assert fields["skipped"]["items"]["description"].startswith("A glob") and fields["skipped"]["default"] == []
    inner = schema["$defs"]["MoreOptionsFields"]["properties"]
    assert [one["type"] for one in inner["kind"]["oneOf"]] == ["boolean", "integer"]


def test_a_new_field_is_read_with_its_place() -> None:
    section = read({"dynamic": True, "skipped": ["a.*"], "more": {"width": 3}})
    assert section == MoreCompile(dynamic=True, skipped=("a.*",), more=MoreOptions(width=3))
    assert {name: place.path for name, place in section.given.items()} == {
        name: ("compile", name) for name in ("dynamic", "skipped", "more")
    }
    assert section.more is not None and section.more.given["width"].path == ("compile", "more", "width")
    assert section.values["passes"] == 1


def test_an_override_of_a_new_field_is_laid_over_the_plan() -> None:
    document = overriding_document({"compile": {"passes": 5, "more": {"kind": 2}}})
    assert document is not None
    plan = PlanFile("mine", "plan.yaml", compile=read({"dynamic": True, "passes": 2, "more": {"width": 3}}))
    child = replace(PlanFile("arguments", "<arguments>"), compile=read(document["compile"]))
    assert effective_sections(with_parent(child, plan)).compile == MoreCompile(
        dynamic=True, passes=5, more=MoreOptions(3, 2)
    )


@pytest.mark.parametrize(
    ("document", "kind", "place"),
    [
        ({"passes": 0}, "greater_than_equal", ("passes",)),
        ({"passes": 10}, "less_than_equal", ("passes",)),
        ({"dynamic": 1}, "bool_type", ("dynamic",)),
        ({"more": {"width": None}}, "int_type", ("more", "width")),
        ({"more": {"kind": 0}}, "greater_than_equal", ("more", "kind", "a number of parts")),
        ({"more": {"kind": "x"}}, "union_tag_invalid", ("more", "kind")),
        ({"skipped": [""]}, "string_too_short", ("skipped", 0)),
        ({"pases": 2}, "extra_forbidden", ("pases",)),
    ],
)
def test_a_new_field_is_checked(document: dict[str, object], kind: str, place: tuple[object, ...]) -> None:
    with pytest.raises(ValidationError) as caught:
        MODEL.model_validate(document)
    assert [(one["type"], one["loc"]) for one in caught.value.errors()] == [(kind, place)]


def test_what_a_document_leaves_out_has_the_defaults_of_the_dataclass() -> None:
    assert read({}) == MoreCompile() and not read({}).given
    assert set(options(DataParallel)) == set(DataParallel().values)


def test_every_list_of_globs_is_checked() -> None:
    assert set(glob_lists(MoreSections)) == {
        ("data_parallel", "units"),
        ("data_parallel", "ignored"),
        ("activation_checkpointing", "modules"),
        ("compile", "modules"),
        ("compile", "skipped"),
        *(("pipeline_parallel", field) for field in ("layers", "first", "last", "carry")),
        *(("separate_matrices", field) for field in ("parts", "heads")),
    }
    wrong = {"version": "1", "data_parallel": {"units": ["a.*"], "ignored": ["a.{b"]}}
    (finding,) = parse_plan(wrong).diagnostics
    assert (finding.code, finding.primary.location.path) == ("SP112", ("data_parallel", "ignored", 0))
