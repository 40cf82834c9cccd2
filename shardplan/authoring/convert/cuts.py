"""Results that a source returns as DTensors, split over their features, to code that cuts them into parts: DTensor gathers them
there, and a plan says which parts each rank holds a slice of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from shardplan.authoring.init.feature_cuts import cut
from shardplan.authoring.init.flow import Flow
from shardplan.authoring.init.parts import features, packed
from shardplan.compiler.layout.model import ModelLayouts
from shardplan.core.diagnostics import Diagnostic, PlanError
from shardplan.model import FoundModel

from .convert_codes import IMPLIED
from .entries import Entry, finding
from .foreign_places import Places

TP = 2  # the size for which the reduced model is made; what is cut does not depend on it


def with_cuts(entries: Iterable[Entry], found: FoundModel, findings: list[Diagnostic]) -> list[Entry]:
    """The entries, with `packed` for each result that the model's code cuts and that the source returns as a DTensor.

    Args:
        findings: a warning (SP546) is added for each.
    """
    entries = list(entries)
    if not any(map(_may_be_cut, entries)):
        return entries
    try:
        bench = ModelLayouts(found, TP).benches[0]
    except PlanError:  # without a run nothing is known of cuts; validating the plan says what stands against it
        return entries
    flow = Flow(bench.reference, bench.tree)
    return [_packed(entry, flow, found, findings) if _may_be_cut(entry) else entry for entry in entries]


def _may_be_cut(entry: Entry) -> bool:
    meaning = entry.meaning
    split = meaning.kind == "colwise" and (meaning.source, meaning.destination) == ("whole", "features")
    return split and meaning.dtensor and entry.layer is not None


def _packed(entry: Entry, flow: Flow, found: FoundModel, findings: list[Diagnostic]) -> Entry:
    names = set(Places(flow.tree).of((entry.pattern,)))
    made = next((product for product in flow.products.values() if product.name in names), None)
    modules = [found.tree.modules[n] for n in Places(found.tree).of((entry.pattern,)) if n in found.tree.modules]
    weight = modules[0].parameter("weight") if modules else None
    if made is None or weight is None or not (lengths := cut(flow, made)):
        return entry
    parts = packed(lengths, flow.tree, found.tree, features(modules[0], weight, "out"))
    if parts is None:
        return entry
    count = parts if isinstance(parts, int) else len(parts)
    message = (
        f"`{entry.pattern}` outputs a DTensor, which is gathered where the code cuts it into {count} parts; "
        "the plan splits each part by itself (`packed_colwise`), which trains the same without gathering"
    )
    help = "check that this is meant; with --model the layouts are proven"
    findings.append(finding(IMPLIED, message, entry.at, help=help, warning=True))
    return replace(entry, meaning=replace(entry.meaning, options={"packed": parts}))
