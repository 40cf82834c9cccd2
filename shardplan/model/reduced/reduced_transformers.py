"""Making the reduced model of a transformers model, of the same class: its configuration, its layers, its weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from math import sqrt
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from shardplan.core.tree import ModuleTree
from shardplan.model.adapters import adapters_in, unwrapped
from shardplan.model.build_tree import tree_of
from shardplan.model.config_numbers import config_value, text_config
from shardplan.model.found import FoundModel
from shardplan.model.model_findings import causes, reason, refuse
from shardplan.model.rebinding import NotBound, copied

from .carry import carry
from .fields import Roles, role
from .layers import Kept, candidates, layer_lists, skeleton
from .live import Live, live_of
from .measured import CHANNELS, SMALLEST, constructed, usual_names, with_usual_names
from .model_inputs import labels_of, sequence_length
from .own_copies import LARGEST, NO_REDUCED_MODEL, not_carried
from .pictures import parts
from .scale import HEAD_DIMS
from .shrink import reduced_config
from .weights import randomise, without_noise

MEASURED: dict[tuple[type, str, int], Mapping[str, str]] = {}  # the usual names of numbers
Adapting = Callable[[nn.Module], nn.Module]  # puts a model's adapters into a reduced model


def maker(
    cls: type[PreTrainedModel], config: PreTrainedConfig, adapted: Adapting, seed: int, options: Mapping[str, Any]
) -> Callable[[], nn.Module]:
    """A function that builds models with the same random weights. They are copies of one model: a copy costs a third of a new model."""

    @cache
    def first() -> nn.Module:
        made = adapted(constructed(cls, config, "cpu", seed, **options)).train()
        without_noise(made)  # also dropout that no field of the configuration sets
        randomise(made, seed)
        return made

    return lambda: copied(first())


def original_of(
    model: FoundModel | nn.Module,
) -> tuple[str, nn.Module, PreTrainedConfig | None, type[PreTrainedModel] | None, ModuleTree, Adapters | None]:
    """Name, module, configuration, class, tree and adapters of the original; the configuration is None for a module that is
    not a transformers model."""
    if isinstance(model, FoundModel):
        name, module, tree = model.name, model.meta if model.meta is not None else model.build("meta"), model.tree
    else:
        module = unwrapped(model)
        name, tree = type(module).__name__, tree_of(module)
    if isinstance(module, PreTrainedModel):
        return name, module, module.config, type(module), tree, adapters_of(module)
    return name, module, None, None, tree, None


def live(module: nn.Module, config: PreTrainedConfig, cls: type[PreTrainedModel], name: str) -> Live | None:
    """What the model has in addition to its class and configuration.

    Raises:
        PlanError: SP520: class and configuration build no model; SP524: the change cannot be made to a reduced model.
    """
    try:
        return live_of(module, constructed(cls, config))
    except NotBound as error:
        raise not_carried(name, error) from error
    except Exception as error:  # raised by the configuration or the modelling code
        raise refuse(
            NO_REDUCED_MODEL, f"{name} cannot be built from its class and configuration", notes=causes(error)
        ) from error


def reduced_config_of(
    config: PreTrainedConfig,
    cls: type[PreTrainedModel],
    tree: ModuleTree,
    adapters: Adapters | None,
    name: str,
    live: Live | None,
    *,
    tp: int,
    ep: int = 1,
    seq_len: int,
    tied: bool | None,
    heads_times: int = 1,
    head_dim: int = HEAD_DIMS[0],
    least: int = 1,
    cp: int = 1,
    shared: Mapping[int, int] = MappingProxyType({}),
) -> tuple[PreTrainedConfig, Kept, Adapting]:
    """The reduced configuration, the layers that it keeps (the fewest whose modules match the original's), and the function that
    adds the adapters and the live model's changes to the reduced model."""
    config = with_usual_names(config, partial(constructed, cls))
    text = text_config(config)
    count = config_value(text, "num_hidden_layers")
    count = count if isinstance(count, int) and count > 0 else 1
    lists = layer_lists(tree, count)
    failures: list[str] = []
    others = [live.of_layer(lists, i) for i in range(count)] if live is not None and lists else ()

    def measured() -> PreTrainedConfig:
        """One size, so that what a name means does not depend on which size a process asks for first."""
        first = candidates(tree, count, vars(text), others)[0]
        return reduced_config(config, tp=2, seq_len=sequence_length(2), kept=first)

    for kept in candidates(tree, count, vars(text), others, least):
        small = partial(
            reduced_config,
            config,
            tp=tp,
            ep=ep,
            seq_len=seq_len,
            kept=kept,
            tied=tied,
            heads_times=heads_times,
            head_dim=head_dim,
            cp=cp,
            shared=shared,
        )
        adapted = _adapting(adapters, live, lists, kept)
        try:
            for smallest in (SMALLEST, CHANNELS):
                reduced = small(roles=roles_of(cls, config, tree, measured, smallest))
                if labels_of(cls) == "class" and getattr(text_config(reduced), "pad_token_id", 0) is None:
                    text_config(reduced).pad_token_id = 0  # such heads look for the last token that is not padding
                plain = constructed(cls, reduced)
                with torch.device("meta"):
                    made = tree_of(adapted(plain))
                size = sum(parameter.numel for _, parameter in made.parameters.values())
                if size <= LARGEST:
                    break
        except NotBound as error:
            raise not_carried(name, error) from error
        except Exception as error:  # the configuration and the modelling code may raise anything on unsuitable numbers
            failures.append(reason(error))
            continue
        if size > LARGEST:
            failures.append(f"the reduced model would have {size:,} parameters, more than {LARGEST:,}")
            continue
        # A tower with the same number of layers as the text model keeps other layers.
        own = [name for name in lists if len(made.children.get(name, ())) == len(kept.layers)]
        if bool(own) == bool(lists) and skeleton(made, own, range(len(kept.layers))) == skeleton(
            tree, own, kept.layers
        ):
            return reduced, kept, adapted
        failures.append(f"the reduced model's layers do not match layers {', '.join(map(str, kept.layers))}")
    raise refuse(
        NO_REDUCED_MODEL,
        f"no reduced model of {name} can be made for tp={tp}",
        notes=tuple(dict.fromkeys(failures)),
        help="name a small configuration of the architecture, or a `module:callable` that builds a small model",
    )


def roles_of(
    cls: type[PreTrainedModel],
    config: PreTrainedConfig,
    tree: ModuleTree,
    small: Callable[[], PreTrainedConfig],
    smallest: int,
) -> Roles:
    """The role of a field: by its name, by the usual name that the configuration's class maps to it, or as it is measured, once
    for each configuration.

    Args:
        small: makes the numbers small whose names have roles.
        smallest: of the numbers that are measured.
    """
    key = (cls, str(config.to_dict()), smallest)
    dims = {dim for _, parameter in tree.parameters.values() for dim in parameter.shape}
    admits = cache(lambda number: number >= smallest and any(dim % number == 0 for dim in dims))
    for base in (small, lambda: config):
        try:
            if key not in MEASURED:
                MEASURED[key] = usual_names(base(), partial(constructed, cls), admits)
        except Exception:  # raised by the configuration or the modelling code, as widths do not fit together
            continue
    names = dict(MEASURED.get(key, {}))
    names |= {name: usual for part in parts(config) for usual, name in part.attribute_map.items() if role(usual)}
    return lambda name: role(name) or role(names.get(name, ""))


def _adapting(adapters: Adapters | None, live: Live | None, lists: tuple[str, ...], kept: Kept) -> Adapting:
    def original(name: str) -> str:
        for listing in lists:
            index, dot, rest = name.removeprefix(f"{listing}.").partition(".")
            if name.startswith(f"{listing}.") and index.isdecimal():
                return f"{listing}.{kept.layers[int(index)]}{dot}{rest}"
        return name

    def adapted(model: nn.Module) -> nn.Module:
        model = model if adapters is None else adapt(model, adapters, original)
        return model if live is None else carry(live, model, original)

    return adapted


# The adapters of a reduced model: they have a small rank, and are on the layers whose originals have adapters.
SMALLEST_RANK = 2  # rank of an adapter; each next larger rank in the original becomes one more


@dataclass(frozen=True, slots=True)
class Adapted:
    """One adapter of one layer.

    Args:
        rank, scaling: those of the layer.
        variant: the class that computes the adapter, where it does not use LoRA's own formula.
    """

    rank: int
    scaling: float
    variant: str | None


@dataclass(frozen=True)
class Adapters:
    """The adapters of a model.

    Args:
        configs: the adapter's name -> peft's configuration.
        active: the names of the adapters that run.
        layers: layer, by the name that rules match -> adapter -> its settings there.
        trained: parameter, by the name that rules match -> whether it is trained.
    """

    configs: Mapping[str, Any]
    active: tuple[str, ...]
    layers: Mapping[str, Mapping[str, Adapted]]
    trained: Mapping[str, bool]


def adapters_of(model: nn.Module) -> Adapters | None:
    """The adapters that peft put into a model; None for a model without adapters."""
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, Mapping):
        return None
    layers = {name: dict(_adapted(wrapper)) for name, wrapper in adapters_in(model)}
    wrappers: list[Any] = [wrapper for _, wrapper in adapters_in(model)]  # layers of peft, of several classes
    active = tuple(wrappers[0].active_adapters) if wrappers else tuple(configs)
    trained = {name: p.requires_grad for name, p in model.named_parameters(remove_duplicate=False)}
    return Adapters(dict(configs), active, layers, trained)


