"""The small copy of a model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from shardplan.core.diagnostics import PlanError
from shardplan.core.tree import ModuleTree
from shardplan.models.adapters import unwrapped
from shardplan.models.findings import reason, refuse
from shardplan.models.found import FoundModel, Inputs
from shardplan.models.numbers import config_value, text_config
from shardplan.models.offline import offline
from shardplan.models.rebinding import NotBound
from shardplan.models.tree import tree_of

from .adapters import Adapters, adapt, adapters_of
from .carry import carry
from .codes import NO_TWIN, NOT_CARRIED, NOT_RUNNING
from .images import Fitting, fitting
from .inputs import Labels, Padding, image_inputs, labels_of, sequence_length, text_inputs
from .layers import Kept, candidates, layer_lists, skeleton
from .live import Live, live_of
from .own import LARGEST, checked, inputs_of, module_maker
from .shrink import small_config
from .weights import randomise


@dataclass(frozen=True, eq=False)
class Twin:
    """A small model of the same classes as a large one, for running both sharded and unsharded.

    Args:
        name: the original's.
        tp: the number of ranks that it was made for.
        seq_len: the length of its inputs; tp divides it.
        config: the small configuration, or None for a module without one.
        kinds: the kinds of inputs that it takes: "text", "image" and "video", or "own".
        layers: which of the original's layers it has.
        maker: builds a model with the twin's weights.
        feeder: gives inputs: (kind, seed, padding) -> keyword arguments of `forward`.
        unseen: why images that the model takes are not among its inputs.
    """

    name: str
    tp: int
    seq_len: int
    config: PreTrainedConfig | None
    kinds: tuple[str, ...]
    layers: tuple[int, ...]
    maker: Callable[[], nn.Module]
    feeder: Callable[[str, int, Padding | None], dict[str, Any]]
    unseen: str = ""

    def build(self) -> nn.Module:
        """A fresh model on the CPU in training mode without dropout; each call gives the same weights."""
        return self.maker()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around a forward of the unsharded model.

        Raises:
            PlanError: SP523: it raised.
        """
        try:
            yield
        except PlanError:  # about its inputs
            raise
        except Exception as error:  # whatever the modelling code raises
            raise refuse(NOT_RUNNING, f"the small copy of {self.name} does not run", notes=(reason(error),)) from error

    def inputs(self, seed: int = 0, kind: str | None = None, padding: Padding | None = None) -> dict[str, Any]:
        """Keyword arguments of `forward`: for language models `input_ids` and `labels` [2, seq_len].

        Args:
            seed: other values for each.
            kind: one of `kinds`; None is the first.
            padding: also give an `attention_mask` that pads the second row on that side.

        Raises:
            ValueError: the twin takes no inputs of that kind.
        """
        kind = self.kinds[0] if kind is None else kind
        if kind not in self.kinds:
            raise ValueError(f"the twin of {self.name} takes inputs of kind {', '.join(self.kinds)}, not {kind!r}")
        return self.feeder(kind, seed, padding)


