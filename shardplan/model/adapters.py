"""The adapters that `peft` puts around layers. They are recognised by their structure: nothing here imports peft.

A wrapper holds the layer as `base_layer` and dicts of adapters by name (`lora_A.default`); its class lists the names of
these dicts. A module that is trained whole is stored as `original_module`, with its copies in `modules_to_save`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from shardplan.core.diagnostics import Code
from shardplan.core.tree import AdapterPart, ModuleKind

from .model_findings import refuse

OUTSIDE_ADAPTER = Code("SP516")

PARTS: Mapping[str, AdapterPart] = {
    "lora_A": "A",
    "lora_B": "B",
    "lora_embedding_A": "embedding_A",
    "lora_embedding_B": "embedding_B",
    "lora_magnitude_vector": "magnitude",
}


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside peft's wrapper; `model` itself where there is no wrapper.

    Raises:
        PlanError: SP516: the wrapper has parameters of its own.
    """
    inner = getattr(model, "get_base_model", None)
    if not callable(inner) or not isinstance(getattr(model, "peft_config", None), Mapping):
        return model
    base = inner()
    own = {id(p) for p in base.parameters()}
    outside = [name for name, p in model.named_parameters() if id(p) not in own]
    if outside:
        raise refuse(
            OUTSIDE_ADAPTER,
            f"{type(model).__name__} has parameters outside the model that it wraps, such as {outside[0]}",
            help="use adapters of the model's layers, such as LoRA",
        )
    return base


def is_wrapper(module: nn.Module) -> bool:
    """Whether a module is peft's wrapper of a layer."""
    return "base_layer" in module._modules and isinstance(getattr(type(module), "adapter_layer_names", None), tuple)


def layer_of(wrapper: nn.Module) -> tuple[str, nn.Module]:
    """The layer inside a wrapper (or inside nested wrappers), and the path to it."""
    path, layer = "base_layer", wrapper.get_submodule("base_layer")
    while is_wrapper(layer):
        path, layer = f"{path}.base_layer", layer.get_submodule("base_layer")
    return path, layer


def copies_of(module: nn.Module) -> tuple[str, ...]:
    """The names of the whole copies of a module inside its wrapper: the original and those that are trained."""
    saved = module._modules.get("modules_to_save")
    if "original_module" not in module._modules or not isinstance(saved, nn.ModuleDict):
        return ()
    return ("original_module", *(f"modules_to_save.{name}" for name in saved))


def part_of(name: str, wrapper: nn.Module, kind: ModuleKind, parameter: nn.Parameter, layer: nn.Module) -> AdapterPart:
    """The role of a wrapper's parameter in its layer, by its name there and its shape."""
    if isinstance(getattr(wrapper, "parameter_name", None), str):
        return "parameter"
    part = PARTS.get(name.partition(".")[0], "other")
    sizes = _sizes(kind, layer)
    if sizes is None:
        return "other"
    features, out = sizes
    table = kind == "embedding"
    fits = {
        "A": not table and parameter.ndim == 2 and parameter.shape[1] == features,
        "B": not table and parameter.ndim in (1, 2) and parameter.shape[0] == out,
        "embedding_A": table and parameter.ndim == 2 and parameter.shape[1] == features,
        "embedding_B": table and parameter.ndim == 2 and parameter.shape[0] == out,
        "magnitude": parameter.ndim == 1,
    }
    return part if fits.get(part) else "other"


def _sizes(kind: ModuleKind, layer: nn.Module) -> tuple[int, int] | None:
    """The input (rows of a table) and output features of a layer."""
    weight = getattr(layer, "weight", None)
    if kind not in ("linear", "conv1d", "embedding") or weight is None or weight.ndim != 2:
        return None
    first, second = weight.shape
    return (second, first) if kind == "linear" else (first, second)


def adapters_in(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The adapted layers of a model, the outermost wrapper of each."""
    outer: list[str] = []
    for name, module in model.named_modules():
        if is_wrapper(module) and not any(name.startswith(f"{other}.") for other in outer):
            outer.append(name)
            yield name, module
