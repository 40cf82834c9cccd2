"""transformers' `DistributedConfig` (with the fields of 5.23): overrides of a model's own plans, and the sizes of the mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardplan.core.diagnostics import Diagnostic, Location

from .entries import IMPLIED, LEFT_OUT, NEEDS_MODEL, NO_FORM, NO_LAYOUTS, finding, quoted
from .foreign_places import Places

# The config's sizes -> the axes of `build_mesh`.
SIZES = {
    "dp_replicate_size": "dp_replicate",
    "fsdp_size": "dp_shard",
    "tp_size": "tp",
    "ep_size": "ep",
    "pp_size": "pp",
}
PLANS = ("tp_plan", "ep_plan", "fsdp_plan")
FLAGS = ("enable_sequence_parallel", "enable_expert_parallel", "fsdp_cpu_offload", "fsdp_mixed_precision")
IMPLEMENTATIONS = ("auto", "all_to_all", "all_reduce", "deepgemm_megamoe")
FIELDS = (*PLANS, *SIZES, *FLAGS, "ep_implementation")
FREED, KEPT = "free_full_weight", "keep_full_weight"  # the config's styles for FSDP2 units
# The compute dtypes of `fsdp_mixed_precision`.
DTYPES = {"param": "bfloat16", "reduce": "float32"}


@dataclass(frozen=True, slots=True)
class Wanted:
    """A config's settings for a model.

    Args:
        styles, experts: names -> styles, of the model's own plan with the config's changes.
        summed: whether all ranks have all tokens, and the outputs of the experts are added up.
        units: globs of data-parallel units; None: as without a config.
        wrapping: other fields of `data_parallel`.
        notes: lines for the plan file.
        findings: what is left out.
    """

    styles: Mapping[str, Any]
    experts: Mapping[str, Any]
    summed: bool = False
    units: tuple[str, ...] | None = None
    wrapping: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    findings: tuple[Diagnostic, ...] = ()


def config_of(source: object) -> Mapping[str, Any] | None:
    """The fields of a config, given as an object or a mapping; None for anything else."""
    if type(source).__name__ == "DistributedConfig" and callable(getattr(source, "to_dict", None)):
        return dict(source.to_dict())  # type: ignore[attr-defined]
    is_one = isinstance(source, Mapping) and any(name in source for name in (*PLANS, *SIZES, "pp_plan"))
    return source if is_one else None  # type: ignore[return-value]


def wanted_of(config: Mapping[str, Any], file: str, found: Any, own: Mapping[str, Mapping[str, Any]] | None) -> Wanted:
    """Read a config's settings.

    Args:
        found: the model.
        own: transformers' plans for it, by the names in `PLANS`; None without a model.
    """
    findings: list[Diagnostic] = []

    def say(code: Any, message: str, *path: str, help: str | None = None, warning: bool = False) -> None:
        findings.append(finding(code, message, Location(file, path), help=help, warning=warning))

    for name, what in config.items():
        if name == "pp_plan":
            say(LEFT_OUT, "`pp_plan` is no field of a config: stages are cut by the plan here", name, warning=True)
        elif name not in FIELDS:
            say(LEFT_OUT, f"a DistributedConfig has no field {quoted(str(name))}", str(name), warning=True)
        elif name in SIZES and not (what is None or (type(what) is int and what > 0)):
            say(NO_FORM, f"`{name}` must be a whole number, 1 or more, or null, not {what!r}", name)
        elif name in PLANS and not (
            what is None or isinstance(what, Mapping) or (name == "tp_plan" and what == "auto")
        ):
            say(NO_FORM, f"`{name}` must be a mapping from names to styles, not {what!r}", name)
    if any(one.is_error for one in findings):
        return Wanted({}, {}, findings=tuple(findings))
    sizes = {axis: config.get(name) or 1 for name, axis in SIZES.items()}
    given = {name: config.get(name) for name in PLANS}
    if config.get("enable_expert_parallel") and config.get("ep_size") is None:  # the old flag, as transformers reads it
        sizes["ep"] = sizes["tp"]
        given["tp_plan"] = {} if given["tp_plan"] is None else given["tp_plan"]
    splits = sizes["tp"] > 1 or (given["tp_plan"] is not None and given["tp_plan"] != {})
    if given["tp_plan"] == {}:
        splits = False
    wraps = sizes["dp_replicate"] * sizes["dp_shard"] > 1
    if own is None and (splits or sizes["ep"] > 1 or wraps):
        message = "a config says what is different from the model's own plans, which are in no file"
        say(NEEDS_MODEL, message, help="name the model: --model")
        return Wanted({}, {}, findings=tuple(findings))
    own = own or {name: {} for name in PLANS}
    merged = {name: {**own[name], **(plan if isinstance(plan, Mapping) else {})} for name, plan in given.items()}
    for name, applied, size in (("ep_plan", sizes["ep"] > 1, "ep_size"), ("fsdp_plan", wraps, "fsdp_size")):
        if given[name] is not None and not applied:
            say(LEFT_OUT, f"`{name}` is applied only where {size} is above 1", name, warning=True)
    if config.get("enable_sequence_parallel"):
        message = "`enable_sequence_parallel` is left out: transformers reserves the word, and does nothing with it"
        help = "`shardplan init MODEL --sequence-parallel` writes the section"
        say(LEFT_OUT, message, "enable_sequence_parallel", help=help, warning=True)
    how = config.get("ep_implementation") or "auto"
    if how not in IMPLEMENTATIONS:
        say(NO_FORM, f"there is no implementation {quoted(str(how))}", "ep_implementation")
    elif how == "deepgemm_megamoe":
        message = "the kernel `deepgemm_megamoe` exchanges tokens by itself; the plan exchanges them by all-to-all"
        say(IMPLIED, message, "ep_implementation", warning=True)
    if sizes["pp"] > 1:
        message = "stages need the section `pipeline_parallel`, which this config does not have"
        say(LEFT_OUT, message, "pp_size", help="`shardplan init MODEL --pipeline` writes it", warning=True)
    units: tuple[str, ...] | None = None
    wrapping: dict[str, Any] = {}
    if wraps:
        units = _units(merged["fsdp_plan"], found, say)
        wrapping = {"reshard_after_forward": True}
        wrapping |= {"cpu_offload": "pinned"} if config.get("fsdp_cpu_offload") else {}
        wrapping |= {"mixed_precision": dict(DTYPES)} if config.get("fsdp_mixed_precision") else {}
    mesh = ", ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)
    return Wanted(
        merged["tp_plan"] if splits else {},
        merged["ep_plan"] if sizes["ep"] > 1 else {},
        how == "all_reduce",
        units,
        wrapping,
        (f"The sizes of the config are those of the mesh: build_mesh({mesh}).",) if mesh else (),
        tuple(findings),
    )


def _units(plan: Mapping[str, Any], found: Any, say: Any) -> tuple[str, ...]:
    """The globs of the units that are freed after the forward. The root is kept: it has the kept modules outside lists, and an
    embedding that is tied to the output head."""
    model, places = found.build(), Places(found.tree)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    inputs = getattr(model, "get_input_embeddings", lambda: None)()
    tied = head is not None and inputs is not None and getattr(head, "weight", 0) is getattr(inputs, "weight", 1)
    units: list[str] = []
    for name, style in plan.items():
        if style not in (FREED, KEPT):
            say(NO_LAYOUTS, f"`{name}`: there is no style of units {quoted(str(style))}", "fsdp_plan", name)
        elif not places.of((name,)):
            say(LEFT_OUT, f"{quoted(name)} matches nothing in this model", "fsdp_plan", name, warning=True)
        elif style == FREED:
            units += [] if tied and inputs is model.get_submodule(name.replace("*", "0")) else [name]
        elif "*" in name:
            message = f"`{name}` is kept after its forward; the plan frees all units, and it is one"
            say(IMPLIED, message, "fsdp_plan", name, warning=True)
            units.append(name)
    return tuple(units)
