"""Making the reduced model of a transformers model, of the same class: its configuration, its layers, its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from shardplan.core.tree import ModuleTree
from shardplan.model.adapters import unwrapped
from shardplan.model.build_tree import tree_of
from shardplan.model.config_numbers import config_value, text_config
from shardplan.model.found import FoundModel
from shardplan.model.model_findings import causes, reason, refuse
from shardplan.model.rebinding import NotBound, copied

from .carry import carry
from .fields import Roles, role
from .layers import Kept, candidates, layer_lists, skeleton
from .live import Live, live_of
from .measured import SMALLEST, constructed, usual_names, with_usual_names
from .model_inputs import labels_of
from .own_copies import LARGEST, NO_REDUCED_MODEL, not_carried
from .pictures import parts
from .reduced_adapters import Adapters, adapt, adapters_of
from .scale import HEAD_DIMS
from .shrink import reduced_config
from .weights import randomise, without_noise

MEASURED: dict[tuple[type, str], Mapping[str, str]] = {}  # the usual names of numbers
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
        try:
            reduced = small(roles=roles_of(cls, config, tree, small))
            if labels_of(cls) == "class" and getattr(text_config(reduced), "pad_token_id", 0) is None:
                text_config(reduced).pad_token_id = 0  # such heads look for the last token that is not padding
            adapted = _adapting(adapters, live, lists, kept)
            plain = constructed(cls, reduced)
            with torch.device("meta"):
                made = tree_of(adapted(plain))
        except NotBound as error:
            raise not_carried(name, error) from error
        except Exception as error:  # the configuration and the modelling code may raise anything on unsuitable numbers
            failures.append(reason(error))
            continue
        size = sum(parameter.numel for _, parameter in made.parameters.values())
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
    cls: type[PreTrainedModel], config: PreTrainedConfig, tree: ModuleTree, small: Callable[[], PreTrainedConfig]
) -> Roles:
    """The role of a field: by its name, by the usual name that the configuration's class maps to it, or as it is measured, once
    for each configuration.

    Args:
        small: makes the numbers small whose names have roles.
    """
    key = (cls, str(config.to_dict()))
    dims = {dim for _, parameter in tree.parameters.values() for dim in parameter.shape}
    admits = cache(lambda number: number >= SMALLEST and any(dim % number == 0 for dim in dims))
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
