"""DeepSpeed AutoTP's `partition_config`: layer specs with regular expressions over names of weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardplan.core.diagnostics import Diagnostic, Location

from .entries import (
    LEFT_OUT,
    NEEDS_MODEL,
    NO_FORM,
    NO_GLOB,
    NO_LAYOUTS,
    NO_STYLE,
    Meaning,
    NotConvertible,
    finding,
    quoted,
)
from .regexes import NoGlob, globs_of

# The fields of a layer spec, in DeepSpeed 0.19.
FIELDS = {"patterns", "partition_type", "shape", "partition_dim", "model_types", "gather_output", "grad_allreduce"}
# The fields of a partition config, and those that do not concern splitting.
READ = {"layer_specs", "use_default_specs", "tp_size", "strict_mode"}
LEFT = {
    "embedding_partition_dim": "DeepSpeed 0.19 keeps it and does nothing with it; the embedding stays whole",
    "lm_head_patterns": "they name the head that `vocab_parallel_lm_head` splits, and the specs say what is split here",
}
SUMMED = {"style": "replicated_with_grad_allreduce"}
TYPES = ("column", "row", "skip")


@dataclass(frozen=True, slots=True)
class Spec:
    """One pattern of a layer spec.

    Args:
        globs: the modules whose weight it matches.
        meaning: None where the spec skips them.
        at: its place in the source.
    """

    globs: tuple[str, ...]
    meaning: Meaning | None
    at: Location


def find_config(data: object) -> tuple[Mapping[str, Any], tuple[str, ...], bool] | None:
    """The partition config in a DeepSpeed config, in its section `tensor_parallel`, or on its own: its content, the path to
    it, and whether DeepSpeed adds the specs of a preset. None where the data is something else.

    Raises:
        NotConvertible: SP540: there is only a preset.
    """
    if not isinstance(data, Mapping):
        return None
    section: Mapping[str, Any] = data
    path: tuple[str, ...] = ()
    if isinstance(data.get("tensor_parallel"), Mapping):
        section, path = data["tensor_parallel"], ("tensor_parallel",)
    config = section.get("partition_config")
    if isinstance(config, Mapping):
        return (
            config,
            (*path, "partition_config"),
            bool(section.get("preset_model")) and config.get("use_default_specs", True) is not False,
        )
    if isinstance(section.get("layer_specs"), (list, tuple)):
        return section, path, False
    if path or "preset_model" in section or "autotp_size" in section:
        raise NotConvertible(
            NO_FORM,
            "this config has no `partition_config`: what is split is in DeepSpeed's own tables, not in it",
            help="`shardplan convert hf --model MODEL` converts transformers' plan, which DeepSpeed prefers too",
        )
    return None


def left_out(data: Mapping[str, Any], config: Mapping[str, Any], file: str, path: tuple[str, ...]) -> list[Diagnostic]:
    """A warning for each field of a config that plans do not have."""
    found: list[Diagnostic] = []

    def say(message: str, at: tuple[str, ...], help: str | None = None) -> None:
        found.append(finding(LEFT_OUT, message, Location(file, at), help=help, warning=True))

    for word in config:
        if word in LEFT:
            say(f"`{word}` is left out: {LEFT[word]}", (*path, word))
        elif word not in READ and path[-1:] == ("partition_config",):
            say(f"a partition_config of DeepSpeed 0.19 has no field {quoted(str(word))}", (*path, str(word)))
    section = data.get("tensor_parallel")
    above = section if isinstance(section, Mapping) else data
    if above.get("vocab_parallel_lm_head"):
        where = ("tensor_parallel", "vocab_parallel_lm_head") if above is section else ("vocab_parallel_lm_head",)
        help = "write `lm_head: colwise_vocab`, and `embedding_rowwise` for an embedding that is tied to it"
        say("`vocab_parallel_lm_head` is left out: no spec says which module it is", where, help)
    experts = data.get("expert_parallel")
    if isinstance(experts, Mapping) and experts.get("enabled"):
        help = "`shardplan init MODEL` writes `expert_parallel`, and `shardplan convert hf --model MODEL` converts transformers' plan"
        say(
            "`expert_parallel` is left out: DeepSpeed's presets say which modules are experts",
            ("expert_parallel",),
            help,
        )
    return found


def specs(
    config: Mapping[str, Any], file: str, path: tuple[str, ...], model_type: str | None, *, has_model: bool
) -> tuple[list[Spec], list[Diagnostic]]:
    """The patterns of all specs in order (a weight takes the first match), and what cannot be converted."""
    found: list[Spec] = []
    findings: list[Diagnostic] = []
    for i, spec in enumerate(config.get("layer_specs") or ()):
        at = Location(file, (*path, "layer_specs", i), "value")
        try:
            found += _spec(spec, at, findings, model_type, has_model=has_model)
        except NotConvertible as error:
            findings.append(error.finding(at))
    return found, findings


def _spec(
    spec: Any, at: Location, findings: list[Diagnostic], model_type: str | None, *, has_model: bool
) -> Iterator[Spec]:
    if not isinstance(spec, Mapping) or not isinstance(spec.get("patterns"), (list, tuple)):
        raise NotConvertible(NO_FORM, "a layer spec is a mapping with a list of `patterns`")
    unknown = sorted(set(spec) - FIELDS)
    if unknown:
        raise NotConvertible(NO_FORM, f"a layer spec has no field {quoted(str(unknown[0]))}")
    if spec.get("model_types") and not has_model:
        raise NotConvertible(NEEDS_MODEL, "the spec is for some model types only", help="name the model: --model")
    if spec.get("model_types") and str(model_type).lower() not in [str(t).lower() for t in spec["model_types"]]:
        findings.append(finding(LEFT_OUT, f"the spec is not for the model type {model_type}", at, warning=True))
        return
    meaning = _meaning(spec)
    for j, pattern in enumerate(spec["patterns"]):
        place = Location(at.file, (*at.path, "patterns", j), "value")
        if not isinstance(pattern, str):
            findings.append(finding(NO_GLOB, "a pattern is text", place))
            continue
        try:
            globs = globs_of(pattern)
        except NoGlob as error:
            findings.append(finding(NO_GLOB, f"{quoted(pattern)} has no glob: {error}", place))
            continue
        if globs:
            yield Spec(globs, meaning, place)
        else:
            message = f"{quoted(pattern)} matches the name of no weight"
            help = "DeepSpeed compares with the names of weights: end it with `\\.weight$`"
            findings.append(finding(LEFT_OUT, message, place, help=help, warning=True))


def _meaning(spec: Mapping[str, Any]) -> Meaning | None:
    """The meaning of a spec. Raises NotConvertible (SP541, SP542)."""
    split = str(spec.get("partition_type", "column")).lower()
    if split not in TYPES:
        raise NotConvertible(
            NO_STYLE, f"there is no partition type {quoted(split)}", help=f"they are {', '.join(TYPES)}"
        )
    summed = bool(spec.get("grad_allreduce", False))
    if split == "skip":
        return Meaning("style", "grad_allreduce", options=dict(SUMMED)) if summed else None
    if summed:
        raise NotConvertible(
            NO_LAYOUTS, f"partition_type {split} with grad_allreduce: DeepSpeed reads it of `skip` alone"
        )
    kind, dim = ("colwise", 0) if split == "column" else ("rowwise", 1)
    label = f"partition_type {split}"
    partition_dim = spec.get("partition_dim")
    if partition_dim is not None and partition_dim != dim:
        raise NotConvertible(
            NO_LAYOUTS, f"{label} with partition_dim {partition_dim}: of a weight [out, in] it splits dim {dim}"
        )
    gathered = bool(spec.get("gather_output", False))
    if gathered and kind == "rowwise":
        raise NotConvertible(NO_LAYOUTS, f"{label} with gather_output: a sum over ranks is whole already")
    source, destination = ("whole", "whole" if gathered else "features") if kind == "colwise" else ("features", "whole")
    shape = spec.get("shape")
    if shape is None:
        return Meaning(kind, label, source, destination)  # type: ignore[arg-type]
    parts = _parts(shape, dim, label)
    if gathered:
        raise NotConvertible(NO_LAYOUTS, f"{label} of several parts with gather_output")
    return Meaning("style", label, options={"style": f"packed_{kind}", "packed": parts})


def _parts(shape: Any, dim: int, label: str) -> int | list[int]:
    """The number or the sizes of the parts of a packed dim."""
    if isinstance(shape, (list, tuple)) and len(shape) == 2 and shape[1 - dim] == -1:
        match shape[dim]:
            case int(number) if number > 1 and not isinstance(number, bool):
                return number
            case list() | tuple() as sizes if sizes and all(type(size) is int and size > 0 for size in sizes):
                return list(sizes)
    raise NotConvertible(
        NO_LAYOUTS,
        f"{label} with the shape {shape}: only the split dim of a matrix can have parts, the other is -1",
        help="experts in one weight are split by `packed_colwise`, `rowwise` and `moe_tp_experts`",
    )