def _adapted(wrapper: Any) -> Iterator[tuple[str, Adapted]]:
    variants = getattr(wrapper, "lora_variant", {})
    for name, rank in getattr(wrapper, "r", {}).items():
        variant = type(variants[name]).__name__ if name in variants else None
        yield name, Adapted(rank, wrapper.scaling[name], variant)


def reduced_rank(adapters: Adapters, rank: int) -> int:
    """A small rank: the ranks keep their order, and equal ranks stay equal."""
    ranks = sorted({one.rank for layer in adapters.layers.values() for one in layer.values()})
    return min(rank, SMALLEST_RANK + ranks.index(rank))


def adapt(model: nn.Module, adapters: Adapters, original: Callable[[str], str]) -> nn.Module:
    """Put small adapters into a reduced model, and freeze what is frozen in the original.

    Args:
        model: changed in place.
        original: the name that a module or parameter of the reduced model has in the original.

    Raises:
        ValueError: peft creates other adapters than the original's.
        Exception: whatever peft raises.
    """
    # The original has adapters of peft, so peft is installed.
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTuner

    names = [name for name, _ in model.named_modules()]
    wanted = {name: adapters.layers[original(name)] for name in names if original(name) in adapters.layers}
    wrapped: PeftModel | None = None
    with torch.random.fork_rng(devices=[]):
        for adapter, config in adapters.configs.items():
            reduced = _config(config, adapter, wanted, adapters)
            if wrapped is None:
                wrapped = PeftModel(model, reduced, adapter_name=adapter, autocast_adapter_dtype=False)
            else:
                wrapped.add_adapter(adapter, reduced, autocast_adapter_dtype=False)
    assert wrapped is not None
    assert isinstance(wrapped.base_model, BaseTuner)
    wrapped.base_model.set_adapter(list(adapters.active))
    result = unwrapped(wrapped)
    without_noise(result)  # afterwards, so that dropout modules exist: peft makes none for the probability 0
    made = {name: {a: one.variant for a, one in _adapted(wrapper)} for name, wrapper in adapters_in(result)}
    if made != {name: {a: one.variant for a, one in layer.items()} for name, layer in wanted.items()}:
        raise ValueError("peft puts adapters into the reduced model that differ from the original's")
    for name, parameter in result.named_parameters():
        parameter.requires_grad_(adapters.trained[original(name)])
    return result


def _config(config: Any, adapter: str, wanted: Mapping[str, Mapping[str, Adapted]], adapters: Adapters) -> Any:
    """peft's configuration of one adapter for exactly these layers; weights that would begin with zeros are random."""
    own = {name: layer[adapter] for name, layer in wanted.items() if adapter in layer}
    ranks = {name: reduced_rank(adapters, one.rank) for name, one in own.items()}
    root = (lambda rank: sqrt(rank)) if config.use_rslora else (lambda rank: rank)
    reduced = copy.deepcopy(config)
    reduced.target_modules = set(own)
    reduced.exclude_modules = reduced.layers_to_transform = reduced.layers_pattern = None
    reduced.rank_pattern = ranks
    reduced.alpha_pattern = {name: own[name].scaling * root(rank) for name, rank in ranks.items()}
    reduced.init_lora_weights = False
    reduced.inference_mode = False
    return reduced
