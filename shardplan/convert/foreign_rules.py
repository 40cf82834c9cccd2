"""Turning a source's styles into rules. Each kind of module has a table. A sequence-parallel source leaves some moves to
DTensor, or declares them on other modules than a plan does; these are added here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardplan.core.diagnostics import Diagnostic
from shardplan.styles import STYLES

from .entries import IMPLIED, LEFT_OUT, NEEDS_MODEL, NO_LAYOUTS, NO_STYLE, TWO, Entry, NotConvertible, Spread, finding

Options = dict[str, Any]
Pair = tuple[str | None, str | None]  # the styles for the whole sequence, and for slices of it

# (split, source, destination) of a linear layer.
LINEAR: dict[tuple[str, Spread | None, Spread | None], Pair] = {
    ("colwise", "whole", "features"): ("colwise", "colwise"),
    ("colwise", "whole", "whole"): ("colwise_gather_output", "colwise_gather_output"),
    ("colwise", "sequence", "features"): ("colwise", "colwise_seq"),
    ("colwise", "sequence", "whole"): ("colwise_gather_output", "colwise_seq_gather_output"),
    ("rowwise", "features", "whole"): ("rowwise", "rowwise"),
    ("rowwise", "features", "sequence"): ("rowwise", "rowwise_seq"),
    ("rowwise", "whole", "whole"): ("rowwise_split_input", "rowwise_split_input"),
}
# The same for an embedding.
EMBEDDING: dict[tuple[str, Spread | None, Spread | None], Pair] = {
    ("rowwise", "whole", "whole"): ("embedding_rowwise", "embedding_rowwise"),
    ("rowwise", "whole", "sequence"): ("embedding_rowwise", "embedding_rowwise_seq"),
    ("colwise", "whole", "whole"): ("embedding_colwise", "embedding_colwise"),
}
INPUT: dict[tuple[Spread | None, Spread | None], Pair] = {
    ("sequence", "whole"): (None, "gather_seq_input"),
    ("whole", "sequence"): (None, "split_seq_input"),
}
OUTPUT: dict[tuple[Spread | None, Spread | None], Pair] = {
    ("partial", "whole"): ("all_reduce", "all_reduce"),
    ("partial", "sequence"): ("all_reduce", "reduce_scatter"),
}
SUMMED = "moe_tp_experts"
SHARED = {"style": "replicated_with_grad_allreduce"}
SLICED = {"colwise": "colwise_seq", "colwise_gather_output": "colwise_seq_gather_output"}


@dataclass
class Rules:
    """Rules by pattern.

    Args:
        whole: the rules for the whole sequence on every rank.
        sliced: the rules for slices of it.
        experts: the rules for experts that are distributed whole.
        findings: what could not be converted, was left out or was added.
    """

    whole: dict[str, Options] = field(default_factory=dict)
    sliced: dict[str, Options] = field(default_factory=dict)
    experts: dict[str, Options] = field(default_factory=dict)
    findings: list[Diagnostic] = field(default_factory=list)


def rules_of(entries: Iterable[Entry]) -> Rules:
    """The rules for all entries, in their order."""
    rules = Rules()
    kept: list[Entry] = []
    for entry in _without_experts(list(entries), rules):
        if entry.meaning.kind == "nothing":
            message = f"`{entry.pattern}` is left out ({entry.meaning.label}): {entry.meaning.why}"
            rules.findings.append(finding(LEFT_OUT, message, entry.at, warning=True))
            continue
        try:
            whole, sliced = _options(entry)
        except NotConvertible as error:
            rules.findings.append(error.finding(entry.at))
            continue
        if entry.pattern in rules.whole.keys() | rules.sliced.keys():
            if (rules.whole.get(entry.pattern), rules.sliced.get(entry.pattern)) != (whole, sliced):
                message = f"`{entry.pattern}` has two entries: here it is {entry.meaning.label}"
                rules.findings.append(finding(TWO, message, entry.at, help="let one entry match each module"))
            continue
        kept.append(entry)
        if whole is not None:
            rules.whole[entry.pattern] = whole
        if sliced is not None:
            rules.sliced[entry.pattern] = sliced
    if any(entry.meaning.uses_sequence for entry in kept):
        _heads(kept, rules)
        _readers(kept, rules)
        _entrance(kept, rules)
    return rules


def _without_experts(entries: list[Entry], rules: Rules) -> list[Entry]:
    """The entries without those for experts. A rule for a module of experts replaces the entries of its stacks and of the parameters
    below it that all experts share. Before transformers 5.23, `moe_tp_experts` over stacks of whole experts meant that all ranks have all tokens."""
    stacks = {entry.pattern.rpartition(".")[0]: entry for entry in entries if entry.meaning.kind == "stack"}
    others = []
    for entry in entries:
        meaning = entry.meaning
        if meaning.kind == "experts":
            rules.experts[entry.pattern] = dict(meaning.options)
        elif meaning.options.get("style") == SUMMED and entry.pattern in stacks:
            rules.experts[entry.pattern] = {"style": "ep_experts", "output": "all_reduce"}
        elif meaning.kind != "stack":
            others.append(entry)
    for module, entry in stacks.items():
        if module not in rules.experts:
            message = f"`{entry.pattern}` is {entry.meaning.label}, but `{module}` has no entry: experts are distributed by module"
            help = "add the module, `ep_dispatch_experts`"
            rules.findings.append(finding(NO_STYLE, message, entry.at, help=help))
    inside = tuple(f"{module}." for module in rules.experts)
    return [e for e in others if not (e.pattern.startswith(inside) and e.meaning.options == SHARED)]


def _options(entry: Entry) -> tuple[Options | None, Options | None]:
    """The rules for the whole and for the sliced sequence. Raises NotConvertible (SP542, SP544)."""
    meaning = entry.meaning
    if meaning.kind == "style":
        return dict(meaning.options), dict(meaning.options)
    if meaning.kind == "sequence":
        gather = {"output": "gather"} if meaning.destination == "whole" else {}
        return None, _with_dim(entry, {"style": "sequence_parallel", **gather})
    if meaning.kind == "input":
        return _block_input(entry)
    if meaning.kind == "output":
        return _styled(entry, OUTPUT.get((meaning.source, meaning.destination)))
    return _matrix(entry)


def _matrix(entry: Entry) -> tuple[Options | None, Options | None]:
    meaning, kinds = entry.meaning, entry.kinds
    if kinds is not None and "embedding" in kinds and len(kinds) > 1:
        message = (
            f"`{entry.pattern}` matches embeddings and other modules, for which {meaning.label} means different things"
        )
        raise NotConvertible(NO_LAYOUTS, message, help="write an entry for each")
    if kinds is not None and not kinds.isdisjoint(("norm", "dropout", "list")):
        raise NotConvertible(NO_LAYOUTS, f"{meaning.label} splits a matrix, and `{entry.pattern}` has none")
    if kinds is None and meaning.unsure:
        raise NotConvertible(
            NEEDS_MODEL,
            f"`{entry.pattern}`, {meaning.label}: only the model tells whether it is an embedding or a linear layer",
            help="name the model: --model",
        )
    key = (meaning.kind, meaning.source, meaning.destination)
    if "packed" in meaning.options:
        whole, sliced = _styled(entry, LINEAR.get(key))
        assert whole == sliced == {"style": "colwise"}, (whole, sliced)
        options = {"style": "packed_colwise", **meaning.options}
        return dict(options), dict(options)
    if kinds is not None:
        return _styled(entry, (EMBEDDING if kinds == {"embedding"} else LINEAR).get(key))
    if key == ("rowwise", "whole", "sequence"):  # it has no meaning for a linear layer
        return _styled(entry, EMBEDDING[key])
    return _styled(entry, LINEAR.get(key))


def _styled(entry: Entry, pair: Pair | None) -> tuple[Options | None, Options | None]:
    if pair is None:
        meaning = entry.meaning
        what = f"{meaning.source} comes in and {meaning.destination} goes out"
        raise NotConvertible(
            NO_LAYOUTS,
            f"no style of ours has the layouts of `{entry.pattern}`: {meaning.label}",
            help=f"{what}: docs/layouts.md lists the styles with their layouts",
        )
    whole, sliced = pair
    if _outputs_split_logits(entry):
        whole, sliced = "colwise_vocab", sliced if entry.meaning.source == "sequence" else "colwise_vocab"
    return {"style": whole} if whole else None, _with_dim(entry, {"style": sliced}) if sliced else None


def _outputs_split_logits(entry: Entry) -> bool:
    """Whether it is an output head: outside the layers, with an output DTensor that is split over its last dim."""
    meaning = entry.meaning
    return meaning.kind == "colwise" and meaning.destination == "features" and meaning.dtensor and entry.layer is None


def _block_input(entry: Entry) -> tuple[Options | None, Options | None]:
    meaning = entry.meaning
    whole, sliced = _styled(entry, INPUT.get((meaning.source, meaning.destination)))
    assert sliced is not None  # each style in INPUT has one for slices
    if meaning.position > 0:
        raise NotConvertible(
            NO_LAYOUTS,
            f"`{entry.pattern}` moves the argument number {meaning.position + 1}: a rule names its argument",
            help="name it in `input_kwarg_layouts`",
        )
    if meaning.argument is not None:
        sliced["argument"] = meaning.argument
    if meaning.output is not None:
        pair = OUTPUT.get(meaning.output)
        if pair is None or sliced["style"] != "gather_seq_input":
            return _styled(entry, None)
        whole = {"style": pair[0]}
        sliced["output"] = pair[1]
    return whole, sliced


def _with_dim(entry: Entry, options: Options) -> Options:
    if entry.meaning.seq_dim != 1 and STYLES[options["style"]].along_sequence:
        return {**options, "seq_dim": entry.meaning.seq_dim}
    return options


def _heads(entries: list[Entry], rules: Rules) -> None:
    """Where a head reads slices of the sequence, let the norm before it gather the sequence: the code between them (a slice
    of the last positions, a pooling) counts positions of the whole sequence."""
    norms = [
        e for e in entries if e.meaning.kind == "sequence" and e.layer is None and e.meaning.destination == "sequence"
    ]
    for head in entries:
        if head.meaning.kind != "colwise" or head.layer is not None or head.pattern not in rules.sliced:
            continue
        takes_slices = head.meaning.source == "sequence"
        implied = head.meaning.source == "whole" and any(norm.meaning.dtensor for norm in norms)
        if not takes_slices and not implied:
            continue
        if len(norms) == 1:
            rules.sliced[norms[0].pattern]["output"] = "gather"
            rules.sliced[head.pattern] = dict(rules.whole[head.pattern])
            if implied:
                _say_implied(rules, head, f"`{norms[0].pattern}`")
        elif _outputs_split_logits(head):
            raised = NotConvertible(
                NO_LAYOUTS,
                f"`{head.pattern}` reads slices of the sequence and outputs split logits",
                help="gather the sequence at the norm in front of it, one `SequenceParallel` outside of the layers",
            )
            rules.findings.append(raised.finding(head.at))


def _readers(entries: list[Entry], rules: Rules) -> None:
    """Where modules read whole values from norms whose output DTensors are slices, let the module around them gather."""
    for layer in dict.fromkeys(entry.layer for entry in entries if entry.layer is not None):
        own = [entry for entry in entries if entry.layer == layer]
        norms = [e for e in own if e.meaning.kind == "sequence"]
        if not any(e.meaning.dtensor for e in norms) or any(e.meaning.destination == "whole" for e in norms):
            continue
        gathering = [f"{e.pattern}." for e in own if e.meaning.kind == "input" and e.meaning.destination == "whole"]
        readers = [
            e
            for e in own
            if e.meaning.kind in ("colwise", "rowwise")
            and e.meaning.source == "whole"
            and not e.pattern.startswith(tuple(gathering))
        ]
        block_inputs: list[str] = []
        for reader in readers:
            around = reader.pattern.rpartition(".")[0]
            if around != layer:
                block_inputs.append(around)
                rules.sliced.setdefault(around, {"style": "gather_seq_input"})
            elif rules.sliced[reader.pattern]["style"] in SLICED:
                block_inputs.append(reader.pattern)
                rules.sliced[reader.pattern] = {"style": SLICED[rules.sliced[reader.pattern]["style"]]}
        if block_inputs:
            _say_implied(
                rules, readers[0], ", ".join(f"`{block_input}`" for block_input in dict.fromkeys(block_inputs))
            )


def _say_implied(rules: Rules, entry: Entry, where: str) -> None:
    message = f"the source leaves it to DTensor where the sequence is gathered; the plan gathers at {where}"
    help = "check that this is meant; with --model the layouts are proven"
    rules.findings.append(finding(IMPLIED, message, entry.at, help=help, warning=True))


def _entrance(entries: list[Entry], rules: Rules) -> None:
    """Where an embedding outputs slices, keep its output a partial sum up to the first layer's block input: positions and masks
    are counted from this output."""
    sources = [e for e in entries if rules.sliced.get(e.pattern, {}).get("style") == "embedding_rowwise_seq"]
    if not sources or any(options["style"] == "split_seq_input" for options in rules.sliced.values()):
        return
    layers = {e.layer for e in entries if e.layer is not None and e.meaning.uses_sequence}
    if len(layers) != 1 or not next(iter(layers)).endswith(".*"):
        raised = NotConvertible(
            NO_LAYOUTS,
            f"`{sources[0].pattern}` outputs slices of the sequence, and no entry shows which module reads them first",
            help="declare it on the first layer: `PrepareModuleInput(Replicate() -> Shard(1))`",
        )
        rules.findings.append(raised.finding(sources[0].at))
        return
    block_input = f"{next(iter(layers)).removesuffix('*')}0"
    rules.sliced[block_input] = _with_dim(sources[0], {"style": "split_seq_input"})


def overlay(whole: Mapping[str, Options], sliced: Mapping[str, Options]) -> dict[str, Options]:
    """The rules for slices of the sequence that differ from those for the whole sequence."""
    return {pattern: options for pattern, options in sliced.items() if whole.get(pattern) != options}
