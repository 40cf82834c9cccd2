"""The reduced model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from shardplan.core.diagnostics import Code, PlanError
from shardplan.core.search_bounds import BOUNDS
from shardplan.core.size_bounds import MOST_RANKS, check_count
from shardplan.model.build_tree import tree_of
from shardplan.model.config_numbers import text_config
from shardplan.model.found import FoundModel, Inputs
from shardplan.model.model_findings import causes, refuse
from shardplan.torchlib.modes import uncompiled

from .feeding import feeding
from .fields import role
from .forms import runs
from .model_inputs import Padding, sequence_length
from .named_reduced import named_by_user
from .outcome import loss_of
from .own_copies import NO_REDUCED_MODEL, checked, inputs_of, module_maker, not_callable
from .pictures import parts
from .precision import cast, without_half
from .reduced_transformers import live, maker, original_of, reduced_config_of
from .scale import HEAD_DIMS
from .weights import without_noise

NOT_RUNNING = Code("SP523")

MOST_RUN = (
    1024  # ranks that run one after the other in one process: each takes about half a second, and its results are kept
)


@dataclass(frozen=True, eq=False)
class ReducedModel:
    """A reduced model with the classes of the original, which can be run sharded and unsharded.

    Args:
        name: the original's name.
        tp: the number of ranks for which it was made.
        seq_len: the length of its inputs; tp divides it.
        config: the reduced configuration, or None for a module without one.
        kinds: the kinds of inputs that it accepts: "text", "image", "video" and "audio", one of plans/inputs.toml, or "own".
        layers: the layers of the original that it has.
        maker: builds a model with the reduced model's weights.
        feeder: gives inputs: (kind, seed, padding) -> keyword arguments of `forward`.
        unseen: why images that the model accepts are not among its inputs.
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
        """The context for a forward of the unsharded model.

        Raises:
            PlanError: SP523: the forward raised an exception.
        """
        try:
            with uncompiled():
                yield
        except PlanError:  # about its inputs
            raise
        except Exception as error:  # the modelling code may raise anything
            raise refuse(NOT_RUNNING, f"the reduced model of {self.name} does not run", notes=causes(error)) from error

    def inputs(self, seed: int = 0, kind: str | None = None, padding: Padding | None = None) -> dict[str, Any]:
        """Keyword arguments of `forward`: for language models `input_ids` and `labels` [2, seq_len].

        Args:
            seed: each seed gives other values.
            kind: one of `kinds`; None is the first.
            padding: also give an `attention_mask` that pads the second row on this side.

        Raises:
            ValueError: the reduced model accepts no inputs of that kind.
        """
        kind = self.kinds[0] if kind is None else kind
        if kind not in self.kinds:
            raise ValueError(
                f"the reduced model of {self.name} accepts inputs of kind {', '.join(self.kinds)}, not {kind!r}"
            )
        return self.feeder(kind, seed, padding)