def make_twin(
    model: FoundModel | nn.Module,
    *,
    tp: int,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    tied: bool | None = None,
    attn_implementation: str | None = None,
    experts_implementation: str | None = None,
    inputs: Inputs | None = None,
) -> Twin:
    """A small copy of a model.

    Counts keep their relation to tp (divided by it or not, below it or not) and to each other (grouped-query
    attention stays grouped); every kind of layer is there once, at least two layers; dropout and other noise
    are off; no parameter is zero or one. Adapters of peft are at the same layers, of a small rank, and what is frozen
    beside them is frozen. A module without a transformers configuration is copied as it is.

    Args:
        model: what `find_model` gave, or a module on any device (its weights are not read, unless it has no
            configuration).
        tp: the number of ranks that it will be split over.
        seed: of the weights. The same seed gives the same weights in every dtype, up to rounding.
        dtype: of the parameters.
        tied: whether embedding and head are one Parameter; None: as in the original.
        attn_implementation: "sdpa" or "eager"; None: the class's default.
        experts_implementation: "eager" (a loop over the experts), "grouped_mm" or "batched_mm"; None: the
            default.
        inputs: for a module without configuration: seed -> keyword arguments of its `forward`.

    Raises:
        PlanError: SP520, SP521, SP522.
        ValueError: `tied` for a model that cannot be so.
    """
    if not isinstance(tp, int) or tp < 1:
        raise ValueError(f"tp must be a positive integer, not {tp!r}")
    own_code = isinstance(model, nn.Module) or model.own_code
    if isinstance(model, FoundModel):
        inputs = inputs or model.inputs
        model = model.module if model.module is not None else model
    name, module, config, cls, tree, adapters = _original(model)
    implementations = {
        "attn_implementation": attn_implementation,
        "experts_implementation": experts_implementation,
    }
    options = {key: value for key, value in implementations.items() if value is not None}
    if config is None or cls is None:
        if tied is not None or options:
            raise ValueError(f"{name} has no transformers configuration to change")
        return _module_twin(model, name, tp, seed, dtype, inputs)
    if inputs is not None:
        raise ValueError(f"the inputs of {name} follow from its configuration; `inputs` is for modules without one")
    live = _live(module, config, cls, name) if own_code else None
    small, kept, adapted = _small(config, cls, tree, adapters, name, live, tp=tp, tied=tied)
    maker = _maker(cls, small, adapted, seed, {"dtype": dtype, **options})
    if tied is not None and bool(tree_of(maker()).tied) != tied:
        raise ValueError(f"{name} cannot be built with tied={tied}: {cls.__name__} has no embedding and head to tie")
    seq_len, labels = sequence_length(tp), labels_of(cls)
    images, unseen = _images(maker(), small, labels, seq_len)

    def feed(kind: str, seed: int, padding: Padding | None) -> dict[str, Any]:
        if kind in images:
            return image_inputs(small, labels, seq_len, seed, padding, images[kind])
        return text_inputs(small, labels, seq_len, seed, padding)

    return Twin(name, tp, seq_len, small, ("text", *images), kept.layers, maker, feed, unseen)


def _images(
    model: nn.Module, config: PreTrainedConfig, labels: Labels | None, seq_len: int
) -> tuple[dict[str, Fitting], str]:
    """The kinds of images that a small model takes, and why those are left out that it takes in an unknown form."""
    found: dict[str, Fitting] = {}
    unseen = []

    def tries(images: Fitting) -> None:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            inputs = image_inputs(config, labels, seq_len, 0, None, images)
            dtype = next(model.parameters()).dtype
            model(**{k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()})

    for kind in ("image", "video"):
        images = fitting(model, config, kind, tries)
        if isinstance(images, Fitting):
            found[kind] = images
        elif images:
            unseen.append(f"{kind}s: {images}")
    return found, "; ".join(unseen)


def _module_twin(
    model: FoundModel | nn.Module, name: str, tp: int, seed: int, dtype: torch.dtype, inputs: Inputs | None
) -> Twin:
    """The twin of a module without configuration: itself with random weights."""
    seq_len = sequence_length(tp)
    maker = module_maker(model, name, seed, dtype)
    own = checked(inputs, name) if inputs is not None else inputs_of(maker(), name, seq_len)
    return Twin(name, tp, seq_len, None, ("own",), (), maker, lambda kind, seed, padding: dict(own(seed)))


Adapting = Callable[[nn.Module], nn.Module]  # what puts a model's adapters into a small copy


def _maker(
    cls: type[PreTrainedModel], config: PreTrainedConfig, adapted: Adapting, seed: int, options: Mapping[str, Any]
) -> Callable[[], nn.Module]:
    """What builds models that all have the same random weights."""

    def make() -> nn.Module:
        return adapted(_construct(cls, config, "cpu", seed, **options)).train()

    @cache
    def state() -> dict[str, torch.Tensor]:
        first = make()
        randomise(first, seed)
        return {key: value.clone() for key, value in first.state_dict().items()}

    def build() -> nn.Module:
        fresh = make()
        fresh.load_state_dict(state())
        return fresh

    return build


