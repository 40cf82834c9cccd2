"""Turn the plans that tools/collect_plans.py found into files of plans/: `python tools/merge_plans.py FOLDER`.

Types whose plans say the same share one file; plans that say the same but for the name of the base model begin with `*`;
a plan that differs little from another extends it. Each file is bound to the models of its types and must give them just
the rules that were found. Files that exist are only given further types.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from shardplan.core.plan import overlays_of

warnings.filterwarnings("ignore")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from shardplan.authoring.init.derive import with_whole_named  # noqa: E402
from shardplan.authoring.init.draft import Draft  # noqa: E402
from shardplan.authoring.init.write import Heading, in_order, plan_text  # noqa: E402
from shardplan.compiler.bind import bind  # noqa: E402
from shardplan.core.mesh import MeshSizes  # noqa: E402
from shardplan.core.plan import PlanFile  # noqa: E402
from shardplan.core.tree import ModuleTree  # noqa: E402
from shardplan.language import parse_plan  # noqa: E402
from shardplan.language.globs import parse_glob  # noqa: E402
from shardplan.language.plan_files import builtin_plans  # noqa: E402
from shardplan.styles import STYLES  # noqa: E402
from tests.model_settings import find  # noqa: E402

SCHEMA = "# yaml-language-server: $schema=../schemas/plan.schema.json\n"
SECTIONS = ("tensor_parallel", "sequence_parallel")
WORTH = 0.8  # of a plan's lines: a child is written where it takes fewer
# Styles that plans/llama.yaml shows; why they are there is not said in every file.
COMMON = ("embedding_rowwise", "embedding_rowwise_seq", "input_with_grad_allreduce", "gather_seq_input", "colwise")
COMMON += ("rowwise", "colwise_gather_output", "sequence_parallel")
Document = dict[str, Any]


def options(said: Any) -> dict[str, Any]:
    return {"style": said} if isinstance(said, str) else dict(said)


def flat(document: Document) -> dict[str, dict[str, dict[str, Any]]]:
    """Section -> single pattern -> options."""
    return {s: {p: options(o) for p, o in document.get(s, {}).items()} for s in SECTIONS}


def said(document: Document) -> str:
    """What a plan says, without its name."""
    return json.dumps({k: v for k, v in document.items() if k not in ("name", "models", "description")}, sort_keys=True)


def with_any_base(document: Document) -> Document:
    """With `*` for the name of the base model."""
    firsts = [p.split(".")[0] for p in document["tensor_parallel"] if ".*." in p]
    base = max(set(firsts), key=firsts.count) if firsts else None

    def renamed(pattern: str) -> str:
        return re.sub(rf"^{base}(?=\.)", "*", pattern)

    result = dict(document)
    for section in SECTIONS:
        if section in document:
            result[section] = {renamed(p): o for p, o in document[section].items()}
    if "data_parallel" in document:
        result["data_parallel"] = {
            **document["data_parallel"],
            "units": [renamed(u) for u in document["data_parallel"]["units"]],
        }
    return result


def groups(documents: Mapping[str, Document]) -> list[tuple[list[str], Document]]:
    """(types, what their plan says)."""
    alike: dict[str, list[str]] = {}
    for name, document in documents.items():
        alike.setdefault(said(with_any_base(document)), []).append(name)
    result = []
    for names in alike.values():
        exact: dict[str, list[str]] = {}
        for name in names:
            exact.setdefault(said(documents[name]), []).append(name)
        if len(exact) == 1:
            result.append((names, documents[names[0]]))
        else:
            result.append((names, with_any_base(documents[names[0]])))
    return result


def assigned(plan: PlanFile, tree: ModuleTree) -> list[Any] | None:
    """What a plan gives each module of a model, without and with its overlay; None where it has errors."""
    result: list[Any] = []
    for on in (False, True) if plan.has_overlay else (False,):
        resolved, about = bind(plan, tree, MeshSizes(tp=2), overlays_of(on))
        if any(d.is_error for d in about):
            return None
        result.append(
            {n: (a.rule.style, a.rule.options) for n, a in resolved.assignments.items()}
            | {"": (tuple(resolved.dp_units), plan.has_overlay)}
        )
    return result


def keys(plan: PlanFile) -> dict[str, dict[str, str]]:
    """Section -> pattern as a plan or its ancestors write it -> style."""
    found: dict[str, dict[str, str]] = {s: {} for s in SECTIONS}
    for file in plan.lineage:
        for section in SECTIONS:
            for rule in getattr(file, section):
                found[section][rule.pattern] = rule.style
    return found


def child(document: Document, parent: PlanFile, tree: ModuleTree) -> Draft:
    """What a plan says beyond its parent."""
    wanted, draft = flat(document), {}
    first: dict[str, str] = {}
    for name in (*tree.modules, *tree.parameters):
        first.setdefault(tree.pattern(name), name)
    names = tuple(first.values())  # one of each kind
    inherited = {s: {} for s in SECTIONS}
    for file in parent.lineage:
        for section in SECTIONS:
            for rule in getattr(file, section):
                for text in parse_glob(rule.pattern).texts:
                    inherited[section][text] = (rule.style, rule.options, rule.optional)
    for section in SECTIONS:
        rules: dict[str, Any] = {}
        for key, style in keys(parent)[section].items():
            glob = parse_glob(key)
            if style != "none" and not any(glob.matches(name) for name in names):
                rules[key] = {"style": "none"}
                continue
            for text in glob.texts:
                known = inherited[section].get(text)
                if text not in wanted[section] and known and known[0] != "none":
                    if any(parse_glob(text).matches(name) for name in names):
                        rules[text] = {"style": "none"}
        for pattern, said_of_it in wanted[section].items():
            known = inherited[section].get(pattern)
            if known is None or _differs(known, said_of_it):
                rules[pattern] = said_of_it
        draft[section] = in_order(rules, tree)
    return Draft(draft["tensor_parallel"], draft["sequence_parallel"] or None)


def _differs(known: tuple[str, Mapping[str, Any], bool], wanted: Mapping[str, Any]) -> bool:
    plan = parse_plan({"version": "1", "name": "x", "tensor_parallel": {"x": dict(wanted)}}, name="x").plan
    rule = plan.tensor_parallel[0]
    return (rule.style, rule.options) != known[:2]


def main(argv: Iterable[str]) -> None:
    parser = argparse.ArgumentParser(prog="python tools/merge_plans.py")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--plans", type=Path, default=ROOT / "plans")
    args = parser.parse_args(list(argv))
    found = {f.stem: json.loads(f.read_text("utf-8")) for f in sorted(args.folder.glob("*.json"))}
    # By what `config.model_type` says, which is not always the type's name.
    documents = {document["models"][0]: document for document in found.values()}
    notes = {d["models"][0]: _notes((args.folder / f"{name}.yaml").read_text("utf-8")) for name, d in found.items()}
    existing = {name: parse_plan(name).plan for name in builtin_plans()}
    of_type = {model: name for name, plan in existing.items() for model in plan.models}
    roots = dict(existing)
    for names, document in sorted(groups(documents), key=lambda g: (-len(g[0]), g[0][0])):
        have = {of_type[name] for name in names if name in of_type}
        new = [name for name in names if name not in of_type]
        if not new:
            continue
        if have:
            plan = existing["llama" if "llama" in have else min(have)]
            path = builtin_plans()[plan.name]
            text = path.read_text("utf-8")
            listed = sorted({*plan.models, *new}, key=lambda n: (n not in plan.models, n))
            path.write_text(
                re.sub(r"^models: \[.*?\]", f"models: [{', '.join(listed)}]", text, flags=re.MULTILINE | re.DOTALL),
                "utf-8",
            )
            print(f"{plan.name}: also {', '.join(new)}")
            continue
        lead = new[0].replace("-", "_")
        tree = find(new[0]).tree
        units = document.get("data_parallel", {}).get("units", [])
        draft = Draft(flat(document)["tensor_parallel"], flat(document)["sequence_parallel"] or None)
        draft = with_whole_named(draft, tree, 2)
        document = document | {"tensor_parallel": draft.tensor_parallel}
        heading = Heading(lead, _described(document["description"], notes[new[0]]), tuple(new), notes[new[0]])
        full = _terse(plan_text(heading, draft, tree, units))
        best, parent = full, None
        target = args.plans / f"{lead}.yaml"
        whole = _parsed(target, full)
        if any(assigned(whole, find(n).tree) is None for n in new):
            print(f"{lead}: does not bind to all of {new}")
        for name, root in roots.items():
            sections = [file.data_parallel for file in root.lineage if file.data_parallel is not None]
            same_units = bool(sections) and list(sections[-1].units) == units
            less = child(document, root, tree)
            if root.has_overlay and not draft.sequence_parallel:
                continue
            text = plan_text(heading, less, tree, () if same_units else units)
            text = text.replace("\nmodels: [", f"\nextends: {name}\nmodels: [", 1)
            text = "\n".join(line for line in text.splitlines() if not line.startswith("  #")) + "\n"
            if len(text.splitlines()) < min(WORTH * len(full.splitlines()), len(best.splitlines())):
                if all(assigned(_parsed(target, text), find(n).tree) == assigned(whole, find(n).tree) for n in new):
                    best, parent = text, name
        target.write_text(SCHEMA + _listed_models(best, new), "utf-8")
        builtin_plans.cache_clear()
        if parent is None:
            roots[lead] = parse_plan(lead).plan
        print(f"{lead}: {len(best.splitlines())} lines{f', extends {parent}' if parent else ''}: {', '.join(new)}")


def _terse(text: str) -> str:
    known = {f"  # {STYLES[style].comment}" for style in COMMON}
    return "\n".join(line for line in text.splitlines() if line not in known) + "\n"


def _parsed(target: Path, text: str) -> PlanFile:
    target.write_text(SCHEMA + text, "utf-8")
    try:
        parsed = parse_plan(str(target))
        errors = [d for d in parsed.diagnostics if d.is_error]
        assert parsed.plan is not None and not errors, (text, errors)
        return parsed.plan
    finally:
        target.unlink()


def _notes(text: str) -> tuple[str, ...]:
    return tuple(line[2:] for line in text.splitlines() if line.startswith("# "))


def _described(text: str, notes: tuple[str, ...]) -> str:
    """The description with what stays whole."""
    whole = re.findall(r"(?:^|\. )(\S+(?:, \S+)*) stay whole on every rank", " ".join(notes))
    return f"{text.rstrip('.')}; {' and '.join(whole)} whole." if whole else text


def _models(names: Iterable[str]) -> str:
    lines, line = [], "models: ["
    for name in names:
        if len(line) + len(name) > 108:
            lines.append(line.rstrip())
            line = "  "
        line += f"{name}, "
    return "\n".join([*lines, line.rstrip(", ") + "]"])


def _listed_models(text: str, names: list[str]) -> str:
    return re.sub(r"^models: \[.*\]$", _models(names), text, count=1, flags=re.MULTILINE)


if __name__ == "__main__":
    main(sys.argv[1:])