def make_reduced_model(
    model: FoundModel | nn.Module,
    *,
    tp: int,
    ep: int = 1,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    tied: bool | None = None,
    attn_implementation: str | None = None,
    experts_implementation: str | None = None,
    inputs: Inputs | None = None,
    heads_times: int = 1,
    layers: int = 1,
    cp: int = 1,
    shared: Mapping[int, int] = MappingProxyType({}),
) -> ReducedModel:
    """A reduced model.

    Counts keep their relation to tp (divisible by it or not, below it or not) and to each other (grouped-query
    attention stays grouped). There is one layer of each kind, and at least two layers. Dropout and other noise are off.
    No parameter is zero or one. Adapters of peft are on the same layers, with a small rank; frozen parameters stay
    frozen. A module without a transformers configuration is copied whole.

    Args:
        model: what `find_model` returned, or a module on any device (its weights are read only where it has no
            configuration).
        tp: the number of ranks that it will be split over.
        ep: the number of ranks that its experts will be distributed over.
        seed: the seed of the weights. The same seed gives the same weights in every dtype, up to rounding.
        dtype: the parameters' dtype.
        tied: whether embedding and head are one Parameter; None is as in the original.
        attn_implementation: "sdpa" or "eager"; None: the class's default.
        experts_implementation: "eager" (a loop over the experts), "grouped_mm" or "batched_mm"; None: the
            default.
        heads_times: the factor by which there are more heads than usual, for models whose plan splits groups of heads.
        inputs: (seed) -> keyword arguments of its `forward`; for a transformers model also (seed, reduced configuration) -> them.
        layers: the least number of layers, as far as the original has so many.
        cp: the number of ranks over which sequences (in addition to tp) and the heads of a tp rank will be split.
        shared: numbers of key-value heads with which several cp ranks compute -> the number on a tp rank.

    Raises:
        PlanError: SP520, SP521, SP522, SP524, SP526.
        ValueError: `tied` is not possible for this model.
    """
    check_count("tp", tp, MOST_RANKS)
    reduced = None
    own_code = isinstance(model, nn.Module) or model.own_code
    if isinstance(model, FoundModel):
        inputs, reduced = inputs or model.inputs, model.reduced
        model = model.module if model.module is not None else model
    name, module, config, cls, tree, adapters = original_of(model)
    if (ranks := max(tp, ep)) > MOST_RUN:
        raise refuse(
            NO_REDUCED_MODEL,
            f"no reduced model of {name} is run on {ranks} ranks: at most {MOST_RUN} are tried in one process",
            help="use a smaller mesh",
        )
    implementations = {
        "attn_implementation": attn_implementation or _own_attention(config),
        "experts_implementation": experts_implementation,
    }
    options = {key: value for key, value in implementations.items() if value is not None}
    seq_len = sequence_length(tp * cp)
    if config is None or cls is None:
        if tied is not None or attn_implementation is not None:
            raise ValueError(f"{name} has no transformers configuration to change")
        if reduced is not None:
            model = named_by_user(reduced, tree, name, seed)
        return _of_module(model, name, tp, seq_len, seed, dtype, inputs)
    if reduced is not None:
        named = named_by_user(reduced, tree, name, seed)
        return _of_named(named, name, tp, seq_len, seed, dtype, inputs, options)
    found = live(module, config, cls, name) if own_code else None
    config = completed(config, module)

    def of_heads(head_dim: int) -> tuple[ReducedModel, bool]:
        """The reduced model with this head dim, and whether it runs."""
        reduced_config, kept, adapted = reduced_config_of(
            config,
            cls,
            tree,
            adapters,
            name,
            found,
            tp=tp,
            ep=ep,
            seq_len=seq_len,
            tied=tied,
            heads_times=heads_times,
            head_dim=head_dim,
            least=layers,
            cp=cp,
            shared=shared,
        )

        def make(weights: int) -> Callable[[], nn.Module]:
            return maker(cls, reduced_config, adapted, weights, {"dtype": dtype, **options})

        model = make(seed)()
        if tied is not None and bool(tree_of(model).tied) != tied:
            raise ValueError(
                f"{name} cannot be built with tied={tied}: {cls.__name__} has no embedding and head to tie"
            )
        fed = feeding(model, reduced_config, seq_len, name, inputs)
        given = fed.feed(fed.kinds[0], 0, None)
        build = reaching(make, seed, given, reduced_config)
        made = ReducedModel(name, tp, seq_len, reduced_config, fed.kinds, kept.layers, build, fed.feed, fed.unseen)
        return made, runs(model, given)

    return _first_running(of_heads)


def _first_running(of_heads: Callable[[int], tuple[ReducedModel, bool]]) -> ReducedModel:
    """The reduced model for the first head dim with which it can be made and runs. Where none runs, the first that can be made;
    where none can be made, the first refusal is raised."""
    found, refused = None, None
    for head_dim in HEAD_DIMS:
        try:
            made, running = of_heads(head_dim)
        except PlanError as error:
            refused = refused or error
            continue
        found = found or made
        if running:
            return made
    if found is None:
        assert refused is not None, "each head dim is made or refused"
        raise refused
    return found


def _own_attention(config: PreTrainedConfig | None) -> str | None:
    """The model's attention implementation, where it is not the default and runs on the CPU: its code reads other numbers."""
    chosen = getattr(config, "_attn_implementation", None)
    return chosen if chosen == "eager" else None


def _of_named(
    model: nn.Module,
    name: str,
    tp: int,
    seq_len: int,
    seed: int,
    dtype: torch.dtype,
    inputs: Inputs | None,
    options: Mapping[str, str],
) -> ReducedModel:
    """The reduced model of a transformers model, where the user names it."""
    assert isinstance(model, PreTrainedModel), "its root is of the original's class"
    if "attn_implementation" in options:
        model.set_attn_implementation(options["attn_implementation"])
    if "experts_implementation" in options:
        model.set_experts_implementation(options["experts_implementation"])
    without_noise(model)
    build = module_maker(model, name, seed, dtype)
    fed = feeding(build(), model.config, seq_len, name, inputs)
    return ReducedModel(name, tp, seq_len, model.config, fed.kinds, (), build, fed.feed, fed.unseen)