def _original(
    model: FoundModel | nn.Module,
) -> tuple[str, nn.Module, PreTrainedConfig | None, type[PreTrainedModel] | None, ModuleTree, Adapters | None]:
    """Name, module, configuration, class, picture and adapters of the original; no configuration where it is no transformers
    model."""
    if isinstance(model, FoundModel):
        name, module, tree = model.name, model.meta if model.meta is not None else model.build("meta"), model.tree
    else:
        module = unwrapped(model)
        name, tree = type(module).__name__, tree_of(module)
    if isinstance(module, PreTrainedModel):
        return name, module, module.config, type(module), tree, adapters_of(module)
    return name, module, None, None, tree, None


def _live(module: nn.Module, config: PreTrainedConfig, cls: type[PreTrainedModel], name: str) -> Live | None:
    """What the model has beside its class and configuration.

    Raises:
        PlanError: SP520: they build no model; SP524: what no reduced model can have.
    """
    try:
        return live_of(module, _construct(cls, config, "meta", 0))
    except NotBound as error:
        raise not_carried(name, error) from error
    except Exception as error:  # of the configuration and the modelling code
        raise refuse(NO_TWIN, f"{name} cannot be built from its class and configuration", notes=(reason(error),)) from error


def not_carried(name: str, error: NotBound) -> PlanError:
    return refuse(
        NOT_CARRIED,
        f"{name} was changed after it was built, in a way that its reduced model cannot have: {error}",
        help="apply the plan first and change the model afterwards, or give `reduced`: a function that builds a small "
        "model with the same changes",
    )


def _small(
    config: PreTrainedConfig,
    cls: type[PreTrainedModel],
    tree: ModuleTree,
    adapters: Adapters | None,
    name: str,
    live: Live | None,
    *,
    tp: int,
    tied: bool | None,
) -> tuple[PreTrainedConfig, Kept, Adapting]:
    """The small configuration, the layers that it keeps (the fewest whose modules come out as the original's), and what
    puts the adapters, and what else the live model has, into its model."""
    text = text_config(config)
    count = config_value(text, "num_hidden_layers")
    count = count if isinstance(count, int) and count > 0 else 1
    lists = layer_lists(tree, count)
    failures: list[str] = []
    others = [live.of_layer(lists, i) for i in range(count)] if live is not None and lists else ()
    for kept in candidates(tree, count, vars(text), others):
        try:
            small = small_config(config, tp=tp, seq_len=sequence_length(tp), kept=kept, tied=tied)
            if labels_of(cls) == "class" and text_config(small).pad_token_id is None:
                text_config(small).pad_token_id = 0  # such heads look for the last token that is no padding
            adapted = _adapting(adapters, live, lists, kept)
            plain = _construct(cls, small, "meta", 0)
            with torch.device("meta"):
                made = tree_of(adapted(plain))
        except NotBound as error:
            raise not_carried(name, error) from error
        except Exception as error:  # what the configuration and the modelling code raise on numbers they do not like
            failures.append(reason(error))
            continue
        size = sum(parameter.numel for _, parameter in made.parameters.values())
        if size > LARGEST:
            failures.append(f"the small model would have {size:,} parameters, more than {LARGEST:,}")
            continue
        if skeleton(made, lists, range(len(kept.layers))) == skeleton(tree, lists, kept.layers):
            return small, kept, adapted
        failures.append(f"the small model's layers are not those of layers {', '.join(map(str, kept.layers))}")
    raise refuse(
        NO_TWIN,
        f"no small copy of {name} can be made for tp={tp}",
        notes=tuple(dict.fromkeys(failures)),
        help="name a small configuration of the architecture, or a `module:callable` that builds one",
    )


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


def _construct(
    cls: type[PreTrainedModel], config: PreTrainedConfig, device: str, seed: int, **options: Any
) -> PreTrainedModel:
    """A model from a copy of the configuration; the random state outside is left as it was."""
    with offline(), torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        return cls._from_config(copy.deepcopy(config), **{"dtype": torch.float32, **options})