def _of_module(
    model: FoundModel | nn.Module,
    name: str,
    tp: int,
    seq_len: int,
    seed: int,
    dtype: torch.dtype,
    inputs: Inputs | None,
) -> ReducedModel:
    """The reduced model of a module without a configuration: the module itself with random weights."""
    build = module_maker(model, name, seed, dtype)
    module = build()
    own = checked(inputs if inputs is not None else inputs_of(module, name, seq_len), name)

    def feed(kind: str, seed: int, padding: Padding | None) -> dict[str, Any]:
        return {argument: cast(value, dtype) for argument, value in own(seed).items()}

    error = _tried(module, feed("own", 0, None))
    if error is not None and _tried(without_half(build()), feed("own", 0, None)) is None:
        return ReducedModel(name, tp, seq_len, None, ("own",), (), lambda: without_half(build()), feed)
    if error is not None and inputs is None:
        raise not_callable(name, feed("own", 0, None), error) from error
    return ReducedModel(name, tp, seq_len, None, ("own",), (), build, feed)


def _tried(model: nn.Module, inputs: Mapping[str, Any]) -> Exception | None:
    """The exception that a model raises on its inputs."""
    try:
        with torch.random.fork_rng(devices=[]):
            model(**inputs)
    except Exception as error:  # raised by the user's own forward
        return error
    return None


# Numbers of the rotary position embedding that a model's code has and its configuration leaves out.
SECTIONS = "mrope_section"  # the number of frequencies for time, for rows and for columns


def completed(config: PreTrainedConfig, module: nn.Module) -> PreTrainedConfig:
    """A configuration with the default sections of rotary frequencies written out, so that they shrink with the heads.

    Args:
        config: the configuration; it is copied where something is missing.
        module: the model built from it, on any device.
    """
    own = list(parts(config))
    missing = {}
    for part in module.modules():  # rotary embeddings keep the part of the configuration that they are built from
        sections, of = getattr(part, SECTIONS, None), getattr(part, "config", None)
        at = next((i for i, one in enumerate(own) if one is of), None)
        rope = getattr(of, "rope_parameters", None)
        if at is not None and isinstance(rope, dict) and (written := _with_sections(rope, sections)) != rope:
            missing[at] = written
    if not missing:
        return config
    result = copy.deepcopy(config)
    for i, one in enumerate(parts(result)):
        if i in missing:
            one.rope_parameters = missing[i]
    return result


def _with_sections(rope: Mapping[str, Any], sections: Any) -> dict[str, Any]:
    """Rotary parameters with the sections that they leave out, which may be those of each kind of layer."""
    if isinstance(sections, list):
        return {SECTIONS: [*sections], **rope}
    of_kinds = sections if isinstance(sections, dict) else {}
    return {
        kind: _with_sections(one, of_kinds[kind]) if kind in of_kinds and isinstance(one, dict) else one
        for kind, one in rope.items()
    }


# Weights with which every expert of the reduced model gets tokens, as an expert without tokens would not be proven.
STEP = 7919  # the step between the seeds that are tried

Maker = Callable[[], nn.Module]


def reaching(make: Callable[[int], Maker], seed: int, inputs: Mapping[str, Any], config: PreTrainedConfig) -> Maker:
    """Of a few makers of random weights, the first with which all experts get tokens, or else the fewest get none; for a
    model without experts, the first.

    Args:
        make: a seed -> a function that builds models with these weights.
        seed: the first to try.
        inputs: keyword arguments of forward.
        config: the reduced model's.
    """
    numbers = vars(text_config(config)).items()
    counts = {value for name, value in numbers if role(name) == "experts" and isinstance(value, int) and value > 1}
    first = make(seed)
    if not counts:
        return first
    best, fewest = first, unreached(first(), inputs, counts)
    for i in range(1, BOUNDS.routing_seeds):
        if not fewest:
            break
        chosen = make(seed + STEP * i)
        missing = unreached(chosen(), inputs, counts)
        if missing < fewest:
            best, fewest = chosen, missing
    return best


def unreached(model: nn.Module, inputs: Mapping[str, Any], counts: set[int]) -> int:
    """The number of experts without a gradient, over all stacks whose length is one of `counts`; 0 for a model that does not run."""
    try:
        with torch.random.fork_rng(devices=[]):
            loss_of(model(**inputs)).backward()
    except Exception:  # raised by the modelling code; the next run of the model reports it
        return 0
    stacks = [p for p in model.parameters() if p.ndim == 3 and p.shape[0] in counts and p.requires_grad]
    return sum(p.shape[0] if p.grad is None else int((p.grad.flatten(1) == 0).all(1).sum()) for p in stacks)
